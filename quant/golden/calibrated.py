"""Comparisons for what depends on a layer's inputs: GPTQ's codes and WUSH's transforms.

Both go through factorizations, whose last digits differ between machines. So the file is not held against one
outcome but against the law that the algorithm fulfils, with a tolerance of the factorization's size.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bitdraft.quant.block import Quantized, dequantize, quantize
from bitdraft.quant.golden.compare import WHOLE, Finding, Vectors, compare
from bitdraft.quant.gptq import gptq_quantize, output_error
from bitdraft.quant.scale_rules import nvfp4_global_scale
from bitdraft.quant.schemes import INT4_GROUP, MXFP4_EVEN, MXFP8_EVEN_CT, NVFP4, Scheme
from bitdraft.quant.transforms import hadamard
from bitdraft.quant.wush import wush_matrices

# M output channel, K input channel, G block of channels, D channel within a block.

_SCHEMES = {"NVFP4": NVFP4, "MXFP4": MXFP4_EVEN, "MXFP8": MXFP8_EVEN_CT, "W4A16": INT4_GROUP}
_MOMENT = 1e-6  # fp32 sums over a few hundred tokens, relative to the channels' own energy
_NEAR_TIE = 1e-4  # of a step: fp32 columns that many others were subtracted from, in another order
_SAME_ERROR = 5e-3  # relative: what the few codes that such ties flip change in the output's error (2e-8 as a rule)
_FP64 = 1e-11  # relative to the largest entry: a singular value decomposition of a badly conditioned 32 x 32 matrix


def check_gptq(vectors: Vectors, keys: Sequence[str]) -> Iterator[Finding]:
    """llm-compressor's GPTQ and plain rounding of one weight ``W`` under the Hessian ``H`` of the inputs ``X``."""
    weight, hessian = vectors["W"].float(), vectors["H"].float()
    for key in keys:
        theirs = vectors[key]
        if key == "H":
            yield compare(
                vectors.file, key, _moment(2 * vectors["X"].double(), vectors["X"].double(), theirs), theirs, WHOLE
            )
            continue
        peer, _, rest = key.partition("/")
        name, _, field = rest.partition("/")
        if peer not in ("llmcompressor_gptq", "rtn") or name not in _SCHEMES:
            continue
        scheme = _SCHEMES[name]
        plain = quantize(weight, scheme)
        if field == "global_scale":
            yield compare(vectors.file, key, nvfp4_global_scale(weight.abs().amax()).reshape(1), theirs, WHOLE)
        elif field == "scale":
            yield compare(vectors.file, key, plain.scale, theirs, WHOLE)
        elif field == "weight" and peer == "rtn":
            yield compare(vectors.file, key, _values(plain, _codes(plain, scheme), scheme) + 0.0, theirs + 0.0, WHOLE)
        elif field == "weight":
            yield _gptq_weight(vectors.file, key, weight, hessian, theirs, plain, scheme)


def _moment(x: Tensor, y: Tensor, theirs: Tensor) -> Tensor:
    """``xᵀ y / N`` for the rows of ``x`` and ``y``; where ``theirs`` differs from it by no more than fp32 sums do, what
    it holds above the diagonal, in fp32, on both sides of it."""
    ours = (x.mT @ y / x.shape[-2]).reshape(theirs.shape)
    energy = ours.diagonal(dim1=-2, dim2=-1).sqrt()
    near = (ours - theirs.double()).abs() <= _MOMENT * energy[..., :, None] * energy[..., None, :]
    upper = theirs.float().double().triu()
    return torch.where(near, upper + upper.triu(1).mT, ours).to(theirs.dtype)


def _gptq_weight(
    file: str, key: str, weight: Tensor, hessian: Tensor, theirs: Tensor, plain: Quantized, scheme: Scheme
) -> Finding:
    """On the grid bit for bit; every code the nearest to what its predecessors, as they are in the file, left of the
    column; and the output's error that of this package."""
    step_MK = _wide(plain, theirs.shape[1], scheme)
    codes_MK = scheme.element.round(theirs / step_MK)
    on_grid = compare(file, key, _values(plain, codes_MK, scheme) + 0.0, theirs + 0.0, WHOLE)
    if on_grid.wrong:
        return on_grid
    factor_KK = _inverse_factor(hessian.double())
    left_MK, far = weight.double().clone(), torch.zeros_like(theirs, dtype=torch.bool)
    for k in range(theirs.shape[1]):
        column_M, chosen_M, step_M = left_MK[:, k], theirs[:, k].double(), step_MK[:, k].double()
        nearest_M = scheme.element.round((column_M / step_M).float()).double() * step_M
        far[:, k] = (column_M - chosen_M).abs() > (column_M - nearest_M).abs() + _NEAR_TIE * step_M
        lost_M = (column_M - chosen_M) / factor_KK[k, k]
        left_MK[:, k + 1 :] -= lost_M[:, None] * factor_KK[k, k + 1 :]
    if far.any():
        row, column = far.nonzero()[0].tolist()
        first = f"row {row}, column {column}: {theirs[row, column].item()} is not the value nearest to what was left"
        return Finding(key, theirs.numel(), int(far.sum()), first=first)
    here, there = (
        output_error(weight, w, hessian) for w in (dequantize(gptq_quantize(weight, hessian, scheme)), theirs)
    )
    if abs(here - there) > _SAME_ERROR * there:
        return Finding(key, theirs.numel(), 1, first=f"output error {there:.6f} in the file, {here:.6f} computed")
    return Finding(key, theirs.numel())


def _inverse_factor(hessian_KK: Tensor) -> Tensor:
    """Upper triangular ``U`` with ``Uᵀ U = H⁻¹``, by the book; damped by 1 % of the mean diagonal."""
    diagonal_K = hessian_KK.diagonal()
    dead_K = torch.where(diagonal_K == 0, 1.0, 0.0)
    damped_KK = hessian_KK + torch.diag(dead_K + 0.01 * (diagonal_K + dead_K).mean())
    return torch.linalg.cholesky(torch.linalg.inv(damped_KK)).mT


def _wide(q: Quantized, columns: int, scheme: Scheme) -> Tensor:
    """``[M, K]``: what one code of every element stands for, in the order of the peer: ``s / g``."""
    scale = q.scale.repeat_interleave(columns // q.scale.shape[-1], dim=-1)
    return scale if not scheme.has_global_scale else scale / _encode(q)


def _encode(q: Quantized) -> Tensor:
    assert q.outer is not None
    return 1.0 / q.outer


def _values(q: Quantized, codes: Tensor, scheme: Scheme) -> Tensor:
    return codes * _wide(q, codes.shape[-1], scheme)


def _codes(q: Quantized, scheme: Scheme) -> Tensor:
    if scheme.scale_format == "fp32":
        return q.values
    return q.values / q.scale.repeat_interleave(q.values.shape[-1] // q.scale.shape[-1], dim=-1)


def check_wush(vectors: Vectors, keys: Sequence[str]) -> Iterator[Finding]:
    """WUSH transforms of the inputs ``X`` and the weight ``W``; signs of singular vectors are arbitrary."""
    moment_GDD, weight = vectors["Sx"].double(), vectors["W"].double()
    width = moment_GDD.shape[-1]
    moment_GDD = moment_GDD.reshape(-1, width, width)
    for key in keys:
        theirs = vectors[key]
        if key == "Sx":
            x_GND = vectors["X"].double().unflatten(-1, (-1, width)).transpose(0, 1)
            yield compare(vectors.file, key, _moment(x_GND, x_GND, theirs), theirs, WHOLE)
        elif key == f"hadamard{theirs.shape[-1]}":
            ours = hadamard(theirs.shape[-1])
            root = theirs.abs().median()  # its last bit is the peer's, but every entry has to have it
            ours = ours.sign() * root if abs(root / ours[0, 0] - 1) < 1e-15 else ours
            yield compare(vectors.file, key, ours, theirs, WHOLE)
        elif key.startswith("T_"):
            ours_GDD = wush_matrices(moment_GDD, weight.unflatten(-1, (-1, width)).transpose(0, 1))
            basis = hadamard(width).double().T  # rows of H^T T are singular vectors, each up to its sign
            ours_GDD, theirs_GDD = basis @ ours_GDD, basis @ theirs.reshape(ours_GDD.shape)
            signs = (ours_GDD * theirs_GDD).sum(-1, keepdim=True).sign()
            largest = ours_GDD.abs().amax()
            yield compare(vectors.file, key, ours_GDD * signs, theirs_GDD, WHOLE, within=_FP64 * float(largest))
