"""Small two's-complement integers as an element format, with the same few operations as ``SmallFloat``."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitdraft.quant.smallfloat import Ties

_MAGIC = 1.5 * 2.0**23  # a sum with this in fp32 has a last place of 1: the hardware rounds to integers


@dataclass(frozen=True)
class SmallInt:
    """Integers from ``-2^(bits-1)`` to ``2^(bits-1) - 1``, the whole range in use."""

    name: str
    bits: int

    @property
    def min(self) -> float:
        return -(2.0 ** (self.bits - 1))

    @property
    def max(self) -> float:
        return 2.0 ** (self.bits - 1) - 1

    def round(self, x: Tensor, *, saturate: bool = True, ties: Ties = "even") -> Tensor:
        """The nearest integer in the range; NaN stays NaN, negatives that round to zero give ``+0``.

        ``x``: fp32, any shape, below 2^22 if ``saturate`` is off. Returns fp32, same shape. Raises
        ``ValueError`` for another dtype and for ties that do not go to the even integer.
        """
        if x.dtype != torch.float32 or ties != "even":
            raise ValueError(f"{self.name}.round works in fp32 with ties to even, got {x.dtype} and ties {ties!r}")
        if saturate and torch.compiler.is_compiling():
            # Inductor's relu is one instruction of a CPU, its clamp several. Saturated last, on integers.
            below_max = torch.relu((_MAGIC + self.max) - (x + _MAGIC))
            return torch.relu((self.max - self.min) - below_max) + self.min
        y = x.clamp(self.min, self.max) if saturate else x
        return (y + _MAGIC) - _MAGIC

    def round_capped(self, x: Tensor) -> Tensor:
        """``round`` of what cannot round to less than ``min``: ``x`` (fp32, any shape) is at least ``min - 0.5``, where
        the tie goes to ``min``, and is saturated at the other end only."""
        if torch.compiler.is_compiling():
            return self.max - torch.relu((_MAGIC + self.max) - (x + _MAGIC))
        return self.round(x.clamp(max=self.max), saturate=False)

    def encode(self, values: Tensor) -> Tensor:
        """Codes (int8, same shape) of ``values`` that are integers in the range; NaN is code 0."""
        return values.nan_to_num(0.0).to(torch.int8)

    def decode(self, codes: Tensor) -> Tensor:
        """What ``codes`` (int8, any shape) mean, in fp32."""
        return codes.float()


INT4 = SmallInt("int4", 4)
INT8 = SmallInt("int8", 8)
