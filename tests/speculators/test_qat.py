"""Heads trained in low bit: what is trained is what is exported, and no one but the numbers sees it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trained_heads import DOWN, TEXT, Batch, Oracle, adam_steps, layers, trained

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.profiles import profile_named
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.decode import generate
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.low_bit import low_bit_layers, quantize_head
from bitdraft.speculators.qat import masters, static_input_scales, train_in_low_bit
from bitdraft.speculators.trained_linear import TrainedLinear

RECIPES = ["fp8", "mxfp4", "mxfp4a16", "mxfp4a4", "nvfp4", "nvfp4a16", "nvfp4-4over6"]
Make = Callable[..., Eagle3Head]


@pytest.fixture
def head(make_eagle3: Make, rounded: LowBitTarget) -> Eagle3Head:
    return make_eagle3(rounded, size=96, steps=3)


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "nvfp4", "nvfp4a16"])
def test_gradients_of_a_head_are_those_of_plain_autograd(head: Eagle3Head, rounded: LowBitTarget, name: str) -> None:
    """Steps that end in the same codes: where a sum's last bit tips a code, gradients differ by that code."""
    done = trained(head, rounded, name)
    oracle, scales = copy.deepcopy(head), static_input_scales(done)
    for own, layer in layers(done).items():
        group = [oracle.get_submodule(other) for other in layer.fused.names]
        source = oracle.get_submodule(own)
        assert isinstance(source, nn.Linear)
        replacement = Oracle(group, source, layer.fused.how.rule, scales.get(own))  # type: ignore[arg-type]
        oracle.set_submodule(own, replacement)
    batch = Batch(rounded, head)
    losses = [batch.loss(done), batch.loss(oracle)]
    torch.testing.assert_close(*losses, rtol=2e-3, atol=0)
    for loss in losses:
        loss.backward()
    expected = dict(oracle.named_parameters())
    for own, parameter in done.named_parameters():
        if parameter.grad is None:
            assert own == "lm_head.weight" and expected[own].grad is None
            continue
        other = expected[own].grad
        assert other is not None and (parameter.grad - other).norm() <= 0.02 * other.norm(), own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_quantized_head_drafts_the_bits_that_were_trained(
    head: Eagle3Head, rounded: LowBitTarget, load_rounded: Callable[[torch.dtype], LowBitTarget], name: str, dtype: Any
) -> None:
    target = rounded if dtype == torch.float32 else load_rounded(dtype)
    done = trained(head.placed(target.device, dtype), target, name)  # type: ignore[arg-type]
    batch = Batch(target, done)
    logits = batch.logits(done)
    assert logits.requires_grad
    exported = quantize_head(copy.deepcopy(done), load_recipe(name))  # needs no text: scales are those of the training
    assert isinstance(exported, Eagle3Head) and set(low_bit_layers(exported)) == set(layers(done)) != set()
    assert torch.equal(logits, batch.logits(exported))
    assert not torch.equal(logits, batch.logits(head))


def test_a_quantized_head_accepts_what_the_trained_one_does(
    head: Eagle3Head, rounded: LowBitTarget, prompts: list[list[int]]
) -> None:
    done = trained(head, rounded, "mxfp4").eval()
    plan = DraftPlan(length=3)
    drafters = [done, quantize_head(copy.deepcopy(done), load_recipe("mxfp4"))]
    runs = [
        generate(rounded, drafter, prompts[:3], plan=plan, max_new_tokens=8, end_ids=set(), batch_size=3)[0]
        for drafter in drafters
    ]
    assert [(g.tokens, g.counts) for g in runs[0]] == [(g.tokens, g.counts) for g in runs[1]]
    assert all(layer.fused.quantizations == 1 for layer in layers(done).values())  # drafting does not repeat it


@pytest.mark.parametrize("name", RECIPES)
def test_fp32_masters_under_autocast_are_the_bf16_layers_of_the_export(
    head: Eagle3Head, rounded: LowBitTarget, name: str
) -> None:
    """Layer by layer, on the inputs that training gives them: norms between them are in fp32 in training alone."""
    done = trained(head, rounded, name)
    exported = quantize_head(copy.deepcopy(done), load_recipe(name)).placed(rounded.device, torch.bfloat16)
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for own, layer in layers(done).items():

        def note(_: nn.Module, args: tuple[Tensor, ...], y: Tensor, own: str = own) -> None:
            seen[own] = args[0].detach(), y.detach()

        layer.register_forward_hook(note)
    with torch.autocast("cpu", torch.bfloat16):
        Batch(rounded, head).loss(done).backward()
    assert seen.keys() == low_bit_layers(exported).keys()
    for own, (x, y) in seen.items():
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, exported.get_submodule(own)(x.to(torch.bfloat16))), own
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in done.layers.parameters())


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_biases_are_trained_in_16_bit(
    make_head_for: Callable[[str, LowBitTarget], DraftHead], rounded: LowBitTarget, name: str
) -> None:
    head = make_head_for("eagle3 biases", rounded)
    assert isinstance(head, Eagle3Head)
    done = trained(head, rounded, name)
    batch = Batch(rounded, head)
    batch.loss(done).backward()
    biases = [layer.bias for own, layer in layers(done).items() if "self_attn" in own]
    assert all(bias is not None and bias.grad is not None and bool(bias.grad.any()) for bias in biases[2:])
    exported = quantize_head(copy.deepcopy(done), load_recipe(name))
    assert torch.equal(batch.logits(done), batch.logits(exported))  # type: ignore[arg-type]


def test_checkpoints_and_optimizers_see_the_16_bit_head(head: Eagle3Head, rounded: LowBitTarget) -> None:
    before = dict(head.named_parameters())
    names = list(head.state_dict())
    done = train_in_low_bit(head, load_recipe("nvfp4"), target=rounded, calibration=TEXT)
    assert done is head and list(done.state_dict()) == names
    after = dict(done.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert len(layers(done)) == 7 and not isinstance(done.fc, TrainedLinear)
    assert not isinstance(done.lm_head, TrainedLinear)
    again = masters(done)
    assert again is head and not layers(again) and list(again.state_dict()) == names
    assert all(parameter is before[name] for name, parameter in again.named_parameters())
    done.load_state_dict(copy.deepcopy(head).state_dict())


def test_masters_compute_in_16_bit(head: Eagle3Head, rounded: LowBitTarget) -> None:
    batch, done = Batch(rounded, head), trained(head, rounded, "fp8")
    assert not torch.equal(batch.logits(done), batch.logits(head))
    assert torch.equal(batch.logits(masters(done)), batch.logits(head))  # type: ignore[arg-type]


def test_q_k_and_v_quantize_their_input_once(head: Eagle3Head, rounded: LowBitTarget) -> None:
    attention = trained(head, rounded, "fp8").layer.self_attn
    x = torch.randn(5, 128, requires_grad=True)
    products = [attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)]
    kept = [y.grad_fn.saved_tensors[0].data_ptr() for y in products]
    assert len(set(kept)) == 1
    with torch.no_grad():
        x.mul_(3.0)
    assert not torch.equal(attention.q_proj(x), products[0])


def test_a_copy_is_trained_on_its_own(head: Eagle3Head, rounded: LowBitTarget) -> None:
    done, batch = trained(head, rounded, "fp8"), Batch(rounded, head)
    before = batch.logits(done)
    other = copy.deepcopy(done)
    with torch.no_grad():
        for parameter in other.layers.parameters():
            parameter.mul_(0.5)
    assert not torch.equal(batch.logits(other), before)
    assert torch.equal(batch.logits(done), before)


def test_a_weight_that_diverged_is_named(head: Eagle3Head, rounded: LowBitTarget) -> None:
    done, batch = trained(head, rounded, "nvfp4a16"), Batch(rounded, head)
    with torch.no_grad():
        layers(done)[DOWN].weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"module layers\.0\.mlp\.down_proj: the weight holds NaN or infinity"):
        batch.logits(done)


def test_static_scales_are_those_of_the_start(head: Eagle3Head, rounded: LowBitTarget) -> None:
    done, batch = trained(head, rounded, "nvfp4"), Batch(rounded, head)
    scales = static_input_scales(done)
    at_start = low_bit_layers(
        quantize_head(copy.deepcopy(head), load_recipe("nvfp4"), target=rounded, calibration=TEXT)
    )
    assert scales.keys() == at_start.keys()
    assert all(torch.equal(scale, at_start[own].input_global_scale) for own, scale in scales.items())  # type: ignore[arg-type]
    adam_steps(done, [batch], 3, rate=2e-3)
    again = quantize_head(copy.deepcopy(done), load_recipe("nvfp4"), target=rounded, calibration=TEXT)
    for own, layer in low_bit_layers(again).items():
        assert torch.equal(layer.stored["input_global_scale"], scales[own].reshape(1)), own
    resumed = copy.deepcopy(head)
    resumed.load_state_dict(done.state_dict())
    plain = quantize_head(copy.deepcopy(resumed), load_recipe("nvfp4"), input_scales=scales)
    assert torch.equal(batch.logits(plain), batch.logits(done))  # type: ignore[arg-type]
    train_in_low_bit(resumed, load_recipe("nvfp4"), input_scales=scales)
    assert torch.equal(batch.logits(resumed), batch.logits(done))


def test_static_scales_serve_only_the_format_that_they_were_measured_for(
    head: Eagle3Head, rounded: LowBitTarget
) -> None:
    done = trained(head, rounded, "mxfp4")
    assert static_input_scales(done) == {}
    with pytest.raises(ValueError, match="has static scales for the head's inputs, which need the target"):
        quantize_head(done, load_recipe("nvfp4"))
    other = Recipe("mlp", (Rule("*.mlp.*", "nvfp4", "nvfp4-kernel"),))
    done = trained(head, rounded, other)
    with pytest.raises(ValueError, match="has static scales for the head's inputs, which need the target"):
        quantize_head(done, load_recipe("nvfp4"))  # attention's are not known
    eight = low_bit_layers(quantize_head(copy.deepcopy(done), load_recipe("fp8")))
    assert all("input_global_scale" not in layer.stored for layer in eight.values())
    assert low_bit_layers(quantize_head(done, other))


def test_a_profile_decides_what_is_trained_and_not_what_is_exported(
    head: Eagle3Head, load_rounded: Callable[[torch.dtype], LowBitTarget]
) -> None:
    target, hopper = load_rounded(torch.bfloat16), profile_named("vllm-sm90+exact")
    head.placed(target.device, target.dtype)
    with torch.no_grad():
        head.get_parameter(f"{DOWN}.weight")[:, :32] *= 1e-5  # block scales that Marlin takes for 0
    done, batch = trained(head, target, "nvfp4", profile=hopper), Batch(target, head)
    layer = layers(done)[DOWN]
    how = layer.fused.how
    assert how.inputs is None and how.at_load == "marlin" and how.exact_product
    exported = quantize_head(copy.deepcopy(done), load_recipe("nvfp4"), profile=hopper)
    assert isinstance(exported, Eagle3Head)
    served = low_bit_layers(exported)[DOWN]
    assert torch.equal(layer.fused.weights(torch.bfloat16)[layer.place].weight, served.weight)
    assert not served.weight[:, :32].any()
    assert torch.equal(batch.logits(done), batch.logits(exported))
    assert torch.equal(served.stored["input_global_scale"], static_input_scales(done)[DOWN].reshape(1))
    for other in ("plain", "vllm-sm90"):
        assert not torch.equal(
            batch.logits(done), batch.logits(trained(head, target, "nvfp4", profile=profile_named(other)))
        )
