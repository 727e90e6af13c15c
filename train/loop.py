"""The training loop: one flat page.

Every rank takes its share of each step's batches; sums are divided by the supervised positions of the whole
step, over all ranks, so that the gradient does not depend on how the step is cut.
"""

import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from bitdraft.data.batches import epoch_batches
from bitdraft.data.chat import Example
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.base import DraftHead
from bitdraft.train.checkpoint import resume_newest, save_checkpoint
from bitdraft.train.config import OptimConfig, RunConfig
from bitdraft.train.environment import RunFailed
from bitdraft.train.journal import Journal
from bitdraft.train.losses import step_weights
from bitdraft.train.objective import objective, wanted_rows
from bitdraft.train.states import StateSource

_START_POSITIONS = 100_000  # many times the unknowns of each output; more changes little


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop; its checkpoint is written."""


def learning_rate(optim: OptimConfig, step: int) -> float:
    """Rate of step ``step`` (from 0): linear warm-up, then cosine to a tenth of the peak."""
    warmup = max(1, round(optim.warmup * optim.steps))
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, optim.steps - warmup)
    return optim.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def train(
    config: RunConfig,
    accelerator: Accelerator,
    target: LowBitTarget,
    head: DraftHead,
    examples: Sequence[Example],
    folder: Path,
) -> DraftHead:
    """Train ``head`` on ``examples`` and return it; checkpoints, metrics and tracker files go to ``folder``.

    Raises ``Interrupted`` after a signal (the checkpoint is written first) and ``RunFailed`` for a loss that is not
    finite, naming the step, the batch and the newest checkpoint.
    """
    optim, rank, ranks = config.optim, accelerator.process_index, accelerator.num_processes
    trained = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)
    resumed = resume_newest(folder / "checkpoints", head, optimizer) if config.resume else None
    first = resumed.step if resumed else 0
    if resumed and first < optim.steps:
        accelerator.print(f"resuming from {resumed.path}")
    if first >= optim.steps:
        return head
    answer = sum(len(e.answer) for e in examples) / len(examples)
    uses = round(optim.batch_tokens * (optim.steps - first) / answer)
    source = StateSource(target, examples, head.capture_layers, config.states, uses=uses)
    if first == 0:
        head.start_from(_first_batches(source, len(examples)))
    wrapped, optimizer = accelerator.prepare(head, optimizer)
    head.train()
    weights_K = step_weights(_steps(head), _decay(head))
    journal = Journal(folder / "metrics.jsonl", first) if accelerator.is_main_process else None
    order = _batches_from(first, examples, optim.batch_tokens, config.seed, ranks)
    checkpoint: Path | None = resumed.path if resumed else None
    with (
        tqdm(total=optim.steps, initial=first, unit="step", desc=f"training {head.kind}", disable=rank > 0) as bar,
        _stop_requests() as stop,
    ):
        teacher = target.logits_of(head.vocab.target_ids)
        for step in range(first, optim.steps):
            started = time.perf_counter()
            supervision = source.supervision(next(order)[rank])
            counts = torch.tensor([supervision.supervised.sum().item(), supervision.batch.lengths.sum().item()])
            counts = accelerator.reduce(counts.to(accelerator.device), "sum")
            positions = float(counts[0])
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(optim, step)
            rows = wanted_rows(supervision, len(weights_K))
            with accelerator.autocast():
                outputs = wrapped(supervision.states, supervision.batch.tokens, rows)
            result = objective(outputs, rows, head, teacher, supervision, weights_K, positions)
            accelerator.backward(result.loss * ranks)  # DDP averages over ranks; the divisor already spans them
            norm = accelerator.clip_grad_norm_(trained, optim.clip)
            loss = float(accelerator.reduce(result.loss.detach(), "sum"))
            if not (math.isfinite(loss) and math.isfinite(float(norm))):
                raise RunFailed(
                    f"step {step + 1}: the loss ({loss}) or gradient is not finite, in the batch of "
                    f"{', '.join(supervision.batch.ids)}; newest checkpoint: {checkpoint or 'none'}"
                )
            optimizer.step()
            optimizer.zero_grad()

            done = step + 1
            accepted = accelerator.reduce(result.accepted, "sum")
            possible = accelerator.reduce(result.possible, "sum")
            per_position = (accepted / possible.clamp(min=1)).tolist()  # teacher-forced, on the training text
            speed = float(counts[1]) / (time.perf_counter() - started)
            metrics: dict[str, Any] = {
                "loss": loss,
                "acceptance_length": 1 + sum(per_position),
                "acceptance_at": per_position,
                "gradient_norm": float(norm),
                "lr": optimizer.param_groups[0]["lr"],
                "tokens_per_second": speed,
            }
            if journal:
                journal.write(done, metrics)
            if config.tracker != "none":
                accelerator.log({**_scalars(metrics)}, step=done)
            bar.set_postfix_str(
                f"loss {loss:.3f}, accepts {metrics['acceptance_length']:.2f}, {speed:.0f} tokens/s",
                refresh=False,
            )
            bar.update()
            stopping = stop.requested and done < optim.steps
            if accelerator.is_main_process and (done % config.checkpoint.every == 0 or done == optim.steps or stopping):
                checkpoint = save_checkpoint(folder / "checkpoints", done, head, optimizer, config.checkpoint.keep)
            if stopping:
                raise Interrupted(f"stopped after step {done}; go on with --resume")
    return head


def _batches_from(
    first: int, examples: Sequence[Example], batch_tokens: int, seed: int, ranks: int
) -> Iterator[list[list[int]]]:
    """Every step's batches, one per rank, beginning at step ``first``; epochs follow each other without end."""
    epoch, waiting, step = 0, [], 0
    while True:
        waiting += epoch_batches(examples, batch_tokens, seed=seed, epoch=epoch)
        epoch += 1
        while len(waiting) >= ranks:
            share, waiting = waiting[:ranks], waiting[ranks:]
            if step >= first:
                yield share
            step += 1


def _first_batches(source: StateSource, examples: int) -> Iterator[tuple[TargetStates, Tensor, Tensor]]:
    """States for a start from data, until ``_START_POSITIONS`` supervised positions are seen."""
    seen = 0
    for begin in range(0, examples, 16):
        supervision = source.supervision(range(begin, min(begin + 16, examples)))
        yield supervision.states, supervision.batch.tokens, supervision.supervised
        seen += int(supervision.supervised.sum())
        if seen >= _START_POSITIONS:
            return


def _steps(head: DraftHead) -> int:
    return int(getattr(head.config, "steps", None) or head.config.heads)


def _decay(head: DraftHead) -> float:
    return float(getattr(head.config, "step_decay", 0.8))


def _scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """Trackers take numbers only: lists become one series per step."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, list):
            flat |= {f"{name}/{k}": v for k, v in enumerate(value)}
        else:
            flat[name] = value
    return flat


class _Stop:
    requested = False


@contextmanager
def _stop_requests() -> Iterator[_Stop]:
    """Ctrl-C or SIGTERM asks the loop to finish its step; a second Ctrl-C stops at once."""
    stop = _Stop()

    def ask(number: int, _frame: object) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        print(f"\n{signal.Signals(number).name}: writing a checkpoint after this step", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
