"""Block-by-block calibration: what it collects, in which order, and that each block sees what is left behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tiny_config
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bitdraft.quant.calibrate import calibrate_layer_by_layer
from bitdraft.quant.experts import separate_experts

BATCHES = [
    torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(0)),
    torch.randint(0, 320, (1, 40), generator=torch.Generator().manual_seed(1)),
]


def tiny_model(layers: int = 3, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(num_hidden_layers=layers, **changes)).eval().requires_grad_(False)


def moments_of_whole_passes(model: nn.Module, name: str) -> Tensor:
    """``E[x xᵀ]`` of the inputs of one layer, from running the model as it is."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    try:
        for ids in BATCHES:
            model(input_ids=ids)
    finally:
        handle.remove()
    x = torch.cat([s.reshape(-1, s.shape[-1]) for s in seen]).double()
    return (x.T @ x / len(x)).float()


def collected(model: nn.Module, change: Callable[[nn.Linear], None] = lambda layer: None) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def visit(name: str, layer: nn.Linear, hessian: Tensor) -> None:
        assert model.get_submodule(name) is layer
        found[name] = hessian
        change(layer)

    calibrate_layer_by_layer(model, BATCHES, visit)
    return found


def test_collects_what_whole_passes_collect() -> None:
    model = tiny_model()
    found = collected(model)
    assert list(found) == [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    for name, hessian in found.items():
        torch.testing.assert_close(hessian, moments_of_whole_passes(model, name), rtol=1e-4, atol=1e-5)


def test_layers_that_read_the_same_tensor_share_their_hessian() -> None:
    found = collected(tiny_model(layers=1))
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert found[f"{attention}.q_proj"] is found[f"{attention}.k_proj"] is found[f"{attention}.v_proj"]
    assert found[f"{mlp}.gate_proj"] is found[f"{mlp}.up_proj"]
    assert len({id(h) for h in found.values()}) == 4


def test_a_block_reads_what_the_changed_blocks_before_it_make() -> None:
    def halve(layer: nn.Linear) -> None:
        layer.weight.mul_(0.5)

    model = tiny_model()
    untouched = collected(tiny_model())
    found = collected(model, halve)
    first, second = "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"
    # Within a block all layers are collected before the first is changed.
    torch.testing.assert_close(found[first], untouched[first])
    assert not torch.allclose(found[second], untouched[second], rtol=0.1)
    torch.testing.assert_close(found[second], moments_of_whole_passes(model, second), rtol=1e-4, atol=1e-5)


def test_a_layer_may_be_replaced_by_another_module() -> None:
    class Doubled(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.layer(x)

    def double(layer: nn.Linear) -> None:
        layer.weight.mul_(2)

    replaced, changed = tiny_model(), tiny_model()
    found: dict[str, Tensor] = {}

    def visit(name: str, layer: nn.Linear, hessian: Tensor) -> None:
        found[name] = hessian
        replaced.set_submodule(name, Doubled(layer))

    calibrate_layer_by_layer(replaced, BATCHES, visit)
    expected = collected(changed, double)
    for name, hessian in expected.items():
        torch.testing.assert_close(found[name], hessian)


def test_only_wanted_layers_are_visited() -> None:
    model, seen = tiny_model(), []
    calibrate_layer_by_layer(
        model,
        BATCHES,
        lambda name, layer, hessian: seen.append(name),
        wanted=lambda name: name.endswith("1.mlp.up_proj"),
    )
    assert seen == ["model.layers.1.mlp.up_proj"]


def test_the_model_works_as_before() -> None:
    model = tiny_model()
    before = model(input_ids=BATCHES[0]).logits
    collected(model)
    assert torch.equal(model(input_ids=BATCHES[0]).logits, before)
    assert all("forward" not in vars(block) for block in model.model.layers)
    assert all(not m._forward_pre_hooks for m in model.modules())


def test_the_model_works_as_before_after_a_visit_that_fails() -> None:
    model = tiny_model()

    def fail(name: str, layer: nn.Linear, hessian: Tensor) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        calibrate_layer_by_layer(model, BATCHES, fail)
    assert all(not m._forward_pre_hooks and "forward" not in vars(m) for m in model.modules())


def test_bf16_models_are_collected_in_fp32() -> None:
    found = collected(tiny_model().bfloat16())
    assert {h.dtype for h in found.values()} == {torch.float32}


def test_a_layer_that_no_token_reaches_gets_zeros() -> None:
    model = tiny_model(layers=1)
    block = model.model.layers[0]
    block.unused = nn.Linear(8, 8)
    found = collected(model)
    assert torch.equal(found["model.layers.0.unused"], torch.zeros(8, 8))


def test_every_expert_gets_the_moments_of_its_own_tokens() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    separate_experts(model, lambda *names: True)
    found = collected(model)
    experts = [name for name in found if ".layers.1.mlp.experts.gate_up_proj." in name]
    assert len(experts) == 4
    for name in experts:
        torch.testing.assert_close(found[name], moments_of_whole_passes(model, name), rtol=1e-3, atol=1e-5)
    assert not torch.allclose(found[experts[0]], found[experts[1]], rtol=0.1)


@pytest.mark.parametrize("batches", [[], [torch.zeros(4, dtype=torch.long)], [torch.zeros(1, 0, dtype=torch.long)]])
def test_refuses_to_run_without_text(batches: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="calibration needs token ids"):
        calibrate_layer_by_layer(tiny_model(1), batches, lambda name, layer, hessian: None)


def test_names_the_layer_whose_inputs_are_not_finite() -> None:
    model = tiny_model(2)
    model.model.layers[0].mlp.up_proj.weight[3] = torch.inf
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.down_proj: .* not finite"):
        collected(model)
