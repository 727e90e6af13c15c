"""Small floating-point element formats as data.

A format is a sign, a few exponent bits and a few mantissa bits. Its grid is described once here; the
block-scaled formats of ``quant/schemes.py`` combine a grid with a scale rule.

Rounding is to nearest, by default ties to the even code (what PTX ``cvt.rn``, vLLM, FlashInfer and
compressed-tensors do). It is done by adding and subtracting ``1.5 · 2^23 · step`` in fp32: the sum's unit
in the last place is then exactly ``step``, so the hardware's own round-to-nearest-even does the work, for
normals and subnormals alike. The binade, and with it the step, comes from the exponent bits in eager mode (two passes)
and, compiled, from Rump's two-multiplication formula, because inductor vectorizes float arithmetic on CPU but not
bit casts. The trap: the arithmetic must be fp32 and must not be contracted or
reassociated; inductor keeps it so on CPU (``-ffp-contract=off``), and a test compares the bits.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

import torch
from torch import Tensor

Ties = Literal["even", "away", "zero"]
"""Where a value in the middle of two codes goes: the even code, the larger magnitude, the smaller one."""

_HALF_ULP = 2.0**-24


@dataclass(frozen=True)
class SmallFloat:
    """A sign-exponent-mantissa format that saturates: no rounding ever gives infinity, and NaN only passes through."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    """Largest finite value. Given, not derived: E4M3FN spends its top code on NaN, E2M1 spends none."""
    infinity: bool = False
    """Whether the code after the largest finite one means infinity (E5M2); any codes beyond are NaN."""

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min(self) -> float:
        """The most negative value."""
        return -self.max

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest binade that holds a finite value (OCP MX calls it emax)."""
        return math.floor(math.log2(self.max))

    @property
    def min_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @cached_property
    def magnitudes(self) -> Tensor:
        """Every finite non-negative value, in code order: code 5 means ``magnitudes[5]``. fp32, ``[codes]``."""
        steps = 2**self.mantissa_bits
        values = torch.tensor(
            [
                2.0 ** max(e - self.bias, 1 - self.bias) * (m / steps + (e > 0))
                for e, m in product(range(2**self.exponent_bits), range(steps))
            ]
        )
        return values[values <= self.max]

    @cached_property
    def values(self) -> Tensor:
        """What every code means, negative ones, infinities and NaN included: ``values[code]``. fp32, ``[2^bits]``."""
        half = torch.full((2 ** (self.bits - 1),), torch.nan)
        finite = len(self.magnitudes)
        half[:finite] = self.magnitudes
        if self.infinity:
            half[finite] = torch.inf
        return torch.cat([half, -half])

    def round(self, x: Tensor, *, saturate: bool = True, ties: Ties = "even") -> Tensor:
        """The nearest value of the grid, saturating at ``max``; NaN stays NaN.

        ``x``: fp32, any shape. Returns fp32, same shape; negatives that round to zero give ``+0``.
        ``saturate=False`` leaves the clamp out, for input that is known to lie within ``max``.
        Raises ``ValueError`` for another dtype.
        """
        if x.dtype != torch.float32:
            raise ValueError(f"{self.name}.round works in fp32, got {x.dtype}")
        y = x.clamp(-self.max, self.max) if saturate else x
        step_source = unit_in_first_place(y).clamp(min=self.min_normal)
        magic = step_source * (1.5 * 2.0 ** (23 - self.mantissa_bits))
        rounded = (y + magic) - magic
        if ties == "even":
            return rounded
        rest = y - rounded  # exact: at most half a step, in units of y's last place
        other = rounded + 2 * rest  # the neighbour on the other side of y, if y is in the middle
        middle = rest.abs() == step_source * 2.0 ** -(self.mantissa_bits + 1)
        larger = other.abs() > rounded.abs()
        return torch.where(middle & (larger if ties == "away" else ~larger), other, rounded)

    def encode(self, values: Tensor) -> Tensor:
        """Codes (uint8, same shape) of ``values`` that lie on the grid; both zeros are code 0.

        NaN becomes the positive NaN code with all bits set or, where the format has none, code 0: there the
        block's scale carries the NaN.
        """
        magnitudes = self.magnitudes.to(values.device)
        code = torch.searchsorted(magnitudes, values.abs().contiguous())
        has_nan = len(magnitudes) < 2 ** (self.bits - 1)
        code = torch.where(values.isnan(), 2 ** (self.bits - 1) - 1 if has_nan else 0, code)
        return (code + (values < 0) * 2 ** (self.bits - 1)).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """What ``codes`` (uint8, any shape) mean, in fp32; an FP4 or FP6 code stands in the low bits of its byte."""
        return self.values.to(codes.device)[codes.int()]


def unit_in_first_place(x: Tensor) -> Tensor:
    """``2^floor(log2 |x|)`` in fp32, exact for ``2^-100 < |x| < 2^100``; smaller inputs give something smaller.

    Infinity and NaN give what makes the rounding NaN. The formula is that of Rump, Ogita and Oishi, "Accurate
    floating-point summation, part I", SIAM J. Sci. Comput. 31 (2008), §3.
    """
    if not torch.compiler.is_compiling():
        return (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    scaled = x * (2.0**23 + 1)
    return (scaled - (1 - _HALF_ULP) * scaled).abs()


# OCP Microscaling Formats (MX) v1.0 §5.3 for the FP4, FP6 and FP8 elements; FP8 as in arXiv:2209.05433.
E2M1 = SmallFloat("e2m1", exponent_bits=2, mantissa_bits=1, max=6.0)
E2M3 = SmallFloat("e2m3", exponent_bits=2, mantissa_bits=3, max=7.5)
E3M2 = SmallFloat("e3m2", exponent_bits=3, mantissa_bits=2, max=28.0)
E4M3 = SmallFloat("e4m3", exponent_bits=4, mantissa_bits=3, max=448.0)
E5M2 = SmallFloat("e5m2", exponent_bits=5, mantissa_bits=2, max=57344.0, infinity=True)
