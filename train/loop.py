"""The training loop: one flat page.

Every rank takes its share of each step's examples, in packs; sums are divided by the supervised positions of the whole
step, over all packs and ranks, so that the gradient does not depend on how the step is cut.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from tqdm import tqdm

from bitdraft.data.chat import Example
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.base import DraftHead
from bitdraft.train.adapted_head import load_adapters, trained_head
from bitdraft.train.adapted_target import TargetAdapters
from bitdraft.train.checkpoint import Checkpoint, newest_checkpoint, path_of, read_checkpoint, save_checkpoint
from bitdraft.train.config import RunConfig
from bitdraft.train.distribution import accumulating, any_process, backward, prepared, update
from bitdraft.train.environment import RunFailed
from bitdraft.train.journal import Journal
from bitdraft.train.objective import Losses
from bitdraft.train.placement import keep_in_step
from bitdraft.train.schedule import learning_rate
from bitdraft.train.selection import Choice, best_of, is_exhausted
from bitdraft.train.sharding import load_head_weights, load_module, refresh, restore, spare_head, whole_state
from bitdraft.train.states import StateSource
from bitdraft.train.steps import StepPacks, step_packs
from bitdraft.train.stopping import Interrupted, stop_requests
from bitdraft.train.weighting import Weighting

_START_POSITIONS = 100_000  # many times the unknowns of each output; more changes little


def train(
    config: RunConfig,
    accelerator: Accelerator,
    target: LowBitTarget,
    head: DraftHead,
    examples: Sequence[Example],
    folder: Path,
    measure: Callable[[DraftHead], float],
    adapters: TargetAdapters,
    weighting: Weighting,
) -> DraftHead:
    """Train ``head`` on ``examples`` and return it as it was when ``measure`` (its acceptance length) found it best;
    checkpoints, metrics and tracker files go to ``folder``. ``adapters``: of the target, trained along and left as they
    were when the head was best; there may be none. ``weighting``: how often each example is drawn.

    Raises ``Interrupted`` after a signal (the checkpoint is written first) and ``RunFailed`` for a loss that is not
    finite, naming the step, the batch and the newest checkpoint.
    """
    optim, selection, rank = config.optim, config.selection, accelerator.process_index
    kept = folder / "checkpoints"
    saved = newest_checkpoint(kept) if config.resume else None
    first, history = (saved.step, list(saved.history)) if saved else (0, [])
    if saved and (first >= optim.steps or is_exhausted(history, selection.patience)):
        return _best(head, kept, saved, adapters)
    module = trained_head(head, target.logits_of(head.vocab.target_ids), config.loss, adapters)
    source = _source(config, accelerator, target, head, examples, folder, first, weighting)
    if first == 0:
        head.start_from(_first_packs(source, weighting.first_draws(examples, config.seed)))
    whole = spare_head(accelerator, head)
    if saved:
        load_module(module, saved)
        weighting.restore(saved.weighting)
    wrapped, optimizer = prepared(accelerator, module, optim, target.dtype, module.groups)
    if saved:
        accelerator.print(f"resuming from {saved.path}")
        restore(accelerator, wrapped, optimizer, saved)
    wrapped.train()
    journal = Journal(folder / "metrics.jsonl", first) if accelerator.is_main_process else None
    with (
        tqdm(total=optim.steps, initial=first, unit="step", desc=f"training {head.kind}", disable=rank > 0) as bar,
        stop_requests() as stop,
    ):
        for step, packs in _steps(first, config, examples, accelerator, weighting):
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(optim, step) * group["share"]
            losses = _backward(accelerator, wrapped, source, packs)
            norm = update(accelerator, wrapped, optimizer, optim.clip)
            if not (math.isfinite(float(losses.loss)) and math.isfinite(norm)):
                raise RunFailed(
                    f"step {step + 1}: the loss ({float(losses.loss)}) or gradient is not finite, in the batch of "
                    f"{', '.join(examples[i].id for pack in packs.of_rank[rank] for i in pack)}; newest checkpoint: "
                    f"{saved.path if saved else 'none'}"
                )
            module.remember(losses.acceptance, losses.terms)
            weighting.take_in(losses.group_accepted.tolist(), losses.group_possible.tolist())

            done = step + 1
            last = done == optim.steps
            speed = packs.tokens / (time.perf_counter() - started)
            metrics = _metrics(losses, norm, learning_rate(optim, step), speed)
            due = selection.every > 0 and (last or done % selection.every == 0)
            if due:
                refresh(accelerator, wrapped, whole)
                history.append(_measured(accelerator, done, whole, measure, together=config.shard_target))
                metrics["measured_acceptance_length"] = history[-1].acceptance_length
            if journal:
                journal.write(done, metrics)
            if config.tracker != "none":
                accelerator.log(_scalars(metrics), step=done)
            bar.set_postfix_str(_summary(metrics, history), refresh=False)
            bar.update()
            ends = last or is_exhausted(history, selection.patience)
            stops = any_process(accelerator, stop.requested)
            if done % config.checkpoint.every == 0 or due or ends or stops:
                tensors = whole_state(accelerator, wrapped, optimizer)
                if accelerator.is_main_process:
                    path = save_checkpoint(kept, done, *tensors, history, config.checkpoint.keep, weighting.state())
                    saved = Checkpoint(done, path, list(history))
            if ends:
                break
            if stops:
                raise Interrupted(f"stopped after step {done}; go on with --resume")
    refresh(accelerator, wrapped, whole)
    if config.shard_target:  # all processes need the head to export
        accelerator.wait_for_everyone()
        saved = newest_checkpoint(kept)
    exports = accelerator.is_main_process or config.shard_target
    return _best(whole, kept, saved, adapters) if saved and exports else whole


def _steps(
    first: int, config: RunConfig, examples: Sequence[Example], accelerator: Accelerator, weighting: Weighting
) -> Iterator[tuple[int, StepPacks]]:
    cap = config.loss.sequence_cap
    return step_packs(first, examples, config.optim, config.seed, accelerator.num_processes, cap, weighting)


def _backward(accelerator: Accelerator, wrapped: nn.Module, source: StateSource, packs: StepPacks) -> Losses:
    """Run this rank's packs forward and backward; the step's losses and counts over all of them and all ranks."""
    rank = accelerator.process_index
    sums: Tensor | float = 0.0
    for number in range(packs.rounds):
        # Ranks with fewer packs run one again for nothing: shards meet in every pass.
        at_once = [share[number if number < len(share) else 0] for share in packs.of_rank]
        counts = number < len(packs.of_rank[rank])
        supervision = source.supervision(at_once[rank], packs.weights)
        keep_in_step(source.target, [source.passes(pack) for pack in at_once], rank)
        with accumulating(accelerator, wrapped, last=number == packs.rounds - 1):
            with accelerator.autocast():
                losses = wrapped(supervision, packs.positions)
            # Gradients are averaged over ranks; the divisor already spans them.
            backward(accelerator, wrapped, losses.loss * (accelerator.num_processes if counts else 0))
        sums = sums + torch.cat([x.detach().float().reshape(-1) for x in losses]) * counts
    loss, *others = accelerator.reduce(sums, "sum").split([x.numel() for x in losses])
    return Losses(loss[0], *others)


def _measured(
    accelerator: Accelerator, done: int, whole: DraftHead, measure: Callable[[DraftHead], float], together: bool
) -> Choice:
    """What the first process measures, on every process; ``together``: all of them have to run the target."""
    found = [measure(whole) if accelerator.is_main_process or together else 0.0]
    return Choice(done, broadcast_object_list(found)[0])


def _source(
    config: RunConfig,
    accelerator: Accelerator,
    target: LowBitTarget,
    head: DraftHead,
    examples: Sequence[Example],
    folder: Path,
    first: int,
    weighting: Weighting,
) -> StateSource:
    answer = sum(len(e.answer) for e in examples) / len(examples)
    with nullcontext() if config.shard_target else accelerator.main_process_first():  # others find states on disk
        return StateSource(
            target,
            examples,
            head.capture_layers,
            head.draft_steps,
            config.states,
            uses=round(config.optim.batch_tokens * accelerator.num_processes * (config.optim.steps - first) / answer),
            cache=config.states.folder or folder / "states",
            weighting=weighting,
        )


def _first_packs(source: StateSource, drawn: Sequence[int]) -> Iterator[tuple[TargetStates, Tensor, Tensor]]:
    """States for a start from data, until ``_START_POSITIONS`` supervised positions are seen."""
    seen = 0
    for begin in range(0, len(drawn), 16):
        supervision = source.supervision(drawn[begin : begin + 16])
        supervised = supervision.supervised & (supervision.documents.positions > 0)
        yield supervision.states, supervision.pack.tokens, supervised
        seen += int(supervised.sum())
        if seen >= _START_POSITIONS:
            return


def _best(whole: DraftHead, kept: Path, newest: Checkpoint, adapters: TargetAdapters) -> DraftHead:
    """The head of the best measurement, or the newest where nothing was measured; the adapters are set likewise."""
    best = best_of(newest.history)
    chosen = newest
    if best is not None and best.step != newest.step:
        path = path_of(kept, best.step)
        found = read_checkpoint(path, "it was the best by acceptance")
        if found is None:
            raise RunFailed(f"the head of step {best.step} was the best by acceptance, but {path} is damaged")
        chosen = found
    load_head_weights(whole, chosen)
    load_adapters(adapters, chosen)
    return whole


def _metrics(losses: Losses, norm: float, lr: float, speed: float) -> dict[str, Any]:
    at = (losses.accepted / losses.possible.clamp(min=1)).tolist()  # teacher-forced, on the training text
    return {
        "loss": float(losses.loss),
        "acceptance_length": 1 + sum(at),
        "acceptance_at": at,
        "gradient_norm": norm,
        "lr": lr,
        "tokens_per_second": speed,
    }


def _summary(metrics: dict[str, Any], history: Sequence[Choice]) -> str:
    best = best_of(history)
    return (
        f"loss {metrics['loss']:.3f}, accepts {metrics['acceptance_length']:.2f}, "
        f"{metrics['tokens_per_second']:.0f} tokens/s"
        + (f", measured {best.acceptance_length:.3f} at step {best.step}" if best else "")
    )


def _scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """Trackers take numbers only: lists become one series per step."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, list):
            flat |= {f"{name}/{k}": v for k, v in enumerate(value)}
        else:
            flat[name] = value
    return flat
