"""Measuring several drafters on several served targets, cell by cell; finished cells are kept and not made again."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from bitdraft.data.chat import Example, thinking_mode
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import Drafter, DraftHead
from bitdraft.speculators.confidence import Calibration, fit
from bitdraft.speculators.decode import Rule
from bitdraft.speculators.drafting import DraftPlan, DynamicShape
from bitdraft.speculators.early_stop import EarlyStop
from bitdraft.speculators.sampling import Sampling
from bitdraft.speculators.tree_shapes import TreeShape, cartesian, sparse
from bitdraft.train.config_io import to_plain
from bitdraft.train.measuring import acceptance
from bitdraft.train.measuring.acceptance import Decoded, Decoding, Measured
from bitdraft.train.measuring.bounds import upper_bounds
from bitdraft.train.measuring.config import MeasureConfig
from bitdraft.train.measuring.cost import measured_cost
from bitdraft.train.measuring.document import (
    confidence_report,
    document,
    result,
    stopped_early,
    table,
    trace_tensors,
)
from bitdraft.train.measuring.drafters import DrafterSpec, LoadTarget
from bitdraft.train.measuring.prompt_sets import Dialogs, PromptSet
from bitdraft.train.measuring.tree_choice import rank_accuracies

Cell = dict[str, Any]
_RANKS = 8  # best tokens per depth that a sparse tree may use


@dataclass
class Bench:
    """One served target with what its cells share: the sets, and plain decoding of them."""

    target: LowBitTarget
    tokenizer: Any
    sets: Sequence[PromptSet]
    traffic: PromptSet
    load_target: LoadTarget
    how: MeasureConfig
    kept: Path | None = None
    """Folder of finished cells."""
    reference: str | None = None
    """The 16-bit model of the upper bounds, if it is not the target itself (which may be stored quantized)."""
    _plain: dict[tuple[float, int, PromptSet], Decoded] = field(default_factory=dict)
    _bounds: dict[str, Any] | None = None

    def cells(self, specs: Sequence[DrafterSpec], announce: Callable[[str], object]) -> list[Cell]:
        """A document for every drafter, temperature and batch size."""
        self._check_room()
        made = []
        for spec in specs:
            drafter: Drafter | None = None
            loaded = False
            for temperature, batch_size in product(self.how.temperature, self.how.batch_size):
                announce(f"{spec.head} on {self.target.recipe.name}, temperature {temperature:g}, batch {batch_size}")
                file = self._file(spec, temperature, batch_size)
                if file and file.is_file():
                    made.append(_read(file))
                    print(f"measured before ({file}): {_in_short(made[-1])}", flush=True)
                    continue
                if not loaded:
                    drafter, loaded = spec.load(self.target, self.load_target), True
                cell = self._cell(spec, drafter, temperature, batch_size)
                if file:
                    write_text_atomically(file, json.dumps(cell) + "\n")
                made.append(cell)
        return made

    def _check_room(self) -> None:
        """``ValueError`` for a first question that leaves no room for its answer, before anything is measured."""
        deepest = max(self.how.draft_length) if self.how.tree == "none" else self.how.tree_nodes
        for prompts in self.sets:
            room = self.how.max_new_tokens + deepest + 1
            thinking = thinking_mode(self.how.thinking)
            Dialogs(prompts, self.tokenizer, self.target.context_length, room, thinking).next_turn()

    def _greedy(self, batch_size: int) -> Decoding:
        thinking = thinking_mode(self.how.thinking)
        return Decoding(max_new_tokens=self.how.max_new_tokens, batch_size=batch_size, thinking=thinking)

    def _file(self, spec: DrafterSpec, temperature: float, batch_size: int) -> Path | None:
        """Where this cell is kept: under a digest of all that decides its numbers."""
        if self.kept is None:
            return None
        asked = [[p.name, [[c.id, c.category, [m.as_dict() for m in c.messages]] for c in p.conversations]]
                 for p in (*self.sets, self.traffic)]  # fmt: skip
        target = [self.target.fingerprint, self.target.recipe.fingerprint, str(self.target.dtype)]
        settings = to_plain(replace(self.how, temperature=(temperature,), batch_size=(batch_size,)))
        key = json.dumps([spec.head, spec.identity, target, self.reference, settings, asked], sort_keys=True)
        return self.kept / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def _cell(self, spec: DrafterSpec, drafter: Drafter | None, temperature: float, batch_size: int) -> Cell:
        how = self.how
        sampling = how.sampling(temperature)
        rule = Rule(sampling=sampling, typical=how.typical, seed=how.seed)
        decoding = replace(self._greedy(batch_size), rule=rule)
        drafts = sampling if how.drafts == "sampled" else Sampling()
        results, warnings = [], self._warnings()
        plans: list[DraftPlan | None] = [None]
        if drafter is not None:
            lengths = [k for k in how.draft_length if k <= (drafter.longest_draft or k)]
            if not lengths:
                raise ValueError(_too_deep(how, drafter))
            if len(lengths) < len(how.draft_length):
                warnings.append(_too_deep(how, drafter))
            plans = [self._plan(drafter, length, drafts) for length in lengths]
        self._warm_up(drafter, plans[-1], decoding)
        stops = {
            plan.length: self._stop(drafter, plan, decoding)
            for plan in plans
            if plan and drafter and (how.confidence or how.stop != "never")
        }
        for prompts in self.sets:
            plain = self._plain_decoded(prompts, decoding) if how.plain or drafter is None else None
            if drafter is None:
                assert plain is not None
                measured = [acceptance.plain_result(plain)]
            else:
                given = [plan for plan in plans if plan]
                measured = acceptance.measure(
                    self.target, drafter, self.tokenizer, prompts, given, decoding, check=how.check
                )
            print(f"\n{prompts.name}: {len(prompts.ids)} prompts, up to {how.max_new_tokens} new tokens")
            print(table(measured), flush=True)
            for m in measured:
                results.append(result(prompts, m, plain))
                if m.draft_length in stops and how.confidence:
                    results[-1]["confidence"] = confidence_report(m.decoded, stops[m.draft_length].calibration)
                if m.draft_length in stops and how.stop != "never" and drafter and m.plan:
                    results.append(self._stopped(drafter, prompts, m, stops[m.draft_length], decoding, plain))
                warnings += m.warnings
        return document(
            self.target,
            head=spec.head,
            kind=drafter.kind if drafter else "none",
            trained_on=spec.trained_on,
            plan=plans[0],
            how=decoding,
            tree_settings=how.tree_settings,
            results=results,
            bounds=self._upper_bounds(decoding) if how.bounds and spec.trained_on else None,
            warnings=warnings,
        )

    def _warm_up(self, drafter: Drafter | None, plan: DraftPlan | None, decoding: Decoding) -> None:
        """Compile and touch what is compiled and touched the first time, so that no timed run pays for it."""
        few = replace(decoding, max_new_tokens=min(4, decoding.max_new_tokens))
        for drafts, how in ((None, None), (drafter, plan)):
            acceptance.decode(self.target, drafts, self.tokenizer, self.sets[0].first(decoding.batch_size), how, few)

    def _plan(self, drafter: Drafter, length: int, drafts: Sampling) -> DraftPlan:
        confident = self.how.confidence or self.how.stop != "never"
        return DraftPlan(length=length, shape=self._shape(drafter, length), sampling=drafts, confidence=confident)

    def _shape(self, drafter: Drafter, length: int) -> TreeShape | DynamicShape | None:
        how = self.how
        if how.tree == "none":
            return None
        if how.tree == "dynamic":
            return DynamicShape(how.tree_nodes, how.tree_width)
        if how.tree_widths:
            return cartesian(how.tree_widths)
        if not isinstance(drafter, DraftHead):
            raise ValueError(f"no accuracies are measured for the {drafter.kind} drafter: give --tree-widths")
        greedy = self._greedy(max(how.batch_size))
        answers = self._plain_decoded(self.traffic, greedy).answers
        examples = [e for turns in answers for e in turns]
        accuracies = rank_accuracies(self.target, drafter, examples, depth=length, ranks=_RANKS)
        return sparse(accuracies, how.tree_nodes, depth=length)

    def _stop(self, drafter: Drafter, plan: DraftPlan, decoding: Decoding) -> EarlyStop:
        """Calibrated on the traffic prompts, which are not measured on."""
        done = acceptance.decode(
            self.target, drafter, self.tokenizer, self.traffic, replace(plan, confidence=True), decoding
        )
        confidence, accepted = trace_tensors(done)
        calibration: Calibration = fit(confidence, accepted)
        counts = sum((c for c in done.per_prompt[1:]), done.per_prompt[0])
        if self.how.stop != "cost":
            return EarlyStop(calibration=calibration, threshold=self.how.stop_threshold)
        cost = measured_cost(self.target, drafter, length=plan.length, batch=decoding.batch_size)
        return EarlyStop(calibration=calibration, cost=cost, per_position=tuple(counts.per_position))

    def _stopped(
        self,
        drafter: Drafter,
        prompts: PromptSet,
        fixed: Measured,
        stop: EarlyStop,
        decoding: Decoding,
        plain: Decoded | None,
    ) -> dict[str, Any]:
        assert fixed.plan is not None
        plan = replace(fixed.plan, stop=stop, confidence=False)
        (measured,) = acceptance.measure(
            self.target, drafter, self.tokenizer, prompts, [plan], decoding, check=self.how.check
        )
        print(f"stopped early by {self.how.stop}:\n{table([measured])}", flush=True)
        return {**result(prompts, measured, plain), "stopped_early": stopped_early(measured, fixed)}

    def _plain_decoded(self, prompts: PromptSet, decoding: Decoding) -> Decoded:
        key = (decoding.rule.sampling.temperature, decoding.batch_size, prompts)
        if key not in self._plain:
            self._plain[key] = acceptance.decode(self.target, None, self.tokenizer, prompts, None, decoding)
        return self._plain[key]

    def _upper_bounds(self, decoding: Decoding) -> dict[str, Any] | None:
        if self._bounds is None and not self.target.recipe.leaves_all_alone and not self._is_stored:
            reference = self.load_target(self.reference or self.target.name, "none")
            greedy = replace(decoding, rule=Rule())
            answers: dict[str, list[list[Example]]] = {
                p.name: self._plain_decoded(p, greedy).answers for p in self.sets
            }
            self._bounds = upper_bounds(reference, self.target, answers, seed=self.how.seed)
        return self._bounds

    @property
    def _is_stored(self) -> bool:
        """Whether the target's 16-bit form is not at hand."""
        return self.target.recipe.name.startswith("auto") and not self.reference

    def _warnings(self) -> list[str]:
        found = []
        if named := self.target.recipe.scales_whole_passes:
            found.append(
                f"{self.target.recipe.name} takes one activation scale over the whole pass ({named}), so a token's "
                "result depends on its neighbours: no verification can make drafted and plain decoding agree"
            )
        if self.how.bounds and self._is_stored:
            found.append("no upper bounds: the target is stored quantized, and --reference names no 16-bit form of it")
        return found


def _too_deep(how: MeasureConfig, drafter: Drafter) -> str:
    what = "drafts of" if how.tree == "none" else "a draft tree of depth"
    deeper = [k for k in how.draft_length if k > (drafter.longest_draft or k)]
    has = f"the {drafter.longest_draft} that the {drafter.kind} drafter has"
    return f"{what} {', '.join(map(str, deeper))} tokens are more than {has}"


def _read(file: Path) -> Cell:
    try:
        cell: Cell = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"the finished cell {file} is damaged ({error}): delete it to measure again") from error
    return cell


def _in_short(cell: Cell) -> str:
    return ", ".join(
        f"{r['set']} length {r['draft_length']}: {r['acceptance_length']:.3f} at {r['acceptance_rate']:.1%} of "
        f"{r['drafted_per_pass']:.2f} drafted"
        for r in cell["results"]
    )
