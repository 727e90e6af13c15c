"""Reading the engine's counters and comparing them with ours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitdraft.speculators.metrics import Acceptance
from bitdraft.train.serving.counters import (
    chance_points,
    disagreement,
    engine_counters,
    partings,
    points_apart,
    unaccounted,
)

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 100.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.7640001e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="2"} 10.0
vllm:request_success_total{engine="0"} 8.0
"""


def counted(passes: int, *accepted_at: int) -> Acceptance:
    return Acceptance(len(accepted_at), 8, passes, len(accepted_at) * passes, accepted_at, (passes, *accepted_at[:-1]))


def test_counters_are_read_from_prometheus_lines() -> None:
    assert engine_counters(METRICS, draft_length=3, prompts=8) == counted(100, 60, 20, 10)


def test_engines_in_several_processes_are_added_up() -> None:
    both = METRICS + METRICS.replace('engine="0"', 'engine="1"')
    assert engine_counters(both, draft_length=3, prompts=8) == counted(200, 120, 40, 20)


@pytest.mark.parametrize(
    ("metrics", "length", "complaint"),
    [
        ("", 3, "lack vllm:spec_decode_num_drafts_total: it serves without a head"),
        (
            METRICS.replace("num_draft_tokens_total", "num_other_total"),
            3,
            "lack vllm:spec_decode_num_draft_tokens_total",
        ),
        (METRICS, 2, "drafts other than 2 tokens a pass"),
        (METRICS.replace(" 20.0", " 21.0"), 3, "contradict each other: 90 accepted, by position [60, 21, 10]"),
        (METRICS.replace(" 100.0", " 0.0"), 3, "drafted nothing"),
        (METRICS.replace(" 300.0", " 296.0"), 3, "drafts other than 3 tokens a pass: 296 in 100 passes"),
    ],
)
def test_counters_that_cannot_be_right_are_refused(metrics: str, length: int, complaint: str) -> None:
    with pytest.raises(ValueError) as error:
        engine_counters(metrics, draft_length=length, prompts=8)
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("ours", "sentence"),
    [
        (counted(100, 60, 20, 10), None),
        (counted(101, 60, 21, 10), None),  # one pass and one draft more
        (counted(99, 60, 20, 9), None),
        (counted(102, 60, 20, 10), "passes: the engine counts 100, we count 102, where fp32 allows"),
        (counted(100, 60, 22, 10), "drafts accepted, the engine's and ours: 20 and 22 at position 2, where fp32"),
        (counted(101, 61, 21, 11), "drafts accepted, the engine's and ours: 60 and 61 at position 1, 20 and 21 at"),
        (counted(100, 59, 21, 10), "drafts accepted, the engine's and ours: 60 and 59 at position 1, 20 and 21 at"),
    ],
)
def test_in_fp32_one_pass_and_one_draft_may_differ(ours: Acceptance, sentence: str | None) -> None:
    found = disagreement(counted(100, 60, 20, 10), ours, exactly=True)
    assert found == sentence or (found is not None and sentence is not None and found.startswith(sentence))


def test_counters_have_to_be_those_of_the_answers() -> None:
    """Equal shares of far fewer passes are no agreement, whatever was rounded: the answers took more."""
    counts = counted(100, 60, 20, 10)  # 190 tokens
    for tokens in (190, 190 - 2 * 3):  # the last pass of each of two answers emits up to 3 tokens behind its end
        assert unaccounted(counts, [[0] * (tokens - 40), [0] * 42]) is None
    for tokens in (191, 190 - 2 * 3 - 1, 19):
        found = unaccounted(counts, [[0] * (tokens + 1), [0]])
        assert found == (
            f"the engine counts 190 tokens out of 100 passes, but its 2 answers took {tokens} to {tokens + 6}"
        )


def test_in_bf16_the_position_that_is_furthest_off_is_named_with_its_numbers() -> None:
    engine, ours = counted(1000, 600, 300, 100), counted(1000, 610, 318, 110)
    assert points_apart(engine, ours) == pytest.approx([-1.0, -1.8, -1.0])
    assert disagreement(engine, ours, exactly=False) is None
    assert disagreement(engine, counted(1000, 610, 322, 110), exactly=False) == (
        "position 2: the engine accepts 30.00 % of 1000 passes, we 32.20 % of 1000: 2.20 points apart, "
        "where 2 are allowed (chance alone: 2.07, less with more prompts)"
    )


def test_chance_is_the_standard_error_of_a_difference_of_shares() -> None:
    engine, ours = counted(400, 200, 0), counted(400, 200, 40)
    first, second = chance_points(engine, ours)
    assert first == pytest.approx(100 * (2 * 0.5 * 0.5 / 400) ** 0.5)
    assert second == pytest.approx(100 * (0.1 * 0.9 / 400) ** 0.5)


@given(st.integers(1, 500), st.data())
def test_equal_counters_agree_under_either_rule(passes: int, data: st.DataObject) -> None:
    kept = [passes]
    for _ in range(3):
        kept.append(data.draw(st.integers(0, kept[-1])))
    counts = counted(passes, *kept[1:])
    assert disagreement(counts, counts, exactly=True) is None
    assert disagreement(counts, counts, exactly=False) is None


def test_answers_part_at_the_first_other_token_or_where_one_ends() -> None:
    found = partings(["a", "b", "c"], [[1, 2, 3], [1, 2], [7]], [[1, 2, 3], [1, 2, 3], [8]])
    assert [(p.prompt, p.token) for p in found] == [("b", 2), ("c", 0)]
