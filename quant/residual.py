"""Residual calibration: a thin 16-bit path beside a low-bit layer that gives back part of what it loses.

A low-bit layer computes ``x̂ Ŵᵀ`` instead of ``x Wᵀ``. With a correction of rank ``r`` it computes ``x̂ Ŵᵀ + (x Aᵀ) Bᵀ``,
where ``A`` ``[r, K]`` reads the input before it is quantized and ``B`` ``[M, r]`` writes to the output. The two are
fitted in closed form over the inputs of calibration text: with ``H = E[x xᵀ] = L Lᵀ`` and
``C = E[(W x - Ŵ x̂) xᵀ]``,

    E‖W x - Ŵ x̂ - B A x‖² = const + ‖C L⁻ᵀ - B A L‖²

so that the best ``B A L`` of rank ``r`` is the truncated singular value decomposition of ``G = C L⁻ᵀ`` (Eckart and
Young 1936; for unquantized inputs, ``C = (W - Ŵ) H``, this is QERA, Zhang et al. 2024, arXiv:2410.06040). ``H`` is
damped: nothing is corrected along directions that calibration hardly saw, and the error on the calibration text never
rises.

The correction costs memory and time that engines' low-bit checkpoints have no place for, which is why it is off unless
a recipe asks for it. Layers are fitted block by block, behind the corrected blocks before them; within a block all
layers are fitted together, on the inputs that the uncorrected ones make.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitdraft.quant.block import dequantize, quantize
from bitdraft.quant.calibrate import calibrate_layer_by_layer
from bitdraft.quant.experts import experts_around
from bitdraft.quant.linear import LowBitLinear
from bitdraft.quant.transforms import TransformedInput

# N token, K input channel, M output channel, R rank.

FEWEST_SAMPLES = 512
"""Inputs (tokens) of a layer that a correction is fitted on at least."""
_DAMP = 0.01  # share of the mean of H's diagonal, as in GPTQ


@dataclass(frozen=True)
class Fitted:
    """What a correction adds to a layer, and how much of its output error is gone on the calibration text."""

    rank: int
    added: int
    """Parameters of ``A`` and ``B``."""
    of: int
    """Parameters of the layer's weight."""
    error_left: float
    """``E‖W x - Ŵ x̂ - B A x‖² / E‖W x - Ŵ x̂‖²``, but for the part of ``x̂ - x`` that ``x`` says nothing about."""


def describe_residuals(fitted: Sequence[Fitted]) -> str:
    """A line for the log."""
    ranks = sorted({f.rank for f in fitted})
    rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    added, of = sum(f.added for f in fitted), sum(f.of for f in fitted)
    return (
        f"residual corrections of {rank} on {len(fitted)} layers: {added:,} parameters in high precision, "
        f"{added / of:.2%} of those layers'"
    )


def rank_of_share(share: float, rows: int, columns: int) -> int:
    """The rank whose ``rank · (rows + columns)`` parameters come nearest to ``share`` of the layer's, at least 1."""
    return min(max(1, round(share * rows * columns / (rows + columns))), rows, columns)


def best_low_rank(cross_MK: Tensor, moments_KK: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """``A`` ``[R, K]`` and ``B`` ``[M, R]`` (fp64) that minimise ``E‖d - B A x‖²``, ``d`` being what outputs miss.

    ``cross_MK``: ``E[d xᵀ]``; ``moments_KK``: ``E[x xᵀ]``; both over the same inputs, fp32 or fp64. Also returns the
    share of ``‖G‖²`` that stays: of the error as far as ``x`` explains it. Raises ``ValueError`` for moments that are
    not positive definite when damped (not finite, or all zero).
    """
    factor_KK = _damped_factor(moments_KK)
    g_MK = torch.linalg.solve_triangular(factor_KK, cross_MK.double().T, upper=False).T
    if len(g_MK) <= g_MK.shape[1]:  # the smaller of G Gᵀ and Gᵀ G has the singular vectors as its eigenvectors
        values, vectors = torch.linalg.eigh(g_MK @ g_MK.T)
        left_MR = vectors[:, -rank:]
        right_RK = left_MR.T @ g_MK
    else:
        values, vectors = torch.linalg.eigh(g_MK.T @ g_MK)
        right_RK = vectors[:, -rank:].T
        left_MR = g_MK @ right_RK.T
    whole = values.clamp(min=0).sum().clamp(min=torch.finfo(torch.float64).tiny)
    left = float(values[: len(values) - rank].clamp(min=0).sum() / whole)
    return torch.linalg.solve_triangular(factor_KK, right_RK, upper=False, left=False), left_MR, left


def _damped_factor(moments_KK: Tensor) -> Tensor:
    h_KK = moments_KK.double().clone()
    diagonal_K = h_KK.diagonal()
    diagonal_K += _DAMP * diagonal_K.mean()
    factor_KK, failed = torch.linalg.cholesky_ex(h_KK)
    if int(failed) or not torch.isfinite(factor_KK).all():
        raise ValueError("the moments of its inputs are not positive definite: calibrate on other text")
    return factor_KK


def check_can_correct(model: nn.Module, names: Collection[str], calibration: Sequence[Tensor]) -> None:
    """``ValueError`` for too little calibration text, and naming the first layer that has no place for a correction."""
    samples = sum(ids.numel() for ids in calibration)
    if names and samples < FEWEST_SAMPLES:
        raise ValueError(
            f"residual corrections are fitted on at least {FEWEST_SAMPLES} samples (tokens), but the calibration text "
            f"has {samples}: give more"
        )
    around = experts_around(model)
    if inside := [name for name in names if name in around]:
        raise ValueError(
            f"module {inside[0]}: experts cannot hold a residual correction, give them a rule of their own without it"
        )


@torch.no_grad()
def fit_residuals(
    model: nn.Module, originals: Mapping[str, Tensor], shares: Mapping[str, float], calibration: Sequence[Tensor]
) -> dict[str, Fitted]:
    """Correct the low-bit layers of ``model`` that ``shares`` names, in place.

    ``originals``: the weights ``[M, K]`` of those layers before they were quantized (and transformed). ``shares``: the
    parameters to add as a share of each layer's. ``calibration``: token ids ``[B, T]`` each, without padding.

    Raises ``ValueError`` for fewer than 512 tokens, for experts, and naming a layer that lies outside the decoder's
    blocks or whose inputs are not finite or always zero.
    """
    check_can_correct(model, shares, calibration)
    layers = {_inner(model, name): name for name in shares}
    losses = _InputLosses()
    for inner in layers:
        layer = model.get_submodule(inner)
        assert isinstance(layer, LowBitLinear)
        losses.watch(inner, layer)
    fitted: dict[str, Fitted] = {}

    def visit(inner: str, layer: LowBitLinear, moments_KK: Tensor) -> None:
        name = layers[inner]
        weight_MK = originals[name].float()
        outer = model.get_submodule(name)
        if isinstance(outer, TransformedInput):
            weight_MK = outer.transform.fold(weight_MK)
        low_MK = layer.dequantized()
        cross_MK = (weight_MK - low_MK) @ moments_KK
        if (lost_KK := losses.taken(inner)) is not None:
            cross_MK += low_MK @ lost_KK
        rows, columns = weight_MK.shape
        rank = rank_of_share(shares[name], rows, columns)
        try:
            residual_in, residual_out, left = best_low_rank(cross_MK, moments_KK, rank)
        except ValueError as error:
            raise ValueError(f"module {name}: {error}") from error
        layer.correct(residual_in, residual_out)
        fitted[name] = Fitted(rank, rank * (rows + columns), rows * columns, left)

    try:
        calibrate_layer_by_layer(model, calibration, visit, wanted=layers.__contains__, kind=LowBitLinear)
    finally:
        losses.stop()
    if outside := [name for name in shares if name not in fitted]:
        raise ValueError(
            f"module {outside[0]} lies outside the decoder's blocks, where calibration sees no inputs: give it a rule "
            "of its own, without residual"
        )
    return fitted


def _inner(model: nn.Module, name: str) -> str:
    return f"{name}.layer" if isinstance(model.get_submodule(name), TransformedInput) else name


class _Mean:
    """A mean of ``[K, K]`` matrices that grows."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self._sum, self._rows = torch.zeros(columns, columns, device=device), 0

    def add(self, a_NK: Tensor, b_NK: Tensor) -> None:
        self._sum.addmm_(a_NK.T, b_NK)
        self._rows += len(a_NK)

    @property
    def value(self) -> Tensor:
        return self._sum / max(self._rows, 1)


class _InputLosses:
    """``E[(x - x̂) xᵀ]`` of layers that quantize their inputs, once for those that read the same tensor in a row."""

    def __init__(self) -> None:
        self._means: dict[str, _Mean] = {}  # the same object for layers that read the same tensor
        self._last: tuple[Tensor, LowBitLinear, _Mean] | None = None
        self._stops: dict[str, Callable[[], None]] = {}

    def watch(self, name: str, layer: LowBitLinear) -> None:
        """Count the inputs of ``layer`` until its mean is taken."""
        if layer.activations is not None:
            self._stops[name] = layer.register_forward_pre_hook(self._hook(name, layer)).remove

    def taken(self, name: str) -> Tensor | None:
        """The mean ``[K, K]`` fp32, once; ``None`` for a layer that takes its inputs as they come."""
        if name not in self._stops:
            return None
        self._stops.pop(name)()
        self._last = None
        return self._means.pop(name).value

    def stop(self) -> None:
        """Leave the layers alone, also where an error came between."""
        for stop in self._stops.values():
            stop()

    def _hook(self, name: str, layer: LowBitLinear) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x, last = args[0], self._last
            if last is not None and last[0] is x and _quantize_alike(last[1], layer):
                self._means[name] = last[2]
                return
            mean = self._means.setdefault(name, _Mean(x.shape[-1], x.device))
            self._last = (x, layer, mean)
            assert layer.activations is not None
            rows_NK = x.reshape(-1, x.shape[-1])
            low_NK = dequantize(quantize(rows_NK, layer.activations, global_scale=layer.input_global_scale))
            mean.add(rows_NK - low_NK, rows_NK.float())

        return hook


def _quantize_alike(a: LowBitLinear, b: LowBitLinear) -> bool:
    return a.activations is b.activations and a.input_global_scale is b.input_global_scale
