"""Sums whose last bit does not depend on how many rows are computed at once, for fp32 targets with low-bit inputs.

A kernel may add the terms of a product in another order for four rows than for one; in fp32 that moves the last bit.
Where nothing is quantized behind it, that stays where it is: far below the distance of two logits. A quantizer, though,
rounds to a few bits, and a value on the edge between two codes falls to either side by that last bit: the tokens that
follow differ, so that decoding with drafts cannot be compared with decoding without.

Within ``steady_sums`` products, attention and whatever else adds up or approximates (means, softmax, ``exp``) is
computed in fp64 and rounded once to fp32. Products of low-bit values are exact in fp64, in any order; elsewhere two
orders differ by 1e-16 of the terms, which the rounding to fp32 nearly always hides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_IN_FP64 = frozenset(
    {
        *(functional.linear, functional.conv1d, functional.scaled_dot_product_attention, functional.softmax),
        *(functional.silu, functional.gelu, functional.softplus, functional.rms_norm, functional.layer_norm),
        *(torch.matmul, torch.bmm, torch.mm, torch.addmm, torch.baddbmm, torch.einsum, torch.softmax, torch.sum),
        *(torch.mean, torch.exp, torch.sigmoid, torch.tanh, torch.rsqrt, torch.cos, torch.sin),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.bmm, Tensor.mm, Tensor.softmax, Tensor.sum),
        *(Tensor.mean, Tensor.exp, Tensor.sigmoid, Tensor.tanh, Tensor.rsqrt, Tensor.cos, Tensor.sin),
    }
)
"""What adds up values, or is computed otherwise in the tail of a vector than within it."""
_MOST_BYTES = 2 * 1024**3
"""Of fp32 weights whose fp64 copies are kept: more are made anew in every pass."""
_DEVICES = ("cpu", "cuda")  # others have no fp64, or not of every operation
_NARROW = (torch.bfloat16, torch.float16)


def can_steady(model: nn.Module) -> bool:
    """Whether ``steady_sums`` can do anything for ``model``: no 16-bit weights, and a device with fp64."""
    return all(p.device.type in _DEVICES and p.dtype not in _NARROW for p in model.parameters())


@contextmanager
def steady_sums(model: nn.Module) -> Iterator[None]:
    """Within the block, fp32 sums are computed in fp64, whoever computes them.

    Twice the memory of ``model`` is held besides, unless its weights are larger than 2 GiB.
    """
    weights = [p for p in model.parameters() if p.dtype == torch.float32]
    kept = {id(p): p.detach().double() for p in weights} if sum(p.nbytes for p in weights) <= _MOST_BYTES else {}
    with _InFp64(kept):
        yield


class _InFp64(TorchFunctionMode):
    def __init__(self, kept: Mapping[int, Tensor]) -> None:
        """``kept``: fp64 copies of tensors, by the id of the fp32 tensor, which must outlive this."""
        super().__init__()
        self.kept = kept

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _IN_FP64 or not any(_is_fp32(x) for x in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        wide = {name: torch.float64 if x is torch.float32 else self._widened(x) for name, x in kwargs.items()}
        out = func(*map(self._widened, args), **wide)
        return out.float() if out.dtype == torch.float64 else out

    def _widened(self, x: Any) -> Any:
        if not _is_fp32(x):
            return x
        kept = self.kept.get(id(x))
        return x.double() if kept is None else kept


def _is_fp32(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float32
