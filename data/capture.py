"""The target's states of whole documents, computed with little padding.

A document is one ``Example``: prompt and answer. Documents of similar length run together, padded on the right; a
causal target's real tokens never see the padding, recurrent layers included. So a document's states are those of a pass
over it alone, up to floating-point effects of shape: a larger product may sum in another order. Formats that scale a
whole tensor by its largest value would see the neighbours; under them every document runs alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from bitdraft.data.batches import make_batch
from bitdraft.data.chat import Example
from bitdraft.data.packing import by_length, document_length
from bitdraft.quant.first_choice import first_choice, log_normaliser
from bitdraft.quant.fp32_products import fast_fp32
from bitdraft.quant.target import LowBitTarget

# B sequence in the group, T position, R supervised row, A captured layer, H hidden, V vocabulary.

TOKENS_AT_ONCE = 8192
MOST_PADDING = 0.05
"""Share of a group's ``[B, T]`` that may be padding."""


@dataclass(frozen=True)
class DocumentStates:
    """What a head is trained on: ``n`` tokens of one document, or of several, one behind the other."""

    captured: Tensor  # [n, A, H] residual streams at the capture ids, in the target's dtype
    last_hidden: Tensor  # [n, H] after the final norm, in the target's dtype
    first_choices: Tensor  # [n] int64: the target's greedy next token where the assistant wrote the next; 0 elsewhere
    log_normalisers: Tensor  # [n] fp32: log of the sum over V of exp(logit) at the same positions; 0 elsewhere

    @classmethod
    def packed(cls, documents: Sequence["DocumentStates"]) -> "DocumentStates":
        """The documents in one row, in the given order."""
        return cls(
            torch.cat([d.captured for d in documents]),
            torch.cat([d.last_hidden for d in documents]),
            torch.cat([d.first_choices for d in documents]),
            torch.cat([d.log_normalisers for d in documents]),
        )


def capture(
    target: LowBitTarget,
    examples: Sequence[Example],
    layers: Sequence[int],
    *,
    indices: Sequence[int] | None = None,
    tokens_at_once: int = TOKENS_AT_ONCE,
    label: str | None = None,
) -> Iterator[tuple[int, DocumentStates]]:
    """``(index, states)`` for the examples at ``indices`` (all of them by default), long ones first.

    ``tokens_at_once``: no pass has more tokens, padding included, unless a single document has. ``label``: of a
    progress bar. The states are on the target's device and share memory with those of their group. Raises
    ``ValueError`` for an example without tokens.
    """
    chosen = range(len(examples)) if indices is None else indices
    lengths = [document_length(examples[i]) for i in chosen]
    if 0 in lengths:
        raise ValueError(f"example {examples[chosen[lengths.index(0)]].id!r} has no tokens: leave it out")
    with tqdm(total=sum(lengths), unit="token", unit_scale=True, desc=label, disable=label is None) as bar:
        for group in groups_for(target, lengths, tokens_at_once):
            states = _group_states(target, [examples[chosen[k]] for k in group], layers)
            yield from ((chosen[k], s) for k, s in zip(group, states, strict=True))
            bar.update(sum(lengths[k] for k in group))


def capture_pack(
    target: LowBitTarget, examples: Sequence[Example], layers: Sequence[int], *, tokens_at_once: int = TOKENS_AT_ONCE
) -> DocumentStates:
    """The states of a few examples in one row, in their order: what training without a cache computes at a step."""
    found = dict(capture(target, examples, layers, tokens_at_once=tokens_at_once))
    return DocumentStates.packed([found[i] for i in range(len(examples))])


def predicting_rows(example: Example) -> tuple[int, int]:
    """``(first, behind)``: the positions that predict a token of the answer; none where there is no answer."""
    first = max(len(example.prompt) - 1, 0)
    return first, max(document_length(example) - 1, first)


def length_groups(lengths: Sequence[int], tokens_at_once: int) -> list[list[int]]:
    """Every index once, longest first, so that memory that does not suffice shows at once: at most ``MOST_PADDING`` of
    each group's ``[B, T]`` is padding, and ``B · T`` is at most ``tokens_at_once`` or ``B`` is 1."""
    groups: list[list[int]] = []
    longest = real = 0
    for i in by_length(lengths):
        if groups:
            size = longest * (len(groups[-1]) + 1)
            if size <= tokens_at_once and size - real - lengths[i] <= MOST_PADDING * size:
                groups[-1].append(i)
                real += lengths[i]
                continue
        groups.append([i])
        longest = real = lengths[i]
    return groups


def groups_for(target: LowBitTarget, lengths: Sequence[int], tokens_at_once: int = TOKENS_AT_ONCE) -> list[list[int]]:
    """Which documents of these lengths run through ``target`` together."""
    return length_groups(lengths, 1 if _scales_whole_tensors(target) else tokens_at_once)


@torch.no_grad()
def _group_states(target: LowBitTarget, examples: Sequence[Example], layers: Sequence[int]) -> list[DocumentStates]:
    """The states of examples that run together, in their order."""
    tokens = make_batch(examples).tokens.to(target.device)  # [B, T]
    stretches = [predicting_rows(e) for e in examples]
    counts = [b - a for a, b in stretches]
    with fast_fp32(target.model):
        states = target.states(tokens, capture=layers)
        supervised = torch.cat([h[a:b] for h, (a, b) in zip(states.last_hidden, stretches, strict=True)])  # [R, H]
        choices, normalisers = (x.split(counts) for x in _teacher(target, supervised))
    return [
        DocumentStates(
            states.captured[row, :n],
            states.last_hidden[row, :n],
            _placed(choices[row], first, n),
            _placed(normalisers[row], first, n),
        )
        for row, (n, (first, _)) in enumerate(zip(map(document_length, examples), stretches, strict=True))
    ]


def _teacher(target: LowBitTarget, last_hidden: Tensor, rows: int = 512) -> tuple[Tensor, Tensor]:
    """Greedy next tokens ``[R]`` and fp32 log-normalisers ``[R]`` for hidden states ``[R, H]``; never more than
    ``rows × V`` logits at once."""
    choices = torch.zeros(len(last_hidden), dtype=torch.int64, device=last_hidden.device)
    normalisers = torch.zeros(len(last_hidden), device=last_hidden.device)
    for start in range(0, len(last_hidden), rows):
        part = slice(start, start + rows)
        logits = target.logits(last_hidden[part]).float()
        top, choices[part] = first_choice(logits)
        normalisers[part] = log_normaliser(top, choices[part], logits.softmax(-1))
    return choices, normalisers


def _placed(values: Tensor, first: int, length: int) -> Tensor:
    """``values`` from position ``first`` on, in a row of ``length`` zeros."""
    row = values.new_zeros(length)
    row[first : first + len(values)] = values
    return row


def _scales_whole_tensors(target: LowBitTarget) -> bool:
    """Whether a layer's inputs are scaled by the largest value in the whole pass."""
    schemes = {rule.activation_scheme for rule in target.applied.quantized.values()}
    return any(s is not None and s.rows is None and s.scale != "static" for s in schemes)
