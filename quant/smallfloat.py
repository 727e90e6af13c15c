"""Small floating-point element formats as data.

A format is a sign, a few exponent bits and a few mantissa bits. Its grid is described once here; the
block-scaled formats of ``quant/schemes.py`` combine a grid with a scale rule.

Rounding is to nearest, ties to the even code (what PTX ``cvt.rn``, vLLM, FlashInfer and
compressed-tensors do). It is done by adding and subtracting ``1.5 · 2^23 · step`` in fp32: the sum's unit
in the last place is then exactly ``step``, so the hardware's own round-to-nearest-even does the work, for
normals and subnormals alike. The binade, and with it the step, comes from Rump's two-multiplication formula
instead of the exponent bits, because ``torch.compile`` vectorizes float arithmetic on CPU but not
bit casts (2.3 times the speed). The trap: the arithmetic must be fp32 and must not be contracted or
reassociated; inductor keeps it so on CPU (``-ffp-contract=off``), and a test compares the bits.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

_HALF_ULP = 2.0**-24


@dataclass(frozen=True)
class SmallFloat:
    """A sign-exponent-mantissa format that saturates: no infinities, and NaN only ever passes through."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    """Largest finite value. Given, not derived: E4M3FN spends its top code on NaN, E2M1 spends none."""

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

    def round(self, x: Tensor, *, saturate: bool = True) -> Tensor:
        """The nearest value of the grid, ties to the even code, saturating at ``max``; NaN stays NaN.

        ``x``: fp32, any shape. Returns fp32, same shape; negatives that round to zero give ``+0``.
        ``saturate=False`` leaves the clamp out, for input that is known to lie within ``max``.
        """
        if x.dtype != torch.float32:
            raise ValueError(f"{self.name}.round works in fp32, got {x.dtype}")
        y = x.clamp(-self.max, self.max) if saturate else x
        step_source = unit_in_first_place(y).clamp(min=self.min_normal)
        magic = step_source * (1.5 * 2.0 ** (23 - self.mantissa_bits))
        return (y + magic) - magic


def unit_in_first_place(x: Tensor) -> Tensor:
    """``2^floor(log2 |x|)`` in fp32, exact for ``2^-100 < |x| < 2^100``; smaller inputs give something smaller.

    Rump, Ogita and Oishi, "Accurate floating-point summation, part I", SIAM J. Sci. Comput. 31 (2008), §3.
    """
    scaled = x * (2.0**23 + 1)
    return (scaled - (1 - _HALF_ULP) * scaled).abs()


E2M1 = SmallFloat("e2m1", exponent_bits=2, mantissa_bits=1, max=6.0)
E4M3 = SmallFloat("e4m3", exponent_bits=4, mantissa_bits=3, max=448.0)
