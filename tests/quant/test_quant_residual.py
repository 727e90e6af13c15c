"""Residual corrections: the closed form against slow searches, what lands in a model, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import save_tiny_target, tiny_config
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bitdraft.quant.apply import Applied, apply_recipe
from bitdraft.quant.block import Quantized, dequantize, quantize
from bitdraft.quant.checkpoints.write import write_quantized
from bitdraft.quant.gap import compare_weights
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.residual import FEWEST_SAMPLES, best_low_rank, rank_of_share
from bitdraft.quant.schemes import FP8_TOKEN, MXFP4_EVEN, NVFP4_KERNEL
from bitdraft.quant.target import load_target
from bitdraft.quant.transforms import TransformedInput

CALIBRATION = [torch.randint(0, 320, (4, 80), generator=torch.Generator().manual_seed(i)) for i in range(2)]
FORMATS = [("mxfp4-even", None), ("mxfp4-even", "fp8-token"), ("mxfp4-even", "mxfp4-rceil"), ("nvfp4", "nvfp4-kernel")]
DAMP = 0.01


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(tokens: int, columns: int, seed: int = 0) -> Tensor:
    """Correlated, of very different sizes, as inputs of layers are."""
    mixed = sample(tokens, columns, seed=seed) @ sample(columns, columns, seed=seed + 1)
    return mixed * torch.logspace(-1, 1, columns, dtype=torch.float64)


def objective(residual_in: Tensor, residual_out: Tensor, d_NM: Tensor, x_NK: Tensor) -> float:
    """``E‖d - B A x‖²`` and the damping, sample by sample."""
    damping = DAMP * x_NK.square().mean(0).mean() * (residual_out @ residual_in).square().sum()
    return float((d_NM - x_NK @ residual_in.T @ residual_out.T).square().sum(1).mean() + damping)


def fitted(d_NM: Tensor, x_NK: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    a, b, _ = best_low_rank(d_NM.T @ x_NK / len(x_NK), x_NK.T @ x_NK / len(x_NK), rank)
    return a, b


@pytest.mark.parametrize(("rows", "columns"), [(7, 12), (12, 7), (9, 9)])
def test_of_full_rank_it_is_ridge_regression(rows: int, columns: int) -> None:
    x, d = inputs(60, columns), sample(60, rows, seed=5)
    a, b = fitted(d, x, min(rows, columns))
    damped = x.T @ x / 60
    damped += DAMP * damped.diagonal().mean() * torch.eye(columns)
    torch.testing.assert_close(b @ a, (d.T @ x / 60) @ damped.inverse())


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 10), st.integers(2, 10), st.integers(1, 4), st.integers(0, 2**20))
def test_no_other_map_of_that_rank_is_better(rows: int, columns: int, rank: int, seed: int) -> None:
    rank = min(rank, rows, columns)
    x, d = inputs(50, columns, seed), sample(50, rows, seed=seed + 9)
    a, b = fitted(d, x, rank)
    best = objective(a, b, d, x)
    for number in range(20):
        near = 10.0 ** -(number % 5)
        other_a, other_b = (m + near * m.norm() * sample(*m.shape, seed=seed + number) for m in (a, b))
        # The best map to the outputs for what the other one reads.
        read = x @ other_a.T
        inner = read.T @ read / 50 + DAMP * x.square().mean(0).mean() * other_a @ other_a.T
        refitted = (d.T @ read / 50) @ inner.pinverse()
        assert objective(other_a, refitted, d, x) >= best * (1 - 1e-9)
        assert objective(other_a, other_b, d, x) >= best * (1 - 1e-9)


@pytest.mark.parametrize("rank", [1, 3])
def test_gradient_descent_finds_nothing_better(rank: int) -> None:
    x, d = inputs(80, 10) / 10, sample(80, 6, seed=3)
    best = objective(*fitted(d, x, rank), d, x)
    parameters = [(sample(rank, 10, seed=8) / 3).requires_grad_(), (sample(6, rank, seed=9) / 3).requires_grad_()]
    optimizer = torch.optim.LBFGS(parameters, max_iter=2000, line_search_fn="strong_wolfe", tolerance_change=1e-14)
    damping = DAMP * x.square().mean(0).mean()

    def closure() -> Tensor:
        optimizer.zero_grad()
        a, b = parameters
        loss = (d - x @ a.T @ b.T).square().sum(1).mean() + damping * (b @ a).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    found = objective(parameters[0].detach(), parameters[1].detach(), d, x)
    assert found == pytest.approx(best, rel=1e-6)
    assert best < d.square().sum(1).mean()


def test_the_error_left_is_the_share_that_the_rank_cannot_reach() -> None:
    x = sample(4000, 8)
    x = x @ torch.linalg.inv(torch.linalg.cholesky(x.T @ x / 4000)).T  # H = 1 exactly
    strengths = torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
    d = x @ (torch.linalg.qr(sample(8, 3, seed=1))[0] * strengths) @ torch.linalg.qr(sample(5, 3, seed=2))[0].T
    for rank, left in ((1, 5 / 21), (2, 1 / 21), (3, 0.0)):
        _, _, computed = best_low_rank(d.T @ x / 4000, x.T @ x / 4000, rank)
        assert computed == pytest.approx(left, abs=1e-9)


@pytest.mark.parametrize(
    ("share", "rows", "columns", "rank"),
    [
        (0.001, 576, 576, 1),  # 0.29: 0.1 % of a small layer is less than rank 1
        (0.001, 4096, 4096, 2),
        (0.001, 14336, 4096, 3),
        (0.01, 576, 576, 3),
        (0.01, 576, 1536, 4),
        (0.9, 8, 8, 4),
        (0.99, 2, 1000, 2),
    ],
)
def test_the_rank_comes_nearest_to_the_share(share: float, rows: int, columns: int, rank: int) -> None:
    assert rank_of_share(share, rows, columns) == rank
    if rank > 1 and rank < min(rows, columns):
        distances = [abs(r * (rows + columns) - share * rows * columns) for r in (rank - 1, rank, rank + 1)]
        assert min(distances) == distances[1]


def low_bit_layer(activations: Any, dtype: torch.dtype = torch.float32) -> LowBitLinear:
    torch.manual_seed(0)
    source = nn.Linear(96, 40, dtype=dtype).requires_grad_(False)
    scale = torch.tensor(2688 / 2.0) if activations is NVFP4_KERNEL else None
    return LowBitLinear(source, MXFP4_EVEN, activations, ActivationQuantizer(compiled=False), input_global_scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activations", [None, FP8_TOKEN, NVFP4_KERNEL])
def test_a_corrected_layer_adds_what_its_unquantized_input_makes(activations: Any, dtype: torch.dtype) -> None:
    layer, a, b = low_bit_layer(activations, dtype), sample(2, 96, seed=1).to(dtype), sample(40, 2, seed=2).to(dtype)
    x, upstream = sample(3, 5, 96, seed=3).to(dtype), sample(3, 5, 40, seed=4).to(dtype)
    wanting = x.clone().requires_grad_()
    plain = layer(wanting)
    (plain_grad,) = torch.autograd.grad(plain, wanting, upstream)
    layer.correct(a, b)
    assert not any(p.requires_grad for p in layer.parameters())
    assert torch.equal(layer(x), plain.detach() + (x @ a.T) @ b.T)
    corrected = layer(wanting)
    assert torch.equal(corrected, layer(x))
    (grad,) = torch.autograd.grad(corrected, wanting, upstream)
    torch.testing.assert_close(grad, plain_grad + upstream @ b @ a)
    if activations is NVFP4_KERNEL:  # beyond the static scale the layer itself passes nothing, the correction does
        saturated = x.abs() > 2
        assert saturated.any()
        assert torch.equal(grad[saturated], (upstream @ b @ a)[saturated])


def tiny_model(layers: int = 2, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(num_hidden_layers=layers, **changes)).eval().requires_grad_(False)


def applied(
    rule: Rule, model: nn.Module | None = None, calibration: Sequence[Tensor] = CALIBRATION
) -> tuple[nn.Module, Applied]:
    model = model or tiny_model()
    return model, apply_recipe(model, Recipe("r", (rule,)), compiled=False, calibration=calibration)


def seen_by(model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """The inputs ``[N, K]`` of layers in the model as it is."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    handles = [
        model.get_submodule(n).register_forward_pre_hook(lambda _m, args, n=n: seen[n].append(args[0].flatten(0, 1)))
        for n in names
    ]
    for ids in CALIBRATION:
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts).double() for name, parts in seen.items()}


Correction = tuple[Tensor | None, Tensor | None]


def taken_from(layer: nn.Module) -> Correction:
    """The correction of a layer, which loses it."""
    assert isinstance(layer, LowBitLinear)
    kept = layer.residual_in, layer.residual_out
    layer.residual_in = layer.residual_out = None
    return kept


NAMES = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(("weights", "activations"), FORMATS)
def test_every_layer_gets_the_best_correction_for_the_inputs_it_will_see(weights: str, activations: str | None) -> None:
    """One block transcribed: inputs from the low-bit layers before, wanted what the original weight makes of them."""
    rule, original = Rule("*.layers.*", weights, activations, residual=0.06), tiny_model()
    model, done = applied(rule)
    names = [f"model.layers.1.{part}" for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")]
    # Fitted together, on what uncorrected layers make.
    kept = {n: taken_from(model.get_submodule(n)) for n in done.quantized if ".layers.1." in n}
    x = seen_by(model, names)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, LowBitLinear)
        weight = original.get_parameter(f"{name}.weight").double()
        rows = x[name].float()
        if layer.activations is not None:
            rows = dequantize(quantize(rows, layer.activations, global_scale=layer.input_global_scale))
        d = x[name] @ weight.T - rows.double() @ layer.dequantized().double().T
        rank = rank_of_share(0.06, *weight.shape)
        assert rank == (3 if "down" in name else 2)
        a, b = fitted(d, x[name], rank)
        residual_in, residual_out = kept[name]
        assert residual_in is not None and residual_out is not None
        torch.testing.assert_close(residual_out.double() @ residual_in.double(), b @ a, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
@pytest.mark.parametrize(("weights", "activations"), FORMATS)
def test_the_error_of_no_layer_rises_on_the_calibration_text(
    weights: str, activations: str | None, rounding: str
) -> None:
    model, done = applied(Rule("*.layers.*", weights, activations, rounding=rounding, residual=0.001))
    original = tiny_model()
    names = list(done.residuals)
    assert len(names) == 14
    for block in ("0", "1"):
        inside = [n for n in names if f".layers.{block}." in n]
        kept = {n: taken_from(model.get_submodule(n)) for n in inside}
        x = seen_by(model, inside)
        for name in inside:
            layer = model.get_submodule(name)
            assert isinstance(layer, LowBitLinear)
            wanted = x[name] @ original.get_parameter(f"{name}.weight").double().T
            errors = []
            corrections: list[Correction] = [(None, None), kept[name]]
            for correction in corrections:
                layer.residual_in, layer.residual_out = correction
                errors.append((layer(x[name].float()).double() - wanted).square().sum().item())
            assert errors[1] < errors[0], name


def test_layers_that_read_one_tensor_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four inputs per block and batch: of q, k and v, of o, of gate and up, of down."""
    calls = []

    def counting(x: Tensor, *args: Any, **options: Any) -> Quantized:
        calls.append(x)
        return quantize(x, *args, **options)

    monkeypatch.setattr("bitdraft.quant.residual.quantize", counting)
    applied(Rule("*.layers.*", "mxfp4-even", "fp8-token", residual=0.001))
    assert len(calls) == 4 * 2 * len(CALIBRATION)


def test_corrections_bring_the_model_nearer_to_the_original() -> None:
    ids = torch.randint(0, 320, (4, 60), generator=torch.Generator().manual_seed(99))
    wanted = tiny_model()(input_ids=ids).logits
    distances = []
    for share in (0.0, 0.001, 0.2):
        model, _ = applied(Rule("*.layers.*", "mxfp4-even", "fp8-token", residual=share))
        distances.append((model(input_ids=ids).logits - wanted).norm().item())
    assert distances[2] < distances[1] < distances[0]


@pytest.mark.parametrize(("weights", "activations"), FORMATS)
def test_without_a_share_the_target_is_the_same_bit_for_bit(weights: str, activations: str | None) -> None:
    plain, with_zero = Rule("*.layers.*", weights, activations), Rule("*.layers.*", weights, activations, residual=0.0)
    assert Recipe("r", (plain,)).fingerprint == Recipe("r", (with_zero,)).fingerprint
    corrected = Recipe("r", (replace(plain, residual=0.001),))
    assert corrected.fingerprint not in (
        Recipe("r", (plain,)).fingerprint,
        Recipe("r", (replace(plain, residual=0.01),)).fingerprint,
    )
    model, done = applied(with_zero)
    state = model.state_dict()
    assert not done.residuals
    assert not any("residual" in key for key in state)
    reference, _ = applied(plain, calibration=CALIBRATION)
    ids = CALIBRATION[0]
    assert torch.equal(model(input_ids=ids).logits, reference(input_ids=ids).logits)
    low, _ = applied(replace(plain, residual=0.001))
    assert all(torch.equal(low.state_dict()[key], value) for key, value in state.items())  # weights stay as they are


def test_the_correction_of_a_transformed_layer_reads_the_transformed_input() -> None:
    rule = Rule("*.layers.*", "mxfp4-even", "mxfp4-rceil", transform="hadamard", residual=0.06)
    model, done = applied(rule)
    name = "model.layers.0.self_attn.q_proj"
    outer = model.get_submodule(name)
    assert isinstance(outer, TransformedInput)
    layer = outer.layer
    assert isinstance(layer, LowBitLinear)
    assert layer.residual_in is not None and layer.residual_out is not None
    x = seen_by(model, [name])[name]
    wanted = x @ tiny_model().get_parameter(f"{name}.weight").double().T
    corrected = (outer(x.float()).double() - wanted).norm()
    taken_from(layer)
    assert corrected < 0.98 * (outer(x.float()).double() - wanted).norm()
    assert len(done.residuals) == 14


def test_the_summary_counts_what_was_added() -> None:
    _, done = applied(Rule("*.layers.*", "mxfp4-even", residual=0.001))
    added = sum(sum(tiny_model().get_parameter(f"{n}.weight").shape) for n in done.residuals)
    of = sum(tiny_model().get_parameter(f"{n}.weight").numel() for n in done.residuals)
    lines = done.summary().splitlines()
    assert "14 linear layers: weights mxfp4-even (residual correction 0.001), activations in high precision" in lines
    share = f"{added:,} parameters in high precision, {added / of:.2%} of those layers'"
    assert f"residual corrections of rank 1 on 14 layers: {share}" in lines


def test_the_gap_counts_the_bits_of_corrections() -> None:
    plain, _ = applied(Rule("*.layers.*", "mxfp4-even"))
    corrected, done = applied(Rule("*.layers.*", "mxfp4-even", residual=0.001))
    before, after = (compare_weights(tiny_model(), model).bits_of_quantized_layers for model in (plain, corrected))
    added, of = (sum(getattr(f, key) for f in done.residuals.values()) for key in ("added", "of"))
    assert before is not None and after is not None
    assert after - before == pytest.approx(16 * added / of)


def test_nothing_is_left_behind_on_the_layers() -> None:
    model, done = applied(Rule("*.layers.*", "mxfp4-even", "fp8-token", residual=0.001))
    assert all(not m._forward_pre_hooks for m in model.modules())
    assert done.quantizer._last is None
    model = tiny_model()
    model.model.layers[0].mlp.up_proj.weight[3] = 1e30
    with pytest.raises(ValueError, match=r"not finite|not positive definite"):
        applied(Rule("*.layers.*", "mxfp4-even", "fp8-token", residual=0.001), model)
    assert all(not m._forward_pre_hooks for m in model.modules())


def test_a_rule_reads_its_share_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text('rules: [{modules: "*", weights: nvfp4, residual: 0.001}]')
    recipe = load_recipe(str(path))
    assert recipe.rules == (Rule("*", "nvfp4", residual=0.001),)
    assert recipe.looks_at_inputs


def test_the_shipped_recipe_is_the_preset_and_a_correction() -> None:
    recipe = load_recipe(str(Path(__file__).parents[2] / "configs/recipes/mxfp4-residual.yaml"))
    assert recipe.rules[-1] == replace(load_recipe("mxfp4").rules[-1], residual=0.001)
    assert recipe.rules[:-1] == load_recipe("mxfp4").rules[:-1]


@pytest.mark.parametrize("share", ["-0.1", "1", "1.5", "true", "null", ".nan", '"0.1%"', "[0.1]"])
def test_a_share_that_is_none_is_refused(share: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f'rules: [{{modules: "*", weights: nvfp4, residual: {share}}}]')
    with pytest.raises(ValueError, match=r"recipe\.yaml, rule 1: residual is a share of the layer's parameters"):
        load_recipe(str(path))


def test_what_cannot_be_corrected_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rule '\*': residual 0.01 needs a format under 'weights'"):
        applied(Rule("*", residual=0.01))
    few = [torch.zeros(1, FEWEST_SAMPLES - 1, dtype=torch.long)]
    with pytest.raises(ValueError, match=r"at least 512 samples \(tokens\), but the calibration text has 511"):
        applied(Rule("*.layers.*", "mxfp4-even", residual=0.01), calibration=few)
    with pytest.raises(ValueError, match="module lm_head lies outside the decoder's blocks"):
        applied(Rule("lm_head", "mxfp4-even", residual=0.01))


def test_experts_are_refused_by_name() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    with pytest.raises(ValueError, match=r"module model.layers.0.mlp.experts.*: experts cannot hold a residual"):
        applied(Rule("*.mlp.experts*", "mxfp4-even", residual=0.01), model)
    recipe = Recipe("r", (Rule("*.experts*", "mxfp4-even"), Rule("*_proj", "mxfp4-even", residual=0.001)))
    done = apply_recipe(model, recipe, compiled=False, calibration=CALIBRATION)
    assert {name.rpartition(".")[2] for name in done.residuals} == set(NAMES)


def test_a_checkpoint_cannot_hold_corrections(tmp_path: Path) -> None:
    recipe = Recipe("r", (Rule("*.layers.*", "mxfp4-even", residual=0.001),))
    with pytest.raises(ValueError, match=r"recipe 'r', rule '.*': compressed-tensors has no place for residual"):
        write_quantized(str(tmp_path), recipe, tmp_path / "out", calibration=CALIBRATION)


def test_a_corrected_target_is_frozen_and_needs_text(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "target", num_hidden_layers=2)
    recipe = Recipe("r", (Rule("*.layers.*", "mxfp4-even", "fp8-token", residual=0.001),))
    options: dict[str, Any] = {"dtype": torch.float32, "compile_quantizer": "off"}
    with pytest.raises(ValueError, match="at least 512 samples"):
        load_target(str(folder), recipe, **options)
    target = load_target(str(folder), recipe, calibration=CALIBRATION, **options)
    again = load_target(str(folder), recipe, calibration=CALIBRATION, **options)
    ids = CALIBRATION[0]
    assert torch.equal(target.states(ids).last_hidden, again.states(ids).last_hidden)
    assert target.recipe.fingerprint == again.recipe.fingerprint != recipe.fingerprint
    before = {key: value.clone() for key, value in target.model.state_dict().items()}
    embedded = target.embedding(ids).requires_grad_()
    target.model(inputs_embeds=embedded, use_cache=False).logits.square().sum().backward()
    assert embedded.grad is not None and embedded.grad.isfinite().all()
    assert all(torch.equal(before[key], value) for key, value in target.model.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())
