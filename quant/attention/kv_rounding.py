"""Keys and values after a trip through a low-bit cache.

Static formats, as vLLM writes and reads them: ``q = e4m3(float(x) / scale)``, saturating, and back
``bf16(float(q) · scale)``. The scale is 1 where nothing else is known, so that keys beyond ±448 saturate. Formats
without a static scale have one for every token and head.

What is read back is kept in the target's own dtype: rounding it again gives the same number (the error of one bf16
rounding, 2^-9, is far less than half of E4M3's or E5M2's step), so no codes need to be stored to be exact.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bitdraft.quant.attention.rules import KvRule
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.straight_through import fake_quantize, straight_through

# L layer, B sequence, M key-value head, T token, D head width.


class KvRounding(nn.Module):
    """What a model's cache makes of keys and values, layer by layer."""

    key_scales: Tensor
    value_scales: Tensor

    def __init__(self, rule: KvRule, key_scales: Tensor, value_scales: Tensor, defaults: int = 0) -> None:
        """``key_scales``, ``value_scales``: fp32 decode scales, ``[L, 1]`` per tensor or ``[L, M]`` per head.

        ``defaults``: how many of the 2 L scales a checkpoint lacks, so that they are 1. Raises ``ValueError`` for
        scales that are not positive and finite.
        """
        super().__init__()
        for name, scales in (("key", key_scales), ("value", value_scales)):
            if not (torch.isfinite(scales).all() and (scales > 0).all()):
                raise ValueError(f"kv: the {name} scales are not all positive and finite")
        self.rule, self.defaults = rule, defaults
        self.register_buffer("key_scales", key_scales.float())
        self.register_buffer("value_scales", value_scales.float())

    @classmethod
    def with_scales_of_one(cls, rule: KvRule, layers: int) -> "KvRounding":
        return cls(rule, torch.ones(layers, 1), torch.ones(layers, 1))

    def read_back(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """New ``keys`` ``[B, M, T, D]`` and ``values`` of ``layer`` as attention reads them from the cache."""
        scheme = self.rule.scheme
        if scheme.scale != "static":
            return fake_quantize(keys, scheme), fake_quantize(values, scheme)
        return (
            round_per_head(keys, scheme, self.key_scales[layer]),
            round_per_head(values, scheme, self.value_scales[layer]),
        )

    def describe(self) -> str:
        """A line for the log."""
        rule = self.rule
        if rule.scheme.scale != "static":
            return f"keys and values cached in {rule.format}, scaled by token and head"
        if rule.scales == "one":
            return f"keys and values cached in {rule.format}, scale 1"
        if self.defaults == 2 * len(self.key_scales):
            return f"keys and values cached in {rule.format}, scale 1: the checkpoint holds no scales"
        told = ", ".join(
            f"{name} {scales.min():.3g} … {scales.max():.3g}"
            for name, scales in (("keys", self.key_scales), ("values", self.value_scales))
        )
        missing = f" (1 where {self.defaults} are missing from the checkpoint)" if self.defaults else ""
        return f"keys and values cached in {rule.format}, scales {rule.scales} per {rule.per}: {told}{missing}"


def round_per_head(x_BMTD: Tensor, scheme: Scheme, scales_M: Tensor) -> Tensor:
    """``x`` rounded to a static ``scheme`` under a decode scale per head (fp32 ``[M]``, or ``[1]`` for all), in its
    own dtype; differentiable straight through where it does not saturate."""
    scale = scales_M[:, None, None]
    with torch.no_grad():
        x = x_BMTD.float()
        quotient = x * (1.0 / scale) if scheme.reciprocal else x / scale
        y = (scheme.element.round(quotient) * scale).to(x_BMTD.dtype)
    if not (torch.is_grad_enabled() and x_BMTD.requires_grad):
        return y
    return straight_through(x_BMTD, y, x_BMTD.abs().float() <= scheme.element.max * scale)


class LargestSeen:
    """The largest magnitudes of keys and values, by layer and head, over the passes that it watches."""

    def __init__(self, layers: int) -> None:
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def read_back(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they are: a cache in high precision that looks at what it is given."""
        for seen, x in ((self._keys, keys), (self._values, values)):
            amax_M = x.abs().amax(dim=(0, 2, 3)).float()
            before = seen[layer]
            seen[layer] = amax_M if before is None else torch.maximum(before, amax_M)
        return keys, values

    def rounding(self, rule: KvRule) -> KvRounding:
        """Scales that put the largest magnitude on the format's largest value; 1 for a head of zeros.

        Raises ``ValueError`` for keys or values that were not finite.
        """
        return KvRounding(rule, self._scales(self._keys, rule), self._scales(self._values, rule))

    def _scales(self, seen: Sequence[Tensor | None], rule: KvRule) -> Tensor:
        amax_LM = torch.stack([amax for amax in seen if amax is not None])
        if not torch.isfinite(amax_LM).all():
            raise ValueError("kv: the calibration text makes keys or values that are not finite")
        if rule.per == "tensor":
            amax_LM = amax_LM.amax(dim=1, keepdim=True)
        return torch.where(amax_LM > 0, amax_LM / rule.scheme.element.max, 1.0)
