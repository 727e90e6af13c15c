"""Answers decoded in batches with a cache: rows leave when their answer ends, and waiting prompts take their place.

How a token is chosen is the caller's: from its row's logits and its row's own uniform number. As every answer has a
stream of such numbers of its own, neither the batch nor the order decides what it becomes.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.attention.packed import quick_attention
from bitdraft.quant.packed_weights import packed_weights
from bitdraft.quant.target import LowBitTarget

# R row of the batch, N new token, V vocabulary.

WORTH_FILLING = 0.8
"""Share of the batch still going at which waiting prompts are read: to read few at a time is slow."""

PREFILL_TOKENS = 16_384
"""Of prompts that are read at once, padding included, unless a single one is longer."""
WORTH_A_PASS = 64
"""Padding tokens that cost about as much as one more pass over prompts."""

Choose = Callable[[Tensor, Tensor], Tensor]
"""Logits ``[R, V]`` and numbers in [0, 1) ``[R]`` → tokens ``[R]``."""
Uniforms = Callable[[int], Tensor]
"""A prompt's index → fp64 ``[N]``: the numbers by which its answer's tokens are drawn."""
Report = Callable[[int, int], None]
"""Called with (prompts finished, tokens written) since the last call."""
FollowUp = Callable[[int, list[int]], Sequence[int] | None]
"""Called with a prompt's index and its finished answer; returns a further prompt to answer, if there is one."""


def greedy_answers(target: LowBitTarget, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """The target's greedy continuation of every prompt; ``options`` are those of ``decoded_answers``."""
    return decoded_answers(target, prompts, choose=likeliest, **options)


def likeliest(logits: Tensor, uniforms: Tensor) -> Tensor:
    """``Choose`` for greedy answers: the first of the highest logits."""
    del uniforms
    return logits.max(-1).indices  # ``argmax`` gives the same, in bf16 on a CPU much slower


def decoded_answers(
    target: LowBitTarget,
    prompts: Sequence[Sequence[int]],
    *,
    end_ids: set[int],
    max_new_tokens: int,
    batch_size: int,
    choose: Choose,
    uniforms: Uniforms | None = None,
    report: Report = lambda prompts, tokens: None,
    follow_up: FollowUp = lambda index, answer: None,
) -> list[list[int]]:
    """The target's continuation of every prompt, the end-of-turn token included, in the given order.

    The batch stays full: rows whose answer has ended leave, and waiting prompts take their place, the shortest first.
    So prompts of a batch are of similar length, and newcomers about as long as what the others have become by then;
    attention is as wide as the longest row. ``follow_up`` is called with every finished answer; the prompt it returns
    is answered too, and its index is the next free one.
    """
    asked, answers = list(prompts), [list[int]() for _ in prompts]
    waiting = sorted(range(len(asked)), key=lambda i: (-len(asked[i]), -i))  # the shortest stands last
    ends = torch.tensor(sorted(end_ids), device=target.device)
    rows: _Rows | None = None
    with packed_weights(target.model), quick_attention():
        while waiting or rows:
            if rows is None or (waiting and rows.count <= WORTH_FILLING * batch_size):
                free = batch_size - (rows.count if rows else 0)
                chosen = [waiting.pop() for _ in range(min(free, len(waiting)))]
                for group in _alike(chosen, [len(asked[i]) for i in chosen]):
                    last = group[-1] if rows else waiting[0] if waiting else chosen[-1]
                    slots = len(asked[last]) + max_new_tokens  # the first cache has room for all that are to come
                    admitted = _prefilled(target, group, [asked[i] for i in group], slots, max_new_tokens, uniforms)
                    rows = rows.joined(admitted) if rows else admitted
            assert rows is not None
            tokens = choose(target.logits(rows.last), rows.uniforms.gather(1, rows.counts[:, None]).squeeze(1))  # [R]
            over = rows.write(tokens, ends)  # [R]
            ended = over.nonzero().squeeze(1).tolist()
            report(len(ended), rows.count)
            for row in ended:
                index = rows.indices[row]
                answers[index] = rows.written[row, : int(rows.counts[row])].tolist()
                further = follow_up(index, answers[index])
                if further is not None:
                    asked.append(further)
                    answers.append([])
                    insort(waiting, len(asked) - 1, key=lambda i: (-len(asked[i]), -i))
            if ended:
                keep = _closed_up(~over)
                rows, tokens = rows.kept(keep), tokens[keep]
            if rows is not None:
                rows.advance(target, tokens)
    return answers


def _alike(chosen: list[int], lengths: list[int]) -> list[list[int]]:
    """``chosen`` in groups that are read at once: neighbours, with little padding and not too many tokens.

    ``lengths``: ascending.
    """
    groups: list[list[int]] = []
    padding = 0
    for number, length, before in zip(chosen, lengths, [0, *lengths[:-1]], strict=True):
        padding += len(groups[-1]) * (length - before) if groups else 0
        if not groups or padding > WORTH_A_PASS or (len(groups[-1]) + 1) * length > PREFILL_TOKENS:
            groups.append([])
            padding = 0
        groups[-1].append(number)
    return groups


@dataclass
class _Rows:
    """The sequences that are being answered."""

    indices: list[int]  # [R] which prompt each row answers
    lengths: Tensor  # [R] tokens in the cache
    last: Tensor  # [R, H] the target's hidden state at the newest token
    written: Tensor  # [R, N] the answers so far
    counts: Tensor  # [R] tokens written
    uniforms: Tensor  # [R, N] fp64
    cache: SlotCache

    @property
    def count(self) -> int:
        return len(self.indices)

    def write(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """Take the next tokens ``[R]``; returns which rows have ended with them, bool ``[R]``."""
        self.written.scatter_(1, self.counts[:, None], tokens[:, None])
        self.counts = self.counts + 1
        return torch.isin(tokens, ends) | (self.counts == self.written.shape[1])

    def joined(self, other: "_Rows") -> "_Rows":
        self.cache.join(other.cache)
        return _Rows(
            self.indices + other.indices,
            torch.cat([self.lengths, other.lengths]),
            torch.cat([self.last, other.last]),
            torch.cat([self.written, other.written]),
            torch.cat([self.counts, other.counts]),
            torch.cat([self.uniforms, other.uniforms]),
            self.cache,
        )

    def kept(self, rows: Tensor) -> "_Rows | None":
        if len(rows) == 0:
            return None
        self.cache.keep_rows(rows)
        return _Rows(
            [self.indices[i] for i in rows.tolist()],
            self.lengths[rows],
            self.last[rows],
            self.written[rows],
            self.counts[rows],
            self.uniforms[rows],
            self.cache,
        )

    def advance(self, target: LowBitTarget, tokens: Tensor) -> None:
        self.last = target.states(tokens[:, None], cache=self.cache, lengths=self.lengths).last_hidden[:, 0]
        self.cache.commit(torch.zeros_like(tokens)[:, None], torch.ones_like(tokens))
        self.lengths = self.lengths + 1


def _closed_up(going: Tensor) -> Tensor:
    """The rows that are going, the last of them in the places of those that have ended: few rows move."""
    count = int(going.sum())
    rows = torch.arange(len(going), device=going.device)
    kept = rows[:count].clone()
    kept[~going[:count]] = rows[count:][going[count:]]
    return kept


def _prefilled(
    target: LowBitTarget,
    indices: list[int],
    prompts: Sequence[Sequence[int]],
    slots: int,
    max_new_tokens: int,
    uniforms: Uniforms | None,
) -> _Rows:
    device, count = target.device, len(indices)
    lengths = torch.tensor([len(p) for p in prompts], device=device)  # [R]
    cache = target.new_cache(slots)
    states = target.prefill(right_padded(prompts).to(device), lengths, cache=cache)
    numbers = torch.stack([uniforms(i) for i in indices]) if uniforms else torch.zeros(count, max_new_tokens)
    return _Rows(
        indices,
        lengths,
        states.last_hidden[torch.arange(count, device=device), lengths - 1],
        torch.zeros(count, max_new_tokens, dtype=torch.int64, device=device),
        torch.zeros_like(lengths),
        numbers.to(device, torch.float64),
        cache,
    )


def right_padded(sequences: Sequence[Sequence[int]]) -> Tensor:
    """``[B, T]`` token ids, zeros behind the end: a causal model's real tokens never see them."""
    longest = max(len(s) for s in sequences)
    return torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences])
