"""The parts of the traffic share no prompt, and held-out prompts are found among training records."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.sources import read_conversations
from bitdraft.data.traffic.duplicates import TEMPLATE, near_duplicates, templates, words
from bitdraft.data.traffic.split import Guard, contaminated, split_traffic

RUN = "one two three four five six seven eight nine ten eleven twelve thirteen"
CHINESE = "昨天下午我在城北的小书店里买了三本关于古代天文学的旧书还有一张星图"


def asked(*messages: str, name: str = "r", system: str = "", answer: str = "") -> Conversation:
    turns = [Message("system", system)] if system else []
    for message in messages:
        turns.append(Message("user", message))
        turns += [Message("assistant", answer)] if answer else []
    return Conversation(name, "", tuple(turns), f"file, {name}")


def together(*prompts: Conversation) -> bool:
    return len(set(near_duplicates(prompts).tolist())) == 1


def test_case_punctuation_width_and_spaces_make_no_other_prompt() -> None:
    assert together(asked("What is  the time?"), asked("what is the TIME"))
    assert together(asked("ABC ①②"), asked("ＡＢＣ 12"))
    assert together(asked("你好，世界！"), asked("你好世界"))
    assert not together(asked("What is the time?"), asked("What was the time?"))


def test_prompts_without_letters_are_told_apart_by_their_signs() -> None:
    assert not together(asked("?!"), asked("..."))
    assert together(asked(" ?! "), asked("?!"))


def test_a_shared_run_of_thirteen_words_links_and_one_of_twelve_does_not() -> None:
    assert together(asked(f"Please, {RUN}."), asked(f"{RUN} and then some"))
    twelve = RUN.removesuffix(" thirteen")
    assert not together(asked(f"Please, {twelve} a"), asked(f"{twelve} b c d"))


def test_a_run_counts_in_any_turn() -> None:
    assert together(asked("Hello there", f"so {RUN}"), asked(f"well {RUN} yes"))


def test_a_run_of_twenty_four_characters_links_where_there_are_no_spaces() -> None:
    assert together(asked(f"请看：{CHINESE[:24]}。"), asked(f"{CHINESE[:24]}好吗"))
    assert not together(asked(f"请看：{CHINESE[:23]}。"), asked(f"{CHINESE[:23]}好吗"))


def test_an_opening_message_of_eight_words_links_and_shorter_or_later_ones_do_not() -> None:
    eight = "write a short poem about the autumn sea"
    assert together(asked(eight), asked(eight, "now in French"))
    assert not together(asked("write a poem about the sea"), asked("write a poem about the sea", "now in French"))
    assert not together(asked("hello", eight), asked("goodbye", eight))
    assert together(asked(CHINESE[:16]), asked(CHINESE[:16], "谢谢"))
    assert not together(asked(CHINESE[:15]), asked(CHINESE[:15], "谢谢"))


def test_system_prompts_and_answers_do_not_link() -> None:
    assert not together(asked("red", system=RUN, answer=RUN), asked("blue", system=RUN, answer=RUN))


def test_links_are_followed() -> None:
    other = " ".join(f"w{i}" for i in range(13))
    assert together(asked(RUN), asked(f"{RUN} {other}"), asked(other))


@pytest.mark.parametrize("versions", [TEMPLATE, TEMPLATE + 1])
def test_a_run_in_many_different_prompts_is_a_template(versions: int) -> None:
    prompts = [asked(f"{RUN} {' '.join(f'v{i}x{j}' for j in range(13))}") for i in range(versions)]
    linked = len(set(near_duplicates([*prompts, prompts[0]]).tolist())) == 1
    assert linked == (versions <= TEMPLATE)
    assert bool(len(templates(prompts))) != linked


def test_one_prompt_asked_many_times_is_no_template() -> None:
    assert together(*[asked(RUN + "!" * i) for i in range(50)])
    assert len(templates([asked(RUN)] * 50)) == 0


def slow_linked(a: str, b: str) -> bool:
    """The definition, for messages of letters alone and few prompts."""
    one, two = words(a), words(b)
    runs = [{tuple(w[i : i + 13]) for i in range(len(w) - 12)} for w in (one, two)]
    return one == two or bool(runs[0] & runs[1])


letters = st.lists(st.sampled_from("ab"), min_size=0, max_size=18).map(" ".join)


@settings(max_examples=200)
@given(letters, letters)
def test_two_prompts_are_linked_as_the_definition_says(a: str, b: str) -> None:
    assert together(asked(a), asked(b)) == slow_linked(a, b)


SHARES = (0.5, 0.2, 0.3)


def some_traffic(count: int = 300) -> list[Conversation]:
    return [asked(f"question number {i // 3} of many" + "?" * (i % 3), name=str(i)) for i in range(count)]


def test_near_duplicates_fall_into_one_part_and_shares_hold_roughly() -> None:
    traffic = some_traffic(3000)
    split = split_traffic(traffic, SHARES, seed=0)
    assert split.groups == 1000
    assert split.largest_group == 3
    parts = [split.fit, split.tune, split.test]
    assert sorted(c.id for part in parts for c in part) == sorted(c.id for c in traffic)
    numbers = [{int(c.id) // 3 for c in part} for part in parts]
    assert not numbers[0] & numbers[1] and not numbers[0] & numbers[2] and not numbers[1] & numbers[2]
    for part, share in zip(parts, SHARES, strict=True):
        assert len(part) / 3000 == pytest.approx(share, abs=0.05)


@given(st.permutations(range(300)))
@settings(max_examples=20, deadline=None)
def test_the_order_of_the_traffic_decides_nothing(order: list[int]) -> None:
    traffic = some_traffic()
    assert split_traffic([traffic[i] for i in order], SHARES, 1) == split_traffic(traffic, SHARES, 1)


def test_more_traffic_moves_no_prompt_and_another_seed_does() -> None:
    traffic = some_traffic()
    before = split_traffic(traffic, SHARES, 0)
    after = split_traffic([*some_traffic(600)], SHARES, 0)
    assert {c.id for c in before.test} <= {c.id for c in after.test}
    assert before.test != split_traffic(traffic, SHARES, 1).test


def test_traffic_of_one_prompt_cannot_be_split() -> None:
    with pytest.raises(ValueError, match=r"30 records are 1 groups .* none of them fell into the part"):
        split_traffic([asked(RUN)] * 30, SHARES, 0)


def test_held_out_prompts_are_found_with_their_places() -> None:
    heldout = [asked("What is love?", name="h0"), asked(f"Count: {RUN}", name="h1"), asked(CHINESE, name="h2")]
    training = [
        asked("what is love", name="t0", answer="baby don't hurt me"),
        asked("What is life?", name="t1"),
        asked("Hello", f"{RUN}, go on", name="t2"),
        asked(f"翻译：{CHINESE}", name="t3"),
    ]
    expected = [("file, t0", "file, h0"), ("file, t2", "file, h1"), ("file, t3", "file, h2")]
    assert contaminated(training, heldout) == expected
    assert contaminated(iter(training), heldout) == expected
    assert contaminated([training[1]], heldout) == []
    assert contaminated(training, []) == []


def test_a_template_of_the_traffic_contaminates_nothing() -> None:
    def made(i: int, name: str) -> Conversation:
        return asked(f"{RUN} {' '.join(f'{name}{i}x{j}' for j in range(13))}", name=f"{name}{i}")

    many = [made(i, "h") for i in range(TEMPLATE + 1)]
    training = [made(0, "t")]
    assert contaminated(training, many) == []
    assert len(contaminated(training, many[:3])) == 1
    guard = Guard(many[:3], context=many)
    guard.look(0, training[0])
    assert guard.found() == {}


def test_what_very_many_training_prompts_share_contaminates_nothing_but_the_whole_prompt_does() -> None:
    def pool(count: int) -> list[Conversation]:
        return [asked(f"{RUN} p{i}", name=str(i)) for i in range(count)]

    heldout = [asked(f"{RUN} p7", name="h")]
    assert len(contaminated(pool(200), heldout)) == 200
    assert contaminated(pool(400), heldout) == [("file, 7", "file, h")]
    assert len(contaminated(pool(3) * 400, heldout)) == 1200, "copies are one prompt"


def test_the_public_training_and_held_out_sets_are_disjoint(shared: Path) -> None:
    heldout = read_conversations(sorted((shared / "data" / "heldout").glob("*.jsonl")))
    training = read_conversations(sorted((shared / "data" / "train").glob("*.jsonl")))
    start = time.perf_counter()
    assert contaminated(training, heldout) == []
    assert time.perf_counter() - start < 20, "about one second on two idle cores"
    some = heldout[::50]
    found = contaminated([*training, *some], some)
    assert {place for place, _ in found} == {c.source for c in some}
