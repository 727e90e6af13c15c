"""Medusa-2: the target is trained along with its heads, through LoRA adapters (Cai et al. 2024, arXiv:2401.10774; Hu et
al. 2021, arXiv:2106.09685).

The target's own weights stay as they are, in low bit; beside each attention and MLP layer learns a product of two thin
matrices, in 16 bit, which is exported as an adapter and served with the target. The heads read the adapted states and
are taught by the original ones, and so is the adapted target: ``keep · KL(original ‖ adapted)`` holds its distribution
where it was (the paper's self-distillation).

Adapters are off, and the target computes what it always did, except inside ``TargetAdapters.on()``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bitdraft.data.capture import capture_pack, groups_for
from bitdraft.data.chat import Example
from bitdraft.data.packing import Pack, make_pack
from bitdraft.quant.linear import LowBitLinear
from bitdraft.quant.target import LowBitTarget
from bitdraft.quant.transforms import TransformedInput
from bitdraft.train.config import TargetLoraConfig

# N packed token, n some of them, H hidden, V vocabulary.

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
_MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
_KINDS = (LowBitLinear, TransformedInput, nn.Linear)


class _AdaptedLinear(Linear):
    """peft's LoRA around a layer of any of the kinds that targets are made of."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        layer: Any = module.layer if isinstance(module, TransformedInput) else module
        return layer.in_features, layer.out_features

    def switch(self, on: bool) -> bool:
        """Returns what it was; peft's own ``enable_adapters`` freezes them as well, which no optimizer expects."""
        before = not self.disable_adapters
        self._disable_adapters = not on
        return before


class TargetAdapters:
    """The adapters of a target: fp32 master weights that start as the identity, all on or all off."""

    def __init__(self, target: LowBitTarget, config: TargetLoraConfig, seed: int) -> None:
        """Puts them into the target's model, off; with rank 0 there are none, and everything here does nothing."""
        self.target, self.config = target, config
        self.layers: dict[str, _AdaptedLinear] = {}
        if config.rank:
            torch.manual_seed(seed)  # the same adapters whatever ran before
            self.layers = _injected(target, config, adapted_layers(target))
            self._switch(dict.fromkeys(self.layers, False))

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """By the names of peft's files, less their prefix: ``model.layers.0.self_attn.q_proj.lora_A.weight``."""
        return {
            f"{name}.{side}.weight": getattr(layer, side)["default"].weight
            for name, layer in self.layers.items()
            for side in ("lora_A", "lora_B")
        }

    @property
    def peft_config(self) -> LoraConfig:
        config: LoraConfig = self.target.model.peft_config["default"]  # type: ignore[index]
        return config

    @contextmanager
    def on(self) -> Iterator[None]:
        before = self._switch(dict.fromkeys(self.layers, True))
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, wanted: Mapping[str, bool]) -> dict[str, bool]:
        return {name: layer.switch(wanted[name]) for name, layer in self.layers.items()}

    def last_hidden(self, pack: Pack) -> Tensor:
        """``[N, H]``: the adapted target's last hidden states, differentiable by the adapters."""
        documents = pack.tokens.split([b - a for a, b in zip(pack.bounds[:-1], pack.bounds[1:], strict=True)])
        found: dict[int, Tensor] = {}
        # Adapted states are trained as they are decoded with: in the target's own types, without autocast.
        with self.on(), torch.autocast(pack.tokens.device.type, enabled=False):
            for group in groups_for(self.target, [len(d) for d in documents]):
                padded = pad_sequence([documents[i] for i in group], batch_first=True)
                states = self.target.trainable_states(padded)
                found |= {i: states.last_hidden[row, : len(documents[i])] for row, i in enumerate(group)}
        return torch.cat([found[i] for i in range(len(documents))])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take weights by the names of ``parameters``; ``KeyError`` for one that is not there."""
        for name, parameter in self.parameters.items():
            parameter.data.copy_(tensors[name])

    def as_written(self) -> None:
        """Round the weights as files hold them, to be used in the target's dtype as engines do; they learn no more."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(torch.bfloat16).to(self.target.dtype)


def adapted_layers(target: LowBitTarget) -> list[str]:
    """The names of the attention and MLP layers that get adapters; those of experts, of which a token sees few, do not.
    ``ValueError`` where there are none."""
    names = [
        name
        for name, module in target.model.named_modules()
        if isinstance(module, _KINDS) and name.rpartition(".")[2] in (*_ATTENTION, *_MLP) and "expert" not in name
    ]
    if names:
        return names
    raise ValueError(
        f"target_lora: {target.name} has none of the layers that get adapters ({', '.join((*_ATTENTION, *_MLP))}): "
        "leave target_lora.rank 0"
    )


def check_adaptable(config: TargetLoraConfig, target: LowBitTarget, accelerator: Accelerator) -> None:
    """``ValueError`` where the target cannot be trained along."""
    if not config.rank:
        return
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        raise ValueError(
            "target_lora.rank: a target that is trained along is not cut up over processes: launch one process or DDP "
            "instead of FSDP or DeepSpeed"
        )
    head, probe = target.output_head, torch.zeros(1)
    if type(head) is not nn.Linear or head.bias is not None or target.finish_logits(probe) is not probe:
        raise ValueError(
            f"target_lora.rank: the output head of {target.name} is in low bit, has a bias, or its logits are scaled "
            "or capped, and the KL to the original distribution is computed for a plain one only: leave it 0, or give "
            "a recipe that leaves lm_head alone"
        )
    adapted_layers(target)


def _injected(target: LowBitTarget, config: TargetLoraConfig, names: list[str]) -> dict[str, _AdaptedLinear]:
    peft = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(names),
        task_type="CAUSAL_LM",
        base_model_name_or_path=target.name,
    )
    peft._register_custom_module(dict.fromkeys(_KINDS, _AdaptedLinear))
    inject_adapter_in_model(peft, target.model)
    layers = {name: target.model.get_submodule(name) for name in names}
    for layer in layers.values():
        assert isinstance(layer, _AdaptedLinear)
        device = next(layer.get_base_layer().parameters()).device  # peft finds it in layers of its own kinds only
        for side in (layer.lora_A, layer.lora_B):
            side.to(device, torch.float32)
    return layers  # type: ignore[return-value]


@dataclass(frozen=True)
class Drift:
    """How far the adapters moved the target."""

    kl_to_original: float
    """KL(original ‖ adapted) in nats, a mean over positions."""
    top_1_agreement: float
    """Share of positions at which both prefer the same token."""
    positions: int


@torch.no_grad()
def drift_of(adapters: TargetAdapters, examples: Sequence[Example], most: int = 20_000) -> Drift:
    """Over the positions that predict tokens of the answers, the first ``most`` or a few more of them."""
    target, kl, agree, positions = adapters.target, 0.0, 0, 0
    for begin in range(0, len(examples), 16):
        some = examples[begin : begin + 16]
        supervised = make_pack(some).predicts_written().to(target.device)
        original = capture_pack(target, some, ()).last_hidden[supervised]  # [n, H]
        with adapters.on():
            adapted = capture_pack(target, some, ()).last_hidden[supervised]
        for before, now in zip(original.split(256), adapted.split(256), strict=True):
            p, q = (target.logits(x).float().log_softmax(-1) for x in (before, now))  # [256, V]
            kl += float((p.exp() * (p - q)).sum())
            agree += int((p.argmax(-1) == q.argmax(-1)).sum())
        positions += len(original)
        if positions >= most:
            break
    return Drift(kl / max(positions, 1), agree / max(positions, 1), positions)
