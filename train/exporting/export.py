"""From a head and a target to a folder that an engine serves."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from typing import Any

from torch import Tensor

from bitdraft.data.calibration import calibration_text
from bitdraft.data.demo_target import DEMO, DEMO_LICENSE, DEMO_NAME, resolve_target
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.checkpoints.tensors import model_folder
from bitdraft.quant.files import folder_written_atomically, write_text_atomically
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.profiles import load_recipe_for, profile_named
from bitdraft.quant.target import LowBitTarget, calibration_ids, load_target, load_tokenizer
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.export import layout_of, write_head_for, write_manifest
from bitdraft.speculators.formats.facts import TargetFacts
from bitdraft.speculators.load import load_head, recipe_of_head
from bitdraft.speculators.low_bit import quantize_head
from bitdraft.train.environment import Environment, chosen_dtype
from bitdraft.train.exporting.card import CardFacts, Row, license_of, model_card
from bitdraft.train.exporting.checked import as_written, check_written
from bitdraft.train.exporting.commands import serve_texts
from bitdraft.train.exporting.config import ExportConfig
from bitdraft.train.exporting.pair import write_target
from bitdraft.train.measuring.acceptance import FEW_PASSES, Decoding, Measured
from bitdraft.train.measuring.document import document, result, table
from bitdraft.train.measuring.prompt_sets import PromptSet

_BAKED = "weights hold the values that the recipe's codes stand for; everything is computed in their own type"


def export(config: ExportConfig, environment: Environment) -> None:
    """Write ``config.out``, whole or not at all.

    Raises ``ValueError`` for what the user can mend, ``RunFailed`` where the written files do not draft as the head
    does or next to nothing that they draft is accepted.
    """
    _check_paths(config)
    prompts = _prompts(config)
    trained = recipe_of_head(config.head)
    quant = _quant(config, trained)
    named = f"{quant}, baked" if config.baked else quant  # how a person calls what is served
    source = resolve_target(config.target, environment.cache_dir)
    tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
    with folder_written_atomically(config.out) as fresh:
        head_folder = fresh / "head" if config.with_target else fresh
        if config.with_target:
            head_folder.mkdir()
            quant = write_target(config, source, quant, tokenizer, fresh / "target")  # tried on these very bytes
        target = _served_target(config, str(fresh / "target") if config.with_target else source, quant, tokenizer)
        head = as_written(load_head(config.head, target), target)
        if config.head_quant:
            quantize_head(
                head,
                load_recipe(config.head_quant),
                target=target,
                calibration=_text(config, config.head_quant, tokenizer),
                profile=profile_named(config.target_profile),
            )
        layout = layout_of(head, config.format)
        served = replace(TargetFacts.of(target), name=_served_name(config))
        write_head_for(head, served, head_folder, draft_length=config.draft_length, layout=layout.NAME, facts=trained)
        plan = DraftPlan(length=config.draft_length)
        print(f"trying the written files on {len(prompts.ids)} prompts of {prompts.name}", flush=True)
        measured = check_written(head, target, head_folder, tokenizer, prompts, plan, _how(config))
        print(table([measured]))
        if measured.total.passes < FEW_PASSES:
            raise ValueError(
                f"{measured.total.passes} passes are too few to show that the written head drafts: raise --prompts or "
                "--max-new-tokens"
            )
        acceptance = _document(config, target, head, prompts, measured, trained) | {"served_on": named}
        write_text_atomically(fresh / "acceptance.json", json.dumps(acceptance, indent=2) + "\n")
        card = _card(config, target, head, layout, source, acceptance, trained)
        write_text_atomically(fresh / "README.md", card)
        if config.with_target:
            write_manifest(head_folder)
        write_manifest(fresh)
    print(f"{layout.NAME} head{' and target' * config.with_target}: {config.out}")


def _check_paths(config: ExportConfig) -> None:
    """Refuse what can never be written before models are loaded."""
    if config.out.exists() and not (config.overwrite and config.out.is_dir()):
        hint = ", or add --overwrite" if config.out.is_dir() else ""
        raise ValueError(f"{config.out} exists: choose another --out{hint}")
    if not (config.head / "config.json").is_file():
        raise ValueError(f"--head {config.head} holds no head: config.json is missing")
    if config.out.resolve() in (config.head.resolve(), *config.head.resolve().parents):
        raise ValueError(f"--out {config.out} holds the head that is read: choose another folder")


def _prompts(config: ExportConfig) -> PromptSet:
    files = config.data or (demo_file("heldout"),)
    return PromptSet("+".join(path.stem for path in files), tuple(read_conversations(files)[: config.prompts]))


def _quant(config: ExportConfig, trained: Mapping[str, Any]) -> str:
    """Name or file of the recipe that the target is served with."""
    if config.target_quant is not None:
        return config.target_quant
    name = str(trained.get("recipe", "")).partition("@")[0]
    try:
        load_recipe(name)
    except ValueError as error:
        found = f"was trained on {name!r}" if name else "does not say what it was trained on"
        raise ValueError(f"the head in {config.head} {found}: say with --target-quant what it is served on") from error
    return name


def _served_target(config: ExportConfig, folder: str, quant: str, tokenizer: Any) -> LowBitTarget:
    """The target that the head is tried on."""
    recipe = load_recipe_for(quant, config.target_profile if quant != "none" else "plain")
    return load_target(
        folder,
        recipe,
        dtype=chosen_dtype(config.dtype, config.device),
        device=config.device,
        calibration=calibration_text(config.calibration, recipe, tokenizer),
        trust_remote_code=config.trust_remote_code,
    )


def _text(config: ExportConfig, quant: str, tokenizer: Any) -> list[Tensor]:
    """What the recipe of that name is calibrated on, if it is."""
    return calibration_text(config.calibration, load_recipe(quant), tokenizer) or calibration_ids(tokenizer)


def _served_name(config: ExportConfig) -> str:
    return config.served_as or str(config.out / "target" if config.with_target else config.target)


def _document(
    config: ExportConfig,
    target: LowBitTarget,
    head: DraftHead,
    prompts: PromptSet,
    measured: Measured,
    trained: Mapping[str, Any],
) -> dict[str, Any]:
    """``acceptance.json`` of the export: what the written files were found to accept."""
    content = document(
        target,
        head=str(config.out),
        kind=head.kind,
        trained_on=trained.get("recipe"),
        plan=measured.plan,
        how=_how(config),
        results=[result(prompts, measured)],
        warnings=measured.warnings,
    )
    return {**content, "target": _served_name(config)}


def _how(config: ExportConfig) -> Decoding:
    return Decoding(max_new_tokens=config.max_new_tokens, batch_size=config.batch_size)


def _card(
    config: ExportConfig,
    target: LowBitTarget,
    head: DraftHead,
    layout: Any,
    source: str,
    acceptance: Mapping[str, Any],
    trained: Mapping[str, Any],
) -> str:
    head_path, served = str(config.out / "head" if config.with_target else config.out), _served_name(config)
    return model_card(
        CardFacts(
            kind=head.kind,
            layout=layout.NAME,
            engines=layout.ENGINES,
            target=config.target if config.target != DEMO else DEMO_NAME,
            license=config.license or (DEMO_LICENSE if config.target == DEMO else license_of(model_folder(source))),
            served=served,
            recipe=acceptance["served_on"],
            numerics=target.applied.summary() if not config.baked else _BAKED,
            head_recipe=config.head_quant,
            trained=trained,
            results=[*_rows_before(config), *_rows(acceptance, "these files")],
            measured_on=date.today().isoformat(),
            commands=serve_texts(
                layout.ENGINES, served, head_path, head.kind, config.draft_length, head.capture_layers
            ),
        )
    )


def _rows_before(config: ExportConfig) -> list[Row]:
    """What was measured before: the run's own acceptance.json."""
    path = config.acceptance or config.head.parent / "acceptance.json"
    if not path.is_file():
        if config.acceptance:
            raise ValueError(f"--acceptance {path} does not exist")
        return []
    try:
        return _rows(
            json.loads(path.read_text(encoding="utf-8")), path.name if config.acceptance else "the training run"
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not an acceptance.json of one head ({error})") from error


def _rows(measured: Mapping[str, Any], by: str) -> list[Row]:
    about = {"by": by, **{key: measured[key] for key in ("served_on", "dtype", "max_new_tokens", "temperature")}}
    return [{**about, **result} for result in measured["results"]]
