"""Mixtures of experts, taken apart into the linear layers that an engine computes.

transformers keeps all experts of a decoder layer in one module with 3-D parameters (the classes under its
``use_experts_implementation``): gate and up in one tensor, sometimes interleaved, sometimes transposed,
sometimes with biases. ``separate_experts`` puts ``RoutedExperts`` in its place, where every expert has two
ordinary ``nn.Linear`` layers that are views of the same memory: ``experts.gate_up_proj.3`` and
``experts.down_proj.3``. From then on all that this package does with linear layers (rules, widths, calibration,
scale methods, ``LowBitLinear``) holds for experts without a word about them; gate and up share an NVFP4 scale because
they are one layer.

What activations meet is what an engine does: each token's hidden state is quantized once, whichever experts it
goes to, and the products of the gate once more before the down projection, under one static scale for all
experts. The router's weights multiply the outputs, whose sum is accumulated in fp32 and rounded once.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bitdraft.quant.linear import LowBitLinear

# N token, S row of the routed tokens (each token once per expert it goes to, sorted by expert), E expert.
# K input and M output channel of a projection.


class ExpertStack(nn.ModuleList):
    """The same projection of every expert of a layer: ``nn.Linear`` or ``LowBitLinear``, all ``[M, K]``."""

    def forward(self, x: Tensor, counts: list[int], token_S: Tensor | None = None) -> Tensor:
        """Rows ``[S, M]``, the first ``counts[0]`` of them computed by expert 0, and so on.

        ``x``: the rows themselves ``[S, K]`` or, with ``token_S``, the tokens ``[N, K]`` that the rows are taken
        from; tokens are then quantized before they are multiplied into rows.
        """
        wants_gradient = torch.is_grad_enabled() and x.requires_grad
        if not wants_gradient and (first := self._all_alike()) is not None:
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                return self._quantized_once(x, counts, token_S, first)
        rows = x if token_S is None else x[token_S]
        parts = rows.split(counts)
        done = [expert(part) for expert, part in zip(self, parts, strict=True) if len(part)]
        return torch.cat(done or [self[0](rows)])

    def _all_alike(self) -> LowBitLinear | None:
        """The first expert, if all are low-bit and want their inputs quantized in the same way."""
        first = self[0]
        if not isinstance(first, LowBitLinear):
            return None
        alike = all(
            isinstance(e, LowBitLinear)
            and e.activations is first.activations
            and e.input_global_scale is first.input_global_scale
            for e in self
        )
        return first if alike else None

    def _quantized_once(self, x: Tensor, counts: list[int], token_S: Tensor | None, first: LowBitLinear) -> Tensor:
        values, outer = x, None
        if first.activations is not None:
            values, outer = first.quantizer(x, first.activations, first.input_global_scale)
        per_row = outer is not None and outer.ndim > 0
        if token_S is not None:
            values = values[token_S]
            outer = outer[token_S] if outer is not None and per_row else outer
        y_SM = values.new_empty(len(values), first.out_features)
        start = 0
        for expert, count in zip(self, counts, strict=True):
            if count:
                part = slice(start, start + count)
                scales = outer[part] if outer is not None and per_row else outer
                y_SM[part] = expert.multiply(values[part], scales)  # type: ignore[operator]
                start += count
        return y_SM


class RoutedExperts(nn.Module):
    """All experts of one decoder layer, as two stacks of linear layers: computes what the module it replaces did."""

    def __init__(self, source: nn.Module) -> None:
        """Take over the parameters of ``source``, a transformers experts module: views of them, no copies.

        ``source`` is left without parameters; its gate function goes on being used. Raises ``ValueError`` for a
        kind of experts that is not known here.
        """
        super().__init__()
        described: Any = source
        if described.has_post_expert_norm:
            raise ValueError(f"{type(source).__name__} normalizes the experts' outputs, which is not known here")
        self.names = expert_projections(source)
        assert self.names is not None
        for name in self.names:
            bias = getattr(source, f"{name}_bias") if described.has_bias else None
            setattr(self, name, _stack(getattr(source, name), bias, transposed=described.is_transposed))
        self.has_gate: bool = described.has_gate
        self.interleaved: bool = not described.is_concatenated
        """Whether rows of gate and up alternate, instead of all of gate before all of up."""
        self.apply_gate: Callable[[Tensor], Tensor] = described._apply_gate if self.has_gate else described.act_fn
        for name in [n for n, _ in source.named_parameters(recurse=False)]:
            delattr(source, name)

    @property
    def stacks(self) -> tuple[ExpertStack, ExpertStack]:
        """The projections before and after the gate."""
        assert self.names is not None
        up, down = (getattr(self, name) for name in self.names)
        return up, down

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``hidden_states`` ``[N, H]``, ``top_k_index`` and ``top_k_weights`` ``[N, top_k]`` → ``[N, H]``."""
        up, down = self.stacks
        tokens, top_k = top_k_index.shape
        expert_S, order_S = top_k_index.reshape(-1).sort(stable=True)
        counts = torch.bincount(expert_S, minlength=len(up)).tolist()
        gated = self.apply_gate(up(hidden_states, counts, order_S // top_k))
        out = down(gated, counts) * top_k_weights.reshape(-1)[order_S, None]
        return out[order_S.argsort()].view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def expert_projections(module: nn.Module) -> tuple[str, str] | None:
    """The names of a transformers experts module's projections, before and after the gate; ``None`` for others."""
    if not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):
        return None
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return names if all(isinstance(getattr(module, n, None), nn.Parameter) for n in names) else None


def separate_experts(model: nn.Module, wanted: Callable[[str, str], bool]) -> None:
    """Replace experts modules by ``RoutedExperts``, in place, where any of their layers is ``wanted``.

    ``wanted`` is asked with the name of the experts module and that of a layer in it (``….experts`` and
    ``….experts.down_proj.0``). Raises ``ValueError`` naming the module for experts of a kind that is not known.
    """
    found = {name: names for name, m in model.named_modules() if (names := expert_projections(m)) is not None}
    for name, names in found.items():
        source = model.get_submodule(name)
        count = len(getattr(source, names[1]))
        if any(wanted(name, f"{name}.{p}.{e}") for p in names for e in range(count)):
            try:
                separated = RoutedExperts(source)
            except ValueError as error:
                raise ValueError(f"module {name}: {error}") from error
            model.set_submodule(name, separated.train(source.training))


def experts_around(model: nn.Module) -> dict[str, str]:
    """For every linear layer of separated experts, the name of the experts module: ``{layer: module}``."""
    return {
        f"{name}.{inner}": name
        for name, module in model.named_modules()
        if isinstance(module, RoutedExperts)
        for inner, _ in _experts_of(module)
    }


def kind_of(name: str) -> str:
    """The last part of a layer's name that is not an expert's number: ``q_proj``, ``gate_up_proj``."""
    return next(part for part in reversed(name.split(".")) if not part.isdigit())


def weight_of(model: nn.Module, name: str) -> Tensor:
    """The weight ``[M, K]`` of the linear layer ``name``, also where ``model`` keeps its experts in one tensor."""
    path, _, expert = name.rpartition(".")
    parent, _, projection = path.rpartition(".")
    if expert.isdigit() and expert_projections(module := model.get_submodule(parent)) is not None:
        weight: Tensor = getattr(module, projection)[int(expert)]
        return weight.T if module.is_transposed else weight
    return model.get_parameter(f"{name}.weight")


@dataclass(frozen=True)
class StoredExpert:
    """A layer of one expert as checkpoints name it (``….experts.3.up_proj``, Mixtral: ``….experts.3.w3``)."""

    module: str
    """The experts module in the model."""
    number: str
    part: Literal["gate", "up", "down"]

    @property
    def layer(self) -> str:
        """The linear layer of ``RoutedExperts`` that holds it."""
        return f"{self.module}.{'down_proj' if self.part == 'down' else 'gate_up_proj'}.{self.number}"


_STORED = re.compile(r"(.+)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
_PARTS: dict[str, Literal["gate", "up", "down"]] = {
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"
}  # fmt: skip


def stored_expert(name: str) -> StoredExpert | None:
    """The expert's layer that ``name`` is in a checkpoint, if it is one."""
    if (match := _STORED.fullmatch(name)) is None:
        return None
    block, number, projection = match.groups()
    return StoredExpert(f"{block.replace('.block_sparse_moe', '.mlp')}.experts", number, _PARTS[projection])


def _experts_of(module: RoutedExperts) -> Iterator[tuple[str, nn.Module]]:
    assert module.names is not None
    for projection, stack in zip(module.names, module.stacks, strict=True):
        for number, layer in enumerate(stack):
            yield f"{projection}.{number}", layer


def _stack(weight: Tensor, bias: Tensor | None, *, transposed: bool) -> ExpertStack:
    """``weight`` ``[E, M, K]``, or ``[E, K, M]`` if transposed, and ``bias`` ``[E, M]`` as one layer per expert."""
    layers = []
    for number, matrix in enumerate(weight.detach()):
        matrix = matrix.T if transposed else matrix
        layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(matrix, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach()[number], requires_grad=False)
        layers.append(layer)
    return ExpertStack(layers)
