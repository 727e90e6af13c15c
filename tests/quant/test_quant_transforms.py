"""Transforms of a layer's input: the model stays the same function, and rounding it costs less."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_config
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from bitdraft.quant.block import dequantize, quantize
from bitdraft.quant.calibrate import calibrate_layer_by_layer
from bitdraft.quant.linear import ActivationQuantizer, LowBitLinear
from bitdraft.quant.schemes import MXFP4_EVEN, MXFP4_RCEIL
from bitdraft.quant.transforms import (
    BlockTransform,
    TransformedInput,
    TransformMemory,
    block_transform,
    hadamard,
    hadamard_transform,
)
from bitdraft.quant.wush import wush_matrices, wush_transform

IDS = torch.randint(0, 320, (2, 32), generator=torch.Generator().manual_seed(0))


def fold_transform(linear: nn.Linear, transform: BlockTransform) -> None:
    with torch.no_grad():
        linear.weight.copy_(transform.fold(linear.weight))


def transform_inputs(model: nn.Module, names: list[str], transform: BlockTransform, memory: TransformMemory) -> None:
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        fold_transform(linear, transform)
        model.set_submodule(name, TransformedInput(linear, transform, memory))


def random_matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tiny_model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(num_hidden_layers=2, **changes)).eval().requires_grad_(False)


def as_one_matrix(transform: BlockTransform, columns: int) -> Tensor:
    """``T`` as a ``[K, K]`` matrix: the slow obvious form."""
    blocks = transform.matrix.double()
    if len(blocks) == 1:
        blocks = blocks.expand(columns // transform.block, -1, -1)
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("size", [1, 2, 16, 32, 128])
def test_hadamard_matrices_are_orthogonal_symmetric_and_even(size: int) -> None:
    h = hadamard(size)
    torch.testing.assert_close(h @ h.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(h, h.T)
    assert torch.equal(h.abs(), torch.full_like(h, size**-0.5))


@pytest.mark.parametrize("size", [0, 3, 12])
def test_hadamard_refuses_other_sizes(size: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        hadamard(size)


@pytest.mark.parametrize("matrix", [hadamard(8), random_matrix(8, 8), random_matrix(4, 8, 8)])
def test_applies_folds_and_moves_moments_like_one_large_matrix(matrix: Tensor) -> None:
    transform = block_transform(matrix)
    full = as_one_matrix(transform, 32)
    x, weight = random_matrix(2, 5, 32, seed=1), random_matrix(6, 32, seed=2)
    torch.testing.assert_close(transform.apply(x).double(), x.double() @ full.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        transform.fold(weight).double(), weight.double() @ torch.linalg.inv(full), rtol=1e-4, atol=1e-4
    )
    hessian = x.flatten(0, 1).T @ x.flatten(0, 1)
    expected = full @ hessian.double() @ full.T
    torch.testing.assert_close(transform.moments(hessian).double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("matrix", [hadamard(16), random_matrix(16, 16), random_matrix(4, 16, 16)])
def test_the_layer_behind_the_transform_is_the_same_layer(matrix: Tensor) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 24), random_matrix(3, 64, seed=1)
    before = linear(x)
    transform = block_transform(matrix)
    fold_transform(linear, transform)
    assert not torch.allclose(linear(x), before, atol=0.1)
    wrapped = TransformedInput(linear, transform, TransformMemory())
    torch.testing.assert_close(wrapped(x), before, rtol=1e-3, atol=1e-3)


def test_the_inverse_is_that_of_the_rounded_matrix() -> None:
    """1/√32 is no bf16 number: folding with the exact matrix would scale the layer by 2^-9."""
    transform = hadamard_transform(32, torch.bfloat16)
    assert transform.matrix.dtype == torch.bfloat16
    product = transform.matrix[0].double() @ transform.inverse[0]
    torch.testing.assert_close(product, torch.eye(32, dtype=torch.float64), rtol=0, atol=1e-12)
    assert not torch.allclose(transform.inverse[0], hadamard(32), rtol=1e-4, atol=0)


def test_a_transform_is_not_applied_in_a_narrower_dtype_than_it_was_made_for() -> None:
    with pytest.raises(ValueError, match="cannot be applied in"):
        hadamard_transform(16).apply(torch.ones(1, 16, dtype=torch.bfloat16))
    assert hadamard_transform(16, torch.bfloat16).apply(torch.ones(1, 16)).dtype == torch.float32


def test_refuses_a_matrix_without_inverse_and_widths_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="no inverse"):
        block_transform(torch.ones(4, 4))
    with pytest.raises(ValueError, match="20 channels do not divide into blocks of 16"):
        hadamard_transform(16).apply(torch.ones(1, 20))
    with pytest.raises(ValueError, match="64 channels do not divide into 2 of 16"):
        block_transform(random_matrix(2, 16, 16)).apply(torch.ones(1, 64))


def groups(model: nn.Module) -> list[list[str]]:
    """The linear layers of the blocks, those with a common input together."""
    found = []
    for number in range(len(model.get_decoder().layers)):  # type: ignore[operator]
        block = f"model.layers.{number}"
        found.append([f"{block}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")])
        found.append([f"{block}.self_attn.o_proj"])
        found.append([f"{block}.mlp.{name}" for name in ("gate_proj", "up_proj")])
        found.append([f"{block}.mlp.down_proj"])
    return found


def test_a_model_with_hadamard_inputs_is_the_same_model() -> None:
    model = tiny_model()
    before = model(input_ids=IDS).logits
    memory, transform = TransformMemory(), hadamard_transform(16)
    weight = model.model.layers[0].mlp.up_proj.weight.clone()
    for names in groups(model):
        transform_inputs(model, names, transform, memory)
    assert not torch.allclose(model.model.layers[0].mlp.up_proj.layer.weight, weight)
    torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=1e-3, atol=1e-3)


def test_layers_with_a_common_input_transform_it_once() -> None:
    model, memory = tiny_model(), TransformMemory()
    for names in groups(model):
        transform_inputs(model, names, hadamard_transform(16), memory)
    with torch.no_grad():
        model(input_ids=IDS)
        assert memory.transformations == 4 * 2
        model(input_ids=IDS)
    assert memory.transformations == 2 * 4 * 2


def test_the_remembered_input_is_not_mistaken_for_another() -> None:
    memory, transform = TransformMemory(), hadamard_transform(4)
    x = torch.ones(1, 4)
    first = memory(x, transform)
    assert memory(x, transform) is first
    assert memory(x, hadamard_transform(4)) is not first
    x.mul_(2)
    assert torch.equal(memory(x, transform), 2 * first)
    with torch.inference_mode():
        y = torch.ones(1, 4)
        memory(y, transform)
        y.mul_(3)
        assert torch.equal(memory(y, transform), 3 * first)


def test_gradients_pass_through_the_transform() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(32, 8).requires_grad_(False)
    x = random_matrix(3, 32).requires_grad_()
    linear(x).sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad.clone(), None
    transform, memory = hadamard_transform(16), TransformMemory()
    fold_transform(linear, transform)
    wrapped = TransformedInput(linear, transform, memory)
    with torch.no_grad():
        wrapped(x)  # what is remembered without a gradient must not be used with one
    for _ in range(2):
        x.grad = None
        wrapped(x).sum().backward()
        torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


def test_a_low_bit_layer_quantizes_what_the_transform_makes() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 24, bias=False), random_matrix(5, 64, seed=1)
    transform = hadamard_transform(32)
    fold_transform(linear, transform)
    expected = dequantize(quantize(transform.apply(x), MXFP4_RCEIL)) @ dequantize(quantize(linear.weight, MXFP4_EVEN)).T
    layer = LowBitLinear(linear, MXFP4_EVEN, MXFP4_RCEIL, ActivationQuantizer(compiled=False))
    torch.testing.assert_close(TransformedInput(layer, transform, TransformMemory())(x), expected)


# WUSH


def lopsided(seed: int = 0, columns: int = 64, rows: int = 48) -> tuple[Tensor, Tensor]:
    """Inputs ``[N, K]`` with correlated channels of very different size, and a weight."""
    x = random_matrix(2000, columns, seed=seed) @ random_matrix(columns, columns, seed=seed + 1)
    return x * torch.logspace(-1, 1, columns)[torch.randperm(columns)], random_matrix(rows, columns, seed=seed + 2)


def product_error(x: Tensor, weight: Tensor, transform: BlockTransform | None) -> float:
    """Relative squared error of ``x Wᵀ`` in W4A4 MXFP4 behind ``transform``."""
    tx, w = (x, weight) if transform is None else (transform.apply(x), transform.fold(weight))
    y = dequantize(quantize(tx, MXFP4_EVEN)) @ dequantize(quantize(w, MXFP4_EVEN)).T
    exact = x @ weight.T
    return float((y - exact).pow(2).sum() / exact.pow(2).sum())


def test_wush_gives_inputs_and_weight_the_same_moments_evenly_spread() -> None:
    torch.manual_seed(0)
    x, weight = lopsided()
    blocks = x.double().unflatten(-1, (2, 32)).movedim(1, 0)  # [G, N, D]
    moments = blocks.mT @ blocks / blocks.shape[1]
    columns = weight.double().unflatten(-1, (2, 32)).movedim(1, 0)  # [G, M, D]
    t = wush_matrices(moments, columns, damp=0.0)
    of_inputs = t @ moments @ t.mT
    folded = columns @ torch.linalg.inv(t)
    torch.testing.assert_close(of_inputs, folded.mT @ folded / len(weight), rtol=1e-6, atol=1e-8)
    spread = of_inputs.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(spread, spread.mean(-1, keepdim=True).expand_as(spread), rtol=1e-6, atol=1e-8)


def test_wush_takes_each_blocks_own_moments() -> None:
    torch.manual_seed(1)
    x, weight = lopsided()
    hessian = x.T @ x / len(x)
    transform = wush_transform(hessian, weight, 32)
    assert transform.matrix.shape == (2, 32, 32)
    second = wush_matrices(hessian[None, 32:, 32:], weight[None, :, 32:])
    torch.testing.assert_close(transform.matrix[1:], second.float())


def test_wush_beats_hadamard_beats_nothing() -> None:
    errors = []
    for seed in range(4):
        torch.manual_seed(seed)
        x, weight = lopsided(seed)
        transforms = (None, hadamard_transform(32), wush_transform(x.T @ x / len(x), weight, 32))
        errors.append([product_error(x, weight, t) for t in transforms])
    plain, hadamarded, wushed = torch.tensor(errors).mean(dim=0).tolist()
    assert wushed < 0.7 * hadamarded
    assert hadamarded < plain


def test_wush_bears_channels_that_are_zero() -> None:
    x, weight = lopsided()
    x[:, :40] = 0  # a whole block and a part
    weight[:, 40:44] = 0
    transform = wush_transform(x.T @ x / len(x), weight, 32)
    folded = transform.fold(weight)
    torch.testing.assert_close(transform.apply(x) @ folded.T, x @ weight.T, rtol=1e-3, atol=1e-2)


def test_wush_refuses_moments_that_are_none() -> None:
    with pytest.raises(ValueError, match="block 1 are not positive definite"):
        wush_matrices(torch.stack([torch.eye(4), -torch.eye(4)]), torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match="20 channels do not divide into blocks of 16"):
        wush_transform(torch.eye(20), torch.ones(3, 20), 16)


def test_wush_is_the_official_transform_up_to_signs(shared: Path) -> None:
    golden = load_file(shared / "golden" / "wush.safetensors")
    official, moment = golden["T_official"], golden["Sx"]
    ours = wush_matrices(moment[None], golden["W"].double()[None])[0]
    # The damped moment is the one that both turn into the same matrix, whatever the signs of their vectors.
    damped = moment + 0.01 * moment.diagonal().mean() * torch.eye(32)
    torch.testing.assert_close(ours @ damped @ ours.T, official @ damped @ official.T, rtol=1e-8, atol=1e-12)
    assert torch.allclose(hadamard(32), golden["hadamard32"], atol=1e-12)


def test_a_model_with_wush_inputs_is_the_same_model() -> None:
    model = tiny_model()
    before = model(input_ids=IDS).logits
    memory = TransformMemory()
    together = {name: names for names in groups(model) for name in names}

    def visit(name: str, layer: nn.Linear, hessian: Tensor) -> None:
        names = together[name]
        if name == names[0]:
            weights = torch.cat([model.get_parameter(f"{n}.weight") for n in names])
            transform_inputs(model, names, wush_transform(hessian, weights, 32), memory)

    calibrate_layer_by_layer(model, [IDS], visit)
    assert isinstance(model.model.layers[1].mlp.down_proj, TransformedInput)
    torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(copy.deepcopy(model)(input_ids=IDS).logits, before, rtol=2e-3, atol=2e-3)
