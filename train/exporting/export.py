"""From a head and a target to a folder that an engine serves."""

import json
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bitdraft.data.calibration import calibration_text
from bitdraft.data.demo_target import DEMO, DEMO_LICENSE, DEMO_NAME, resolve_target
from bitdraft.quant.checkpoints.tensors import model_folder
from bitdraft.quant.files import folder_written_atomically, write_text_atomically
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.profiles import load_recipe_for, profile_named
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.export import default_layout, layout_of, write_head, write_manifest
from bitdraft.speculators.formats.facts import TargetFacts
from bitdraft.speculators.load import load_head
from bitdraft.speculators.low_bit import quantize_head
from bitdraft.train.environment import Environment, chosen_dtype
from bitdraft.train.exporting.card import CardFacts, license_of, model_card
from bitdraft.train.exporting.checked import LEAST_TO_LEAVE, as_written, check_written, refuse_if_worse
from bitdraft.train.exporting.commands import serve_texts
from bitdraft.train.exporting.config import ExportConfig
from bitdraft.train.exporting.pair import calibration_for, write_target
from bitdraft.train.exporting.request import Request, checked_request, is_hub_id, rows_of
from bitdraft.train.measuring.acceptance import FEW_PASSES, Decoding, Measured
from bitdraft.train.measuring.document import document, result, table


def export(config: ExportConfig, environment: Environment) -> None:
    """Write ``config.out``, whole or not at all.

    Raises ``ValueError`` for what the user can mend, ``RunFailed`` where the written files do not draft as the head
    does, or where the target accepts next to nothing of it or far less than it did when it was trained.
    """
    request = checked_request(config)
    source = resolve_target(config.target, environment.cache_dir)
    tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
    with folder_written_atomically(config.out) as fresh:
        head_folder, quant = fresh, request.quant
        if config.with_target:
            head_folder = fresh / "head"
            head_folder.mkdir()
            quant = write_target(request, source, tokenizer, fresh / "target")  # the head is tried on these very bytes
        target = _target(request, str(fresh / "target") if config.with_target else source, quant, tokenizer)
        head = _head(request, target, tokenizer)
        layout = layout_of(head.kind, config.format or default_layout(head))
        name = config.served_as or str(config.out / "target" if config.with_target else source)
        write_head(
            head,
            replace(TargetFacts.of(target), name=name),
            head_folder,
            draft_length=config.draft_length,
            layout=layout.NAME,
            facts=request.trained,
        )
        print(f"trying the written files on {len(request.prompts.ids)} prompts of {request.prompts.name}", flush=True)
        measured = _tried(request, head, target, head_folder, tokenizer)
        acceptance = _document(request, target, head, measured) | {"target": name, "served_on": request.named}
        write_text_atomically(fresh / "acceptance.json", json.dumps(acceptance, indent=2) + "\n")
        card = _card(request, target, head, layout, source, acceptance)
        write_text_atomically(fresh / "README.md", card)
        if config.with_target:
            write_manifest(head_folder)
        write_manifest(fresh)
    print(f"{layout.NAME} head{' and target' * config.with_target}: {config.out}")


def _target(request: Request, folder: str, quant: str, tokenizer: Any) -> LowBitTarget:
    """The target that the head is tried on."""
    config = request.config
    recipe = load_recipe_for(quant, request.profile)
    return load_target(
        folder,
        recipe,
        dtype=chosen_dtype(config.dtype, config.device),
        device=config.device,
        calibration=calibration_text(config.calibration, recipe, tokenizer),
        trust_remote_code=config.trust_remote_code,
    )


def _head(request: Request, target: LowBitTarget, tokenizer: Any) -> DraftHead:
    """The head as the files will hold it, quantized if asked."""
    config = request.config
    head = as_written(load_head(config.head, target), target)
    if config.head_quant:
        quantize_head(
            head,
            load_recipe(config.head_quant),
            target=target,
            calibration=calibration_for(config, config.head_quant, tokenizer),
            profile=profile_named(request.profile),
        )
    return head


def _tried(request: Request, head: DraftHead, target: LowBitTarget, folder: Path, tokenizer: Any) -> Measured:
    plan, how = DraftPlan(length=request.config.draft_length), _how(request)
    measured = check_written(head, target, folder, tokenizer, request.prompts, plan, how, least=LEAST_TO_LEAVE)
    print(table([measured]))
    if measured.total.passes < FEW_PASSES:
        raise ValueError(
            f"{measured.total.passes} passes are too few to show that the written head drafts: raise --prompts or "
            "--max-new-tokens"
        )
    alike: dict[str, Any] = {"served_on": request.quant, "temperature": 0, "set": request.prompts.name}
    alike["max_new_tokens"] = request.config.max_new_tokens
    for row in request.measured_before:
        if all(row[key] == value for key, value in alike.items()):
            refuse_if_worse(measured.total, row["passes"], row["per_position"][0])
    return measured


def _how(request: Request) -> Decoding:
    return Decoding(max_new_tokens=request.config.max_new_tokens, batch_size=request.config.batch_size)


def _document(request: Request, target: LowBitTarget, head: DraftHead, measured: Measured) -> dict[str, Any]:
    """``acceptance.json`` of the export: what the written files were found to accept."""
    return document(
        target,
        head=str(request.config.out),
        kind=head.kind,
        trained_on=request.trained.get("recipe"),
        plan=measured.plan,
        how=_how(request),
        results=[result(request.prompts, measured)],
        warnings=measured.warnings,
    )


def _card(
    request: Request, target: LowBitTarget, head: DraftHead, layout: Any, source: str, acceptance: dict[str, Any]
) -> str:
    config = request.config
    demo = config.target == DEMO
    engines = layout.engines(head)
    where = config.served_as or ("target" if config.with_target else "TARGET")
    return model_card(
        CardFacts(
            kind=head.kind,
            layout=layout.NAME,
            engines=engines,
            target=DEMO_NAME if demo else config.target,
            base_model=DEMO_NAME if demo else config.target if is_hub_id(config.target) else None,
            license=config.license or (DEMO_LICENSE if demo else license_of(model_folder(source))),
            with_target=config.with_target,
            recipe=request.named,
            numerics=_numerics(config, target),
            captured=head.capture_layers,
            vocabulary=(len(head.vocab), head.vocab.target_size),
            head_recipe=config.head_quant,
            trained=request.trained,
            results=[*rows_of(acceptance, "these files"), *request.measured_before],
            made=f"Bitdraft {version('bitdraft')} on {date.today().isoformat()}, {acceptance['machine']['device']}",
            commands=serve_texts(
                engines,
                where,
                "head" if config.with_target else "HEAD",
                head.kind,
                config.draft_length,
                head.capture_layers,
            ),
        )
    )


def _numerics(config: ExportConfig, target: LowBitTarget) -> str:
    if config.baked:
        return "weights hold the values that the recipe's codes stand for; everything is computed in their own type"
    return "every layer in 16 bit" if target.recipe.leaves_all_alone else target.applied.summary()
