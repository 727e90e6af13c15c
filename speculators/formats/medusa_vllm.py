"""Medusa in the layout that vLLM has given it (``model_type: medusa``, ``blocks.*``).

Always the full vocabulary: vLLM cannot load a truncated one. A shared output head is stored once.
"""

from typing import Any

from torch import Tensor

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.formats import medusa
from bitdraft.speculators.formats.facts import WRITTEN, TargetFacts
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead

NAME = "medusa-vllm"
KIND = "medusa"
ENGINES = ("vLLM",)
WEIGHTS = "model.safetensors"
MODEL_TYPE = "medusa"


def is_this_format(config: dict[str, Any], names: set[str]) -> bool:
    return config.get("model_type") == MODEL_TYPE and any(name.startswith("blocks.") for name in names)


def engines(head: MedusaHead) -> tuple[str, ...]:
    """All: they compute whatever ``check`` lets through."""
    del head
    return ENGINES


def check(head: MedusaHead) -> None:
    """``ValueError`` for heads that vLLM has no words for."""
    if head.config.link:
        raise ValueError(
            "the heads read the tokens drafted before their own (medusa.link), which no engine computes: use the "
            "format medusa-original, which holds them for Bitdraft alone"
        )


def tensors(head: MedusaHead) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, in bf16."""
    out = {name: weight.detach().to(WRITTEN) for name, weight in head.state_dict().items()}
    if not head.config.own_output:
        out["lm_head.weight"] = medusa.shared_output(head)
    return out


def shapes(head: MedusaHead) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all tensors."""
    blocks = medusa.block_shapes(head, bias=head.config.bias)
    output = (head.vocab.target_size, head.target_hidden_size)
    outputs = [f"lm_heads.{i}.weight" for i in range(head.config.heads)]
    return {
        **{f"blocks.{i}.layers.{j}.{leaf}": s for (i, j, leaf), s in blocks.items()},
        **dict.fromkeys(outputs if head.config.own_output else ["lm_head.weight"], output),
    }


def config(head: MedusaHead, target: TargetFacts, draft_length: int) -> dict[str, Any]:
    """``config.json`` of the checkpoint."""
    del draft_length  # vLLM drafts with all heads unless told otherwise
    return {
        **medusa.settings(head, target),
        "num_heads": head.config.heads,
        "num_hidden_layers": head.config.blocks,
        "medusa_fc_bias": head.config.bias,
    }


def load(config: dict[str, Any], weights: dict[str, Tensor], target: LowBitTarget) -> DraftHead:
    """The heads of a checkpoint. Raises ``ValueError`` for settings or tensors that they cannot represent."""
    shared = bool(config.get("original_lm_head"))
    if shared and "lm_head.weight" not in weights:
        raise ValueError("config.json says original_lm_head but lm_head.weight is missing")
    shape = MedusaConfig(
        heads=config["num_heads"],
        blocks=config["num_hidden_layers"],
        own_output=not shared,
        bias=bool(config.get("medusa_fc_bias")),
    )
    return medusa.build(shape, config, weights, target)
