"""Mixtures of experts: taken apart without a change, quantized like one linear layer per expert."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_tokenizer
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from bitdraft.quant.apply import Applied, apply_recipe
from bitdraft.quant.block import quantize
from bitdraft.quant.experts import RoutedExperts, experts_around, kind_of, separate_experts, weight_of
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.presets import PRESETS, load_recipe
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.target import load_target

H, INNER, E, TOP = 64, 32, 5, 2
VOCAB = 320
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": TOP,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 258,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHARED, intermediate_size=2 * INNER, moe_intermediate_size=INNER, num_experts=E)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHARED, intermediate_size=INNER, num_local_experts=E)),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**SHARED, intermediate_size=INNER, num_local_experts=E)),
}
LOW_BIT = ["fp8", "mxfp4", "mxfp4a16", "mxfp4a4", "nvfp4", "nvfp4a16"]
CALIBRATION = [torch.arange(20)[None], torch.arange(40, 90)[None]]
EXPERTS = "model.layers.1.mlp.experts"


def make(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "bias" in name or "sinks" in name:
            parameter.normal_(std=0.3)  # zeros would hide a forgotten bias
    return model.to(dtype)


def quantized(model: nn.Module, preset: str) -> Applied:
    return apply_recipe(model, load_recipe(preset), compiled=False, calibration=CALIBRATION)


def experts_of(model: nn.Module, name: str = EXPERTS) -> RoutedExperts:
    module = model.get_submodule(name)
    assert isinstance(module, RoutedExperts)
    return module


def layers_of(stack: nn.ModuleList) -> list[LowBitLinear]:
    assert all(isinstance(layer, LowBitLinear) for layer in stack)
    return list(stack)  # type: ignore[arg-type]


def input_scales(experts: RoutedExperts) -> list[Tensor | None]:
    return [layers_of(stack)[0].input_global_scale for stack in experts.stacks]


def routed(rows: int, *, experts: int = E, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, and for every token two different experts with weights."""
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, H, generator=make)
    index = torch.rand(rows, experts, generator=make).argsort(dim=1)[:, :TOP]
    return hidden, index, torch.rand(rows, TOP, generator=make)


def gate_of(family: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The formula of each family, written out."""
    if family == "gpt-oss":

        def clamped(gate: Tensor, up: Tensor) -> Tensor:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return (up + 1) * gate * torch.sigmoid(1.702 * gate)

        return clamped
    return lambda gate, up: nn.functional.silu(gate) * up


def matrices(family: str, original: nn.Module, expert: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """gate, up and down of one expert as ``[M, K]`` weights and ``[M]`` biases, from the transformers module."""
    module: Any = original
    if family == "gpt-oss":
        both, bias = module.gate_up_proj[expert].T, module.gate_up_proj_bias[expert]
        weights = [both[::2], both[1::2], module.down_proj[expert].T]
        return weights, [bias[::2], bias[1::2], module.down_proj_bias[expert]]
    gate, up = module.gate_up_proj[expert].chunk(2)
    return [gate, up, module.down_proj[expert]], [None, None, None]


class SlowExperts(nn.Module):
    """A loop over experts and tokens, each projection a ``LowBitLinear`` of its own: gate, up and down."""

    def __init__(self, family: str, original: nn.Module, rule: Rule, input_scales: list[Tensor | None]) -> None:
        super().__init__()
        self.gate_function = gate_of(family)
        self.experts = nn.ModuleList()
        quantizer = ActivationQuantizer(compiled=False)
        assert rule.weight_scheme is not None
        for e in range(E):
            weights, biases = matrices(family, original, e)
            largest = torch.maximum(weights[0].abs().max(), weights[1].abs().max()).float()
            layers = []
            for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).to(weight.dtype)
                linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
                if bias is not None:
                    linear.bias = nn.Parameter(bias.clone(), requires_grad=False)
                shared = 2688 / largest if number < 2 and rule.weight_scheme.has_global_scale else None
                layers.append(
                    LowBitLinear(
                        linear,
                        rule.weight_scheme,
                        rule.activation_scheme,
                        quantizer,
                        weight_global_scale=shared,
                        input_global_scale=input_scales[number // 2],
                    )
                )
            self.experts.append(nn.ModuleList(layers))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for n in range(len(hidden)):
            for k in range(TOP):
                gate, up, down = layers_of(self.experts[int(index[n, k])])  # type: ignore[arg-type]
                x = hidden[n : n + 1].clone()
                out[n] += (down(self.gate_function(gate(x), up(x))) * weights[n, k])[0]
        return out


@pytest.mark.parametrize("family", FAMILIES)
def test_taking_experts_apart_changes_nothing(family: str) -> None:
    model, original = make(family), make(family)
    separate_experts(model, lambda *names: True)
    assert len(experts_around(model)) == 2 * 2 * E
    assert not any(p.ndim == 3 for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in original.parameters())
    for rows in (1, 7, 40):
        inputs = routed(rows, seed=rows)
        torch.testing.assert_close(
            experts_of(model)(*inputs), original.get_submodule(EXPERTS)(*inputs), rtol=1e-5, atol=1e-5
        )
    ids = torch.randint(VOCAB, (2, 15), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(input_ids=ids).logits, original(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", LOW_BIT)
def test_experts_equal_a_slow_loop_of_quantized_linear_layers(family: str, preset: str) -> None:
    model, original = make(family), make(family)
    rule = quantized(model, preset).quantized[f"{EXPERTS}.down_proj.0"]
    experts = experts_of(model)
    slow = SlowExperts(family, original.get_submodule(EXPERTS), rule, input_scales(experts))
    for rows in (1, 23):
        hidden, index, weights = routed(rows, seed=rows)
        torch.testing.assert_close(experts(hidden, index, weights), slow(hidden, index, weights), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset", ["fp8", "mxfp4", "nvfp4"])
def test_experts_equal_the_slow_loop_in_bf16_too(preset: str) -> None:
    model, original = make("qwen3-moe", torch.bfloat16), make("qwen3-moe", torch.bfloat16)
    rule = quantized(model, preset).quantized[f"{EXPERTS}.down_proj.0"]
    experts = experts_of(model)
    slow = SlowExperts("qwen3-moe", original.get_submodule(EXPERTS), rule, input_scales(experts))
    hidden, index, weights = routed(23)
    inputs = hidden.bfloat16(), index, weights.bfloat16()
    ours, theirs = experts(*inputs).float(), slow(*inputs).float()
    assert experts(*inputs).dtype == torch.bfloat16
    assert (ours - theirs).norm() / theirs.norm() < 1e-2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", ["fp8", "mxfp4", "nvfp4a16"])
def test_weights_are_those_of_separate_layers_where_gate_and_up_share_a_scale(family: str, preset: str) -> None:
    model, original = make(family), make(family)
    scheme = quantized(model, preset).quantized[f"{EXPERTS}.down_proj.0"].weight_scheme
    assert scheme is not None
    outers = set()
    for e in range(E):
        weights, _ = matrices(family, original.get_submodule(EXPERTS), e)
        up_layer, down_layer = (layers_of(stack)[e] for stack in experts_of(model).stacks)
        both = up_layer.weight
        rows = (both[::2], both[1::2]) if family == "gpt-oss" else both.chunk(2)
        shared = 2688 / torch.cat(weights[:2]).abs().max() if scheme.has_global_scale else None
        for stored, weight in zip(rows, weights[:2], strict=True):
            assert torch.equal(stored, quantize(weight, scheme, global_scale=shared).values)
        assert torch.equal(down_layer.weight, quantize(weights[2], scheme).values)
        if shared is not None:
            assert up_layer.weight_outer is not None
            outers.add(up_layer.weight_outer.item())
    assert len(outers) in (0, E), "every expert has a scale of its own"


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_share_one_static_scale_measured_over_all_experts(family: str) -> None:
    """``2688 / amax`` of what reaches any expert, and of what reaches any down projection: measured by hand."""
    model, original = make(family), make(family)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    original.get_submodule(EXPERTS).register_forward_pre_hook(lambda _module, args: seen.append(args))
    for ids in CALIBRATION:
        original(input_ids=ids)
    quantized(model, "nvfp4")
    gate_function, largest_middle = gate_of(family), 0.0
    for hidden, index, _weights in seen:
        for e in range(E):
            (wg, wu, _), (bg, bu, _) = matrices(family, original.get_submodule(EXPERTS), e)
            x = hidden[(index == e).any(dim=1)]
            if len(x):
                middle = gate_function(nn.functional.linear(x, wg, bg), nn.functional.linear(x, wu, bu))
                largest_middle = max(largest_middle, middle.abs().max().item())
    largest = [max(h.abs().max().item() for h, _, _ in seen), largest_middle]
    for stack, amax in zip(experts_of(model).stacks, largest, strict=True):
        scales = [layer.input_global_scale for layer in layers_of(stack)]
        assert all(scale is scales[0] for scale in scales)
        assert scales[0] is not None
        assert scales[0].item() == pytest.approx(2688 / amax, rel=1e-5)


def test_each_token_is_quantized_once_for_all_its_experts() -> None:
    model = make("qwen3-moe")
    quantizer = quantized(model, "mxfp4").quantizer
    experts_of(model)(*routed(9))
    assert quantizer.quantizations == 2, "before gate and up, and before down"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", ["mxfp4", "nvfp4", "nvfp4a16"])
def test_a_gradient_passes_straight_through_and_the_forward_pass_stays_the_same(family: str, preset: str) -> None:
    model = make(family)
    quantized(model, preset)
    experts = experts_of(model)
    hidden, index, weights = routed(11)
    wanting = hidden.clone().requires_grad_()
    out = experts(wanting, index, weights)
    torch.testing.assert_close(out.detach(), experts(hidden, index, weights), rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    assert wanting.grad is not None
    assert wanting.grad.isfinite().all()
    assert (wanting.grad.abs().sum(dim=1) > 0).all()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_summary_counts_experts_and_routers_stay(family: str) -> None:
    model = make(family)
    before = {n: p.clone() for n, p in model.named_parameters() if ".router." in n or ".gate." in n}
    assert before
    applied = quantized(model, "mxfp4")
    linears, inside = 2 * (4 + 2 * E), 2 * 2 * E
    lines = applied.summary().splitlines()
    assert lines[0] == f"{linears} linear layers ({inside} of experts): weights mxfp4-even, activations fp8-token"
    router = "router" if family == "gpt-oss" else "gate"
    assert applied.left_alone[f"model.layers.0.mlp.{router}"] == f"rule '*.{router}'"
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], parameter) for name, parameter in before.items())


def test_a_rule_may_name_the_experts_or_one_of_their_layers() -> None:
    model = make("mixtral")
    rules = (Rule("*.experts.down_proj.*"), Rule("*.layers.0.mlp.experts", "fp8-channel"), Rule("*.experts.*", "nvfp4"))
    applied = apply_recipe(model, Recipe("mixed", rules), compiled=False)
    weights = {name: rule.weights for name, rule in applied.quantized.items()}
    expected = {
        f"model.layers.{i}.mlp.experts.gate_up_proj.{e}": ("fp8-channel", "nvfp4")[i] for i in (0, 1) for e in range(E)
    }
    assert weights == expected
    hidden, index, routing = routed(5)
    assert experts_of(model)(hidden, index, routing).isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_may_stay_in_one_tensor_on_purpose(family: str) -> None:
    model = make(family)
    recipe = Recipe("attention", (Rule("*.experts"), *load_recipe("mxfp4").rules))
    applied = apply_recipe(model, recipe, compiled=False)
    assert sorted(applied.quantized) == [f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "koqv"]
    assert applied.left_alone[EXPERTS] == "rule '*.experts'"
    assert any(p.ndim == 3 for p in model.parameters())


def test_an_expert_that_no_calibration_text_reaches_takes_the_scale_of_the_others() -> None:
    model = make("qwen3-moe")
    one_token = [torch.tensor([[7]])]
    apply_recipe(model, load_recipe("nvfp4"), compiled=False, calibration=one_token)
    scales = [layer.input_global_scale for layer in layers_of(experts_of(model).stacks[1])]
    assert all(scale is scales[0] for scale in scales)
    assert scales[0] is not None
    assert scales[0].isfinite()


def test_a_damaged_expert_is_refused_by_name() -> None:
    model = make("qwen3-moe")
    model.get_submodule(EXPERTS).down_proj[3, 1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"module model\.layers\.1\.mlp\.experts\.down_proj\.3: .*NaN or infinity"):
        quantized(model, "mxfp4a16")


def test_a_width_of_experts_that_does_not_divide_is_refused_by_name() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SHARED, intermediate_size=64, moe_intermediate_size=16, num_experts=E)
    with pytest.raises(ValueError, match=r"experts\.down_proj\.0: 16 columns do not divide into blocks of 32"):
        quantized(Qwen3MoeForCausalLM(config), "mxfp4")


def test_experts_that_normalize_their_outputs_are_refused() -> None:
    model = make("qwen3-moe")
    model.get_submodule(EXPERTS).has_post_expert_norm = True
    with pytest.raises(ValueError, match=r"module model\.layers\.1\.mlp\.experts: .* normalizes the experts' outputs"):
        quantized(model, "mxfp4")


def test_experts_of_an_unknown_kind_are_refused_rather_than_skipped() -> None:
    unknown = nn.Module()
    unknown.stacked = nn.Parameter(torch.zeros(2, 32, 32))
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(32, 32), unknown])})
    wrapped = nn.ModuleDict({"model": model})
    with pytest.raises(ValueError, match=r"module model\.layers\.1 keeps its experts in one tensor \(stacked\)"):
        quantized(wrapped, "mxfp4")


def test_a_convolution_is_left_alone_and_listed() -> None:
    block = nn.ModuleDict({"proj": nn.Linear(32, 32), "conv1d": nn.Conv1d(8, 8, 4, groups=8)})
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([block])})})
    assert quantized(model, "mxfp4").left_alone == {"model.layers.0.conv1d": "Conv1d is not a linear layer"}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_found_by_the_names_of_separated_layers(family: str) -> None:
    separated, original = make(family), make(family)
    separate_experts(separated, lambda *names: True)
    for name in experts_around(separated):
        assert torch.equal(weight_of(separated, name), weight_of(original, name))
    assert kind_of(f"{EXPERTS}.gate_up_proj.3") == "gate_up_proj"
    assert kind_of("model.layers.0.self_attn.q_proj") == "q_proj"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", ["mxfp4", "nvfp4"])
def test_a_saved_mixture_is_loaded_and_computed_in_low_bit(family: str, preset: str, tmp_path: Path) -> None:
    original = make(family)
    original.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    targets = {
        p: load_target(str(tmp_path), load_recipe(p), dtype=torch.float32, compile_quantizer="off")
        for p in ("none", preset)
    }
    ids = torch.randint(VOCAB, (1, 15), generator=torch.Generator().manual_seed(1))
    exact, rounded = (t.logits(t.states(ids).last_hidden) for t in targets.values())
    torch.testing.assert_close(exact, original(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert 1e-3 < (rounded - exact).norm() / exact.norm() < 1.5
    assert targets["none"].fingerprint == targets[preset].fingerprint


def test_every_preset_covers_experts() -> None:
    for preset in PRESETS:
        if preset not in ("none", "fp8-block", "w4a16"):  # the last two come in groups of 128
            assert f"{EXPERTS}.down_proj.0" in quantized(make("qwen3-moe"), preset).quantized, preset
