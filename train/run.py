"""One training run from configuration to measured export.

The run folder:

    run.yaml            the resolved configuration
    metrics.jsonl       one line per step
    checkpoints/        resumable states
    export/             the head as the engine loads it
    acceptance.json     what it accepts on held-out prompts
"""

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import set_seed

from bitdraft.data.calibration import calibration_text
from bitdraft.data.chat import Example, end_of_turn_ids, thinking_mode, written_examples
from bitdraft.data.conversation import Conversation
from bitdraft.data.demo_target import resolve_target
from bitdraft.data.regenerate import AnswerSettings, foreign_answers, on_policy_examples
from bitdraft.data.sources import demo_file
from bitdraft.quant.files import write_text_atomically
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.profiles import load_recipe_for
from bitdraft.quant.recipe import Recipe
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.load import load_head
from bitdraft.speculators.sampling import Sampling
from bitdraft.train.adapted_target import TargetAdapters, check_adaptable
from bitdraft.train.config import RunConfig
from bitdraft.train.config_io import to_plain, to_yaml
from bitdraft.train.environment import Environment
from bitdraft.train.exporting.adapter import FinishedAdapter
from bitdraft.train.exporting.checked import export_checked
from bitdraft.train.launch import make_accelerator, wants_bf16
from bitdraft.train.loop import train
from bitdraft.train.measuring.acceptance import Decoding, measure, require_lossless
from bitdraft.train.measuring.document import document, result, table
from bitdraft.train.measuring.prompt_sets import PromptSet
from bitdraft.train.placement import first_device, place
from bitdraft.train.selection import acceptance_of
from bitdraft.train.starting import as_served, check_head_settings, make_head
from bitdraft.train.texts import read_texts, weighting_of

_MAY_DIFFER = (
    *("resume", "checkpoint", "acceptance", "tracker", "output_dir", "compile_quantizer", "states"),
    *("device_map", "shard_target"),
)
"""Fields that may change between a run and its resumption."""


@dataclass(frozen=True)
class Finished:
    folder: Path
    export: Path
    acceptance: Path

    @classmethod
    def under(cls, folder: Path) -> "Finished":
        return cls(folder, folder / "export", folder / "acceptance.json")

    def is_whole(self, config: RunConfig) -> bool:
        """Whether the run has nothing left to do: exported, measured as asked, and no answer found to differ."""
        if not (self.export / "manifest.json").is_file():
            return False
        if not config.acceptance.draft_lengths:
            return True
        if not self.acceptance.is_file():
            return False
        measured = json.loads(self.acceptance.read_text(encoding="utf-8"))
        failed = sum(r["lossless_failed"] for r in measured["results"])
        return measured["settings"] == to_plain(config.acceptance) and failed == 0


def run(config: RunConfig, environment: Environment) -> Finished:
    """Train, export and measure. Raises ``ValueError`` for what the user can mend."""
    folder = config.run_dir
    recipe = load_recipe_for(config.target_quant, config.target_profile)
    text_recipe = load_recipe_for(config.answers.quant, config.target_profile) if config.answers.quant else recipe
    if config.draft_quant:
        load_recipe(config.draft_quant)  # an unknown name ends the run before anything is loaded
    accelerator = make_accelerator(config, environment, folder)
    texts = read_texts(config, accelerator.print)
    contents = {"target_quant": recipe.fingerprint, "answers.quant": text_recipe.fingerprint, **texts.fingerprints}
    if accelerator.is_main_process:
        _open_run(folder, config, contents)
    accelerator.wait_for_everyone()
    finished = Finished.under(folder)
    if finished.is_whole(config):
        accelerator.print(f"{folder} is finished: head in {finished.export}")
        return finished
    set_seed(config.seed)

    name = resolve_target(config.target, environment.cache_dir)
    dtype = torch.bfloat16 if wants_bf16(config, accelerator.device.type) else torch.float32
    tokenizer = load_tokenizer(name, trust_remote_code=config.trust_remote_code)
    target = _load(config, name, recipe, dtype, accelerator, tokenizer)
    accelerator.print(
        f"target {config.target} ({target.fingerprint}), recipe {recipe.name}, profile {recipe.profile}, "
        f"{str(dtype).removeprefix('torch.')} on {accelerator.device}, "
        f"quantizer {'compiled' if target.applied.quantizer.compiled else 'eager'}\n"
        f"{target.applied.summary()}"
    )
    check_head_settings(config, target)
    check_adaptable(config.target_lora, target, accelerator)
    with nullcontext() if config.shard_target else accelerator.main_process_first():  # others read the cache
        examples = _examples(
            config, environment, accelerator, name, dtype, text_recipe, target, tokenizer, texts.training
        )
    weighting = weighting_of(config, examples, texts.weights)
    drawn = [examples[i] for i in weighting.first_draws(examples, config.seed)]
    head = make_head(config, target, tokenizer, drawn, accelerator.print)
    if config.tracker != "none":
        accelerator.init_trackers("bitdraft", config={k: str(v) for k, v in to_plain(config).items()})
    adapters = TargetAdapters(target, config.target_lora, config.seed)

    def measure_selection(head: DraftHead) -> float:
        with adapters.on():
            return acceptance_of(target, head, tokenizer, texts.selection, config)

    head = train(config, accelerator, target, head, examples, folder, measure_selection, adapters, weighting)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process or config.shard_target:  # a target in parts runs in all processes or in none
        scratch = TemporaryDirectory()
        out = finished if accelerator.is_main_process else Finished.under(Path(scratch.name))
        head = as_served(head, config)
        adapter = FinishedAdapter.of(adapters, examples, accelerator.print)
        facts = {
            "answers_by": "the data" if config.answers.source == "file" else text_recipe.name,
            "data_fingerprint": contents["data"],
            "examples": len(examples),
            "steps": config.optim.steps,
            "seed": config.seed,
            **({"head_recipe": load_recipe(config.draft_quant).name} if config.draft_quant else {}),
            **adapter.facts,
        }
        with adapters.on():
            _export_and_measure(config, target, head, tokenizer, texts.heldout, out, facts, adapter)
    accelerator.end_training()
    return finished


def _open_run(folder: Path, config: RunConfig, contents: dict[str, str]) -> None:
    """Take the folder for this run, or refuse it."""
    described, fingerprints = folder / "run.yaml", folder / "contents.json"
    if described.is_file():
        before, now = _with_defaults(yaml.safe_load(described.read_text(encoding="utf-8"))), to_plain(config)
        other = sorted(k for k in now if k not in _MAY_DIFFER and before.get(k) != now[k])
        if other:
            raise ValueError(f"{folder} holds another run (different {', '.join(other)}): choose another --output-dir")
        read = json.loads(fingerprints.read_text(encoding="utf-8")) if fingerprints.is_file() else contents
        if changed := sorted(key for key in contents if read.get(key) != contents[key]):
            raise ValueError(
                f"{folder} holds a run on other contents (what {', '.join(changed)} names has changed since it began): "
                "choose another --output-dir"
            )
        if not config.resume:
            raise ValueError(f"{folder} already holds this run: add --resume to go on, or choose another --output-dir")
    elif folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no run.yaml: choose another --output-dir")
    write_text_atomically(fingerprints, json.dumps(contents, indent=2) + "\n")
    write_text_atomically(described, to_yaml(replace(config, resume=False)))


def _with_defaults(before: Any, defaults: Any = None) -> Any:
    """What a ``run.yaml`` says, and what it meant by fields that there were none of when it was written."""
    defaults = to_plain(RunConfig()) if defaults is None else defaults
    if not isinstance(before, dict) or not isinstance(defaults, dict):
        return before
    return defaults | {key: _with_defaults(value, defaults.get(key, value)) for key, value in before.items()}


def _load(
    config: RunConfig, name: str, recipe: Recipe, dtype: torch.dtype, accelerator: Accelerator, tokenizer: Any
) -> LowBitTarget:
    target = load_target(
        name,
        recipe,
        dtype=dtype,
        device=first_device(config.device_map, config.shard_target, accelerator),
        compile_quantizer=config.compile_quantizer,
        calibration=calibration_text(config.calibration, recipe, tokenizer),
        trust_remote_code=config.trust_remote_code,
    )
    place(target, config.device_map, config.shard_target, accelerator)
    return target


def _examples(
    config: RunConfig,
    environment: Environment,
    accelerator: Accelerator,
    name: str,
    dtype: torch.dtype,
    text_recipe: Recipe,
    target: LowBitTarget,
    tokenizer: Any,
    conversations: list[Conversation],
) -> list[Example]:
    """The training text: the target's own answers, another recipe's, or the file's."""
    end_ids = end_of_turn_ids(target.model, tokenizer)
    if config.answers.source == "file":
        if foreign := foreign_answers(conversations, target):
            accelerator.print(f"warning: {foreign}")
        thinking, kept = thinking_mode(config.thinking), config.answers.keep_thinking
        found = (
            written_examples(tokenizer, c, end_ids, thinking=thinking, keep_thinking=kept, vocab_size=target.vocab_size)
            for c in conversations
        )
        examples = [example for of_one in found for example in of_one]
    else:
        writer = target
        if text_recipe.fingerprint != load_recipe_for(config.target_quant, config.target_profile).fingerprint:
            writer = _load(config, name, text_recipe, dtype, accelerator, tokenizer)
        examples = on_policy_examples(
            writer,
            tokenizer,
            conversations,
            AnswerSettings(
                config.answers.max_new_tokens,
                config.answers.batch_size,
                Sampling(temperature=config.answers.temperature, top_p=config.answers.top_p),
                config.seed,
                thinking_mode(config.thinking),
            ),
            end_ids=end_ids,
            cache_dir=environment.cache_dir,
            label=f"answers by the {text_recipe.name} target",
        )
    too_long = next((e for e in examples if len(e.prompt) + len(e.answer) > target.context_length), None)
    if too_long:
        raise ValueError(
            f"conversation {too_long.id} has {len(too_long.prompt) + len(too_long.answer)} tokens, more than the "
            f"target's context of {target.context_length}"
        )
    accelerator.print(
        f"{len(examples)} examples, {sum(len(e.answer) for e in examples):,} answer tokens written by "
        f"{'the data' if config.answers.source == 'file' else f'the {text_recipe.name} target'}"
    )
    return examples


def _export_and_measure(
    config: RunConfig,
    target: LowBitTarget,
    head: DraftHead,
    tokenizer: Any,
    heldout: list[Conversation],
    out: Finished,
    facts: dict[str, Any],
    adapter: FinishedAdapter,
) -> None:
    """Export, and measure with what is loaded from the export."""
    measured = config.acceptance
    name = "+".join(path.stem for path in measured.data or [demo_file("heldout")])
    prompts = PromptSet(name, tuple(heldout[: measured.prompts]))
    how = Decoding(
        max_new_tokens=measured.max_new_tokens,
        batch_size=measured.batch_size,
        thinking=thinking_mode(config.thinking),
    )
    longest = max(measured.draft_lengths, default=min(3, head.longest_draft or 3))
    export_checked(
        head, target, out.export, tokenizer, prompts, draft_length=longest, facts=facts, beside=adapter.write
    )
    if not measured.draft_lengths:
        return
    plans = [DraftPlan(length=length) for length in measured.draft_lengths]
    results = measure(target, load_head(out.export, target), tokenizer, prompts, plans, how, check=measured.check)
    print(table(results))
    content = document(
        target,
        head=str(out.export),
        kind=head.kind,
        trained_on=target.recipe.name,
        plan=plans[0],
        how=how,
        results=[result(prompts, m) for m in results],
        warnings=[text for m in results for text in m.warnings],
    )
    content |= {"settings": to_plain(measured), **adapter.facts}
    write_text_atomically(out.acceptance, json.dumps(content, indent=2) + "\n")
    require_lossless(results)
    print(f"head: {out.export}\nacceptance: {out.acceptance}")
