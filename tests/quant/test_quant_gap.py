"""The gap's numbers against slow loops in double precision, against laws, and on the tiny target."""

import math
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.quant.block import dequantize, quantize
from bitdraft.quant.gap import (
    Gap,
    compare,
    compare_logits,
    compare_states,
    compare_weights,
    joined,
    stored_bits,
)
from bitdraft.quant.schemes import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT4_GROUP,
    INT4_GROUP_ASYM,
    MXFP4_EVEN,
    MXFP8_RCEIL,
    NVFP4,
    Scheme,
)
from bitdraft.quant.target import LowBitTarget


def random_gap(seed: int = 0, positions: int = 7, vocabulary: int = 11, rows: int | None = None) -> Gap:
    """The gap of random states, with output heads that differ."""
    generator = torch.Generator().manual_seed(seed)
    reference, low = torch.randn(2, positions, 3, 5, generator=generator)
    heads = torch.randn(2, vocabulary, 5, generator=generator)
    tokens = torch.randint(0, vocabulary, (positions,), generator=generator)
    return compare(reference, low, lambda h: h @ heads[0].T, lambda h: h @ heads[1].T, tokens, rows=rows)


def test_known_distributions() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    reference, low = (torch.tensor([row]).log() for row in (p, q))
    agrees, tv, kl_low_reference, kl_reference_low, nll_reference, nll_low = (
        float(x) for x in compare_logits(reference, low, torch.tensor([2]))
    )
    assert agrees == 0
    assert tv == pytest.approx(0.25)
    assert kl_low_reference == pytest.approx(0.25 * math.log(2), abs=1e-6)  # ¼ log ½ + ½ log 2
    assert kl_reference_low == pytest.approx(0.25 * math.log(2), abs=1e-6)
    assert (nll_reference, nll_low) == pytest.approx((math.log(4), math.log(2)))


def test_the_two_divergences_are_not_mixed_up() -> None:
    p, q = torch.tensor([0.9, 0.1]), torch.tensor([0.5, 0.5])
    _, _, kl_low_reference, kl_reference_low, _, _ = compare_logits(p.log()[None], q.log()[None], torch.tensor([0]))
    assert float(kl_low_reference) == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), abs=1e-6)
    assert float(kl_reference_low) == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5), abs=1e-6)


def test_tokens_that_neither_target_can_say_count_nothing() -> None:
    reference, low = torch.tensor([[1.0, 0.0, -torch.inf]]), torch.tensor([[0.5, 0.0, -torch.inf]])
    with_mask = compare_logits(reference, low, torch.tensor([0]))
    without = compare_logits(reference[:, :2], low[:, :2], torch.tensor([0]))
    for a, b in zip(with_mask, without, strict=True):
        torch.testing.assert_close(a, b)


def slow(reference: Tensor, low: Tensor, token: int) -> tuple[bool, float, float, float, float, float]:
    """One position, by the definitions, in double precision."""
    p, q = (x.double().softmax(-1).tolist() for x in (reference, low))
    tv = 1 - sum(min(a, b) for a, b in zip(p, q, strict=True))
    kl_qp = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    kl_pq = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return p.index(max(p)) == q.index(max(q)), tv, kl_qp, kl_pq, -math.log(p[token]), -math.log(q[token])


logits = st.lists(st.floats(-8, 8, width=32), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(logits, logits, st.integers(0, 3))
def test_equals_the_definitions_and_obeys_pinsker(a: list[float], b: list[float], token: int) -> None:
    reference, low = torch.tensor(a), torch.tensor(b)
    computed = [x.item() for x in compare_logits(reference[None], low[None], torch.tensor([token]))]
    assert computed[1:] == pytest.approx(slow(reference, low, token)[1:], abs=2e-5)
    assert bool(computed[0]) == (int(reference.argmax()) == int(low.argmax()))
    _, tv, kl_low_reference, kl_reference_low, _, _ = computed
    assert tv <= math.sqrt(min(kl_low_reference, kl_reference_low) / 2) + 1e-3


def test_equal_targets_have_no_gap() -> None:
    states = torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(1))
    head = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
    gap = compare(states, states, lambda h: h @ head.T, lambda h: h @ head.T, torch.zeros(5, dtype=torch.long))
    assert gap.agrees.all()
    for values in (gap.tv, gap.kl_low_reference, gap.kl_reference_low, gap.relative_error):
        assert torch.equal(values, torch.zeros_like(values))
    assert torch.equal(gap.nll_reference, gap.nll_low)
    torch.testing.assert_close(gap.cosine, torch.ones_like(gap.cosine))


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
def test_chunks_do_not_change_a_number(rows: int) -> None:
    whole, chunked = random_gap(), random_gap(rows=rows)
    for field in fields(Gap):
        torch.testing.assert_close(getattr(chunked, field.name), getattr(whole, field.name))


def test_no_more_logits_at_once_than_asked() -> None:
    seen = []

    def head(hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return hidden @ torch.ones(5, 9)

    states = torch.randn(10, 2, 5)
    compare(states, states, head, head, torch.zeros(10, dtype=torch.long), rows=4)
    assert max(seen) == 4
    assert sum(seen) == 20


def test_the_last_state_makes_the_logits_and_tokens_follow_their_positions() -> None:
    gap = random_gap(positions=1)
    generator = torch.Generator().manual_seed(0)
    reference, low = torch.randn(2, 1, 3, 5, generator=generator)
    heads = torch.randn(2, 11, 5, generator=generator)
    token = int(torch.randint(0, 11, (1,), generator=generator))
    expected = slow(reference[0, -1] @ heads[0].T, low[0, -1] @ heads[1].T, token)
    found = [getattr(gap, field.name).item() for field in fields(Gap)[:6]]
    assert found == pytest.approx(expected, abs=1e-5)


def test_states() -> None:
    reference = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    low = torch.tensor([[6.0, 8.0], [0.0, 1.0], [0.0, -2.0]])
    cosine, error = compare_states(reference, low)
    torch.testing.assert_close(cosine, torch.tensor([1.0, 0.0, -1.0]))
    torch.testing.assert_close(error, torch.tensor([1.0, math.sqrt(2), 2.0]))


def test_joined_keeps_the_order() -> None:
    a, b = random_gap(1, positions=2), random_gap(2, positions=3)
    both = joined([a, b])
    assert both.cosine.shape == (5, 3)
    assert torch.equal(both.tv, torch.cat([a.tv, b.tv]))


# Weights


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        (MXFP4_EVEN, 64 * 128 * 4.25),
        (NVFP4, 64 * 128 * 4.5 + 32),
        (MXFP8_RCEIL, 64 * 128 * 8.25),
        (FP8_CHANNEL, 64 * 128 * 8 + 64 * 32),
        (FP8_TENSOR, 64 * 128 * 8 + 32),
        (FP8_BLOCK, 64 * 128 * 8 + 32),  # one block, shorter than 128 rows
        (INT4_GROUP, 64 * 128 * 4 + 64 * 16),
        (INT4_GROUP_ASYM, 64 * 128 * 4 + 64 * (16 + 4)),
    ],
)
def test_stored_bits_count_the_scales(scheme: Scheme, bits: float) -> None:
    assert stored_bits(scheme, 64, 128) == bits


@pytest.mark.parametrize(("preset", "scheme"), [("mxfp4a16", MXFP4_EVEN), ("fp8", FP8_CHANNEL)])
def test_weight_errors_are_those_of_the_format(
    preset: str, scheme: Scheme, tiny_target: Callable[[str], LowBitTarget]
) -> None:
    reference, low = tiny_target("none"), tiny_target(preset)
    gap = compare_weights(reference.model, low.model)
    names = [n for n, _ in reference.model.named_modules() if n.endswith("down_proj")]
    before = torch.cat([reference.model.get_parameter(f"{n}.weight").flatten() for n in names])
    after = torch.cat(
        [dequantize(quantize(reference.model.get_parameter(f"{n}.weight"), scheme)).flatten() for n in names]
    )
    assert gap.relative_error["down_proj"] == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-4)
    kinds = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(gap.relative_error) == kinds


def test_nvfp4_weights_are_scaled_back_before_they_are_compared(tiny_target: Callable[[str], LowBitTarget]) -> None:
    gap = compare_weights(tiny_target("none").model, tiny_target("nvfp4a16").model)
    assert all(0.05 < error < 0.15 for error in gap.relative_error.values())


def test_bits_of_the_whole_model_count_what_stays_as_16(tiny_target: Callable[[str], LowBitTarget]) -> None:
    low = tiny_target("mxfp4a16")
    gap = compare_weights(tiny_target("none").model, low.model)
    quantized = sum(p.numel() for n, p in low.model.named_parameters() if n.endswith("_proj.weight"))
    everything = sum(p.numel() for p in low.model.parameters())
    assert gap.bits_of_quantized_layers == 4.25
    assert gap.bits_of_model == pytest.approx((4.25 * quantized + 16 * (everything - quantized)) / everything)


def test_an_untouched_model_has_16_bits_and_no_error(tiny_target: Callable[[str], LowBitTarget]) -> None:
    reference = tiny_target("none").model
    gap = compare_weights(reference, reference)
    assert (gap.bits_of_quantized_layers, gap.bits_of_model, gap.relative_error) == (None, 16.0, {})
