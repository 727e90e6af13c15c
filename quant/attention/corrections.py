"""What low-bit attention measures on calibration text: static scales, a factor per head, a temperature per layer.

The text runs through the model while every layer computes attention in high precision; beside it each layer looks at
what its low-bit attention would have made of the same queries, keys and values.

*Factor per head.* ``γ`` on the scores ``ŝ`` of rounded queries and keys that leaves the least divergence of its softmax
``p̂`` from the softmax ``p`` in high precision, summed over queries. The divergence is convex in ``γ``, with slope
``Σ (E_p̂ ŝ - E_p ŝ)`` and curvature ``Σ var_p̂ ŝ``: Newton's method, one step per pass over the text. Noise in the scores
asks for factors below 1, as regression on a noisy variable does.

*Temperature per layer.* The one that leaves the least squared error of the probabilities as the second product sees
them, quantized if the rule says so, summed over queries and heads: among steps of 1/32 octave, then at the vertex of
the parabola through the best three.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitdraft.quant.attention.low_bit import LowBitAttention, chunks, hidden, scores_of
from bitdraft.quant.attention.packed import place_low_bit
from bitdraft.quant.attention.rules import AttentionRule
from bitdraft.quant.block import nvfp4_global_scale

# B sequence, N query head, T query, S key, C candidate.

_STEPS_PER_OCTAVE = 32
_CANDIDATES = 2.0 ** (torch.arange(-8, 9) / _STEPS_PER_OCTAVE)  # 0.84 … 1.19

_NEWTON_STEPS = 3  # from 1; a fourth moves no factor of SmolLM2 by more than 0.004 (NVFP4 and MXFP4 queries and keys)

Look = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], None]
"""Called with a layer's queries, keys, values, mask and scale, as ``LowBitAttention.forward``."""


@torch.no_grad()
def calibrate_attention(
    model: nn.Module,
    layers: Mapping[str, tuple[nn.Module, LowBitAttention]],
    rule: AttentionRule,
    calibration: Sequence[Tensor],
) -> None:
    """Fill in what ``rule`` asks for: ``layers`` holds every attention module and what was placed in it, by name.

    ``calibration``: token ids ``[1, T]`` each. Raises ``ValueError`` without any, and naming the layer for text that
    makes scores which are not finite or all the same.
    """
    if not rule.needs_calibration:
        return
    if not calibration:
        raise ValueError("attention: scales and corrections are measured on calibration text, and none was given")
    run = _Run(model, layers, calibration)
    low_bit = [low for _, low in layers.values()]
    if any(s is not None and s.has_global_scale for low in low_bit for s in (low.queries, low.keys, low.values)):
        run([_LargestInputs(low) for low in low_bit])
    if rule.head_scales == "fitted":
        for _ in range(_NEWTON_STEPS):
            run([_NewtonStep(low) for low in low_bit])
    if rule.temperature == "fitted":
        run([_Temperature(low) for low in low_bit])


class _Measured:
    """Something that is added up over all passes and then set."""

    def __init__(self, low: LowBitAttention) -> None:
        self.low = low

    def look(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Set what was measured; ``ValueError`` where nothing can come of it."""
        raise NotImplementedError


class _Watched(nn.Module):
    """Attention in high precision that shows what it is given."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.exact, self.look = LowBitAttention(None), look

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        self.look(query, key, value, mask, scale)
        out: Tensor = self.exact(query, key, value, mask, scale)
        return out


class _Run:
    """One pass of the model over the calibration text per measurement."""

    def __init__(
        self, model: Any, layers: Mapping[str, tuple[nn.Module, LowBitAttention]], calibration: Sequence[Tensor]
    ) -> None:
        self.decoder, self.layers, self.calibration = model.get_decoder(), layers, calibration

    def __call__(self, measured: Sequence[_Measured]) -> None:
        for (module, _), of_layer in zip(self.layers.values(), measured, strict=True):
            place_low_bit(module, _Watched(of_layer.look))
        try:
            for ids in self.calibration:
                self.decoder(input_ids=ids, use_cache=False)
        finally:
            for module, low in self.layers.values():
                place_low_bit(module, low)
        for name, of_layer in zip(self.layers, measured, strict=True):
            try:
                of_layer.finish()
            except ValueError as error:
                raise ValueError(f"module {name}: {error}") from error


class _LargestInputs(_Measured):
    """NVFP4's encode scales of queries, keys and values."""

    def __init__(self, low: LowBitAttention) -> None:
        super().__init__(low)
        self.largest = torch.zeros(3)

    def look(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> None:
        seen = torch.stack([x.abs().amax().float() for x in (query, key, value)])
        self.largest = torch.maximum(self.largest.to(seen.device), seen)

    def finish(self) -> None:
        if not torch.isfinite(self.largest).all():
            raise ValueError("the calibration text makes queries, keys or values that are not finite")
        low, scales = self.low, nvfp4_global_scale(self.largest)
        if low.queries is not None and low.queries.has_global_scale:
            low.query_scale = scales[0]
        if low.keys is not None and low.keys.has_global_scale:
            low.key_scale = scales[1]
        if low.values is not None and low.values.has_global_scale:
            low.value_scale = scales[2]


class _NewtonStep(_Measured):
    """One step of every head's factor toward the least divergence."""

    def __init__(self, low: LowBitAttention) -> None:
        super().__init__(low)
        self.slope: Tensor | float = 0.0  # [N]
        self.curvature: Tensor | float = 0.0  # [N]

    def look(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> None:
        rounded_query, rounded_key, _ = self.low.rounded(query, key, value)
        factor: Tensor | float = 1.0 if self.low.head_scales is None else self.low.head_scales[:, None, None]
        for rows in chunks(query, key):
            exact = scores_of(query[:, :, rows].float(), key.float(), scale)  # [B, N, t, S]
            noisy = scores_of(rounded_query[:, :, rows], rounded_key, scale)
            p = hidden(exact, mask, rows, query.shape[2]).softmax(-1)
            q = hidden(factor * noisy, mask, rows, query.shape[2]).softmax(-1)
            centred = noisy - (q * noisy).sum(-1, keepdim=True)
            self.slope -= (p * centred).sum(dim=(0, 2, 3))  # E_q of what is centred under q is 0
            self.curvature += (q * centred * centred).sum(dim=(0, 2, 3))

    def finish(self) -> None:
        assert isinstance(self.slope, Tensor) and isinstance(self.curvature, Tensor)
        before = torch.ones_like(self.slope) if self.low.head_scales is None else self.low.head_scales
        scales = before - self.slope / self.curvature
        if not torch.isfinite(scales).all():
            raise ValueError("no head scale can be fitted: on the calibration text the scores of a head do not vary")
        self.low.head_scales = scales.clamp(before / 2, before * 2).float()


class _Temperature(_Measured):
    def __init__(self, low: LowBitAttention) -> None:
        super().__init__(low)
        self.errors: Tensor | float = 0.0  # [C]

    def look(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> None:
        rounded_query, rounded_key, _ = self.low.rounded(query, key, value)
        for rows in chunks(query, key):
            exact = scores_of(query[:, :, rows].float(), key.float(), scale)
            p = hidden(exact, mask, rows, query.shape[2]).softmax(-1)
            scores = self.low.scores(rounded_query[:, :, rows], rounded_key, scale)
            errors = []
            for temperature in _CANDIDATES.tolist():
                weights, total = self.low.softmax(hidden(scores / temperature, mask, rows, query.shape[2]))
                errors.append((weights / total - p).square().sum().double())
            self.errors += torch.stack(errors)

    def finish(self) -> None:
        assert isinstance(self.errors, Tensor)
        if not torch.isfinite(self.errors).all():
            raise ValueError("the calibration text makes attention that is not finite")
        self.low.temperature = _vertex(self.errors).to(self.errors.device)


def _vertex(errors_C: Tensor) -> Tensor:
    """The candidate of least error, between candidates by a parabola over their logarithms; fp32 ``[]``."""
    best = int(errors_C.argmin().clamp(1, len(errors_C) - 2))
    left, middle, right = errors_C[best - 1 : best + 2].tolist()
    bend = left - 2 * middle + right
    step = 0.5 * (left - right) / bend if bend > 0 else 0.0
    return _CANDIDATES[best] * 2.0 ** (max(-1.0, min(1.0, step)) / _STEPS_PER_OCTAVE)
