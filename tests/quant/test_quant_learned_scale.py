"""Learned scales: their gradients by hand and by finite differences, what is stored, and that learning them helps."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from bitdraft.quant.block import dequantize, quantize
from bitdraft.quant.fake import fake
from bitdraft.quant.learned_scale import LearnedScale
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.schemes import NVFP4, NVFP4_KERNEL, SCHEMES, Scheme, scheme_named
from bitdraft.quant.smallfloat import E2M1, E4M3
from bitdraft.quant.target import can_compile

ONE_LEVEL = [
    "int4-g128",
    "int4-channel",
    "int8-g128",
    "int8-channel",
    "int8-token",
    "fp8-tensor",
    "fp8-channel",
    "fp8-channel-ct",
    "fp8-channel-torchao",
    "fp8-tensor-static",
    "fp8-tensor-dynamic",
]
TWO_LEVEL = ["nvfp4", "nvfp4-kernel", "nvfp4-modelopt", "nvfp4-ct"]


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fake_at_start(x: Tensor, scheme: Scheme, scale: LearnedScale) -> Tensor:
    if scheme.has_global_scale:
        return fake(x, scheme, global_scale=1.0 / scale.stored().detach())
    return fake(x, scheme, global_scale=scale.stored().detach() if scheme.scale == "static" else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*ONE_LEVEL, *TWO_LEVEL])
def test_it_begins_as_what_follows_the_maximum_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    scheme, x = scheme_named(name), sample(6, 256, dtype=dtype)
    scale = LearnedScale(x, scheme)
    y = scale(x)
    assert y.dtype == dtype
    assert torch.equal(y, fake_at_start(x, scheme, scale))
    if scheme.scale != "static":  # and the global scale of NVFP4 is, but for a reciprocal, the one of the maximum
        torch.testing.assert_close(y, fake(x, scheme), rtol=0.2, atol=1e-2)


@pytest.mark.parametrize("name", [*ONE_LEVEL, *TWO_LEVEL])
def test_the_two_factors_are_the_values_of_the_forward_pass_after_learning_too(name: str) -> None:
    scheme, x = scheme_named(name), sample(6, 256, dtype=torch.bfloat16)
    scale = LearnedScale(x, scheme)
    with torch.no_grad():
        scale.scale.mul_(0.7)
    assert torch.equal(dequantize(scale.quantized(x)).to(x.dtype), scale(x))


def lsq_by_hand(x: float, s: float, low: float, high: float) -> tuple[float, float]:
    """∂y/∂x and ∂y/∂s, equation by equation."""
    z = x / s
    if z <= low:
        return 0.0, low
    if z >= high:
        return 0.0, high
    return 1.0, float(torch.tensor(z).round()) - z


@pytest.mark.parametrize("saturation", ["mask", "identity"])
@pytest.mark.parametrize(("name", "group"), [("int4-g128", 128), ("int8-g128", 128), ("int4-channel", 256)])
def test_gradients_of_integers_are_those_of_the_paper(name: str, group: int, saturation: str) -> None:
    scheme, x = scheme_named(name), sample(3, 256).requires_grad_()
    scale = LearnedScale(x, scheme, start="mean", saturation=saturation)  # type: ignore[arg-type]
    with torch.no_grad():
        scale.scale.mul_(0.4)
    upstream = sample(3, 256, seed=1)
    grad_x, grad_s = torch.autograd.grad(scale(x), [x, scale.scale], upstream)
    low, high = scheme.element.min, scheme.element.max
    expected_x, expected_s = torch.zeros(3, 256), torch.zeros_like(scale.scale)
    for row in range(3):
        for column in range(256):
            s = scale.scale[row, column // group].item()
            dx, ds = lsq_by_hand(x[row, column].item(), s, low, high)
            expected_x[row, column] = upstream[row, column] * (1.0 if saturation == "identity" else dx)
            expected_s[row, column // group] += upstream[row, column] * (ds / math.sqrt(group * high))
    assert torch.equal(grad_x, expected_x)
    torch.testing.assert_close(grad_s, expected_s, rtol=1e-4, atol=1e-5)
    if name == "int4-channel":  # both ends were reached
        assert (expected_x == 0).any() == (saturation == "mask")


@dataclass(frozen=True)
class Smooth:
    """An element whose rounding error stands still: what straight-through gradients are the true gradients of."""

    min: float
    max: float
    error: Tensor | float

    def round(self, z: Tensor, *, saturate: bool = True, ties: str = "even") -> Tensor:
        return z.clamp(self.min, self.max) + self.error

    def round_capped(self, z: Tensor) -> Tensor:
        return self.round(z)


def jacobians_agree(function: Callable[..., Tensor], *inputs: Tensor) -> bool:
    """In fp32, with steps as wide as functions that are linear around their input allow."""
    return torch.autograd.gradcheck(function, inputs, eps=1e-2, atol=2e-3, rtol=1e-3, check_undefined_grad=False)


@pytest.mark.filterwarnings("ignore:Input #:UserWarning")
@pytest.mark.parametrize("name", ["int4-channel", "fp8-channel", "fp8-tensor-static"])
def test_gradcheck_where_the_rounding_error_stands_still(name: str) -> None:
    z = torch.tensor([[-3.0, -1.5, 0.25, 1.0, 2.5, -0.5], [1.5, 4.0, -0.25, 0.5, -2.5, 0.0]])  # in steps, of ±2
    s = torch.tensor(1.5) if name == "fp8-tensor-static" else torch.tensor([[1.5], [0.75]])
    element = Smooth(-2.0, 2.0, sample(2, 6, seed=3) / 4)
    scheme = replace(scheme_named(name), element=element)  # type: ignore[arg-type]
    x = (z * s).requires_grad_()
    scale = LearnedScale(x, scheme)
    scale.gradient_weight = 1.0

    def function(x: Tensor, s: Tensor) -> Tensor:
        return functional_call(scale, {"scale": s}, (x,))

    assert jacobians_agree(function, x, s.clone().requires_grad_())
    scale.gradient_weight = 0.5
    with pytest.raises(GradcheckError):
        jacobians_agree(function, x, s.clone().requires_grad_())


@pytest.mark.filterwarnings("ignore:Input #:UserWarning")
@pytest.mark.parametrize("scheme", [NVFP4, NVFP4_KERNEL], ids=lambda s: s.name)
def test_gradcheck_of_the_global_scale_of_nvfp4(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 0 and 1 have block scales that are rounded, row 2 one that is clipped at its largest value."""
    for module in ("scale_rules", "learned_scale"):
        monkeypatch.setattr(f"bitdraft.quant.{module}.E4M3", Smooth(0.0, 4.0, 0.25))
    smooth = replace(scheme, element=Smooth(-6.0, 6.0, sample(3, 1, 16, seed=3) / 4))  # type: ignore[arg-type]
    x = sample(3, 16).clamp(-1.5, 1.5) * torch.tensor([[2.0], [4.0], [44.0]])
    scale = LearnedScale(x, smooth)
    scale.gradient_weight = 1.0
    d = torch.tensor(1.0, requires_grad=True)
    assert (x.abs().amax(-1) / 6 < 4).tolist() == [True, True, False]
    assert jacobians_agree(lambda d: functional_call(scale, {"scale": d}, (x,)), d)


@pytest.mark.parametrize("saturation", ["mask", "identity"])
def test_under_a_global_scale_values_beyond_its_reach_get_no_gradient(saturation: str) -> None:
    x = sample(4, 64).requires_grad_()
    scale = LearnedScale(x, NVFP4, saturation=saturation)  # type: ignore[arg-type]
    with torch.no_grad():
        scale.scale.fill_(2.0 / 2688)  # reaches 2
    (grad_x,) = torch.autograd.grad(scale(x).sum(), x)
    assert torch.equal(grad_x, ((x.abs() <= 2) | (saturation == "identity")).float())
    clipped = x.detach().unflatten(-1, (4, 16)).abs().amax(-1) > 2
    assert 0 < clipped.sum() < clipped.numel()


@pytest.mark.parametrize("name", [n for n in ONE_LEVEL if n.startswith("int")])
def test_the_start_from_the_mean_is_the_papers(name: str) -> None:
    scheme, x = scheme_named(name), sample(4, 256)
    parts = x.unflatten(-1, (-1, scheme.block or 256))
    expected = 2 * parts.abs().mean(-1) / math.sqrt(2 ** (8 if "8" in name.split("-")[0] else 4) / 2 - 1)
    torch.testing.assert_close(LearnedScale(x, scheme, start="mean").scale.detach(), expected)


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("int4-g128", 1 / math.sqrt(128 * 7)),
        ("int8-channel", 1 / math.sqrt(256 * 127)),
        ("fp8-tensor", 1 / math.sqrt(6 * 256 * 448)),
        ("nvfp4", 1 / math.sqrt(6 * 256 * 2688)),
    ],
)
def test_the_gradient_is_weighted_by_how_many_share_the_scale(name: str, weight: float) -> None:
    assert LearnedScale(sample(6, 256), scheme_named(name)).gradient_weight == pytest.approx(weight)
    shared = LearnedScale(sample(6, 256), scheme_named("fp8-tensor-static"), sharing=256)
    assert shared.gradient_weight == pytest.approx(1 / math.sqrt(256 * 448))


def test_stored_scales_are_positive_numbers_of_the_format() -> None:
    scale = LearnedScale(sample(4, 256, dtype=torch.bfloat16), scheme_named("int4-g128"))
    with torch.no_grad():
        scale.scale.copy_(torch.tensor([[0.1234567, -0.3], [0.0, 1e-30], [1.0, 2.0], [-1e-45, 5.0]]))
    stored = scale.stored()
    assert torch.equal(stored, stored.bfloat16().float())
    assert (stored > 0).all()
    assert stored[0].tolist() == pytest.approx([0.1234567, 0.3], rel=2**-8)
    (grad,) = torch.autograd.grad(stored.sum(), scale.scale)
    assert grad[0].tolist() == [1, -1]  # the gradient of the magnitude: a scale that went below zero comes back
    fp32 = LearnedScale(sample(4, 256, dtype=torch.bfloat16), scheme_named("fp8-channel"))
    with torch.no_grad():
        fp32.scale.fill_(0.1234567)
    assert (fp32.stored() == torch.tensor(0.1234567)).all()


@pytest.mark.parametrize("name", ["int4-g128", "fp8-channel", "nvfp4"])
def test_a_learned_weight_is_a_layer_that_computes_with_it(name: str) -> None:
    source = nn.Linear(256, 8)
    scale = LearnedScale(source.weight, scheme_named(name))
    with torch.no_grad():
        scale.scale.mul_(0.8)
    low = scale(source.weight).detach()
    layer = LowBitLinear(
        source, scale.scheme, None, ActivationQuantizer(compiled=False), quantized=scale.quantized(source.weight)
    )
    torch.testing.assert_close(layer.dequantized(), low, rtol=1e-6, atol=0)


def training_step(scale: LearnedScale, weight: nn.Parameter, x: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: nn.functional.linear(x, scale(weight)).square().mean()


@pytest.mark.parametrize("name", ["int4-g128", "fp8-channel", "fp8-tensor-static", "nvfp4"])
def test_autocast_and_both_ways_of_checkpointing_change_nothing(name: str) -> None:
    weight, x = nn.Parameter(sample(16, 256)), sample(4, 256, seed=1).requires_grad_()
    scale = LearnedScale(weight, scheme_named(name))
    with torch.no_grad():
        scale.scale.mul_(0.6)
    wanted = [weight, scale.scale, x]
    alone = scale(weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(scale(weight), alone)
        assert scale(weight).dtype == torch.float32
        step = training_step(scale, weight, x)
        expected = torch.autograd.grad(step(x).float(), wanted)
        for use_reentrant in (True, False):
            for parameter in wanted:
                parameter.grad = None
            checkpoint(step, x, use_reentrant=use_reentrant).float().backward()
            for parameter, grad in zip(wanted, expected, strict=True):
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, grad)
                assert grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["int4-g128", "nvfp4"])
def test_compiled_without_a_break_it_has_the_same_values_and_gradients(name: str) -> None:
    if not can_compile():
        pytest.skip("no C++ compiler on the PATH")
    weight = nn.Parameter(sample(16, 256))
    scale = LearnedScale(weight, scheme_named(name))
    with torch.no_grad():
        scale.scale.mul_(0.6)
    torch._dynamo.reset()
    y, expected = torch.compile(scale, fullgraph=True)(weight), scale(weight)
    assert torch.equal(y, expected)
    upstream = sample(16, 256, seed=2)
    computed = torch.autograd.grad(y, [weight, scale.scale], upstream)
    for a, b in zip(computed, torch.autograd.grad(expected, [weight, scale.scale], upstream), strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "begin", "share"), [("int4-channel", 1.0, 0.8), ("fp8-tensor-static", 1 / 16, 0.2), ("nvfp4", 1 / 4, 0.2)]
)
def test_learning_lowers_the_error(name: str, begin: float, share: float) -> None:
    """From the maximum under an outlier per row, and from scales so small that most values saturate."""
    x = sample(16, 256)
    x[:, 0] *= 8
    scale = LearnedScale(x, scheme_named(name))
    with torch.no_grad():
        scale.scale.mul_(begin)
    optimizer = torch.optim.Adam(scale.parameters(), lr=0.05 * scale.scale.abs().mean().item())
    errors = []
    for _ in range(300):
        loss = (scale(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(loss.item())
    assert errors[-1] < share * errors[0]


@pytest.mark.parametrize(
    "name",
    [
        s.name
        for s in SCHEMES.values()
        if s.scale_format == "e8m0" or s.has_zero_point or (s.rows or 1) > 1 or s.scale.startswith("pow2")
    ],
)
def test_formats_whose_scale_cannot_be_learned_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"the scales of {name} cannot be learned"):
        LearnedScale(sample(4, 256), scheme_named(name))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="start 'mean' is for integers: fp8-channel"):
        LearnedScale(sample(4, 256), scheme_named("fp8-channel"), start="mean")
    with pytest.raises(ValueError, match="100 columns do not divide into blocks of 128"):
        LearnedScale(sample(4, 100), scheme_named("int4-g128"))
    with pytest.raises(ValueError, match="not finite"):
        LearnedScale(torch.full((2, 128), torch.nan), scheme_named("int4-g128"))
    with pytest.raises(ValueError, match=r"scales of shape \[4, 2\] do not fit a tensor of \[5, 256\]"):
        LearnedScale(sample(4, 256), scheme_named("int4-g128"))(sample(5, 256))


def test_a_scale_for_activations_fits_any_number_of_tokens() -> None:
    scale = LearnedScale(sample(100, 64), scheme_named("fp8-tensor-static"), sharing=64)
    for shape in ((64,), (3, 64), (2, 5, 64)):
        y = scale(sample(*shape))
        assert torch.equal(y, fake(sample(*shape), scale.scheme, global_scale=scale.stored().detach()))


def test_e4m3_and_e2m1_reach_what_the_weights_assume() -> None:
    assert E4M3.max * E2M1.max == 2688
    q = quantize(sample(4, 64), NVFP4)
    assert q.outer is not None
    assert LearnedScale(sample(4, 64), NVFP4).scale.item() == q.outer.item()
