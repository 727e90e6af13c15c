"""Capturing states: little padding, and what a pass over each document alone gives."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrids import save_hybrid
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.data import capture as capture_module
from bitdraft.data.capture import DocumentStates, capture, capture_pack, length_groups, predicting_rows
from bitdraft.data.chat import Example
from bitdraft.quant.fp32_products import fast_fp32
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.target import LowBitTarget, load_target

LAYERS = (0, 2, 3)


def made(lengths: list[tuple[int, int]], seed: int = 0) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 256, (n,), generator=generator).tolist())

    return [Example(f"d{i}", "", ids(prompt), ids(answer)) for i, (prompt, answer) in enumerate(lengths)]


def alone(target: LowBitTarget, example: Example) -> DocumentStates:
    """The slow way: one document, all its logits at once, position by position."""
    tokens = [*example.prompt, *example.answer]
    with fast_fp32(target.model):
        states = target.states(torch.tensor([tokens]), capture=LAYERS)
    choices, normalisers = torch.zeros(len(tokens), dtype=torch.int64), torch.zeros(len(tokens))
    for j in range(len(tokens) - 1):
        if j + 1 >= len(example.prompt):
            hidden = states.last_hidden[0, j : j + 1]
            with torch.no_grad():
                choices[j] = target.top_tokens(hidden)[0]
                normalisers[j] = target.logits(hidden)[0].double().exp().sum().log()
    return DocumentStates(states.captured[0], states.last_hidden[0], choices, normalisers)


def assert_same(found: DocumentStates, expected: DocumentStates, tolerance: float) -> None:
    for name, wanted in vars(expected).items():
        got: Tensor = getattr(found, name)
        assert got.dtype == wanted.dtype and got.shape == wanted.shape, name
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(found.first_choices, expected.first_choices)


# Close together, so that they share groups; two without an answer; one alone, with a prompt of a single token.
EXAMPLES = made([(5, 36), (20, 20), (40, 0), (1, 38), (13, 27), (1, 7), (39, 2), (2, 0), (1, 1)])


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "mamba2", "falcon_h1", "lfm2"])
def test_states_are_those_of_every_document_alone(name: str, tmp_path: Path) -> None:
    target = load_target(str(save_hybrid(name, tmp_path / name, scale=0.5)), load_recipe("none"), dtype=torch.float32)
    found = dict(capture(target, EXAMPLES, LAYERS))
    assert sorted(found) == list(range(len(EXAMPLES)))
    for i, example in enumerate(EXAMPLES):
        assert_same(found[i], alone(target, example), 1e-5)


@pytest.mark.parametrize("preset", ["mxfp4", "fp8+kvfp8"])
def test_low_bit_targets_give_the_same_states_in_groups(
    preset: str, tiny_target: Callable[[str], LowBitTarget]
) -> None:
    """Exactly where activations are rounded: a sum in another order may round to another code, so most must agree."""
    target = tiny_target(preset)
    found = dict(capture(target, EXAMPLES, LAYERS))
    for i, example in enumerate(EXAMPLES):
        wanted = alone(target, example)
        near = (found[i].last_hidden - wanted.last_hidden).abs() <= 1e-4
        assert near.float().mean() > 0.9


def test_a_scale_over_the_whole_pass_means_passes_of_one_document(tiny_folder: Path) -> None:
    rule = Rule("*", weights="fp8-tensor", activations="fp8-tensor-dynamic")
    target = load_target(str(tiny_folder), Recipe("t", (rule,)), dtype=torch.float32, compile_quantizer="off")
    found = dict(capture(target, EXAMPLES, LAYERS))
    for i, example in enumerate(EXAMPLES):
        with fast_fp32(target.model):
            expected = target.states(torch.tensor([[*example.prompt, *example.answer]]), capture=LAYERS)
        assert torch.equal(found[i].captured, expected.captured[0])
        assert torch.equal(found[i].last_hidden, expected.last_hidden[0])


def test_a_pack_is_its_documents_one_behind_the_other(target: LowBitTarget) -> None:
    chosen = [EXAMPLES[i] for i in (5, 0, 2, 1)]
    pack = capture_pack(target, chosen, LAYERS)
    assert_same(pack, DocumentStates.packed([alone(target, e) for e in chosen]), 1e-5)
    assert pack.captured.shape == (sum(len(e.prompt) + len(e.answer) for e in chosen), len(LAYERS), target.hidden_size)


def test_indices_choose_documents_and_keep_their_numbers(target: LowBitTarget) -> None:
    found = dict(capture(target, EXAMPLES, LAYERS, indices=[7, 3, 4]))
    assert sorted(found) == [3, 4, 7]
    for i, states in found.items():
        assert_same(states, alone(target, EXAMPLES[i]), 1e-5)


def test_a_target_without_captured_layers_gives_its_last_state(target: LowBitTarget) -> None:
    expected = alone(target, EXAMPLES[0])
    [(_, states)] = capture(target, EXAMPLES[:1], ())
    assert states.captured.shape == (41, 0, 0)
    assert_same(replace(states, captured=expected.captured), expected, 1e-5)


def test_logits_are_computed_once_in_chunks_and_for_supervised_positions_alone(
    target: LowBitTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, rows = target.logits, []

    def counting(hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return whole(hidden)

    examples = made([(30, 270)] * 7 + [(300, 0)])
    expected = dict(capture(target, examples, LAYERS))
    monkeypatch.setattr(target, "logits", counting)
    found = dict(capture(target, examples, LAYERS))
    assert rows == [512, 512, 512, 270 * 7 - 3 * 512]
    for i in expected:
        assert torch.equal(found[i].log_normalisers, expected[i].log_normalisers)


def test_normalisers_are_added_up_in_fp32(tiny_folder: Path) -> None:
    target = load_target(str(tiny_folder), load_recipe("none"), dtype=torch.bfloat16, compile_quantizer="off")
    [(_, states)] = capture(target, EXAMPLES[:1], LAYERS)
    a, b = predicting_rows(EXAMPLES[0])
    with torch.no_grad():
        exact = target.logits(states.last_hidden[a:b]).double().logsumexp(-1)
    assert states.captured.dtype == states.last_hidden.dtype == torch.bfloat16
    assert (states.log_normalisers[a:b] - exact).abs().max() < 1e-5


lengths_strategy = st.lists(
    st.one_of(st.integers(1, 40), st.integers(1, 3000), st.integers(180, 220)), min_size=1, max_size=80
)


@settings(max_examples=300, deadline=None)
@given(lengths_strategy, st.sampled_from([1, 64, 1000, 8192]))
def test_groups_hold_every_document_once_with_little_padding(lengths: list[int], tokens_at_once: int) -> None:
    groups = length_groups(lengths, tokens_at_once)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest, size = max(lengths[i] for i in group), max(lengths[i] for i in group) * len(group)
        assert size - sum(lengths[i] for i in group) <= 0.05 * size
        assert size <= tokens_at_once or len(group) == 1
        assert lengths[group[0]] == longest
    # None is closed before it is full: the next document would break a bound.
    for group, following in pairwise(groups):
        together = [*group, following[0]]
        size = lengths[group[0]] * len(together)
        assert size > tokens_at_once or size - sum(lengths[i] for i in together) > 0.05 * size


def test_many_documents_of_common_lengths_fill_their_passes() -> None:
    lengths = torch.randint(50, 1500, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    groups = length_groups(lengths, 8192)
    assert len(groups) < 1.2 * sum(lengths) / 8192


def test_an_example_without_tokens_is_refused_by_name(target: LowBitTarget) -> None:
    with pytest.raises(ValueError, match="'nothing' has no tokens"):
        list(capture(target, [EXAMPLES[0], Example("nothing", "", (), ())], LAYERS))


def test_progress_counts_every_token(target: LowBitTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    class Bar(capture_module.tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            bars.append(self)

    monkeypatch.setattr(capture_module, "tqdm", Bar)
    list(capture(target, EXAMPLES, LAYERS, label="states"))
    list(capture(target, EXAMPLES, LAYERS))
    assert bars[0].n == bars[0].total == sum(len(e.prompt) + len(e.answer) for e in EXAMPLES)
    assert bars[0].desc == "states" and bars[1].disable
