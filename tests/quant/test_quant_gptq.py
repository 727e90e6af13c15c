"""GPTQ: a slow obvious oracle, the laws it must keep, and vectors that llm-compressor wrote."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from bitdraft.quant.block import dequantize, nvfp4_global_scale, quantize
from bitdraft.quant.gptq import gptq_quantize, output_error
from bitdraft.quant.schemes import (
    FP8_BLOCK,
    FP8_BLOCK_HF,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT4_GROUP,
    INT8_CHANNEL,
    MXFP4_EVEN,
    MXFP4_RCEIL,
    MXFP4_RCEIL_AWAY,
    MXFP6_E2M3_EVEN,
    MXFP8_RCEIL,
    NVFP4,
    NVFP4_KERNEL,
    NVFP4_MODELOPT,
    NVFP4_TORCHAO,
    Scheme,
    scheme_named,
)

SCHEMES = [
    FP8_TENSOR,
    FP8_CHANNEL,
    FP8_BLOCK,
    MXFP4_EVEN,
    MXFP4_RCEIL,
    MXFP4_RCEIL_AWAY,
    MXFP6_E2M3_EVEN,
    MXFP8_RCEIL,
    NVFP4,
    NVFP4_KERNEL,
    NVFP4_MODELOPT,
    NVFP4_TORCHAO,
    INT8_CHANNEL,
    scheme_named("int4-g32"),
    scheme_named("int4-g32-asym"),
]
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)


def problem(seed: int, columns: int = 160, rows: int = 24, correlation: float = 0.9) -> tuple[Tensor, Tensor]:
    """A random weight and ``E[x xᵀ]`` of inputs that mix ``correlation`` of a few common directions."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=g) * torch.rand(rows, 1, generator=g)
    common = torch.randn(1000, 8, generator=g) @ torch.randn(8, columns, generator=g)
    x = correlation * common / 8**0.5 + (1 - correlation) * torch.randn(1000, columns, generator=g)
    return weight, x.T @ x / len(x)


def error(weight: Tensor, hessian: Tensor, scheme: Scheme, **how: Any) -> float:
    return output_error(weight, dequantize(gptq_quantize(weight, hessian, scheme, **how)), hessian)


def rounding_error(weight: Tensor, hessian: Tensor, scheme: Scheme) -> float:
    return output_error(weight, dequantize(quantize(weight, scheme)), hessian)


def slow_gptq(weight: Tensor, hessian: Tensor, scales: Tensor, block: int, damp: float = 0.01) -> Tensor:
    """The paper's loop as it is written: the inverse Hessian is updated after every column. MX formats, fp64."""
    w, h = weight.double().clone(), hessian.double().clone()
    h += damp * h.diagonal().mean() * torch.eye(len(h))
    done = torch.zeros_like(w)
    inverse = torch.linalg.inv(h)
    for j in range(w.shape[1]):
        scale = scales[:, j // block]
        done[:, j] = (MXFP4_EVEN.element.round((w[:, j] / scale).float()) * scale).double()
        w -= ((w[:, j] - done[:, j]) / inverse[j, j])[:, None] * inverse[j]
        inverse = inverse - inverse[:, j : j + 1] @ inverse[j : j + 1] / inverse[j, j]  # without row and column j
    return done.float()


def test_equals_the_papers_loop() -> None:
    weight, hessian = problem(0)
    scales = quantize(weight, MXFP4_EVEN).scale
    fast = dequantize(gptq_quantize(weight, hessian.double(), MXFP4_EVEN))
    slow = slow_gptq(weight, hessian, scales, block=32)
    # A column on the edge between two codes may fall to the other side, and then moves its row's later columns.
    assert (fast == slow).all(dim=1).float().mean() > 0.8
    assert output_error(weight, fast, hessian) == pytest.approx(output_error(weight, slow, hessian), rel=0.02)


@each_scheme
@pytest.mark.parametrize("act_order", [False, True])
def test_with_inputs_that_do_not_correlate_it_is_plain_rounding_bit_for_bit(scheme: Scheme, act_order: bool) -> None:
    weight, _ = problem(1, columns=288)
    energy = torch.rand(288, generator=torch.Generator().manual_seed(2)) + 0.1
    for hessian in (torch.eye(288), torch.diag(energy), torch.zeros(288, 288)):
        ours, plain = gptq_quantize(weight, hessian, scheme, act_order=act_order), quantize(weight, scheme)
        assert torch.equal(ours.values, plain.values)
        assert torch.equal(ours.scale, plain.scale)
        assert torch.equal(dequantize(ours), dequantize(plain))
        assert (ours.outer is None) == (plain.outer is None)
        assert ours.outer is None or (plain.outer is not None and torch.equal(ours.outer, plain.outer))


def test_a_rule_that_never_looks_at_its_scale_is_rounded_within_the_last_bit_of_it() -> None:
    weight, _ = problem(1, columns=256, rows=256)
    ours, plain = gptq_quantize(weight, torch.eye(256), FP8_BLOCK_HF), quantize(weight, FP8_BLOCK_HF)
    assert torch.equal(ours.scale, plain.scale)
    assert (ours.values != plain.values).float().mean() < 1e-4


@pytest.mark.parametrize("scheme", [FP8_CHANNEL, NVFP4, scheme_named("int4-g32")], ids=lambda s: s.name)
def test_scales_are_those_of_the_weight_in_its_own_dtype(scheme: Scheme) -> None:
    weight, hessian = problem(12)
    half = weight.bfloat16()
    assert torch.equal(gptq_quantize(half, hessian, scheme).scale, quantize(half, scheme).scale)


@each_scheme
def test_errs_less_than_rounding(scheme: Scheme) -> None:
    strong: list[float] = []
    weak: list[float] = []
    for seed in range(8):
        for ratios, correlation in ((strong, 0.9), (weak, 0.3)):
            weight, hessian = problem(seed, correlation=correlation)
            ratios.append(error(weight, hessian, scheme) / rounding_error(weight, hessian, scheme))
    assert sum(weak) / len(weak) < 1
    assert max(strong) < 0.8
    assert sum(strong) / len(strong) < 0.5


@given(st.integers(0, 10**6), st.floats(0, 0.95), st.sampled_from(SCHEMES))
@settings(max_examples=25, deadline=None)
def test_hardly_ever_errs_more_than_rounding(seed: int, correlation: float, scheme: Scheme) -> None:
    # One greedy pass has no guarantee for a single problem; by how much it could lose is a matter of noise.
    weight, hessian = problem(seed, columns=64, rows=16, correlation=correlation)
    assert error(weight, hessian, scheme) < 1.1 * rounding_error(weight, hessian, scheme)


@each_scheme
def test_the_result_is_an_ordinary_tensor_of_its_scheme(scheme: Scheme) -> None:
    weight, hessian = problem(3)
    ours, plain = gptq_quantize(weight, hessian, scheme), quantize(weight, scheme)
    assert torch.equal(ours.scale, plain.scale)
    codes = ours.values
    if scheme.scale_format != "fp32":
        codes = codes / ours.scale.repeat_interleave(scheme.block or 1, dim=1)
    if not scheme.has_zero_point:
        assert torch.equal(scheme.element.round(codes), codes)
    assert torch.equal(codes, codes.bfloat16().float())
    assert not torch.equal(ours.values, plain.values)


@each_scheme
def test_the_order_of_the_work_is_undone(scheme: Scheme) -> None:
    """Rounding shuffled columns is another problem with the same answer, if each column keeps its scale."""
    weight, hessian = problem(4, columns=64)
    energy = torch.linspace(0.5, 2, 64)[torch.arange(64) * 37 % 64]  # the order by energy is none of the columns'
    hessian = energy[:, None] * hessian * energy
    by_energy = gptq_quantize(weight, hessian, scheme, act_order=True)
    order = hessian.diagonal().argsort(descending=True)
    if scheme.block is None:
        shuffled = gptq_quantize(weight[:, order], hessian[order][:, order], scheme)
        assert torch.equal(by_energy.values[:, order], shuffled.values)
    assert error(weight, hessian, scheme, act_order=True) < 0.9 * rounding_error(weight, hessian, scheme)
    assert torch.equal(by_energy.scale, quantize(weight, scheme).scale)


def test_large_inputs_first_helps_where_few_channels_carry_the_energy() -> None:
    ratios = []
    for seed in range(8):
        weight, hessian = problem(seed)
        energy = torch.logspace(0, 1.5, 160)  # the largest inputs come last
        hessian = energy[:, None] * hessian * energy
        ratios.append(error(weight, hessian, MXFP4_EVEN, act_order=True) / error(weight, hessian, MXFP4_EVEN))
    assert sum(ratios) / len(ratios) < 0.9


def test_given_scales_are_kept_and_used() -> None:
    weight, hessian = problem(5)
    encode = nvfp4_global_scale(weight.abs().amax()) / 1.5
    wider = quantize(weight, NVFP4, global_scale=encode).scale * 1.5
    q = gptq_quantize(weight, hessian, NVFP4, global_scale=encode, scales=wider)
    assert torch.equal(q.scale, wider)
    codes = q.values / wider.repeat_interleave(16, dim=1)
    assert torch.equal(NVFP4.element.round(codes), codes)
    assert q.outer is not None and torch.equal(q.outer, 1.0 / encode)
    plain = NVFP4.element.round(weight / (wider.repeat_interleave(16, dim=1) / encode))
    diagonal = gptq_quantize(weight, torch.eye(160), NVFP4, global_scale=encode, scales=wider)
    assert torch.equal(diagonal.values, plain * wider.repeat_interleave(16, dim=1))


def test_the_factor_of_the_hessian_does_not_matter() -> None:
    weight, hessian = problem(6)
    assert torch.equal(
        gptq_quantize(weight, hessian, MXFP4_EVEN).values, gptq_quantize(weight, hessian * 4, MXFP4_EVEN).values
    )


@pytest.mark.parametrize("scale", ["nvfp4", "nvfp4-kernel"])
def test_a_block_under_a_scale_of_zero_stays_zero(scale: str) -> None:
    """Its neighbours hand their errors over to it, and it can hold nothing."""
    scheme = scheme_named(scale)
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(8, 64, generator=generator), torch.randn(256, 64, generator=generator)
    weight[2, 16:32] = 0
    g = nvfp4_global_scale(weight.abs().amax())
    scales = quantize(weight, scheme, global_scale=g).scale
    scales[2, 1] = 0
    q = gptq_quantize(weight, (x + x[:, :1]).T @ (x + x[:, :1]) / 256, scheme, global_scale=g, scales=scales)
    assert torch.isfinite(q.values).all()
    assert not q.values[2, 16:32].any()
    assert q.values[2].any()


def test_columns_whose_inputs_were_zero_are_rounded_plainly_and_concern_nobody() -> None:
    weight, hessian = problem(7)
    dead = torch.tensor([0, 31, 32, 127, 128, 159])
    hessian[dead] = 0
    hessian[:, dead] = 0
    alive = torch.ones(160, dtype=torch.bool)
    alive[dead] = False
    q = dequantize(gptq_quantize(weight, hessian, MXFP4_EVEN))
    assert torch.equal(q[:, dead], dequantize(quantize(weight, MXFP4_EVEN))[:, dead])
    # Damping is a share of the mean over the columns that live: as if the dead ones were not there.
    other = weight.clone()
    other[:, dead] *= 0.5
    moved = gptq_quantize(other, hessian, MXFP4_EVEN, scales=quantize(weight, MXFP4_EVEN).scale)
    assert torch.equal(dequantize(moved)[:, alive], q[:, alive])


def test_damping_leads_back_to_rounding() -> None:
    weight, hessian = problem(8)
    assert torch.equal(gptq_quantize(weight, hessian, MXFP4_EVEN, damp=1e9).values, quantize(weight, MXFP4_EVEN).values)


def test_fewer_tokens_than_channels_are_enough() -> None:
    g = torch.Generator().manual_seed(9)
    weight, x = torch.randn(8, 96, generator=g), torch.randn(20, 96, generator=g)
    hessian = x.T @ x / 20
    assert error(weight, hessian, MXFP4_EVEN) < 0.5 * rounding_error(weight, hessian, MXFP4_EVEN)


def test_low_precision_weights_are_taken_at_their_value() -> None:
    weight, hessian = problem(10)
    half = weight.bfloat16()
    assert torch.equal(gptq_quantize(half, hessian, NVFP4).values, gptq_quantize(half.float(), hessian, NVFP4).values)


def test_the_arguments_are_left_alone() -> None:
    weight, hessian = problem(11)
    copies = weight.clone(), hessian.clone()
    gptq_quantize(weight, hessian, MXFP4_EVEN, act_order=True)
    assert torch.equal(weight, copies[0]) and torch.equal(hessian, copies[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hessian": torch.eye(32)}, "a weight of 64 columns needs a Hessian of that size"),
        ({"hessian": torch.eye(64).half()}, "fp32 or fp64"),
        ({"hessian": torch.full((64, 64), torch.nan)}, "the Hessian holds NaN"),
        ({"hessian": -torch.eye(64)}, "not positive definite with damping 0.01"),
        ({"weight": torch.full((4, 64), torch.inf)}, "the weight holds NaN or infinity"),
        ({"weight": torch.ones(4, 60), "hessian": torch.eye(60)}, "60 columns do not divide"),
        ({"scales": torch.ones(4, 2), "global_scale": torch.ones(())}, r"scales of this weight are \[4, 4\]"),
        ({"scales": torch.ones(4, 4)}, "without the global scale"),
        ({"scheme": scheme_named("int4-g32-asym"), "scales": torch.ones(4, 2)}, "has zero points"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"weight": torch.ones(4, 64), "hessian": torch.eye(64), "scheme": NVFP4, **change}
    with pytest.raises(ValueError, match=message):
        gptq_quantize(**arguments)


@pytest.mark.parametrize(
    ("peer", "scheme", "published"),
    [
        ("NVFP4", NVFP4, (0.00907, 0.00750)),
        ("MXFP4", MXFP4_EVEN, (0.01237, 0.00999)),
        ("W4A16", INT4_GROUP, (0.01224, 0.00966)),
    ],
)
def test_llm_compressor_finds_the_same(shared: Path, peer: str, scheme: Scheme, published: tuple[float, float]) -> None:
    golden = load_file(shared / "golden" / "gptq.safetensors")
    weight, hessian = golden["W"], golden["H"]
    ours = gptq_quantize(weight, hessian, scheme)
    theirs = golden[f"llmcompressor_gptq/{peer}/weight"]
    assert torch.equal(ours.scale, golden[f"llmcompressor_gptq/{peer}/scale"])
    assert rounding_error(weight, hessian, scheme) == pytest.approx(published[0], abs=1e-5)
    # The order of a factorization's sums moves a few codes, so errors are compared and most of the values.
    assert output_error(weight, theirs, hessian) == pytest.approx(published[1], abs=1e-5)
    assert output_error(weight, dequantize(ours), hessian) == pytest.approx(published[1], rel=5e-3)
    assert torch.isclose(dequantize(ours), theirs, rtol=1e-6).float().mean() > 0.97
