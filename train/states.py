"""Where the loop gets the target's states from: computed at every step, or once and kept in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from bitdraft.data.batches import Batch, make_batch
from bitdraft.data.chat import Example
from bitdraft.quant.target import LowBitTarget, TargetStates

_AUTO_LIMIT = 2 * 1024**3  # bytes of states that `auto` keeps


@dataclass(frozen=True)
class Supervision:
    """A batch as a head is trained on it."""

    batch: Batch
    states: TargetStates
    first_choices: Tensor  # [B, T] the target's greedy next token, where ``supervised``; 0 elsewhere
    supervised: Tensor  # [B, T] bool: the token that the target predicts here was written by the assistant


class StateSource:
    """Batches of examples with the target's states. Both modes give the same supervision."""

    def __init__(
        self,
        target: LowBitTarget,
        examples: Sequence[Example],
        capture: Sequence[int],
        mode: Literal["auto", "memory", "online"],
        *,
        uses: int,
        batch_size: int = 16,
    ) -> None:
        """``uses``: how many examples will be asked for in all; keeping states pays from the second use on."""
        self.target, self.examples, self.capture = target, examples, tuple(capture)
        tokens = sum(len(e.prompt) + len(e.answer) for e in examples)
        needed = tokens * (len(self.capture) + 1) * target.hidden_size * target.dtype.itemsize
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        if mode == "memory" or (mode == "auto" and needed <= _AUTO_LIMIT and uses > len(examples)):
            self._keep_all(batch_size)

    def _keep_all(self, batch_size: int) -> None:
        order = sorted(
            range(len(self.examples)), key=lambda i: len(self.examples[i].prompt) + len(self.examples[i].answer)
        )
        with tqdm(total=len(order), unit="example", desc="target states") as bar:
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                found = self._compute(make_batch([self.examples[i] for i in chosen]))
                for row, i in enumerate(chosen):
                    n = int(found.batch.lengths[row])
                    self._kept[i] = (
                        found.states.captured[row, :n].clone(),
                        found.states.last_hidden[row, :n].clone(),
                        found.first_choices[row, :n].clone(),
                    )
                bar.update(len(chosen))

    def supervision(self, indices: Sequence[int]) -> Supervision:
        """The examples at ``indices``, as one padded batch on the target's device."""
        batch = make_batch([self.examples[i] for i in indices])
        if not self._kept:
            return self._compute(batch)
        captured, last, choices = (
            torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
            for parts in zip(*(self._kept[i] for i in indices), strict=True)
        )
        batch = batch.to(self.target.device)
        return Supervision(batch, TargetStates(captured, last), choices, _predicts_written(batch))

    def _compute(self, batch: Batch) -> Supervision:
        batch = batch.to(self.target.device)
        states = self.target.states(batch.tokens, capture=self.capture)
        supervised = _predicts_written(batch)
        choices = torch.zeros_like(batch.tokens)
        choices[supervised] = self.target.top_tokens(states.last_hidden[supervised])
        return Supervision(batch, states, choices, supervised)


def _predicts_written(batch: Batch) -> Tensor:
    """``[B, T]``: position ``j`` predicts token ``j + 1``, so the mask of written tokens shifts left by one."""
    written = batch.written()
    return torch.cat([written[:, 1:], torch.zeros_like(written[:, :1])], dim=1)
