"""Looking drafts up in the text, against a search that is written as the idea is told."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import save_tiny_target

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target
from bitdraft.speculators.base import DraftContext
from bitdraft.speculators.confidence import Calibration
from bitdraft.speculators.decode import Generation, Rule, generate
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.early_stop import EarlyStop
from bitdraft.speculators.ngram import UNKNOWN, NgramDrafter, continuations
from bitdraft.speculators.sampling import Sampling
from bitdraft.speculators.tree_shapes import cartesian

NEW_TOKENS = 40
Prompts = list[list[int]]


def looked_up(text: list[int], longest: int, shortest: int, count: int) -> list[int]:
    """The tokens behind the first occurrence of the last ``longest`` … ``shortest`` tokens."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(text) - n):
            same = text[start : start + n] == text[-n:]
            if same and UNKNOWN not in text[start : start + n]:
                return text[start + n :][:count]
    return []


texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(
    batch=st.lists(texts, min_size=1, max_size=4), shortest=st.integers(1, 4), more=st.integers(0, 3), data=st.data()
)
def test_continuations_are_those_of_the_plain_search(
    batch: Prompts, shortest: int, more: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 6))
    batch = [[UNKNOWN, *text] for text in batch]
    width = max(map(len, batch))
    # What stands behind a row's tokens must not matter: as if the row went on with what it had.
    tokens = torch.tensor([(text * width)[:width] for text in batch])
    lengths = torch.tensor([len(text) for text in batch])
    drafts, found = continuations(tokens, lengths, longest=shortest + more, shortest=shortest, count=count)
    assert drafts.shape == (len(batch), count)
    for row, text in enumerate(batch):
        assert drafts[row, : int(found[row])].tolist() == looked_up(text, shortest + more, shortest, count)
        assert set(drafts[row].tolist()) <= set(text[1:]), "filler too must be tokens that there are"


def test_the_unknown_first_token_of_prompts_is_never_found() -> None:
    """The row ``? 5 5``: its last two tokens ``5 5`` stood nowhere before, its last one did."""
    drafts, found = continuations(
        torch.tensor([[UNKNOWN, 5, 5], [UNKNOWN, 5, UNKNOWN]]), torch.tensor([3, 3]), longest=2, shortest=1, count=2
    )
    assert (drafts[0].tolist(), found.tolist()) == ([5, 5], [1, 0])


def context_of(known: list[int]) -> DraftContext:
    """The context of a prompt of which ``known`` is all but the first token, the newest included."""
    nothing = torch.empty(1, len(known), 0, 0)
    rows = torch.tensor([len(known) - 1])
    return DraftContext(nothing, nothing, torch.tensor([known]), torch.zeros_like(rows), rows)


def decode(
    target: LowBitTarget,
    drafter: NgramDrafter | None,
    prompts: Prompts,
    *,
    length: int = 4,
    sampling: Sampling | None = None,
    batch_size: int = 8,
    end_ids: set[int] | None = None,
) -> list[Generation]:
    done, _ = generate(
        target,
        drafter,
        prompts,
        plan=DraftPlan(length=length, sampling=sampling or Sampling()) if drafter else None,
        rule=Rule(sampling=sampling or Sampling()),
        max_new_tokens=NEW_TOKENS,
        end_ids=end_ids or set(),
        batch_size=batch_size,
    )
    return done


@pytest.fixture(scope="module")
def cyclic(tmp_path_factory: pytest.TempPathFactory) -> LowBitTarget:
    """A target without attention: what it writes depends on the newest token alone, so it ends in cycles."""
    folder = save_tiny_target(tmp_path_factory.mktemp("cyclic") / "target", num_hidden_layers=2)
    target = load_target(str(folder), load_recipe("none"), dtype=torch.float64, compile_quantizer="off")
    for layer in target.decoder.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    return target


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_answers_are_the_targets_and_counts_those_of_a_walk(
    cyclic: LowBitTarget, prompts: Prompts, batch_size: int
) -> None:
    plain = decode(cyclic, None, prompts)
    ends = {plain[0].tokens[15], plain[3].tokens[30]}  # sequences leave the batch at different times
    length = 3
    done = decode(cyclic, NgramDrafter(3), prompts, length=length, batch_size=batch_size, end_ids=ends)
    for prompt, alone, generation in zip(prompts, plain, done, strict=True):
        answer = alone.tokens
        stop = next((i + 1 for i, token in enumerate(answer) if token in ends), NEW_TOKENS)
        assert generation.tokens == answer[:stop]
        written, passes, drafted, accepted = 1, 0, 0, 0
        while written < stop:
            drafts = looked_up([*prompt, *answer[:written]], 3, 1, length)
            agree = [a == b for a, b in zip(drafts, answer[written:], strict=False)]
            right = (*agree, False).index(False)
            passes, drafted, accepted = passes + 1, drafted + len(drafts), accepted + right
            written += right + 1
        counts = generation.counts
        assert (counts.passes, counts.drafted) == (passes, drafted)
        # The last pass counts whole, also where it goes beyond the answer that is known here.
        assert accepted <= counts.accepted <= accepted + length
    assert sum(g.counts.accepted for g in done) > 0, "nothing was found: nothing was compared"


def test_a_text_that_repeats_itself_is_drafted_right() -> None:
    """An answer of period 4: every draft is the text's next four tokens, whatever part of it was accepted."""
    period, drafter = [7, 8, 9, 7], NgramDrafter(3)
    text = period * 10
    state, plan = drafter.new_state(len(text), SlotCache(1, 8)), DraftPlan(length=4)
    known, rejected = 12, [3] * 4
    tree = drafter.propose(context_of(text[1:known]), state, plan, torch.empty(1, 0))
    for accepted in (4, 0, 2, 3, 4):
        assert tree.tokens[0].tolist() == text[known - 1 : known + 4]
        assert tree.is_chain and tree.proposals is None and int(tree.drafted) == 4
        rows = [*text[known : known + accepted + 1], *rejected][:5]
        nothing = torch.empty(1, 5, 0, 0)
        context = DraftContext(
            nothing, nothing, torch.tensor([rows]), torch.tensor([known - 1]), torch.tensor([accepted])
        )
        known += accepted + 1
        tree = drafter.propose(context, state, plan, torch.empty(1, 0))


def test_answers_at_a_temperature_depend_on_no_batch(cyclic: LowBitTarget, prompts: Prompts) -> None:
    warm = Sampling(temperature=0.7)
    alone, together = (
        [g.tokens for g in decode(cyclic, NgramDrafter(2), prompts, sampling=warm, batch_size=n)] for n in (1, 5)
    )
    assert alone == together


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (DraftPlan(length=2, shape=cartesian((2, 1))), "the ngram drafter drafts chains only"),
        (DraftPlan(length=2, confidence=True), "the ngram drafter has no probabilities"),
        (DraftPlan(length=2, stop=EarlyStop(calibration=Calibration((1.0,) * 2, (0.0,) * 2))), "no probabilities"),
    ],
)
def test_plans_that_it_cannot_follow_are_refused(target: LowBitTarget, plan: DraftPlan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(target, NgramDrafter(2), [[1, 2]], plan=plan, max_new_tokens=2, end_ids=set(), batch_size=1)


@pytest.mark.parametrize(("longest", "shortest"), [(0, 0), (2, 3), (3, 0)])
def test_impossible_lengths_are_refused(longest: int, shortest: int) -> None:
    with pytest.raises(ValueError, match="1 ≤ shortest ≤ longest"):
        NgramDrafter(longest, shortest)
