"""The number formats a recipe can name: an element grid, a block and a rule for the scale.

A scheme is data; ``quant/block.py`` holds the arithmetic. Adding a format is adding a row here, and a
scale rule there if it needs a new one.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

from bitdraft.quant.smallfloat import E2M1, E4M3, SmallFloat

ScaleRule = Literal["amax", "amax-floored", "even", "rceil", "two-level", "two-level-kernel"]


@dataclass(frozen=True)
class Scheme:
    """One number format.

    ``block`` counts elements along the last dimension (the contraction dimension of a linear layer);
    ``None`` is the whole row. The scale rules, with ``A`` the block's largest magnitude:

    ==================== ==============================================================================
    ``amax``             fp32 ``A / max``: FP8 weights, one scale per output channel
    ``amax-floored``     fp32 ``max(A / max, 1 / (448 · 512))``: FP8 activations, one per token (vLLM)
    ``even``             E8M0: exponent of ``A`` rounded to the element's mantissa (compressed-tensors)
    ``rceil``            E8M0: ``2^ceil(log2(A · fl(1/max)))`` (FlashInfer's MXFP4 activations)
    ``two-level``        E4M3 per block under one fp32 scale per tensor, codes by division
                         (compressed-tensors' NVFP4 weights)
    ``two-level-kernel`` the same storage, codes by reciprocals (vLLM's and FlashInfer's NVFP4 kernels)
    ==================== ==============================================================================
    """

    name: str
    element: SmallFloat
    block: int | None
    scale: ScaleRule

    @property
    def has_global_scale(self) -> bool:
        """Whether an fp32 scale of the whole tensor stands above the block scales."""
        return self.scale in ("two-level", "two-level-kernel")


FP8_CHANNEL = Scheme("fp8-channel", E4M3, None, "amax")
FP8_TOKEN = Scheme("fp8-token", E4M3, None, "amax-floored")
MXFP4_EVEN = Scheme("mxfp4-even", E2M1, 32, "even")
MXFP4_RCEIL = Scheme("mxfp4-rceil", E2M1, 32, "rceil")
NVFP4 = Scheme("nvfp4", E2M1, 16, "two-level")
NVFP4_KERNEL = Scheme("nvfp4-kernel", E2M1, 16, "two-level-kernel")

SCHEMES = {s.name: s for s in (FP8_CHANNEL, FP8_TOKEN, MXFP4_EVEN, MXFP4_RCEIL, NVFP4, NVFP4_KERNEL)}


def scheme_named(name: str) -> Scheme:
    """The scheme called ``name``; ``ValueError`` names the nearest one otherwise."""
    if name not in SCHEMES:
        near = difflib.get_close_matches(name, SCHEMES, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown number format {name!r}: did you mean {near!r}? (known: {', '.join(SCHEMES)})")
    return SCHEMES[name]
