"""Rounding a weight so that the layer's output stays, not each weight: GPTQ for block-scaled formats.

Frantar et al. 2022 (arXiv:2210.17323). Columns are rounded one after the other; what one column loses, the
columns not yet rounded take over, so that ``‖(W - Ŵ) X‖²`` grows as little as it can. With ``H = E[x xᵀ]``
damped and ``H⁻¹ = Uᵀ U`` (``U`` upper triangular), column ``j`` leaves the error ``e_j = (w_j - ŵ_j) / U_jj``
and column ``c > j`` becomes ``w_c - U_jc e_j``.

The block scales are fixed before the pass, from the original weight or from outside: a scale that followed
the drifting columns would change the columns of its block that are rounded already. So the result is an
ordinary tensor of its scheme, and activation order needs no index in the checkpoint: only the order of the
work changes. With a diagonal ``H`` no column concerns another and the result is plain rounding, bit for bit.

The work is done on the transposed weight, whose rows (columns of the layer) are contiguous. Inside a batch
of columns each one gathers what its predecessors left (one matrix-vector product); the columns behind the
batch take all of it in one matrix product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bitdraft.quant.block import OnGrid, Quantized, check_divides, drop_inner, to_grid
from bitdraft.quant.scale_rules import multiplier, nvfp4_codes
from bitdraft.quant.schemes import Scheme

# M output channel, K input channel (column), G block of columns that share a scale, C column of a batch.

_BATCH = 128  # columns per batch: the paper's choice
_FROM_MAXIMUM = ("amax-reciprocal", "hf-inverse")
"""Rules that make codes from the block's maximum instead of its scale; here columns are divided by the scale, which
differs in the last bit."""


@dataclass(frozen=True)
class _FixedScales:
    """Rounding of one column when the scales are given: the arithmetic of ``quant/block.py``, column by column."""

    scheme: Scheme
    scale: Tensor  # [G, M]
    factor: Tensor | None  # [G, M]: what columns are multiplied by where the rule does not divide them by the scale
    zero: Tensor | None  # [G, M]
    encode: Tensor | None  # the global scale in both conventions, fp32 []
    decode: Tensor | None

    def round(self, w_M: Tensor, group: int) -> Tensor:
        """The ``Quantized.values`` ``[M]`` of one column that belongs to block ``group``."""
        element, ties, scale_M = self.scheme.element, self.scheme.ties, self.scale[group]
        if self.zero is not None:
            return element.round(w_M / scale_M + self.zero[group], ties=ties) - self.zero[group]
        if self.encode is not None and self.decode is not None:
            # As blocks of one element, [M, 1].
            scaled_M = nvfp4_codes(w_M[:, None], scale_M[:, None], self.scheme, self.encode, self.decode)[:, 0]
        else:
            scaled_M = w_M / scale_M if self.factor is None else w_M * self.factor[group]
        # A block of zeros may have a scale of zero; what its neighbours hand over, it cannot hold.
        codes_M = element.round(scaled_M.masked_fill(scale_M == 0, 0.0), ties=ties)
        return codes_M if self.scheme.scale_format == "fp32" else codes_M * scale_M

    def weights(self, values_M: Tensor, group: int) -> Tensor:
        """The weights that ``values_M`` of block ``group`` stand for."""
        if self.decode is not None:
            return values_M * self.decode
        return values_M * self.scale[group] if self.scheme.scale_format == "fp32" else values_M

    def finish(self, values_MK: Tensor, scale: Tensor) -> Quantized:
        """All columns as ``quantize`` returns them; ``scale`` as it is stored."""
        if self.scheme.scale_format != "fp32":
            return Quantized(values_MK, self.decode, scale)
        if self.scheme.rows is None:
            return Quantized(values_MK, scale, scale)
        return Quantized(values_MK, self.scale.T.contiguous(), scale, self.scheme.block)


def _fixed(grid: OnGrid, scale: Tensor, scheme: Scheme, rows: int) -> _FixedScales:
    """The scales per column block and row. ``grid``: the original weight's; ``scale``: its block scales or others."""
    scale_GM = _per_row(scale, scheme, rows)
    zero = None if grid.zero_point is None else _per_row(drop_inner(grid.zero_point, scheme), scheme, rows)
    one_level = scheme.scale_format == "fp32" and not scheme.has_zero_point and scheme.scale not in _FROM_MAXIMUM
    factor = multiplier(scale_GM, scale_GM, scheme) if one_level else None
    if grid.global_scale is None:
        return _FixedScales(scheme, scale_GM, factor, zero, None, None)
    given, inverse = grid.global_scale, 1.0 / grid.global_scale
    encode, decode = (inverse, given) if scheme.stores_decode_scale else (given, inverse)
    return _FixedScales(scheme, scale_GM, None, None, encode, decode)


def _per_row(scale: Tensor, scheme: Scheme, rows: int) -> Tensor:
    """Stored scales as ``[G, M]``: one for every row, whatever number of them shares it."""
    if scheme.rows is None:
        return scale.reshape(1, 1).expand(1, rows)
    if scheme.rows > 1:
        scale = scale.repeat_interleave(scheme.rows, dim=0)[:rows]
    return scale.T.contiguous()


@torch.no_grad()
def gptq_quantize(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    *,
    global_scale: Tensor | None = None,
    scales: Tensor | None = None,
    act_order: bool = False,
    damp: float = 0.01,
) -> Quantized:
    """Quantize ``weight`` to ``scheme`` with the least output error that one greedy pass finds.

    ``weight``: ``[M, K]``, any float dtype. ``hessian``: ``[K, K]``, fp32 or fp64, ``E[x xᵀ]`` of the layer's
    inputs up to a factor (``quant/calibrate.py`` collects it); the dtype is also that of its factorization.
    ``scales``: decode scales that a search chose, shaped as ``Quantized.scale`` is (``[M, K / block]``); by default
    those of ``quantize``. ``global_scale``: as in ``quantize``; required with ``scales`` where the format has one.
    ``act_order`` rounds the columns with the largest inputs first. ``damp``: added to the diagonal, as a share of
    its mean. Compensated columns are divided in fp32, also where the scheme's owner computes scales in bf16.

    Columns whose inputs were always zero are rounded plainly: nothing is known against their weights.
    Raises ``ValueError`` for shapes that do not fit, values that are not finite, scales without their global
    scale or for a format with zero points, and a Hessian that damping does not make positive definite.
    """
    weight = weight.detach()
    _check(weight, hessian, scheme)
    if scales is not None and scheme.has_global_scale and global_scale is None:
        raise ValueError(f"{scheme.name} block scales mean nothing without the global scale they were chosen under")
    grid = to_grid(weight, scheme, global_scale)
    scale = drop_inner(grid.scale, scheme)
    if scales is not None:
        if scheme.has_zero_point:
            raise ValueError(f"{scheme.name} has zero points, which scales from outside would not fit")
        if scales.shape != scale.shape:
            raise ValueError(f"{scheme.name} scales of this weight are {list(scale.shape)}, not {list(scales.shape)}")
        scale = scales.float()
    fixed = _fixed(grid, scale, scheme, len(weight))

    order_K = _order(hessian, act_order)
    factor_KK = _inverse_factor(hessian[order_K][:, order_K], damp).float()
    groups = [0] * weight.shape[1] if scheme.block is None else (order_K // scheme.block).tolist()
    values_KM = _compensate(weight.float().T[order_K].contiguous(), factor_KK, groups, fixed)
    values_MK = torch.empty_like(values_KM).index_copy_(0, order_K, values_KM).T.contiguous()
    return fixed.finish(values_MK, scale)


def output_error(weight: Tensor, approximation: Tensor, hessian: Tensor) -> float:
    """``tr(E H Eᵀ) / tr(W H Wᵀ)``, ``E`` the difference: the share of the output's energy that is lost.

    ``weight``, ``approximation``: ``[M, K]``; ``hessian``: ``[K, K]``. Computed in fp64.
    """
    h = hessian.double()
    w = weight.double()
    e = w - approximation.double()
    return float(((e @ h) * e).sum() / ((w @ h) * w).sum())


def _compensate(w_KM: Tensor, factor_KK: Tensor, groups: list[int], fixed: _FixedScales) -> Tensor:
    """Round the rows of ``w_KM`` in order, passing on what each loses; destroys ``w_KM``, returns the values."""
    values_KM = torch.empty_like(w_KM)
    for first in range(0, len(w_KM), _BATCH):
        last = min(first + _BATCH, len(w_KM))
        own_CC = factor_KK[first:last, first:last]
        lost_CM = torch.empty_like(w_KM[first:last])
        for c in range(last - first):
            w_M = w_KM[first + c]
            if c:
                w_M = w_M - own_CC[:c, c] @ lost_CM[:c]
            values_M = fixed.round(w_M, groups[first + c])
            values_KM[first + c] = values_M
            lost_CM[c] = (w_M - fixed.weights(values_M, groups[first + c])) / own_CC[c, c]
        w_KM[last:].addmm_(factor_KK[first:last, last:].T, lost_CM, alpha=-1)
    return values_KM


def _order(hessian: Tensor, act_order: bool) -> Tensor:
    """The order of the work ``[K]``; equal inputs keep their own order."""
    if act_order:
        return hessian.diagonal().argsort(descending=True, stable=True)
    return torch.arange(len(hessian), device=hessian.device)


def _inverse_factor(hessian: Tensor, damp: float) -> Tensor:
    """Upper triangular ``U`` with ``Uᵀ U = H⁻¹`` for the damped ``hessian`` ``[K, K]``.

    One Cholesky factorization and one triangular inverse, on the matrix with rows and columns reversed:
    ``H = R Rᵀ`` with ``R`` upper triangular, ``U = R⁻¹``. ``H⁻¹`` itself, which loses digits, is never formed.
    """
    h_KK = hessian.clone()
    diagonal_K = h_KK.diagonal()
    dead_K = diagonal_K == 0
    mean = diagonal_K.sum() / (~dead_K).sum().clamp(min=1)
    diagonal_K += torch.where(dead_K, torch.where(mean > 0, mean, 1.0), damp * mean)
    lower_KK, failed = torch.linalg.cholesky_ex(h_KK.flip(0, 1))
    if int(failed):
        raise ValueError(
            f"the Hessian is not positive definite with damping {damp}: "
            "calibrate on more tokens, or raise the damping (0.1 is a lot)"
        )
    identity = torch.eye(len(h_KK), dtype=h_KK.dtype, device=h_KK.device)
    return torch.linalg.solve_triangular(lower_KK, identity, upper=False).flip(0, 1)


def _check(weight: Tensor, hessian: Tensor, scheme: Scheme) -> None:
    columns = weight.shape[1]
    check_divides(columns, scheme)
    if hessian.shape != (columns, columns):
        raise ValueError(f"a weight of {columns} columns needs a Hessian of that size, not {list(hessian.shape)}")
    if hessian.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the Hessian must be fp32 or fp64, got {hessian.dtype}")
    if not torch.isfinite(weight).all():
        raise ValueError("the weight holds NaN or infinity")
    if not torch.isfinite(hessian).all():
        raise ValueError("the Hessian holds NaN or infinity: an input of the calibration text was not finite")
