"""From pool and traffic to weights: what is raised, what is dropped, and what must not matter."""

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from matched_traffic import pool, records, silent, traffic

from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.traffic import match as module
from bitdraft.data.traffic.match import FEWEST, Matching, match
from bitdraft.data.traffic.pool import States, survey
from bitdraft.data.traffic.split import Guard, split_traffic
from bitdraft.data.traffic.weighing import MatchSettings

SETTINGS = MatchSettings(floor=0.05, clusters=4)


def matched(
    pool_records: Sequence[Conversation],
    asked: Sequence[Conversation],
    settings: MatchSettings = SETTINGS,
    states: States | None = None,
) -> Matching:
    return match(lambda: iter(pool_records), asked, settings, progress=silent, states=states)


@pytest.fixture(scope="module")
def plain() -> Matching:
    return matched(pool(), traffic())


def mean_weight(found: Matching, domain: str) -> float:
    return float(np.mean([w for w, name in zip(found.weights, found.ids, strict=True) if name.startswith(domain)]))


def by_key(found: Matching) -> dict[str, float]:
    return dict(zip(found.keys, found.weights.tolist(), strict=True))


def test_what_the_traffic_asks_for_is_drawn_as_often_as_the_traffic_asks_for_it(plain: Matching) -> None:
    assert plain.weights.mean() == pytest.approx(1)
    assert mean_weight(plain, "cooking") / 3 == pytest.approx(0.7, abs=0.12)
    assert mean_weight(plain, "code") / 3 == pytest.approx(0.2, abs=0.1)
    assert mean_weight(plain, "travel") / 3 == pytest.approx(0.1, abs=0.08)


def test_every_distance_to_the_traffic_shrinks(plain: Matching) -> None:
    for name in ("auc", "kl", "tv", "ngram_kl", "ngram_tv", "mmd"):
        measure = plain.measures[name]
        assert measure.after < measure.before, name
    assert plain.unmatched < 0.2
    assert plain.finished.ess_fraction == pytest.approx(
        plain.weights.sum() ** 2 / (len(plain.weights) * (plain.weights @ plain.weights))
    )


def test_rows_belong_together(plain: Matching) -> None:
    by_id = {c.id: (number, c) for number, c in enumerate(pool())}
    assert len(plain.ids) == len(by_id)
    for key, name, place, number in zip(plain.keys, plain.ids, plain.places, plain.numbers, strict=True):
        assert (number, key, place) == (by_id[name][0], by_id[name][1].key, by_id[name][1].source)


def test_groups_say_what_stands_in_them(plain: Matching) -> None:
    assert sum(g.traffic_share for g in plain.groups) == pytest.approx(1)
    assert sum(g.share_before for g in plain.groups) == pytest.approx(1)
    assert sum(g.share_after for g in plain.groups) == pytest.approx(1)
    raised = max(plain.groups, key=lambda g: g.weight)
    assert raised.kind == "cooking"
    assert raised.prompts and set(raised.words) <= set(" ".join(c.messages[0].content for c in pool()).split())


def test_the_order_of_the_records_changes_no_weight(plain: Matching) -> None:
    shuffled, asked = pool(), traffic()
    random.Random(5).shuffle(shuffled)
    random.Random(6).shuffle(asked)
    again = matched(shuffled, asked)
    assert by_key(again) == by_key(plain)
    assert again.split == plain.split
    assert again.measures == plain.measures
    assert again.groups == plain.groups


def test_a_bounded_sample_of_texts_is_kept_and_its_choice_does_not_depend_on_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_TEXTS", 50)
    monkeypatch.setattr("bitdraft.data.traffic.weighing._FITTED", 100)
    monkeypatch.setattr(module, "_MEASURED", 80)
    monkeypatch.setattr("bitdraft.data.traffic.pool._CHUNK", 10)
    alive: list[weakref.ref[Conversation]] = []
    most = 0

    def read() -> Iterator[Conversation]:
        nonlocal most
        for conversation in pool():
            fresh = replace(conversation)
            alive[:] = [w for w in alive if w() is not None]
            alive.append(weakref.ref(fresh))
            most = max(most, len(alive))
            yield fresh

    first = match(read, traffic(), SETTINGS, progress=silent)
    assert len(first.survey.sample) == 50
    assert most <= 50 + 3 * 10
    monkeypatch.setattr("bitdraft.data.traffic.pool._CHUNK", 7)
    shuffled = pool()
    random.Random(5).shuffle(shuffled)
    again = matched(shuffled, traffic())
    np.testing.assert_allclose(again.weights, first.weights, rtol=1e-4)
    assert again.keys == first.keys


@pytest.fixture(scope="module")
def marked() -> Matching:
    """Records of the traffic in the pool, empty answers, and one record without any."""
    asked = traffic(answer=5)
    split = split_traffic(asked, SETTINGS.shares, SETTINGS.seed)
    loud_turns = (Message("user", split.test[0].messages[0].content.upper() + "!!"), Message("assistant", "Yes."))
    loud = replace(split.test[0], id="loud", messages=loud_turns)
    empty = replace(records("code", 1, seed=7)[0], messages=(Message("user", "ask"), Message("assistant", " \n")))
    bare = records("code", 1, seed=8)
    return matched([*pool(answer=5), loud, replace(split.fit[0], id="same"), empty, empty, *bare], asked)


def test_a_pool_record_that_is_nearly_in_the_test_split_has_weight_zero(marked: Matching) -> None:
    assert marked.weights[marked.ids.index("loud")] == 0
    assert np.count_nonzero(marked.weights == 0) == 1
    assert marked.weights[marked.weights > 0].mean() == pytest.approx(1)
    [(record, prompt)] = marked.survey.dropped.values()
    assert (record.id, prompt) == ("loud", marked.split.test[0])
    assert all(c.id != "loud" for c in marked.survey.sample)


def test_a_pool_record_that_is_in_the_fit_split_stays(marked: Matching) -> None:
    assert marked.weights[marked.ids.index("same")] > 0


def test_missing_and_empty_answers_are_counted_and_then_prompts_are_compared_alone(marked: Matching) -> None:
    assert (marked.survey.empty_answers, marked.traffic_empty_answers) == (2, 0)
    assert (marked.survey.unanswered, marked.survey.first_unanswered) == (1, "code8.jsonl, line 1")
    assert not marked.answers and not marked.by_tokens


def test_traffic_in_a_language_that_the_pool_does_not_hold_is_said() -> None:
    found = matched(pool(), records("chinese", 60))
    traffic_share, before, after = found.languages["zh"]
    assert (traffic_share, before, after) == (1, 0, 0)
    bare = [g for g in found.groups if not g.pool_records]
    assert sum(g.traffic_share for g in bare) == pytest.approx(1)
    assert all(g.kind == "chinese, zh" and g.prompts for g in bare)
    assert found.unmatched == pytest.approx(1)


def with_ids(conversations: list[Conversation]) -> list[Conversation]:
    """As a target wrote them: one token id a word."""
    return [replace(c, answers=(tuple(range(len(c.messages[1].content.split()))),)) for c in conversations]


def test_long_answers_of_the_traffic_are_drawn_more_often_unless_they_are_counted_in_another_way() -> None:
    asked = [*records("cooking", 40, seed=1, answer=40), *records("code", 40, seed=1, answer=10)]
    ids = with_ids(pool(answer=20))
    by_tokens, mixed = matched(ids, with_ids(asked)), matched(ids, asked)
    assert by_tokens.answers and by_tokens.by_tokens
    assert mixed.answers and not mixed.by_tokens
    ratio = [mean_weight(found, "cooking") / mean_weight(found, "code") for found in (by_tokens, mixed)]
    assert ratio[0] > 1.5 * ratio[1]


def test_answers_that_are_demanded_but_missing_are_named() -> None:
    with pytest.raises(ValueError, match=r"code7.jsonl, line 1: the record has no answer"):
        matched([*pool(answer=20), *records("code", 1, seed=7)], traffic(answer=20), replace(SETTINGS, read="answers"))


@pytest.mark.parametrize(
    ("pool_records", "asked", "said"),
    [
        (pool(), [], "the traffic has 0 records: 20 are the least"),
        (pool(), traffic()[: FEWEST - 1], "the traffic has 19 records: 20 are the least"),
        ([], traffic(), "the pool has 0 records: 20 are the least"),
        (pool()[:19], traffic(), "the pool has 19 records: 20 are the least"),
    ],
)
def test_too_few_records_are_refused(pool_records: list[Conversation], asked: list[Conversation], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        matched(pool_records, asked)


def test_a_pool_that_is_the_test_split_is_refused() -> None:
    asked = traffic(cooking=100)
    held = split_traffic(asked, SETTINGS.shares, 0).test
    with pytest.raises(ValueError, match=rf"0 records that are not nearly in the traffic \(of {len(held)}\)"):
        matched(held, asked)


def test_a_pool_that_changes_between_the_readings_is_refused() -> None:
    readings = iter([pool(), pool()[:-1]])
    with pytest.raises(ValueError, match="the pool had 180 records when it was read first and 179 the second time"):
        match(lambda: next(readings), traffic(), SETTINGS, progress=silent)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"clusters": 1}, "clusters must be at least 2"),
        ({"floor": 1.5}, "floor is a share"),
        ({"uniform": -0.1}, "uniform is a share"),
        ({"shares": (0.5, 0.5, 0.0)}, "shares of fit, tune and test"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(SETTINGS, **change)  # type: ignore[arg-type]


def test_hidden_states_of_every_record_join_the_features() -> None:
    """States that tell what the words do not: whether a prompt is of even length."""
    read = []

    def states(asked: Sequence[Conversation], answers: bool) -> np.ndarray:
        read.append(len(asked))
        assert not answers
        even = np.array([len(c.messages[0].content.split()) % 2 == 0 for c in asked])
        return np.stack([even, ~even], axis=1).astype(np.float32)

    def is_even(c: Conversation) -> bool:
        return len(c.messages[0].content.split()) % 2 == 0

    asked = [c for c in records("code", 200, seed=1) if is_even(c)]
    domain = records("code", 120)
    found = matched(domain, asked, states=states)
    # The sample and the parts of the traffic are read for the features, the pool once more for its rows.
    assert sum(read) == 120 + len(found.split.fit) + 120 + len(asked)
    evens = {c.id for c in domain if is_even(c)}
    assert sum(w for w, name in zip(found.weights, found.ids, strict=True) if name in evens) > 0.8 * 120


@pytest.mark.parametrize("order", [sorted, lambda records: sorted(records)[::-1]])
def test_a_sample_of_texts_is_chosen_by_what_is_asked(order: Callable[[list[str]], list[str]]) -> None:
    every = {c.id: c for c in pool()}
    guard = Guard(records("travel", 3, seed=9))
    seen = survey((every[name] for name in order(list(every))), guard, sample=20, seed=0, report=lambda n: None)
    again = survey(every.values(), guard, sample=20, seed=0, report=lambda n: None)
    assert [c.id for c in seen.sample] == [c.id for c in again.sample]
    assert len(seen.sample) == 20
    assert seen.records == 180
