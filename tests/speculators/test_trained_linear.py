"""A layer trained in low bit: its gradients, and when its weight is quantized again."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trained_heads import Oracle

from bitdraft.quant.recipe import Rule
from bitdraft.speculators.trained_linear import Computation, FusedLayers, TrainedLinear

# N row, M output channel, K input channel.

FORMATS = [
    ("fp8-channel", "fp8-token", None),
    ("fp8-channel", None, None),
    ("fp8-tensor", "fp8-token", None),
    ("fp8-block128", "fp8-group128", None),
    ("mxfp4-even", "fp8-token", None),
    ("mxfp4-even", "mxfp4-rceil", None),
    ("mxfp4-floor", None, None),
    ("nvfp4", None, None),
    ("nvfp4", "nvfp4-kernel", 2688 / 1.5),  # inputs up to about 4: much of them saturates
    ("nvfp4", "nvfp4-kernel", 2688 / 8.0),
]


def single(
    weights: str, activations: str | None, dtype: torch.dtype, scale: float | None = None, *, rows: int = 48
) -> tuple[TrainedLinear, Oracle]:
    """A random layer and its oracle, with parameters of their own."""
    torch.manual_seed(4)
    source, rule = nn.Linear(128, rows).to(dtype), Rule("*", weights, activations)
    static = None if scale is None else torch.tensor(scale)
    layer = TrainedLinear(copy.deepcopy(source), static)
    FusedLayers([layer], ["it"], Computation(rule, rule.activation_scheme))
    return layer, Oracle([source], source, rule, static)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("weights", "activations", "scale"), FORMATS)
def test_gradients_of_a_layer_are_those_of_fake_quantized_tensors_in_plain_autograd(
    weights: str, activations: str | None, scale: float | None, dtype: torch.dtype
) -> None:
    layer, oracle = single(weights, activations, dtype, scale)
    x = (torch.randn(2, 9, 128) * torch.rand(2, 9, 1) * 2).to(dtype)
    direction = torch.randn(2, 9, 48).to(dtype)
    found: list[Tensor | None] = []
    expected: list[Tensor | None] = []
    for module, into in ((layer, found), (oracle, expected)):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(direction)
        into += [y.detach(), leaf.grad, module.weight.grad, module.bias.grad]
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2  # of the largest
    for a, b in zip(found, expected, strict=True):
        assert a is not None and b is not None and a.dtype == dtype
        assert (a - b).abs().amax() <= tolerance * b.abs().amax()
    assert found[1] is not None
    stopped = (found[1] == 0).float().mean()
    assert (stopped > 0.02) == (scale is not None and scale > 1000)


def test_changes_that_leave_no_trace_in_a_version_are_seen_after_a_backward_pass() -> None:
    layer, _ = single("mxfp4-even", "fp8-token", torch.float32)
    x = torch.randn(3, 128)
    before = layer(x)
    before.sum().backward()
    version = layer.weight._version
    layer.weight.data.neg_()
    assert layer.weight._version == version
    torch.testing.assert_close(layer(x) - layer.bias, -(before - layer.bias))


@torch.no_grad()
def test_drafting_sees_weights_that_were_loaded_and_another_dtype() -> None:
    layer, _ = single("mxfp4-even", "fp8-token", torch.float32)
    x = torch.randn(3, 128)
    before = layer(x)
    assert torch.equal(layer(x), before) and layer.fused.quantizations == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    layer.load_state_dict({"weight": -layer.weight, "bias": layer.bias})
    torch.testing.assert_close(layer(x) - layer.bias, -(before - layer.bias))


def test_what_drafts_in_inference_mode_trains_afterwards() -> None:
    layer, _ = single("nvfp4", "nvfp4-kernel", torch.float32, 2688 / 8.0)
    x = torch.randn(3, 128)
    with torch.inference_mode():
        drafted = layer(x)
    y = layer(x.requires_grad_())
    assert torch.equal(y, drafted)
    y.sum().backward()
    assert layer.weight.grad is not None and layer.fused.quantizations == 1


def test_activation_checkpointing_changes_no_gradient() -> None:
    grads = []
    for wrap in (False, True):
        layer, _ = single("nvfp4", "nvfp4-kernel", torch.float32, 2688 / 1.5)
        x = torch.randn(6, 128, generator=torch.Generator().manual_seed(2)).requires_grad_()
        y = checkpoint(layer, x, use_reentrant=False) if wrap else layer(x)
        y.square().sum().backward()
        grads.append((x.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
