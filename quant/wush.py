"""WUSH: the block transform of a layer's input that suits both its inputs and its weight.

Chen et al. 2025 (arXiv:2512.00956). For a block of ``d`` channels let ``E[x xᵀ] = Bᵀ B`` and ``B Wᵀ / √M = V S Uᵀ``.
Then ``T = H S^½ Vᵀ B⁻ᵀ`` with ``H`` the Hadamard matrix gives transformed inputs and transformed weights the *same*
second moment, ``E[T x xᵀ Tᵀ] = H S Hᵀ = (W T⁻¹)ᵀ(W T⁻¹) / M``, with an equal share on every channel of
the block. Both factors of the product are then as easy to round as the other.

``V`` and ``S²`` come from the ``d × d`` matrix ``B (Wᵀ W / M) Bᵀ``, so the weight's height costs one product. The
eigenvectors' signs are arbitrary: ``T`` may differ from another implementation's while what it does is equal.
"""

import torch
from torch import Tensor

from bitdraft.quant.transforms import BlockTransform, block_transform, hadamard

# M output channel, K input channel, G block of channels, D channel within a block.


@torch.no_grad()
def wush_matrices(second_moment_GDD: Tensor, weight_GMD: Tensor, damp: float = 0.01) -> Tensor:
    """``T`` of every block, fp64 ``[G, D, D]``.

    ``second_moment_GDD``: ``E[x xᵀ]`` of each block's inputs. ``weight_GMD``: the columns of each block. ``damp``: what
    is added to the moments' diagonal and to the singular values, as a share of their mean; blocks of zeros get
    1 instead. Raises ``ValueError`` where a moment is not positive definite even so.
    """
    moment = second_moment_GDD.double()
    weight = weight_GMD.double()
    width = moment.shape[-1]
    moment = moment + torch.diag_embed(_share_of_mean(moment.diagonal(dim1=-2, dim2=-1), damp))
    lower, failed = torch.linalg.cholesky_ex(moment)  # B = lowerᵀ
    if failed.any():
        raise ValueError(f"second moments of block {int(failed.nonzero()[0])} are not positive definite")
    gram = weight.mT @ weight / weight.shape[1]
    squares, vectors = torch.linalg.eigh(lower.mT @ gram @ lower)
    singular = squares.clamp(min=0).sqrt().flip(-1)  # largest first, as an SVD orders them
    v = vectors.flip(-1)
    singular = singular + _share_of_mean(singular, damp)
    # B⁻ᵀ = lower⁻¹, and Vᵀ lower⁻¹ is the solution Z of Z lower = Vᵀ.
    projected = torch.linalg.solve_triangular(lower, v.mT, upper=False, left=False)
    return hadamard(width).to(moment.device) @ (singular.sqrt()[..., None] * projected)


def wush_transform(
    hessian: Tensor, weight: Tensor, block: int, dtype: torch.dtype = torch.float32, damp: float = 0.01
) -> BlockTransform:
    """The WUSH transform of a layer, to be applied in ``dtype``.

    ``hessian``: ``[K, K]``, ``E[x xᵀ]`` of the inputs, not just up to a factor. ``weight``: ``[M, K]``; of layers that
    share their input, all of them stacked along ``M``. ``block``: channels per block, a power of two that divides
    ``K`` (that of the activation format). Raises ``ValueError`` otherwise.
    """
    columns = weight.shape[1]
    if columns % block:
        raise ValueError(f"{columns} channels do not divide into blocks of {block}")
    blocks = columns // block
    moments = hessian.reshape(blocks, block, blocks, block).diagonal(dim1=0, dim2=2).movedim(-1, 0)  # [G, D, D]
    columns_GMD = weight.reshape(len(weight), blocks, block).transpose(0, 1)
    return block_transform(wush_matrices(moments, columns_GMD, damp), dtype)


def _share_of_mean(values: Tensor, share: float) -> Tensor:
    """``share`` of the mean along the last dimension, spread over it; 1 where the mean is zero."""
    mean = values.mean(dim=-1, keepdim=True)
    return torch.where(mean > 0, share * mean, 1.0).expand_as(values)
