"""Calibration of a decoder one block at a time.

Methods that look at a layer's inputs (GPTQ, WUSH) need them from a model whose earlier blocks are already
quantized. Running the whole model once per block would cost time quadratic in its depth; keeping all
inputs would cost memory linear in it. Instead the inputs of one block are kept: the block runs once to collect
second moments, its layers are replaced, and it runs once more to make the inputs of the next block.

What a block receives besides its hidden states (masks, rotary embeddings) is recorded beforehand, from one
pass of the decoder in which the blocks do nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

# B sequence, T token, H hidden, K input channel.

Visit = Callable[[str, Any, Tensor], None]
"""Called with a linear layer's full name, the layer and ``E[x xᵀ]`` of its inputs, ``[K, K]`` fp32."""


@torch.no_grad()
def calibrate_layer_by_layer(
    model: nn.Module,
    token_batches: Sequence[Tensor],
    visit: Visit,
    *,
    wanted: Callable[[str], bool] = lambda name: True,
    kind: type[nn.Module] = nn.Linear,
) -> None:
    """Show ``visit`` every linear layer of the decoder's blocks that is ``wanted`` (by full name), in order.

    ``kind``: the class of those layers, which has ``weight`` and ``in_features`` as ``nn.Linear`` does.

    ``model``: a transformers causal LM. ``token_batches``: token ids ``[B, T]`` without padding. ``visit`` may
    change the layer's weight or put another module in its place; the next block's inputs come from what it
    leaves behind. All layers of a block are collected before the first of them is visited, and layers that read
    the same tensor (q, k and v; gate and up) get the same Hessian object. A layer that no token reached (an
    expert, say) gets zeros.

    Raises ``ValueError`` without calibration text, for inputs that are not finite (naming the layer), and for
    blocks that return more than hidden states.
    """
    if not token_batches or any(ids.ndim != 2 or ids.numel() == 0 for ids in token_batches):
        raise ValueError("calibration needs token ids [B, T] with at least one token in each batch")
    blocks: nn.ModuleList = model.get_decoder().layers  # type: ignore[operator]
    names = {id(module): name for name, module in model.named_modules()}
    hidden, keywords = _block_inputs(model, blocks, token_batches)
    # Shown after a few seconds only: small models are done by then.
    for number, block in enumerate(tqdm(blocks, desc="calibrating", unit="block", delay=3, leave=False)):
        linears = {
            f"{names[id(block)]}.{inner}": module
            for inner, module in block.named_modules()
            if isinstance(module, kind) and wanted(f"{names[id(block)]}.{inner}")
        }
        options = [layers[number] for layers in keywords]
        moments = _second_moments(block, linears, hidden, options)
        for name, linear in linears.items():
            visit(name, linear, moments[name])
        moments.clear()
        if number + 1 < len(blocks):
            for i, x in enumerate(hidden):
                hidden[i] = _run(block, x, options[i])


def _run(block: nn.Module, hidden_BTH: Tensor, options: Mapping[str, Any]) -> Tensor:
    out = block(hidden_BTH, **options)
    if not isinstance(out, Tensor):
        raise ValueError(f"{type(block).__name__} returns a {type(out).__name__}, not hidden states: not known here")
    return out


def _second_moments(
    block: nn.Module, linears: Mapping[str, Any], hidden: Sequence[Tensor], options: Sequence[Mapping[str, Any]]
) -> dict[str, Tensor]:
    """``E[x xᵀ]`` over all batches for every layer, one object for layers that share their input."""
    inputs = _Inputs()
    handles = [layer.register_forward_pre_hook(inputs.watch(name)) for name, layer in linears.items()]
    try:
        for x, keyword in zip(hidden, options, strict=True):
            _run(block, x, keyword)
            inputs.end_of_pass()
    finally:
        for handle in handles:
            handle.remove()
    return inputs.moments(linears)


class _Inputs:
    """Sums ``x xᵀ`` of the inputs of named layers, once per distinct tensor."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}
        self._same_as: dict[str, str] = {}  # layer → the layer that read the same tensor before it
        self._pass: list[tuple[Tensor, str]] = []  # inputs of the running pass and who read them first

    def watch(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0]
            first = next((reader for seen, reader in self._pass if seen is x), None)
            if first is not None and name not in self._sums:
                self._same_as[name] = first
                return
            self._pass.append((x, name))
            self._add(name, x.reshape(-1, x.shape[-1]).float())

        return hook

    def end_of_pass(self) -> None:
        """Let go of the tensors, whose memory the next pass may reuse."""
        self._pass.clear()

    def moments(self, linears: Mapping[str, Any]) -> dict[str, Tensor]:
        means: dict[str, Tensor] = {}
        for name, total in self._sums.items():
            means[name] = total / max(self._rows[name], 1)
            if not torch.isfinite(means[name]).all():
                raise ValueError(f"module {name}: the calibration text makes inputs that are not finite")
        for name, layer in linears.items():
            if name in self._same_as:
                means[name] = means[self._same_as[name]]
            elif name not in means:
                means[name] = layer.weight.new_zeros(layer.in_features, layer.in_features, dtype=torch.float32)
        return means

    def _add(self, name: str, x_NK: Tensor) -> None:
        if name not in self._sums:
            self._sums[name] = x_NK.new_zeros(x_NK.shape[1], x_NK.shape[1])
        self._sums[name].addmm_(x_NK.T, x_NK)
        self._rows[name] = self._rows.get(name, 0) + len(x_NK)


def _block_inputs(
    model: nn.Module, blocks: nn.ModuleList, token_batches: Sequence[Tensor]
) -> tuple[list[Tensor], list[list[dict[str, Any]]]]:
    """The first block's hidden states ``[B, T, H]`` and every block's other arguments, per batch."""
    embedding: nn.Embedding = model.get_input_embeddings()  # type: ignore[operator]
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    hidden: list[Tensor] = []
    keywords: list[list[dict[str, Any]]] = []
    for ids in token_batches:
        with _idle(blocks) as calls:
            decoder(input_ids=ids.to(embedding.weight.device), use_cache=False)
        hidden.append(calls[0][0])
        keywords.append([options for _, options in calls])
    return hidden, keywords


@contextmanager
def _idle(blocks: nn.ModuleList) -> Iterator[list[tuple[Tensor, dict[str, Any]]]]:
    """Blocks that hand their hidden states on unchanged and note what they were called with."""
    calls: list[tuple[Tensor, dict[str, Any]]] = []

    def note(hidden_states: Tensor, **options: Any) -> Tensor:
        calls.append((hidden_states, options))
        return hidden_states

    for block in blocks:
        block.forward = note
    try:
        yield calls
    finally:
        for block in blocks:
            del block.forward  # uncovers the class's own
