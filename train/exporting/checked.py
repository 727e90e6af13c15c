"""No head leaves untried: what was written is read back, compared with the head, and made to draft.

Engines load a head with missing scales, shifted maps or another target's captured layers without a word, and then
accept nothing. So the files themselves are asked: their logits must be the head's bit for bit, and the drafts that
they make must be accepted.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitdraft.data.chat import prompt_ids
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftContext, DraftHead
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.export import export_head
from bitdraft.speculators.load import load_head
from bitdraft.speculators.metrics import Acceptance
from bitdraft.train.environment import RunFailed
from bitdraft.train.measuring.acceptance import FEW_PASSES, Decoding, Measured, measure
from bitdraft.train.measuring.prompt_sets import PromptSet

TRIED = Decoding(max_new_tokens=64, batch_size=8)
"""How a run's export is tried, whatever the run itself measures."""
TRIED_PROMPTS = 8
LEAST = 1 / 500
"""Share of first drafts below which a head is taken for broken: engines load heads without a map or an output head and
accept next to none of their drafts. A short run's head has more."""
LEAST_TO_LEAVE = 1 / 50
"""The same for a head that is to be served. One whose map is shifted has now and then a draft accepted by chance."""
_FAR = 4.0  # standard errors
_COMPARED = 2  # prompts whose drafting logits are compared


def export_checked(
    head: DraftHead,
    target: LowBitTarget,
    path: Path,
    tokenizer: Any,
    prompts: PromptSet,
    *,
    draft_length: int,
    facts: Mapping[str, Any],
    beside: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Write a trained head to ``path``, whole and tried on some of ``prompts``, or not at all.

    ``head`` keeps the rounded weights of the files. ``facts``: what the files say of the training. ``beside`` writes
    more files into the folder, before it takes its place. Raises as ``export_head`` and ``check_written`` do.
    """
    as_written(head, target)
    few, plan = prompts.first(TRIED_PROMPTS), DraftPlan(length=draft_length)

    def check(written: Path) -> None:
        beside(written)
        check_written(head, target, written, tokenizer, few, plan, TRIED, least=LEAST)

    export_head(head, target, path, draft_length=draft_length, facts=facts, check=check)


def as_written(head: DraftHead, target: LowBitTarget) -> DraftHead:
    """The head with its weights multiplied out and rounded as in files, in place, as it drafts for ``target``."""
    head.multiplied_out()
    for dtype in (torch.bfloat16, target.dtype):
        head.placed(target.device, dtype)
    return head.eval().requires_grad_(False)


def check_written(
    head: DraftHead,
    target: LowBitTarget,
    folder: Path,
    tokenizer: Any,
    prompts: PromptSet,
    plan: DraftPlan,
    how: Decoding,
    *,
    least: float,
) -> Measured:
    """Measure the head that lies in ``folder`` on a few prompts, after comparing its logits with those of ``head``.

    ``head``: what was exported, as ``as_written`` leaves it. ``least``: share of first drafts that must be accepted,
    once there are ``FEW_PASSES`` passes. Raises ``RunFailed`` where the files draft otherwise than the head, or where
    fewer of their drafts are accepted.
    """
    loaded = load_head(folder, target)
    if not torch.equal(head.vocab.target_ids, loaded.vocab.target_ids):
        raise RunFailed("the written files hold another draft vocabulary than the head: nothing was exported")
    for conversation in prompts.conversations[:_COMPARED]:
        tokens = prompt_ids(tokenizer, conversation.messages[:1])
        mine, its = (_drafting_logits(h, target, tokens, plan.length) for h in (head, loaded))
        if not torch.equal(mine, its):
            raise RunFailed(
                "the written files do not draft what the head drafts (largest difference of logits "
                f"{float((mine.float() - its.float()).abs().max()):.3g}): nothing was exported"
            )
    (measured,) = measure(target, loaded, tokenizer, prompts, [plan], how, check=0)
    counts = measured.total
    if counts.passes >= FEW_PASSES and counts.per_position[0] < least:
        raise RunFailed(
            f"the target accepts {counts.accepted_at[0]:,} of {counts.passes:,} first drafts on {prompts.name}: this "
            "head does not belong to this target, or its maps or captured layers are wrong; nothing was exported"
        )
    return measured


def refuse_if_worse(counts: Acceptance, passes: int, share: float) -> None:
    """``RunFailed`` where far fewer first drafts are accepted than were once, a ``share`` of them in ``passes`` passes:
    a head of which captured layers or switches were changed still accepts something."""
    now = counts.per_position[0]
    both = (now * counts.passes + share * passes) / (counts.passes + passes)
    error = (both * (1 - both) * (1 / counts.passes + 1 / passes)) ** 0.5
    if share - now > _FAR * error:
        raise RunFailed(
            f"the target accepts {now:.1%} of the first drafts, where {share:.1%} were accepted when the head was "
            "measured before in the same way: its files or the target have changed since; nothing was exported "
            "(more --prompts make it surer)"
        )


@torch.no_grad()
def _drafting_logits(head: DraftHead, target: LowBitTarget, prompt: list[int], length: int) -> Tensor:
    """Logits ``[K, D]`` of a greedy chain of ``length`` drafts behind ``prompt``."""
    tokens = torch.tensor([prompt], device=target.device)
    slots = len(prompt) + length + 1
    cache = target.new_cache(slots)
    lengths = torch.tensor([len(prompt)], device=target.device)
    states = target.prefill(tokens, lengths, cache=cache, capture=head.capture_layers)
    newest = target.logits(states.last_hidden[:, -1]).argmax(-1)  # [1]
    following = torch.cat([tokens[:, 1:], newest[:, None]], dim=1)
    context = DraftContext(
        states.captured, states.last_hidden, following, lengths * 0, lengths - 1, first_tokens=tokens[:, 0]
    )
    state = head.new_state(slots, cache)
    logits = [head.first(context, state)]  # [1, D] each
    while len(logits) < length:
        draft = head.to_target_ids(logits[-1].argmax(-1))[:, None]
        logits.append(head.following(state, draft, torch.zeros_like(draft))[:, 0])
    return torch.cat(logits)
