"""Exponents of MX scales chosen by error, against all the exponents there are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.quant.block import Quantized, dequantize, quantize
from bitdraft.quant.scales.mx_exponent import best_bias, exponent_bias, exponent_search, shifted
from bitdraft.quant.schemes import MXFP4_EVEN, MXFP4_RCEIL, Scheme
from bitdraft.quant.smallfloat import E2M1

SCHEMES = [MXFP4_EVEN, MXFP4_RCEIL]


def sample(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def errors(x: Tensor, q: Quantized, diagonal: Tensor | None = None) -> Tensor:
    """Per block of 32, in fp64."""
    squares = (dequantize(q).double() - x.double()).square()
    return (squares if diagonal is None else squares * diagonal).unflatten(-1, (-1, 32)).sum(-1)


def exponents(scale: Tensor) -> Tensor:
    return torch.frexp(scale).exponent - 1


def all_exponents(x: Tensor) -> Tensor:
    """Least error of every block over the exponents -20 to 5, by the slow loop in fp64."""
    blocks = x.unflatten(-1, (-1, 32))
    steps = [2.0**e for e in range(-20, 6)]
    return torch.stack([(E2M1.round(blocks / s).double() * s - blocks.double()).square().sum(-1) for s in steps]).amin(
        0
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_search_finds_the_best_of_all_exponents(scheme: Scheme) -> None:
    torch.manual_seed(0)
    heavy = torch.distributions.StudentT(4.0).sample(torch.Size((64, 256))) * 0.02
    for x in (sample(0, 64, 256), heavy, torch.rand(64, 256)):
        assert torch.allclose(errors(x, exponent_search(x, scheme)), all_exponents(x), rtol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_block_errs_more_than_under_the_rule(scheme: Scheme) -> None:
    x = sample(1, 64, 256)
    x[0, :32] = 0
    ours, rule = errors(x, exponent_search(x, scheme)), errors(x, quantize(x, scheme))
    assert (ours <= rule).all()
    assert ours.sum() < (0.999 if scheme is MXFP4_EVEN else 0.9) * rule.sum()


def test_the_search_looks_at_the_weights_of_the_channels() -> None:
    x, diagonal = sample(2, 64, 64), torch.zeros(64)
    diagonal[:4] = 1.0
    weighted, plain = exponent_search(x, MXFP4_EVEN, hessian=diagonal), exponent_search(x, MXFP4_EVEN)
    assert (errors(x, weighted, diagonal) <= errors(x, plain, diagonal) * (1 + 1e-6)).all()
    assert errors(x, weighted, diagonal).sum() < 0.95 * errors(x, plain, diagonal).sum()


def test_the_bias_is_one_shift_for_all_blocks_and_the_best_one() -> None:
    for scheme in SCHEMES:
        x = sample(3, 32, 128)
        totals = {}
        for offset in (0, -1, 1):
            scale = shifted(quantize(x, scheme).scale, offset)[..., None]
            blocks = x.unflatten(-1, (-1, 32))
            totals[offset] = (E2M1.round(blocks / scale) * scale - blocks).double().square().sum().item()
        best = min(totals, key=lambda offset: totals[offset])
        assert best_bias([x], scheme) == best
        q = exponent_bias(x, scheme)
        assert torch.equal(exponents(q.scale), exponents(quantize(x, scheme).scale) + best)
        assert errors(x, q).sum().item() == pytest.approx(totals[best], rel=1e-6)


def test_a_group_decides_together() -> None:
    """One kind of block wants a smaller exponent, the other its own; the larger total error decides."""
    lower, own = torch.full((1, 64), 1.5), torch.full((1, 32), 4.0)
    lower[0, ::32] = 7.2  # even: steps of 1 below 4, so 1.5 errs by 0.5; one exponent lower it is exact, 7.2 becomes 6
    assert best_bias([lower], MXFP4_EVEN) == -1
    assert best_bias([own], MXFP4_EVEN) == 0
    assert best_bias([own, lower], MXFP4_EVEN) == 0
    assert best_bias([own, lower.expand(3, 64)], MXFP4_EVEN) == -1


def test_equal_errors_keep_the_rule() -> None:
    x = torch.ones(2, 64)
    assert best_bias([x], MXFP4_EVEN) == 0
    assert torch.equal(exponent_search(x, MXFP4_EVEN).scale, quantize(x, MXFP4_EVEN).scale)


@given(st.integers(0, 2**32 - 1), st.integers(-148, 126), st.sampled_from(SCHEMES))
def test_zeros_stay_exact_and_scales_stay_within_e8m0(seed: int, exponent: int, scheme: Scheme) -> None:
    x = sample(seed, 2, 64).clamp(-1, 1) * 2.0**exponent
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.4] = 0
    for q in (exponent_search(x, scheme), exponent_bias(x, scheme)):
        assert (dequantize(q)[x == 0] == 0).all()
        assert torch.isfinite(q.values).all()
        assert ((q.scale >= 2.0**-127) & (q.scale <= 2.0**127)).all()
        assert (torch.frexp(q.scale).mantissa == 0.5).all()
        assert q.outer is None


@pytest.mark.parametrize("method", [exponent_search, exponent_bias])
def test_a_width_that_does_not_divide_is_refused(method: object) -> None:
    assert callable(method)
    with pytest.raises(ValueError, match="48 columns do not divide into blocks of 32"):
        method(torch.ones(2, 48), MXFP4_EVEN)


def test_no_exponent_lies_below_what_a_byte_holds() -> None:
    """Blocks of the smallest numbers would be finer under 2^-128, which E8M0 does not have."""
    x = torch.full((1, 32), 2.0**-129)  # a quarter of the smallest scale: a tie that goes to 0
    finer = E2M1.round(x / 2.0**-128) * 2.0**-128
    assert torch.equal(finer, x)
    for q in (exponent_search(x, MXFP4_EVEN), exponent_bias(x, MXFP4_EVEN)):
        assert (q.scale == 2.0**-127).all()
        assert torch.isin(q.values / q.scale, E2M1.magnitudes).all()
