"""Sweep and SOAR: golden errors, exhaustive oracles, and what must never get worse."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from bitdraft.quant.block import Quantized, dequantize, quantize
from bitdraft.quant.scales.error import block_hessian, blocks_of, dot
from bitdraft.quant.scales.soar import (
    Fit,
    bracket,
    decoupled_search,
    joint_fit,
    least_squares_global,
    least_squares_scale,
    soar,
)
from bitdraft.quant.scales.sweep import sweep, sweep_decoupled
from bitdraft.quant.schemes import NVFP4
from bitdraft.quant.smallfloat import E2M1, E4M3

E4M3_ABOVE_ZERO = E4M3.magnitudes[1:]


def sample(seed: int, *shape: int, kind: str = "normal") -> Tensor:
    torch.manual_seed(seed)
    size = torch.Size(shape)
    if kind == "laplace":
        return torch.distributions.Laplace(0.0, 0.02).sample(size)
    if kind == "student":
        return torch.distributions.StudentT(5.0).sample(size) * 0.02
    return torch.rand(size) - 0.5 if kind == "uniform" else torch.randn(size) * 0.02


def correlated_hessian(columns: int, *, seed: int = 7, strength: float = 3.0) -> Tensor:
    """``[K / 16, 16, 16]``: second moments of inputs that share a few directions."""
    torch.manual_seed(seed)
    x = torch.randn(4 * columns, columns // 16, 16)
    x = x + strength * torch.randn(4 * columns, columns // 16, 1) * torch.randn(columns // 16, 16)
    return torch.einsum("nbe,nbf->bef", x, x) / len(x)


HESSIANS = [correlated_hessian(256).diagonal(dim1=1, dim2=2).flatten() ** 2, correlated_hessian(256)]


def errors(x: Tensor, q: Quantized, hessian: Tensor | None = None) -> Tensor:
    """Per block, in fp64."""
    difference = (dequantize(q).double() - x.double()).unflatten(-1, (-1, 16))
    h = block_hessian(hessian, x.shape[-1], NVFP4)
    return dot(difference, difference, None if h is None else h.double())


def total(x: Tensor, q: Quantized, hessian: Tensor | None = None) -> float:
    return errors(x, q, hessian).sum().item()


def is_nvfp4(q: Quantized) -> bool:
    """Codes on the E2M1 grid, scales on E4M3's and not 0, one fp32 scale."""
    codes = q.values.unflatten(-1, (q.scale.shape[-1], -1)) / q.scale[..., None]
    on_grid = torch.isin(codes.abs(), E2M1.magnitudes).all() and torch.isin(q.scale, E4M3_ABOVE_ZERO).all()
    return bool(on_grid) and q.outer is not None and q.outer.shape == () and q.outer.dtype == torch.float32


def all_scales(x: Tensor, hessian: Tensor | None = None) -> Tensor:
    """Least error of every block over all 126 scales, by the slow loop in fp64."""
    encode = 2688 / x.abs().max()
    blocks = x.unflatten(-1, (-1, 16))
    h = block_hessian(hessian, x.shape[-1], NVFP4)
    found = []
    for scale in E4M3_ABOVE_ZERO:
        difference = (E2M1.round(blocks / (scale / encode)) * (scale / encode)).double() - blocks.double()
        found.append(dot(difference, difference, None if h is None else h.double()))
    return torch.stack(found).amin(dim=0)


@pytest.mark.parametrize("kind", ["normal", "laplace", "student", "uniform"])
def test_the_window_of_the_sweep_holds_the_best_of_all_scales(kind: str) -> None:
    x = sample(0, 64, 256, kind=kind)
    best = all_scales(x)
    ours = errors(x, sweep(x, NVFP4))
    assert ours.sum() <= best.sum() * (1 + 1e-4)
    assert (ours > best * (1 + 1e-4)).float().mean() < 0.002


@pytest.mark.parametrize("hessian", HESSIANS, ids=["diagonal", "blocks"])
def test_the_weighted_sweep_finds_nearly_the_best_of_all_scales_under_its_weights(hessian: Tensor) -> None:
    x = sample(1, 64, 256)
    assert total(x, sweep(x, NVFP4, hessian=hessian), hessian) <= all_scales(x, hessian).sum() * (1 + 2e-4)


@pytest.mark.parametrize("hessian", [None, *HESSIANS], ids=["no", "diagonal", "blocks"])
def test_no_block_errs_more_than_under_the_plain_rule(hessian: Tensor | None) -> None:
    x = sample(2, 32, 256)
    x[3, 32:64] = 0
    x[4, :16] *= 1e-6
    q = sweep(x, NVFP4, hessian=hessian)
    plain = errors(x, quantize(x, NVFP4), hessian)
    assert (errors(x, q, hessian) <= plain * (1 + 1e-5)).all()
    assert is_nvfp4(q)
    assert total(x, q, hessian) < 0.95 * plain.sum().item()


def test_weights_that_look_at_one_channel_only_make_it_exact_or_nearly() -> None:
    x = sample(3, 32, 32)
    only = torch.zeros(32)
    only[5] = 1.0
    weighted, plain = sweep(x, NVFP4, hessian=only), sweep(x, NVFP4)
    assert total(x, weighted, only) < 0.3 * total(x, plain, only)


def test_a_constant_diagonal_changes_nothing() -> None:
    x = sample(4, 16, 64)
    assert torch.equal(sweep(x, NVFP4, hessian=torch.full((64,), 2.0)).values, sweep(x, NVFP4).values)


def test_a_diagonal_written_as_blocks_is_the_same_weight() -> None:
    x, diagonal = sample(5, 16, 64), torch.rand(64) + 0.1
    blocks = torch.diag_embed(diagonal.view(4, 16))
    assert torch.equal(sweep(x, NVFP4, hessian=diagonal).scale, sweep(x, NVFP4, hessian=blocks).scale)


@pytest.mark.parametrize("method", [sweep, sweep_decoupled, soar])
@pytest.mark.parametrize(
    ("hessian", "complaint"),
    [
        (torch.ones(63), r"shape \[64\] \(its diagonal\) or \[4, 16, 16\] .*, got \[63\]"),
        (torch.ones(64, 64), r"got \[64, 64\]"),
        (-torch.ones(64), "must be finite and its diagonal must not be negative"),
        (torch.full((4, 16, 16), torch.nan), "must be finite"),
    ],
)
def test_a_hessian_that_does_not_fit_is_refused(
    method: Callable[..., Quantized], hessian: Tensor, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        method(sample(6, 4, 64), NVFP4, hessian=hessian)


@pytest.mark.parametrize("method", [sweep, sweep_decoupled, soar])
def test_a_width_that_does_not_divide_is_refused(method: Callable[..., Quantized]) -> None:
    with pytest.raises(ValueError, match="40 columns do not divide into blocks of 16"):
        method(torch.ones(2, 40), NVFP4)


@pytest.mark.parametrize("method", [sweep, sweep_decoupled, soar])
def test_zeros_stay_exact(method: Callable[..., Quantized]) -> None:
    x = sample(7, 16, 64)
    x[torch.rand(x.shape) < 0.4] = 0
    x[2] = 0
    q = method(x, NVFP4)
    assert (dequantize(q)[x == 0] == 0).all()
    assert is_nvfp4(q)
    zeros = method(torch.zeros(2, 32), NVFP4)
    assert (dequantize(zeros) == 0).all()
    assert is_nvfp4(zeros)


@pytest.mark.parametrize("method", [sweep, sweep_decoupled, soar])
def test_a_power_of_two_moves_into_the_global_scale(method: Callable[..., Quantized]) -> None:
    x = sample(8, 16, 64)
    one, other = method(x, NVFP4), method(x * 2.0**-40, NVFP4)
    assert torch.equal(one.values, other.values)
    assert one.outer is not None and other.outer is not None
    assert torch.equal(one.outer * 2.0**-40, other.outer)


@pytest.mark.parametrize("method", [sweep, sweep_decoupled, soar])
def test_bf16_is_computed_in_fp32(method: Callable[..., Quantized]) -> None:
    x = sample(9, 16, 64).bfloat16()
    ours, reference = method(x, NVFP4), method(x.float(), NVFP4)
    assert torch.equal(ours.values, reference.values)
    assert ours.values.dtype == torch.float32


@pytest.mark.parametrize("method", [sweep, sweep_decoupled, soar])
def test_rows_in_chunks_are_the_rows_at_once(method: Callable[..., Quantized], monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample(10, 37, 64)
    whole = method(x, NVFP4)
    monkeypatch.setattr("bitdraft.quant.scales.error._CHUNK", 200)
    parts = method(x, NVFP4)
    assert torch.equal(whole.values, parts.values)
    assert torch.equal(whole.scale, parts.scale)


def test_a_second_scale_gains_nothing_under_a_separable_error() -> None:
    """Nearest codes are the best for every stored scale, element by element."""
    x = sample(11, 64, 256)
    for hessian in (None, HESSIANS[0]):
        one, two = (
            total(x, sweep(x, NVFP4, hessian=hessian), hessian),
            total(x, sweep_decoupled(x, NVFP4, hessian=hessian), hessian),
        )
        assert one * (1 - 1e-4) <= two <= one * (1 + 1e-6)


def test_a_second_scale_gains_something_under_a_full_block() -> None:
    x, hessian = sample(12, 64, 256), correlated_hessian(256)
    one, two = (errors(x, method(x, NVFP4, hessian=hessian), hessian) for method in (sweep, sweep_decoupled))
    assert (two <= one * (1 + 1e-4)).all()
    assert two.sum() < 0.97 * one.sum()


def test_the_least_squares_scales_are_where_the_derivative_is_zero() -> None:
    x, hessian = sample(13, 8, 64).double(), correlated_hessian(64).double()
    for h in (None, torch.rand(4, 16).double(), hessian):
        blocks = x.unflatten(-1, (-1, 16))
        codes = E2M1.round((blocks / 0.01).float()).double()
        scale = torch.rand(8, 4).double() + 0.5
        alpha = least_squares_global(blocks, Fit.of(blocks, codes, scale, torch.tensor(0.01), h), torch.tensor(1.0), h)
        variable = alpha.double().requires_grad_()
        (slope,) = torch.autograd.grad(Fit.of(blocks, codes, scale, variable, h).error.sum(), variable)
        curvature = 2 * (scale.square() * dot(codes, codes, h)).sum()
        assert abs(slope / curvature / alpha) < 1e-6  # alpha is rounded to fp32
        best = least_squares_scale(blocks, codes, alpha.double(), h, otherwise=scale).requires_grad_()
        slopes = torch.autograd.grad(Fit.of(blocks, codes, best, alpha.double(), h).error.sum(), best)[0]
        assert (slopes.abs() < 1e-12).all()


def test_bracket_gives_the_neighbours_on_both_sides() -> None:
    grid = E4M3_ABOVE_ZERO
    below, above = bracket(grid)
    assert torch.equal(below, grid)
    assert torch.equal(above, grid)
    middles = (grid[:-1] + grid[1:]) / 2
    below, above = bracket(middles)
    assert torch.equal(below, grid[:-1])
    assert torch.equal(above, grid[1:])
    ends = torch.tensor([-1.0, 0.0, 2.0**-12, 500.0])
    assert [t.tolist() for t in bracket(ends)] == [[2.0**-9, 2.0**-9, 2.0**-9, 448.0]] * 2


@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["normal", "laplace", "student", "uniform"]),
    st.floats(-20, 20),
    st.sampled_from([None, "diagonal", "blocks"]),
)
def test_the_error_that_soar_keeps_never_rises(seed: int, kind: str, exponent: float, weights: str | None) -> None:
    """With every iteration, with the decoupled search after them, and against the plain rule; any scale of rows."""
    x = sample(seed, 6, 64, kind=kind) * 2.0**exponent * torch.exp2(torch.randint(-6, 7, (6, 1)))
    hessian = {None: None, "diagonal": torch.rand(64), "blocks": correlated_hessian(64, seed=seed)}[weights]
    h = block_hessian(hessian, 64, NVFP4)
    plain = total(x, quantize(x, NVFP4), hessian)
    kept = [joint_fit(blocks_of(x, NVFP4), E2M1, h, n)[1].error.double().sum().item() for n in range(6)]
    assert kept[0] <= plain * (1 + 1e-5)
    assert all(later <= earlier for earlier, later in pairwise(kept))
    joint = total(x, soar(x, NVFP4, hessian=hessian, iterations=5, factors=()), hessian)
    assert joint == pytest.approx(kept[-1], rel=1e-4)
    q = soar(x, NVFP4, hessian=hessian, iterations=5)
    assert total(x, q, hessian) <= joint * (1 + 1e-6)
    assert is_nvfp4(q)


@pytest.fixture
def golden(shared: Path) -> dict[str, Tensor]:
    return load_file(shared / "golden" / "soar_sweep.safetensors")


def test_the_sweep_equals_the_reference(golden: dict[str, Tensor]) -> None:
    q = sweep(golden["w"], NVFP4)
    assert total(golden["w"], q) == pytest.approx(golden["sweep448/sse"].item(), rel=1e-6)
    assert torch.equal(q.scale.flatten(), golden["sweep448/delta"])


def test_the_joint_fit_equals_the_reference(golden: dict[str, Tensor]) -> None:
    alpha, fit = joint_fit(blocks_of(golden["w"], NVFP4), E2M1, None, 20)
    assert torch.equal(fit.scale.flatten(), golden["cjso/delta_e4m3"])
    assert torch.equal(fit.codes.reshape(-1, 16), golden["cjso/q"])
    assert alpha.item() == pytest.approx(golden["cjso/alpha"].item(), rel=1e-6)
    assert fit.error.sum().item() == pytest.approx(golden["cjso/sse"].item(), rel=1e-6)


def test_the_decoupled_search_equals_the_reference_and_soar_does_better(golden: dict[str, Tensor]) -> None:
    """The reference searches around the joint fit's E4M3 scale and stores it or the next one below; ``soar`` takes the
    real-valued scale before it was rounded, and both its neighbours."""
    w = golden["w"]
    blocks = blocks_of(w, NVFP4)
    alpha, start = joint_fit(blocks, E2M1, None, 20)
    grid = E4M3.magnitudes
    below = grid[(torch.searchsorted(grid, start.scale) - 1).clamp(min=1)]
    assigning = [start.scale * (i / 100) for i in range(50, 151)]
    fit = decoupled_search(blocks, start, assigning, lambda _: (start.scale, below), alpha, E2M1, None)
    assert torch.equal(fit.scale.flatten(), golden["dss/delta_d"].float())
    assert fit.error.sum().item() == pytest.approx(golden["dss/sse"].item(), rel=1e-6)
    assert total(w, soar(w, NVFP4)) < golden["dss/sse"].item()
    assert total(w, soar(w, NVFP4, factors=())) == pytest.approx(golden["cjso/sse"].item(), rel=1e-6)
