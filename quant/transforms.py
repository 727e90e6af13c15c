"""Linear maps of a layer's input that make it easier to quantize, with the inverse folded into the weight.

``y = W x = (W T⁻¹)(T x)``: the model stays the same function, but what is rounded is ``T x`` and ``W T⁻¹``. ``T`` is
block-diagonal along the input channels, one ``d × d`` block or one per block of channels, applied at run time
just before the activations are quantized. A Hadamard block spreads an outlier over its block (QuaRot,
arXiv:2404.00456; MR-GPTQ, arXiv:2509.23202); ``quant/wush.py`` finds a better block from data. The residual
stream is not touched, so captured hidden states stay what they were.

``T`` is rounded to the dtype that it is applied in *before* it is inverted: the fold then undoes exactly what
the run-time product does, in bf16 as well.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# N row, K input channel, G block of channels, D channel within a block, M output channel.


@dataclass(frozen=True, eq=False)
class BlockTransform:
    """``T`` and its inverse, one block for all channels (``G = 1``) or one for each block of them."""

    matrix: Tensor  # [G, D, D] in the dtype in which it is applied
    inverse: Tensor  # [G, D, D] fp64

    @property
    def block(self) -> int:
        return self.matrix.shape[-1]

    def apply(self, x: Tensor) -> Tensor:
        """``T x`` for the vectors along the last dimension of ``x`` ``[..., K]``, in ``x``'s dtype.

        Raises ``ValueError`` for a dtype too narrow for ``T``: the fold would undo another matrix.
        """
        if torch.promote_types(x.dtype, self.matrix.dtype) != x.dtype:
            raise ValueError(f"a transform made in {self.matrix.dtype} cannot be applied in {x.dtype}")
        return _multiply_blocks(x, self.matrix.to(x.device, x.dtype))

    def fold(self, weight: Tensor) -> Tensor:
        """``W T⁻¹`` for ``weight`` ``[M, K]``, computed in fp64, in ``weight``'s dtype."""
        folded = _multiply_blocks(weight.double(), self.inverse.to(weight.device).mT)
        return folded.to(weight.dtype)

    def unfold(self, weight: Tensor) -> Tensor:
        """``W T`` for ``weight`` ``[M, K]``: from what ``fold`` gave (or its low-bit form) back, fp32."""
        matrix = self.matrix.to(weight.device, torch.float64)
        return _multiply_blocks(weight.double(), matrix.mT).float()

    def moments(self, hessian: Tensor) -> Tensor:
        """``T H Tᵀ``: the second moments ``[K, K]`` of the transformed inputs from those of the inputs."""
        matrix = self.matrix.to(hessian.device, hessian.dtype)
        return _multiply_blocks(_multiply_blocks(hessian, matrix).T, matrix).T.contiguous()


def _multiply_blocks(x: Tensor, matrix_GDD: Tensor) -> Tensor:
    """``[..., K]`` → ``[..., K]``: each block of ``x`` multiplied by its matrix from the left."""
    blocks, width, _ = matrix_GDD.shape
    if x.shape[-1] % width or (blocks > 1 and x.shape[-1] != blocks * width):
        raise ValueError(f"{x.shape[-1]} channels do not divide into {blocks if blocks > 1 else 'blocks'} of {width}")
    if blocks == 1:
        return (x.unflatten(-1, (-1, width)) @ matrix_GDD[0].T).flatten(-2)
    x_GND = x.reshape(-1, blocks, width).transpose(0, 1)
    return torch.bmm(x_GND, matrix_GDD.mT).transpose(0, 1).reshape(x.shape)


def block_transform(matrix: Tensor, dtype: torch.dtype = torch.float32) -> BlockTransform:
    """The transform by ``matrix`` (``[D, D]`` for all blocks, or ``[G, D, D]``), to be applied in ``dtype``.

    Raises ``ValueError`` for a matrix that has no inverse.
    """
    rounded = matrix.to(dtype)
    rounded = rounded[None] if rounded.ndim == 2 else rounded
    inverse, failed = torch.linalg.inv_ex(rounded.double())
    if failed.any() or not torch.isfinite(inverse).all():
        raise ValueError("the transform has no inverse: it would lose what the layer reads")
    return BlockTransform(rounded, inverse)


def hadamard(size: int) -> Tensor:
    """Sylvester's Hadamard matrix over ``√size``: symmetric, orthogonal, fp64 ``[size, size]``.

    Raises ``ValueError`` unless ``size`` is a power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard matrix of this kind needs a power of two, got {size}")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


def hadamard_transform(block: int, dtype: torch.dtype = torch.float32) -> BlockTransform:
    """The Hadamard transform of every block of ``block`` channels."""
    return block_transform(hadamard(block), dtype)


class TransformMemory:
    """The last transformed input of a model, so that layers that read one tensor transform it once.

    It hands the very same tensor to q, k and v, whose shared activation quantizer then works once as well.
    """

    def __init__(self) -> None:
        self.transformations = 0  # how often work was really done
        self._last: tuple[Tensor, int, BlockTransform] | None = None
        self._result: Tensor | None = None

    def __call__(self, x: Tensor, transform: BlockTransform) -> Tensor:
        if self._result is not None and self._is_last(x, transform):
            return self._result
        self.transformations += 1
        result = transform.apply(x)
        # Results that carry a gradient would keep their graph alive; inference tensors keep no count of changes.
        if result.requires_grad or x.is_inference():
            self.forget()
        else:
            self._last, self._result = (x, x._version, transform), result
        return result

    def _is_last(self, x: Tensor, transform: BlockTransform) -> bool:
        last = self._last
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        return last is not None and last[0] is x and last[1] == x._version and last[2] is transform and not needs_grad

    def forget(self) -> None:
        """Drop the remembered input, so that its memory can be freed."""
        self._last = self._result = None


class TransformedInput(nn.Module):
    """A linear layer (of any kind) behind the transform of its input."""

    def __init__(self, layer: nn.Module, transform: BlockTransform, memory: TransformMemory) -> None:
        """``layer`` already holds the folded weight; ``memory`` is shared by the layers of one model."""
        super().__init__()
        self.layer = layer
        self.transform, self.memory = transform, memory

    def forward(self, x: Tensor) -> Tensor:
        # Autocast would apply the transform in bf16, in which it was not rounded and inverted.
        with torch.autocast(x.device.type, enabled=False):
            transformed = self.memory(x, self.transform)
        return self.layer(transformed)

    def dequantized(self) -> Tensor:
        """``[M, K]`` fp32: the weight that the low-bit layer and the transform before it stand for together."""
        layer: Any = self.layer
        return self.transform.unfold(layer.dequantized())

    def extra_repr(self) -> str:
        blocks = len(self.transform.matrix)
        return f"blocks of {self.transform.block}, {'one matrix' if blocks == 1 else f'{blocks} matrices'}"
