"""Writing a trained head for an engine.

An export is a folder with the head's weights in safetensors, ``config.json`` in the engines' own words and
``manifest.json`` with the sha256 of both. What engines would not notice is checked before anything is written: names,
shapes, maps, values that are not finite, and heads that one of the layout's engines computes otherwise.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bitdraft.quant.checkpoints.tensors import save_tensors
from bitdraft.quant.files import folder_written_atomically, sha256_of
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.formats import eagle3_original, eagle3_speculators, medusa_original, medusa_vllm
from bitdraft.speculators.formats.facts import TargetFacts
from bitdraft.speculators.formats.maps import check_maps
from bitdraft.speculators.medusa import MedusaHead

LAYOUTS: dict[str, ModuleType] = {
    layout.NAME: layout for layout in (eagle3_speculators, eagle3_original, medusa_vllm, medusa_original)
}
"""The layouts that engines load, by name. Each has ``NAME``, ``KIND``, ``ENGINES``, ``WEIGHTS`` (its file) and the
functions ``is_this_format``, ``check``, ``engines`` (those of ``ENGINES`` that compute a given head), ``tensors``,
``shapes``, ``config`` and ``load``."""

DEFAULT_LAYOUT = {"eagle3": eagle3_speculators.NAME, "medusa": medusa_vllm.NAME}
"""By kind of head: what vLLM reads. ``default_layout`` knows the heads that it does not."""

MANIFEST = "manifest.json"
_PART = 1 << 20  # elements looked at at once
_E8M0_NAN = 255


def export_head(
    head: DraftHead,
    target: LowBitTarget,
    path: Path,
    *,
    draft_length: int,
    layout: str | None = None,
    facts: Mapping[str, Any] | None = None,
    check: Callable[[Path], object] = lambda written: None,
) -> None:
    """Write ``path``, whole or not at all (replaced as a whole if it exists), with its manifest.

    ``check`` looks at the written files before they take their place, and raises what keeps them from it. The rest as
    in ``write_head``. Raises ``ValueError`` for another target than the head's.
    """
    head.fits(target)
    with folder_written_atomically(path) as fresh:
        write_head(head, TargetFacts.of(target), fresh, draft_length=draft_length, layout=layout, facts=facts)
        check(fresh)
        write_manifest(fresh)


@torch.no_grad()
def write_head(
    head: DraftHead,
    target: TargetFacts,
    folder: Path,
    *,
    draft_length: int,
    layout: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write weights and config.json into ``folder``, which exists, for a target that need not be loaded.

    ``draft_length``: what the engine drafts by default. ``facts``: what else the block ``bitdraft`` of config.json
    says, or says otherwise than the target does (the recipe that the head was trained on). Raises ``ValueError`` for a
    layout that does not hold the head, naming those that do, for weights that are not finite and maps that are wrong;
    ``OSError`` where writing fails.
    """
    chosen = layout_of(head.kind, layout or default_layout(head))
    chosen.check(head)
    weights = {name: t.cpu().contiguous() for name, t in chosen.tensors(head).items()}
    _check_weights(weights, chosen.shapes(head), head)
    described: dict[str, Any] = chosen.config(head, target, draft_length)
    described["bitdraft"] = {
        "recipe": target.recipe,
        "recipe_fingerprint": target.recipe_fingerprint,
        "target_fingerprint": target.fingerprint,
        **(facts or {}),
        "residual_basis": target.residual_basis,
        "tokenizer": target.tokenizer,
        "format": chosen.NAME,
    }
    save_tensors(weights, folder / chosen.WEIGHTS)
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def write_manifest(folder: Path) -> None:
    """``manifest.json``: the sha256 of every other file below ``folder``."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
    sums = {p.relative_to(folder).as_posix(): sha256_of(p) for p in files}
    (folder / MANIFEST).write_text(json.dumps({"sha256": sums}, indent=2) + "\n", encoding="utf-8")


def default_layout(head: DraftHead) -> str:
    """The layout that a head is written in where none is named."""
    if isinstance(head, MedusaHead) and head.config.link:  # which is for ``load_head`` alone
        return medusa_original.NAME
    return DEFAULT_LAYOUT[head.kind]


def layout_of(kind: str, name: str | None) -> Any:
    """The layout of that name, by default vLLM's; ``ValueError`` naming those that hold a head of that kind."""
    fitting = [layout.NAME for layout in LAYOUTS.values() if kind == layout.KIND]
    chosen = name or DEFAULT_LAYOUT[kind]
    if chosen not in fitting:
        what = "is for another kind of head" if chosen in LAYOUTS else "is not known"
        raise ValueError(f"the format {chosen} {what}: {kind} heads are written as {' or '.join(fitting)}")
    return LAYOUTS[chosen]


def _check_weights(weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], head: DraftHead) -> None:
    """``ValueError`` unless ``weights`` are what engines ask for; they check nothing of this themselves."""
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in sorted({*found, *shapes}):
        if found.get(name) != shapes.get(name):
            wanted = f"{list(shapes[name])}" if name in shapes else "no tensor of this layout"
            raise ValueError(
                f"not exported: {name} is {list(found[name]) if name in found else 'missing'}, not {wanted}"
            )
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not _finite(tensor):
            raise ValueError(f"not exported: {name} holds NaN or infinity")
        if name.endswith(".weight_scale") and tensor.dtype == torch.uint8 and bool((tensor == _E8M0_NAN).any()):
            raise ValueError(f"not exported: {name} holds NaN")
    try:
        check_maps(weights, len(head.vocab), head.vocab.target_size)
    except ValueError as error:
        raise ValueError(f"not exported: {error}") from error


def _finite(tensor: Tensor) -> bool:
    """Whether the least and the greatest value are, which are NaN where any value is: ``isfinite`` on all of a large
    tensor takes many times as long, and its memory several times over."""
    parts = tensor.view(-1).split(_PART)
    return all(
        bool(end.isfinite()) for part in parts for end in (part.float() if part.itemsize == 1 else part).aminmax()
    )
