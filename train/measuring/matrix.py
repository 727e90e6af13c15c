"""Measuring several drafters on several served targets, cell by cell; finished cells are kept and not made again."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from bitdraft.data.chat import Example
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
from bitdraft.train.measuring.prompt_sets import PromptSet
from bitdraft.train.measuring.tree_choice import rank_accuracies

Cell = dict[str, Any]
_RANKS = 8  # best tokens per depth that a sparse tree may use


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """How acceptance is measured."""

    draft_length: tuple[int, ...] = (3, 4, 5)
    """Drafted tokens per pass; of a tree, its depth."""
    tree: Literal["none", "static", "dynamic"] = "none"
    """Chains; a tree of a fixed shape; or EAGLE-2's trees, which follow the drafter's probabilities."""
    tree_nodes: int = 16
    """Drafted tokens per pass of a tree."""
    tree_width: int = 4
    """Dynamic trees: nodes that are expanded at each depth, and tokens behind each."""
    tree_widths: tuple[int, ...] = ()
    """Static trees: every combination of so many best tokens at each depth. By default the tree of `--tree-nodes`
    nodes that fits the head's accuracies on the traffic prompts."""
    temperature: tuple[float, ...] = (0.0,)
    """0 is greedy; several are measured one after the other."""
    top_p: float = 1.0
    top_k: int = 0
    drafts: Literal["sampled", "greedy"] = "sampled"
    """Above temperature 0: draw drafts from the drafter's distribution, or take its most probable tokens."""
    typical: bool = False
    """Medusa's typical acceptance instead of speculative sampling. Lossy: the output's distribution changes."""
    batch_size: tuple[int, ...] = (48,)
    """Prompts decoded at once; several are measured one after the other."""
    max_new_tokens: int = 64
    check: int = 8
    """Prompts of each set whose greedy answers are compared with plain decoding."""
    plain: bool = True
    """Also decode every prompt without drafts, for the speedup."""
    bounds: bool = True
    """Also compare the served target with the 16-bit one: what a perfect 16-bit head could reach."""
    confidence: bool = False
    """Calibrate the drafter's confidence on the traffic prompts and report how far it can be trusted (chains)."""
    stop: Literal["never", "threshold", "cost"] = "never"
    """End drafts early: below `--stop-threshold`, or where they cost more than they promise."""
    stop_threshold: float = 0.3
    """Least calibrated probability that a draft and all before it are accepted."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.draft_length or min(self.draft_length) < 1:
            raise ValueError("--draft-length needs numbers of at least 1")
        if not self.batch_size or min(self.batch_size) < 1:
            raise ValueError("--batch-size needs numbers of at least 1")
        for name in ("max_new_tokens", "tree_nodes", "tree_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        if self.tree_widths and len(self.draft_length) > 1:
            raise ValueError("--tree-widths gives the tree's depth: give one --draft-length, the same")
        if self.tree != "none" and (self.confidence or self.stop != "never"):
            raise ValueError("--confidence and --stop are for chains: leave out --tree")
        if not 0 < self.stop_threshold <= 1:
            raise ValueError(f"--stop-threshold must lie in (0, 1], got {self.stop_threshold}")
        for temperature in self.temperature:  # refuses what sampling refuses
            Rule(sampling=self.sampling(temperature), typical=self.typical)

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature=temperature, top_p=self.top_p, top_k=self.top_k)


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
    _plain: dict[tuple[float, int, PromptSet], Decoded] = field(default_factory=dict)
    _bounds: dict[str, Any] | None = None

    def cells(self, specs: Sequence[DrafterSpec], announce: Callable[[str], object]) -> list[Cell]:
        """A document for every drafter, temperature and batch size."""
        made = []
        for spec in specs:
            drafter: Drafter | None = None
            loaded = False
            for temperature, batch_size in product(self.how.temperature, self.how.batch_size):
                announce(f"{spec.head} on {self.target.recipe.name}, temperature {temperature:g}, batch {batch_size}")
                file = self._file(spec, temperature, batch_size)
                if file and file.is_file():
                    made.append(json.loads(file.read_text(encoding="utf-8")))
                    continue
                if not loaded:
                    drafter, loaded = spec.load(self.target, self.load_target), True
                cell = self._cell(spec, drafter, temperature, batch_size)
                if file:
                    write_text_atomically(file, json.dumps(cell) + "\n")
                made.append(cell)
        return made

    def _file(self, spec: DrafterSpec, temperature: float, batch_size: int) -> Path | None:
        """Where this cell is kept: under a digest of all that decides its numbers."""
        if self.kept is None:
            return None
        asked = [[p.name, [[c.id, c.category, [m.as_dict() for m in c.messages]] for c in p.conversations]]
                 for p in (*self.sets, self.traffic)]  # fmt: skip
        target = [self.target.fingerprint, self.target.recipe.fingerprint, str(self.target.dtype)]
        settings = to_plain(replace(self.how, temperature=(temperature,), batch_size=(batch_size,)))
        key = json.dumps([spec.head, spec.identity, target, settings, asked], sort_keys=True)
        return self.kept / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def _cell(self, spec: DrafterSpec, drafter: Drafter | None, temperature: float, batch_size: int) -> Cell:
        how = self.how
        sampling = how.sampling(temperature)
        rule = Rule(sampling=sampling, typical=how.typical, seed=how.seed)
        decoding = Decoding(max_new_tokens=how.max_new_tokens, batch_size=batch_size, rule=rule)
        drafts = sampling if how.drafts == "sampled" else Sampling()
        plans: list[DraftPlan | None] = [None]
        if drafter is not None:
            plans = [self._plan(drafter, length, drafts) for length in how.draft_length]
        stops = {
            plan.length: self._stop(drafter, plan, decoding)
            for plan in plans
            if plan and drafter and (how.confidence or how.stop != "never")
        }
        results, warnings = [], self._warnings()
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
            results=results,
            bounds=self._upper_bounds(decoding) if how.bounds else None,
            warnings=warnings,
        )

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
        greedy = Decoding(max_new_tokens=how.max_new_tokens, batch_size=max(how.batch_size))
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
        if self._bounds is None and not self.target.recipe.leaves_all_alone:
            reference = self.load_target(self.target.name, "none")
            greedy = replace(decoding, rule=Rule())
            answers: dict[str, list[list[Example]]] = {
                p.name: self._plain_decoded(p, greedy).answers for p in self.sets
            }
            self._bounds = upper_bounds(reference, self.target, answers, seed=self.how.seed)
        return self._bounds

    def _warnings(self) -> list[str]:
        named = self.target.recipe.scales_whole_passes
        if not named:
            return []
        return [
            f"{self.target.recipe.name} takes one activation scale over the whole pass ({named}), so a token's result "
            "depends on its neighbours in the pass: no verification can make drafted and plain decoding agree"
        ]
