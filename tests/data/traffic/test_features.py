"""Texts, facts and vectors: what is told apart, and what must not depend on order, chunks or other records."""

from dataclasses import replace

import numpy as np
import pytest

from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.traffic.features import BUCKETS, FeatureSpace, length_bins
from bitdraft.data.traffic.texts import Facts, estimated_tokens, language_of, pieces

WORDS = ["river", "bread", "code", "green", "seven", "light", "stone", "paper", "music", "the", "of", "and", "what"]


def record(asked: str, answer: str | None = None, **fields: str) -> Conversation:
    messages = [Message("user", asked)]
    if answer is not None:
        messages.append(Message("assistant", answer, fields.get("thinking", "")))
    return Conversation(asked, "", tuple(messages), "made.jsonl, line 1")


def made(count: int, seed: int = 0) -> list[Conversation]:
    generator = np.random.default_rng(seed)

    def text() -> str:
        return " ".join(generator.choice(WORDS, generator.integers(3, 40)))

    return [record(f"{i} {text()}", text()) for i in range(count)]


RECORDS = made(80)


def test_pieces_are_words_marks_and_single_characters_where_there_are_no_spaces() -> None:
    assert pieces("Hello, World's x_1") == ["hello", ",", "world", "'", "s", "x_1"]
    assert pieces("def f(x): return x+1") == ["def", "f", "(", "x", ")", ":", "return", "x", "+", "1"]
    assert pieces("我想学python吗？") == ["我", "想", "学", "python", "吗", "？"]
    assert pieces("") == []


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("What is the capital of France?", "en"),
        ("¿Cuál es la capital de los Estados Unidos?", "es"),
        ("Quelle est la capitale de la France et pourquoi ?", "fr"),
        ("Was ist die Hauptstadt von Frankreich?", "de"),
        ("布洛芬和对乙酰氨基酚的区别是？", "zh"),
        ("イブプロフェンとは何ですか", "ja"),
        ("프랑스의 수도는 어디입니까?", "ko"),
        ("Какая столица Франции?", "ru"),
        ("What does the word 你好 mean in this sentence of a letter?", "en"),
        ("x = y + 1", "none"),
        ("", "none"),
    ],
)
def test_language_by_script_and_stop_words(text: str, language: str) -> None:
    assert language_of(text) == language


def test_tokens_are_ids_where_the_record_holds_them_and_else_estimated() -> None:
    assert estimated_tokens("abcd" * 10) == 10
    assert estimated_tokens("汉字汉字汉字") == 4
    plain = record("ask", "abcd" * 10)
    facts = Facts.of([plain, replace(plain, answers=((1, 2, 3),))], ["ask"] * 2, ["abcd" * 10] * 2)
    assert facts.answer_tokens.tolist() == [10, 3]
    assert facts.counted.tolist() == [False, True]
    unread = Facts.of([replace(plain, answers=((1, 2, 3),))], ["ask"], [""])  # on prompts alone
    assert unread.answer_tokens.tolist() == [0]


def test_length_bins_are_logarithms() -> None:
    assert length_bins(np.array([0, 1, 2, 3, 4, 7, 8, 1e9])).tolist() == [0, 1, 2, 2, 3, 3, 4, 14]


def test_turns_and_thinking_are_facts() -> None:
    turns = Conversation("a", "", (Message("user", "x"), Message("assistant", "y", "hm"), Message("user", "z")), "s")
    facts = Facts.of([turns, record("x", "y")], ["x", "x"], ["y", "y"])
    assert facts.turns.tolist() == [2, 1]
    assert facts.thinking.tolist() == [True, False]


def test_prompt_and_answer_are_counted_apart() -> None:
    space = FeatureSpace.fit(RECORDS, answers=True, components=8)
    counts = space.rows([record("river", "bread"), record("bread", "river")]).counts.toarray()
    assert counts.shape == (2, 2 * BUCKETS)
    assert (counts[0, :BUCKETS] == counts[1, BUCKETS:]).all()
    assert (counts[0, BUCKETS:] == counts[1, :BUCKETS]).all()
    assert not (counts[0] == counts[1]).all()


def test_vectors_do_not_depend_on_the_order_of_the_fit_nor_on_chunks() -> None:
    space = FeatureSpace.fit(RECORDS, answers=True, components=8)
    other = FeatureSpace.fit(RECORDS[::-1], answers=True, components=8)
    whole = space.rows(RECORDS).vectors
    assert (other.rows(RECORDS).vectors == whole).all()
    parts = [space.rows(RECORDS[i : i + 7]).vectors for i in range(0, 80, 7)]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)
    assert whole.dtype == np.float32


def test_on_prompts_alone_answers_make_no_difference() -> None:
    space = FeatureSpace.fit(RECORDS, answers=False, components=8)
    bare = [r.opening for r in RECORDS]
    assert (space.rows(bare).vectors == space.rows(RECORDS).vectors).all()
    assert space.rows(bare).counts.shape == (80, BUCKETS)


@pytest.mark.parametrize("bare", [record("what?"), record("what?", "")])
def test_a_record_without_an_answer_is_refused_where_answers_are_read(bare: Conversation) -> None:
    with pytest.raises(ValueError, match=r"made.jsonl, line 1: record 'what\?' has no answer"):
        FeatureSpace.fit([*RECORDS, bare], answers=True)
    space = FeatureSpace.fit(RECORDS, answers=True, components=8)
    with pytest.raises(ValueError, match="match on prompts alone"):
        space.rows([bare])


def test_hidden_states_are_projected_and_must_belong_to_the_records() -> None:
    states = np.random.default_rng(0).normal(size=(80, 48))
    space = FeatureSpace.fit(RECORDS, answers=True, components=8, states=states, state_components=6)
    plain = FeatureSpace.fit(RECORDS, answers=True, components=8)
    vectors = space.rows(RECORDS, states).vectors
    assert vectors.shape[1] == plain.rows(RECORDS).vectors.shape[1] + 6
    assert space.rows(RECORDS, states * 100).vectors == pytest.approx(vectors, abs=1e-5)  # directions alone count
    shuffled = FeatureSpace.fit(RECORDS[::-1], answers=True, components=8, states=states[::-1], state_components=6)
    np.testing.assert_allclose(shuffled.rows(RECORDS, states).vectors, vectors, atol=1e-5)
    with pytest.raises(ValueError, match="for all records"):
        space.rows(RECORDS)
    with pytest.raises(ValueError, match="do not belong to 80 records"):
        space.rows(RECORDS, states[:3])
    states[3, 4] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        space.rows(RECORDS, states)


def test_no_records_are_refused_and_few_or_equal_ones_are_not() -> None:
    with pytest.raises(ValueError, match="pool and traffic are empty"):
        FeatureSpace.fit([], answers=False)
    for few in (RECORDS[:1], [RECORDS[0]] * 9, RECORDS[:3], [record("", "")]):
        vectors = FeatureSpace.fit(few, answers=False).rows(few).vectors
        assert np.isfinite(vectors).all()
        assert len(vectors) == len(few)
