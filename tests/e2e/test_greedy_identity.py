"""Greedy decoding with drafts writes what the target writes alone: 200 prompts of 128 tokens, in fp32, no exception;
where inputs are quantized, 32 prompts of 48 tokens.

    pytest -m slow tests/e2e/test_greedy_identity.py -s

Every head × {chain, static tree, dynamic tree} × {SmolLM2, every tiny hybrid}, and SmolLM2 and a tiny one in low bit.
Prints the rows of docs/results/verification.md.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hybrids import HYBRIDS, save_hybrid

from bitdraft.data.capture import capture_pack
from bitdraft.data.chat import Example, end_of_turn_ids, prompt_ids
from bitdraft.data.packing import make_pack
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, TargetStates, load_target, load_tokenizer
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.decode import Generation, generate
from bitdraft.speculators.drafting import DraftPlan, DynamicShape
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead
from bitdraft.speculators.metrics import total
from bitdraft.speculators.tree_shapes import cartesian
from bitdraft.speculators.vocab import DraftVocab

pytestmark = pytest.mark.slow

BATCH, DEPTH = 50, 3
SIZE, SIZE_IN_LOW_BIT = (200, 128), (32, 48)  # prompts and new tokens; sums in fp64 take their time
PLANS = {
    "chain": DraftPlan(length=DEPTH),
    "static tree": DraftPlan(length=DEPTH, shape=cartesian([2, 2, 1])),
    "dynamic tree": DraftPlan(length=DEPTH, shape=DynamicShape(nodes=8, width=3)),
}
TARGETS = [(name, "none") for name in ("smollm2", *HYBRIDS)]
TARGETS += [("smollm2", r) for r in ("mxfp4", "mxfp4a4", "nvfp4", "fp8", "mxfp4+kvfp8")] + [("llama", "mxfp4")]


@pytest.fixture(scope="module", params=TARGETS, ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, LowBitTarget, Any]:
    name, recipe = request.param
    if name == "smollm2":
        folder: Path = request.getfixturevalue("smollm2")
    else:
        folder = save_hybrid(name, tmp_path_factory.mktemp(name) / "target")
    target = load_target(str(folder), load_recipe(recipe), dtype=torch.float32)
    return f"{name} {recipe}".removesuffix(" none"), target, load_tokenizer(str(folder))


def size(target: LowBitTarget) -> tuple[int, int]:
    """How many prompts, and how many new tokens of each."""
    return SIZE_IN_LOW_BIT if target.recipe.rounds_on_the_way else SIZE


@pytest.fixture(scope="module")
def prompts(served: tuple[str, LowBitTarget, Any]) -> list[list[int]]:
    """Shipped prompts, as the target is asked them; a small context takes their last tokens."""
    _, target, tokenizer = served
    count, new_tokens = size(target)
    room = target.context_length - new_tokens - 16
    conversations = read_conversations([demo_file("heldout"), demo_file("train")])[:count]
    return [prompt_ids(tokenizer, c.messages[:1])[-room:] for c in conversations]


@pytest.fixture(scope="module")
def plain(served: tuple[str, LowBitTarget, Any], prompts: list[list[int]]) -> list[list[int]]:
    return [g.tokens for g in decoded(served, None, None, prompts)]


@pytest.fixture(scope="module")
def heads(
    served: tuple[str, LowBitTarget, Any], prompts: list[list[int]], plain: list[list[int]]
) -> dict[str, DraftHead]:
    """Heads that are right now and then: the closed-form start of EAGLE-3 on some answers, Medusa's own start."""
    _, target, _ = served
    torch.manual_seed(0)
    size = min(target.vocab_size, 2048)
    vocab = DraftVocab.most_frequent([torch.tensor(a) for a in plain], size, target.vocab_size, ())
    eagle3 = Eagle3Head.from_target(Eagle3Config(steps=DEPTH), target, vocab)
    texts = [Example(str(i), "", tuple(p[-64:]), tuple(a)) for i, (p, a) in enumerate(zip(prompts, plain, strict=True))]
    found, pack = capture_pack(target, texts[:48], eagle3.capture_layers), make_pack(texts[:48])
    states = TargetStates(found.captured, found.last_hidden)
    eagle3.start_from([(states, pack.tokens, pack.written())])
    medusa = MedusaHead.from_target(MedusaConfig(heads=DEPTH), target, DraftVocab.full(target.vocab_size))
    return {h.kind: h.placed(target.device, target.dtype).eval() for h in (eagle3, medusa)}


def decoded(
    served: tuple[str, LowBitTarget, Any],
    head: DraftHead | None,
    plan: DraftPlan | None,
    prompts: list[list[int]],
    *,
    batch: int = BATCH,
    new_tokens: int | None = None,
) -> list[Generation]:
    _, target, tokenizer = served
    ends = end_of_turn_ids(target.model, tokenizer)
    new_tokens = new_tokens or size(target)[1]
    done, _ = generate(target, head, prompts, plan=plan, max_new_tokens=new_tokens, end_ids=ends, batch_size=batch)
    return done


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_every_answer_is_the_targets_own(
    served: tuple[str, LowBitTarget, Any],
    prompts: list[list[int]],
    plain: list[list[int]],
    heads: dict[str, DraftHead],
    kind: str,
    plan: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = decoded(served, heads[kind], PLANS[plan], prompts)
    differing = [i for i, (g, answer) in enumerate(zip(done, plain, strict=True)) if g.tokens != answer]
    counts = total([g.counts for g in done], DEPTH)
    tokens = sum(map(len, plain))
    with capsys.disabled():
        print(
            f"\n| {served[0]} | {kind} | {plan} | {len(done) - len(differing)} of {len(done)} | {tokens:,} | "
            f"{counts.passes:,} | {counts.accepted:,} of {counts.drafted:,} | {counts.length:.3f} |"
        )
    assert not differing, f"{len(differing)} answers differ, the first is of prompt {differing[0]}"
    assert counts.accepted > 0, "no draft was accepted: nothing was verified"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_batches_of_one_and_of_sixteen_count_alike(
    served: tuple[str, LowBitTarget, Any],
    prompts: list[list[int]],
    heads: dict[str, DraftHead],
    kind: str,
    plan: str,
) -> None:
    alone, together = (
        decoded(served, heads[kind], PLANS[plan], prompts[:16], batch=batch, new_tokens=48) for batch in (1, 16)
    )
    assert [(g.tokens, g.counts) for g in alone] == [(g.tokens, g.counts) for g in together]
