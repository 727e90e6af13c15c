"""Attention as a low-bit kernel computes it: both products have quantized inputs, everything else is fp32.

``s = scale · (q̂ · k̂)``, ``p = exp(s - max s)``, ``out = (p̂ · v̂) / Σ p``: probabilities are quantized before they are
divided by their sum, and the sum is that of the unquantized ones, as FlashAttention-3 and SageAttention do it. Static
FP8 probabilities have the scale 2^-8 of FlashAttention-3 (its ``Max_offset`` of 8), so that the largest becomes 256 of
448; NVFP4's scale above the block scales comes from their largest possible value, 1.

Kernels keep a running maximum while they walk along the keys; here the maximum is that of the whole row. Nothing that
is rounded shares a scale with another token, so a token's result does not depend on what follows it, nor on whether
keys come from a cache.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from bitdraft.quant.attention.kv_rounding import round_per_head
from bitdraft.quant.attention.rules import AttentionRule
from bitdraft.quant.schemes import Scheme, scheme_named
from bitdraft.quant.smallfloat import E2M1, E4M3
from bitdraft.quant.straight_through import fake_quantize

# B sequence, N query head, M key-value head, T query, S key, D head width, E width of values.

PROBABILITY_SCALE = 2.0**-8
"""FlashAttention-3's decode scale of FP8 probabilities that are not yet divided by their sum."""
_AT_ONCE = 2**24
"""Scores that exist at a time; 64 MiB in fp32."""


class LowBitAttention(nn.Module):
    """One layer's attention under an ``AttentionRule``; without one, attention in fp32."""

    head_scales: Tensor | None
    temperature: Tensor | None
    query_scale: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None

    def __init__(self, rule: AttentionRule | None, query_scale: Tensor | None = None) -> None:
        """``query_scale``: fp32 ``[1]`` or ``[M]``, the decode scale of queries in a static format, by default 1."""
        super().__init__()
        self.queries, self.keys, self.probabilities, self.values = (
            scheme_named(name) if name else None
            for name in (
                (rule.queries, rule.keys, rule.probabilities, rule.values) if rule else (None, None, None, None)
            )
        )
        static = self.queries is not None and self.queries.scale == "static"
        one = torch.ones(1) if query_scale is None else query_scale
        self.register_buffer("query_scale", one if static else None)
        self.register_buffer("key_scale", None)  # fp32 []: NVFP4's encode scales, from calibration
        self.register_buffer("value_scale", None)
        self.register_buffer("head_scales", None)  # fp32 [N]: factors on the scores
        self.register_buffer("temperature", None)  # fp32 []

    def forward(
        self, query_BNTD: Tensor, key_BMSD: Tensor, value_BMSE: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """``[B, T, N, E]`` in the query's dtype. ``mask``: ``[B, 1, T, S]``, True where a query sees a key, or numbers
        to add to the scores; without one a query sees the keys up to its own place, a single one all of them."""
        outs = []
        with torch.autocast(query_BNTD.device.type, enabled=False):  # which would multiply in 16 bit
            query, key, value = self.rounded(query_BNTD, key_BMSD, value_BMSE)
            for rows in chunks(query_BNTD, key_BMSD):
                scores = hidden(self.scores(query[:, :, rows], key, scale), mask, rows, query.shape[2])
                outs.append(self.attend(scores, value))
        return torch.cat(outs, dim=2).transpose(1, 2).to(query_BNTD.dtype).contiguous()

    def rounded(self, query_BNTD: Tensor, key_BMSD: Tensor, value_BMSE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three inputs as the products see them, at least fp32."""
        query, key, value = (
            x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query_BNTD, key_BMSD, value_BMSE)
        )
        if self.queries is not None and self.queries.scale == "static":
            assert self.query_scale is not None
            repeated = query.shape[1] // len(self.query_scale)
            query = round_per_head(query, self.queries, self.query_scale.repeat_interleave(repeated))
        elif self.queries is not None:
            query = fake_quantize(query, self.queries, global_scale=self.query_scale)
        if self.keys is not None:
            key = fake_quantize(key, self.keys, global_scale=self.key_scale)
        if self.values is not None:
            value = fake_quantize(value, self.values, global_scale=self.value_scale)
        return query, key, value

    def scores(self, query_BNTD: Tensor, key_BMSD: Tensor, scale: float) -> Tensor:
        """``[B, N, T, S]`` from rounded inputs, with the corrections that were fitted."""
        scores = scores_of(query_BNTD, key_BMSD, scale)
        if self.head_scales is not None:
            scores = scores * self.head_scales[:, None, None]
        return scores if self.temperature is None else scores / self.temperature

    def attend(self, scores_BNTS: Tensor, value_BMSE: Tensor) -> Tensor:
        """Masked scores and rounded values → ``[B, N, T, E]``."""
        weights, total = self.softmax(scores_BNTS)
        return _sum_of_values(weights, value_BMSE) / total

    def softmax(self, scores_BNTS: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities as rounded numerators ``[B, N, T, S]`` over exact sums ``[B, N, T, 1]``."""
        weights = (scores_BNTS - scores_BNTS.amax(-1, keepdim=True)).exp()
        total = weights.sum(-1, keepdim=True)
        if self.probabilities is not None:
            weights = round_probabilities(weights, self.probabilities)
        return weights, total

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name} {scheme.name}"
            for name in ("queries", "keys", "probabilities", "values")
            if (scheme := getattr(self, name)) is not None
        )


def describe(layers: Sequence[LowBitAttention]) -> str:
    """A line for the log about all layers of a model."""
    line = f"attention in {len(layers)} layers: {layers[0].extra_repr()}"
    for name, words in (("head_scales", "head scales"), ("temperature", "temperatures")):
        fitted = [x for layer in layers if (x := getattr(layer, name)) is not None]
        if fitted:
            line += f", {words} {min(x.min() for x in fitted):.4f} … {max(x.max() for x in fitted):.4f}"
    return line


def chunks(query_BNTD: Tensor, key_BMSD: Tensor) -> Iterator[slice]:
    """Ranges of queries whose scores fit into memory at once."""
    batch, heads, rows, _ = query_BNTD.shape
    step = max(1, _AT_ONCE // max(1, batch * heads * key_BMSD.shape[2]))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def scores_of(query_BNTD: Tensor, key_BMSD: Tensor, scale: float) -> Tensor:
    """``scale · q · k``, ``[B, N, T, S]``; query heads that share a key are rows of one product."""
    batch, heads, rows, width = query_BNTD.shape
    shared = key_BMSD.shape[1]
    packed = query_BNTD.reshape(batch, shared, heads // shared * rows, width)
    return (packed @ key_BMSD.transpose(-1, -2) * scale).view(batch, heads, rows, -1)


def _sum_of_values(weights_BNTS: Tensor, value_BMSE: Tensor) -> Tensor:
    batch, heads, rows, keys = weights_BNTS.shape
    shared = value_BMSE.shape[1]
    packed = weights_BNTS.reshape(batch, shared, heads // shared * rows, keys)
    return (packed @ value_BMSE).view(batch, heads, rows, -1)


def hidden(scores_BNtS: Tensor, mask: Tensor | None, rows: slice, queries: int) -> Tensor:
    """The scores of ``rows`` of ``queries`` queries, very small where a query does not see the key."""
    lowest = torch.finfo(scores_BNtS.dtype).min  # not -inf: a row of padding that sees nothing must not become NaN
    if mask is None:
        if queries == 1:
            return scores_BNtS
        keys = scores_BNtS.shape[-1]
        assert keys == queries, "without a mask queries and keys are the same tokens"
        at = torch.arange(keys, device=scores_BNtS.device)
        return scores_BNtS.masked_fill(at > at[rows, None], lowest)
    part = mask[:, :, rows]
    return scores_BNtS.masked_fill(~part, lowest) if part.dtype == torch.bool else scores_BNtS + part


def round_probabilities(weights_BNTS: Tensor, scheme: Scheme) -> Tensor:
    """``exp(s - max)`` in ``[0, 1]`` rounded to ``scheme``, blocks along the keys; the last may be filled up with 0."""
    keys = weights_BNTS.shape[-1]
    scale: dict[str, Any] = {}
    if scheme.scale == "static":
        scale["global_scale"] = weights_BNTS.new_tensor(PROBABILITY_SCALE, dtype=torch.float32)
    elif scheme.has_global_scale:
        scale["global_scale"] = weights_BNTS.new_tensor(E4M3.max * E2M1.max, dtype=torch.float32)
    short = -keys % (scheme.block or 1)
    if not short:
        return fake_quantize(weights_BNTS, scheme, **scale)
    return fake_quantize(pad(weights_BNTS, (0, short)), scheme, **scale)[..., :keys]
