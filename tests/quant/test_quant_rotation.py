"""A rotated residual stream: equal logits, other hidden states, and the way back for heads."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import tiny_config
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bitdraft.quant.rotation import ORIGINAL, basis_name, basis_of, check_basis, random_rotation, rotate_residual
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.vocab import DraftVocab

IDS = torch.randint(0, 320, (2, 32), generator=torch.Generator().manual_seed(0))
CAPTURE = (2, 4, 5)


def with_gains(model: nn.Module) -> nn.Module:
    """Norm gains that are not all one: a fold that forgot them would pass otherwise."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data = torch.rand(parameter.shape, generator=generator) + 0.5
    return model.eval().requires_grad_(False)


def tiny_model(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return with_gains(LlamaForCausalLM(tiny_config(**changes)))


@pytest.fixture
def pair(tiny_target: Callable[[str], LowBitTarget]) -> tuple[LowBitTarget, LowBitTarget]:
    """The tiny target with gains, as it is and rotated."""
    base = tiny_target("none")
    plain = with_gains(copy.deepcopy(base.model))
    rotated = copy.deepcopy(plain)
    rotate_residual(rotated, random_rotation(64))
    return tuple(  # type: ignore[return-value]
        LowBitTarget(m, base.recipe, base.applied, name="tiny", fingerprint="none") for m in (plain, rotated)
    )


@pytest.mark.parametrize("size", [1, 8, 48, 576])
def test_random_rotations_are_orthogonal_and_mix_all_channels(size: int) -> None:
    q = random_rotation(size, seed=3)
    torch.testing.assert_close(q @ q.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-10)
    assert (q.abs() > 1e-6 * size**-0.5).all()
    assert torch.equal(q, random_rotation(size, seed=3))
    assert size == 1 or not torch.equal(q, random_rotation(size, seed=4))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_a_rotated_model_has_the_same_logits_and_other_states(changes: dict[str, Any]) -> None:
    model = tiny_model(**changes)
    if changes.get("attention_bias"):
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    before = model(input_ids=IDS, output_hidden_states=True)
    basis = rotate_residual(model, random_rotation(64))
    after = model(input_ids=IDS, output_hidden_states=True)
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-3, atol=1e-3)
    assert basis_of(model) is basis
    for old, new in zip(before.hidden_states[:-1], after.hidden_states[:-1], strict=True):
        torch.testing.assert_close(new, old @ basis.rotation.float(), rtol=1e-3, atol=1e-3)


def test_queries_and_keys_with_norms_of_their_own_are_no_obstacle() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = with_gains(Qwen3ForCausalLM(config))
    before = model(input_ids=IDS).logits
    rotate_residual(model, random_rotation(64))
    torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=1e-3, atol=1e-3)


def test_outlier_channels_are_spread() -> None:
    model = tiny_model()
    model.get_input_embeddings().weight[:, 5] *= 30  # type: ignore[operator]
    stream = model(input_ids=IDS, output_hidden_states=True).hidden_states[0]
    rotate_residual(model, random_rotation(64))
    rotated = model(input_ids=IDS, output_hidden_states=True).hidden_states[0]
    largest = [float(s.abs().amax() / s.pow(2).mean().sqrt()) for s in (stream, rotated)]
    assert largest[1] < 0.5 * largest[0]


def test_a_heads_inputs_are_equal_once_turned_back_and_different_before(
    pair: tuple[LowBitTarget, LowBitTarget],
) -> None:
    plain, rotated = pair
    head = Eagle3Head.from_target(Eagle3Config(capture_layers=CAPTURE), plain, DraftVocab.full(320))
    expected = plain.states(IDS, capture=CAPTURE)
    basis = basis_of(rotated.model)
    assert basis is not None
    raw = rotated.states(IDS, capture=CAPTURE)
    back = basis.unrotate(raw)
    size = expected.captured.pow(2).mean().sqrt()
    torch.testing.assert_close(back.captured, expected.captured, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(back.last_hidden, expected.last_hidden, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(head.fuse(back.captured), head.fuse(expected.captured), rtol=1e-3, atol=1e-3)
    embedding = basis.original_embedding(rotated.embedding.weight)
    torch.testing.assert_close(embedding, plain.embedding.weight, rtol=1e-4, atol=1e-5)
    # Not turned back, they have as little to do with each other as two random vectors.
    assert (raw.captured - expected.captured).pow(2).mean().sqrt() > size
    assert (raw.last_hidden - expected.last_hidden).pow(2).mean() > expected.last_hidden.pow(2).mean()
    assert (head.fuse(raw.captured) - head.fuse(expected.captured)).norm() > head.fuse(expected.captured).norm()


def test_a_heads_weight_can_be_turned_instead_of_the_states(pair: tuple[LowBitTarget, LowBitTarget]) -> None:
    plain, rotated = pair
    basis = basis_of(rotated.model)
    assert basis is not None
    fc = torch.randn(64, 3 * 64, generator=torch.Generator().manual_seed(3))
    expected = plain.states(IDS, capture=CAPTURE).captured.flatten(-2) @ fc.T
    found = rotated.states(IDS, capture=CAPTURE).captured.flatten(-2) @ basis.fold_into_reader(fc).T
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)


def test_states_come_back_in_their_own_dtype(pair: tuple[LowBitTarget, LowBitTarget]) -> None:
    _, rotated = pair
    basis = basis_of(rotated.model)
    assert basis is not None
    states = rotated.states(IDS, capture=CAPTURE)
    half = replace(states, captured=states.captured.bfloat16(), last_hidden=states.last_hidden.bfloat16())
    assert basis.unrotate(half).captured.dtype == torch.bfloat16
    assert basis.unrotate(half).last_hidden.dtype == torch.bfloat16


def test_the_mark_tells_bases_apart() -> None:
    models = [tiny_model(num_hidden_layers=1) for _ in range(4)]
    for model, seed in zip(models[1:], (0, 0, 1), strict=True):
        rotate_residual(model, random_rotation(64, seed))
    names = [basis_name(m) for m in models]
    assert names[0] == ORIGINAL and names[1] == names[2] and len(set(names)) == 3
    check_basis(names[1], models[2])
    check_basis(ORIGINAL, models[0])
    for name, model in ((ORIGINAL, models[1]), (names[1], models[0]), (names[1], models[3])):
        with pytest.raises(ValueError, match="turn the states back"):
            check_basis(name, model)


def gemma(config: type, model: type) -> nn.Module:
    torch.manual_seed(0)
    return model(
        config(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
    ).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gemma(Gemma2Config, Gemma2ForCausalLM), "block 0 has post_feedforward_layernorm|block 0 has pre_"),
        (lambda: gemma(GemmaConfig, GemmaForCausalLM), "GemmaRMSNorm is not x / rms"),
    ],
)
def test_refuses_architectures_that_the_fold_does_not_know(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        rotate_residual(model, random_rotation(64))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_refuses_a_model_whose_logits_change() -> None:
    class Twisted(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * self.model.embed_tokens.weight[0, 0]  # a number that depends on the basis
            return out

    torch.manual_seed(0)
    model = with_gains(Twisted(tiny_config(num_hidden_layers=1)))
    with pytest.raises(ValueError, match="logits are no longer the same"):
        rotate_residual(model, random_rotation(64))


@pytest.mark.parametrize(
    ("rotation", "message"),
    [(torch.ones(64, 64), "not orthogonal"), (random_rotation(32), "does not fit a hidden size of 64")],
)
def test_refuses_what_is_no_rotation_of_this_model(rotation: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotate_residual(tiny_model(num_hidden_layers=1), rotation)


def test_refuses_to_rotate_twice() -> None:
    model = tiny_model(num_hidden_layers=1)
    rotate_residual(model, random_rotation(64))
    with pytest.raises(ValueError, match="rotated already"):
        rotate_residual(model, random_rotation(64))
