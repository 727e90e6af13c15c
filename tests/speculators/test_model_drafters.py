"""Models that draft: what they propose is what they would write themselves, and answers stay the target's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gla_model import save_gla_target
from tiny import save_tiny_target
from torch import Tensor

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target
from bitdraft.speculators.base import DraftContext, Drafter
from bitdraft.speculators.decode import Generation, Rule, generate
from bitdraft.speculators.drafting import DraftPlan, DynamicShape
from bitdraft.speculators.model_drafter import ModelDrafter, _vocabulary
from bitdraft.speculators.sampling import Sampling
from bitdraft.speculators.self_drafter import SelfDrafter
from bitdraft.speculators.tree_shapes import cartesian

NEW_TOKENS = 12
Prompts = list[list[int]]
Load = Callable[[str, str], LowBitTarget]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """``load("small", "mxfp4a4")``: a tiny model of that name under a preset, in fp64, loaded once."""
    folder = tmp_path_factory.mktemp("models")
    make: dict[str, Callable[[Path], Path]] = {
        "target": lambda path: save_tiny_target(path, num_hidden_layers=2),
        "small": lambda path: save_tiny_target(path, seed=1, num_hidden_layers=1, hidden_size=32),
        "wide": lambda path: save_tiny_target(path, num_hidden_layers=1, vocab_size=384),
        "recurrent": save_gla_target,
    }
    loaded: dict[tuple[str, str], LowBitTarget] = {}

    def get(name: str, preset: str) -> LowBitTarget:
        if (name, preset) not in loaded:
            path = folder / name if (folder / name).exists() else make[name](folder / name)
            loaded[name, preset] = load_target(
                str(path), load_recipe(preset), dtype=torch.float64, compile_quantizer="off"
            )
        return loaded[name, preset]

    return get


def decode(
    target: LowBitTarget,
    drafter: Drafter | None,
    prompts: Prompts,
    plan: DraftPlan,
    *,
    temperature: float = 0.0,
    end_ids: set[int] | None = None,
) -> list[Generation]:
    done, _ = generate(
        target,
        drafter,
        prompts,
        plan=plan if drafter else None,
        rule=Rule(sampling=Sampling(temperature=temperature)),
        max_new_tokens=NEW_TOKENS,
        end_ids=end_ids or set(),
        batch_size=8,
    )
    return done


def answers(generations: list[Generation]) -> Prompts:
    return [g.tokens for g in generations]


CHAIN = DraftPlan(length=3)
FIXED = DraftPlan(length=2, shape=cartesian((2, 2)))
DYNAMIC = DraftPlan(length=3, shape=DynamicShape(nodes=6, width=2))
PLANS = [pytest.param(CHAIN, id="chain"), pytest.param(FIXED, id="fixed"), pytest.param(DYNAMIC, id="dynamic")]


def likeliest(model: LowBitTarget, text: list[int]) -> Tensor:
    """Token ids behind ``text``, the likeliest first, by one pass over all of it."""
    logits = model.logits(model.states(torch.tensor([text])).last_hidden[0, -1])
    return logits.argsort(descending=True, stable=True)


def check_drafts(model: LowBitTarget, text: list[int], tokens: list[int], parents: list[int]) -> None:
    """Every node is what ``model`` finds likeliest behind ``text`` and the path to the node, siblings by rank."""
    assert tokens[0] == text[-1]
    paths = [text]
    for node in range(1, len(tokens)):
        rank, path = parents[:node].count(parents[node]), paths[parents[node]]
        assert tokens[node] == likeliest(model, path)[rank]
        paths.append([*path, tokens[node]])


def context_of(rows: Tensor, start: Tensor, newest: Tensor, first: Tensor | None = None) -> DraftContext:
    nothing = torch.empty(*rows.shape, 0, 0)
    return DraftContext(nothing, nothing, rows, start, newest, first)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["small", "recurrent"])
def test_drafts_are_what_the_model_writes_itself(load: Load, name: str, plan: DraftPlan) -> None:
    """Prompts of several lengths, uneven acceptance, a row that rides along and leaves, no trace of refusals."""
    model, chance = load(name, "none"), torch.Generator().manual_seed(3)

    def some(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=chance)

    drafter = ModelDrafter(model)
    state = drafter.new_state(48, SlotCache(1, 1))
    newest = torch.tensor([6, 2, 2, 0])
    prompts = some(4, 8)
    context = context_of(prompts[:, 1:], torch.zeros_like(newest), newest, prompts[:, 0])
    texts = [row[: n + 2].tolist() for row, n in zip(prompts, newest.tolist(), strict=True)]
    for accepted in ([0, 2, 1, 1], [2, 0, None, 1], [1, 1, None, 0], [0, 2, None, 2], [1, 1, 1]):
        if len(accepted) < len(texts):
            stay = torch.tensor([0, 1, 3])
            state.keep_rows(stay)
            context, texts = context.rows(stay), [texts[row] for row in stay.tolist()]
        tree = drafter.propose(context, state, plan, torch.empty(len(texts), 0))
        start, rows = torch.tensor([len(text) - 1 for text in texts]), some(len(texts), plan.nodes + 1)
        for row, (text, count) in enumerate(zip(texts, accepted, strict=True)):
            if count is None:  # finished: it rides along and shows its newest token again
                rows[row, 0] = text[-1]
                continue
            check_drafts(model, text, tree.tokens[row].tolist(), tree.parents[row].tolist())
            text += rows[row, : count + 1].tolist()
        context = context_of(rows, start, torch.tensor([count or 0 for count in accepted]))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_the_targets_own(load: Load, prompts: Prompts, plan: DraftPlan, temperature: float) -> None:
    """Greedily they are those without drafts; at a temperature they do not depend on the batch."""
    target, drafter = load("target", "none"), ModelDrafter(load("small", "none"))
    plan = replace(plan, sampling=Sampling(temperature=temperature))
    plain = answers(decode(target, None, prompts, plan))
    ends = {plain[0][4], plain[3][7]}  # sequences end at different times
    together = answers(decode(target, drafter, prompts, plan, temperature=temperature, end_ids=ends))
    if temperature:
        assert (
            together[0] == decode(target, drafter, prompts[:1], plan, temperature=temperature, end_ids=ends)[0].tokens
        )
    else:
        assert together == answers(decode(target, None, prompts, plan, end_ids=ends))
        assert len({len(answer) for answer in together}) > 2


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [ModelDrafter, SelfDrafter])
def test_a_target_that_drafts_for_itself_is_always_right(
    load: Load, prompts: Prompts, plan: DraftPlan, kind: type[ModelDrafter]
) -> None:
    target = load("target", "mxfp4a16")
    done = decode(target, kind(target), prompts, plan)
    assert answers(done) == answers(decode(target, None, prompts, plan))
    sure = 1 if plan is DYNAMIC else plan.length  # such a tree may leave out deep nodes that turn out to be right
    for generation in done:
        assert generation.counts.accepted_at[:sure] == (generation.counts.passes,) * sure


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("cached", [pytest.param("", id="16-bit cache"), pytest.param("+kvfp8", id="FP8 cache")])
def test_fewer_bits_draft_worse_and_change_no_answer(
    load: Load, prompts: Prompts, plan: DraftPlan, cached: str
) -> None:
    target, drafter = load("target", "mxfp4a16" + cached), SelfDrafter(load("target", "mxfp4a4"))
    plain = answers(decode(target, None, prompts, plan))
    ends = {plain[0][4], plain[3][7]}
    done = decode(target, drafter, prompts, plan, end_ids=ends)
    assert answers(done) == answers(decode(target, None, prompts, plan, end_ids=ends))
    passes, accepted = (
        sum(numbers) for numbers in zip(*[(g.counts.passes, g.counts.accepted) for g in done], strict=True)
    )
    assert passes / 2 < accepted < passes * plan.length


def test_models_that_do_not_fit_are_refused(load: Load) -> None:
    target = load("target", "none")
    with pytest.raises(ValueError, match=r"wide has a vocabulary of 384 tokens and .*target one of 320"):
        ModelDrafter(load("wide", "none")).fits(target)
    ModelDrafter(load("small", "none")).fits(target)
    with pytest.raises(ValueError, match=r"small is another checkpoint than .*target"):
        SelfDrafter(load("small", "none")).fits(target)
    SelfDrafter(load("target", "mxfp4a4")).fits(load("target", "mxfp4a16"))
    with pytest.raises(ValueError, match=r"recipe none\+kvfp8 rounds keys and values"):
        SelfDrafter(load("target", "none+kvfp8"))
    recurrent = load("recurrent", "none")
    with pytest.raises(ValueError, match="recurrent states"):
        SelfDrafter(recurrent).new_state(8, recurrent.new_cache(8))


def test_another_tokenizer_of_the_same_size_is_refused(load: Load, tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path / "swapped", num_hidden_layers=1)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"A": 32', '"A": 33').replace('"B": 33', '"B": 32'))
    swapped = load_target(str(folder), load_recipe("none"), compile_quantizer="off")
    with pytest.raises(ValueError, match=r"token 32 is 'B' to .*swapped and 'A' to .*target"):
        ModelDrafter(swapped).fits(load("target", "none"))
    file.unlink()
    _vocabulary.cache_clear()
    ModelDrafter(swapped).fits(load("target", "none"))  # no file tells
