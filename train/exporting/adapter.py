"""The adapter of a target that was trained along with its heads: peft's files in the folder ``adapter`` of an export.

``adapter_config.json`` and ``adapter_model.safetensors`` are what peft and vLLM load beside the low-bit target; a page
says how. The manifest of the export holds their sums too.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file

from bitdraft.data.chat import Example
from bitdraft.quant.checkpoints.tensors import save_tensors
from bitdraft.quant.target import LowBitTarget
from bitdraft.train.adapted_target import Drift, TargetAdapters, drift_of
from bitdraft.train.config import TargetLoraConfig

FOLDER = "adapter"
"""Of an export: where the adapter lies."""
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of the names in peft's files


@dataclass(frozen=True)
class FinishedAdapter:
    """Adapters that have learned, as files hold them."""

    adapters: TargetAdapters
    drift: Drift | None
    """How far they moved the target; ``None`` where there are no adapters, and then nothing is written or said."""

    @classmethod
    def of(cls, adapters: TargetAdapters, examples: Sequence[Example], say: Callable[[str], object]) -> Self:
        """Rounds the adapters as files hold them, and measures the drift on the training text."""
        if not adapters:
            return cls(adapters, None)
        adapters.as_written()
        drift = drift_of(adapters, examples)
        say(
            f"the target's adapter: KL(original ‖ adapted) {drift.kl_to_original:.4g} nats, the same first choice at "
            f"{drift.top_1_agreement:.2%} of {drift.positions:,} positions of the training text"
        )
        return cls(adapters, drift)

    @property
    def facts(self) -> dict[str, Any]:
        """What an export's ``config.json`` and ``acceptance.json`` say of the adapter."""
        if self.drift is None:
            return {}
        config = self.adapters.config
        told = {"folder": FOLDER, "rank": config.rank, "alpha": config.alpha, "keep": config.keep}
        return {"target_adapter": {**told, "layers": len(self.adapters.layers), **asdict(self.drift)}}

    def write(self, export: Path) -> None:
        """Write the folder ``adapter`` into ``export``, which exists."""
        if self.drift is None:
            return
        folder = export / FOLDER
        folder.mkdir()
        weights = self.adapters.parameters.items()
        save_tensors({_PREFIX + name: p.detach().to(torch.bfloat16).cpu() for name, p in weights}, folder / _WEIGHTS)
        config = replace(self.adapters.peft_config, inference_mode=True)
        config.target_modules = sorted(config.target_modules or ())
        config.save_pretrained(str(folder))
        (folder / "README.md").write_text(_page(self.adapters, self.drift), encoding="utf-8")


def read_adapter(target: LowBitTarget, export: Path) -> TargetAdapters:
    """Put the adapter in ``export`` into ``target``, off; ``ValueError`` naming the folder if it does not fit."""
    folder = export / FOLDER
    try:
        described: dict[str, Any] = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        weights = {name.removeprefix(_PREFIX): x for name, x in load_file(folder / _WEIGHTS).items()}
        config = TargetLoraConfig(rank=described["r"], alpha=described["lora_alpha"])
        adapters = TargetAdapters(target, config, seed=0)
        adapters.load(weights)
    except (KeyError, RuntimeError, OSError) as error:
        raise ValueError(f"{folder} holds no adapter for {target.name}: {str(error).splitlines()[0]}") from error
    adapters.as_written()
    return adapters


def refuse_adapter(head: Path) -> None:
    """``ValueError`` for an exported head whose target was trained along, where the target would be another one."""
    if (head / FOLDER).is_dir():
        raise ValueError(
            f"the head in {head} was trained along with its target, and drafts for the target with the adapter in "
            f"{head / FOLDER}, which is not put in here: its run has measured it (acceptance.json), engines load both"
        )


def _page(adapters: TargetAdapters, drift: Drift) -> str:
    target = adapters.target
    most = max(8, 1 << (adapters.config.rank - 1).bit_length())  # vLLM knows powers of two from 8 on
    options = shlex.join(["--enable-lora", "--lora-modules", f"adapted={FOLDER}", "--max-lora-rank", str(most)])
    return f"""---
library_name: peft
tags: [speculative-decoding, medusa, lora]
---

# LoRA adapter of {target.name} in {target.recipe.name}, trained along with the heads beside it

The heads read the states of the target with this adapter and draft for no other. Decoding with them gives what the
adapted target gives, which is not what the target alone gives: on the training text KL(original ‖ adapted) is
{drift.kl_to_original:.4g} nats, and the preferred token is the same at {drift.top_1_agreement:.2%} of
{drift.positions:,} positions.

The adapter is added to the low-bit layers and not merged into them: merged weights would be quantized anew. vLLM takes
it beside the low-bit checkpoint and the heads with

```sh
{options}
```

and requests for the model `adapted`. Together with speculative decoding that was not tried in an engine.
"""
