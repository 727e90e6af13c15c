"""A quantized checkpoint in compressed-tensors format, from the recipe that a training run simulates.

The model is loaded and the recipe applied as for training; what is written are the codes and scales of the very
weights that were simulated, or, baked, the numbers that they stand for (``quant/checkpoints/bake.py``). Everything
else is copied from the source, tensor by tensor under its own names, so the result is the source's folder with other
weights.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from bitdraft.quant.apply import Applied, apply_recipe
from bitdraft.quant.block import Quantized, spread
from bitdraft.quant.checkpoints.bake import Exactness, baked_config, check_can_bake, low_bit_layer
from bitdraft.quant.checkpoints.declare import check_has_layout, quantization_config
from bitdraft.quant.checkpoints.read import method_of, quantization_of
from bitdraft.quant.checkpoints.tensors import TensorFiles, model_folder, save_tensors
from bitdraft.quant.codes import Encoded, e8m0_bytes
from bitdraft.quant.experts import RoutedExperts, StoredExpert, expert_projections, experts_around, stored_expert
from bitdraft.quant.files import check_free, folder_written_atomically
from bitdraft.quant.fingerprint import digest_of
from bitdraft.quant.loading import load_model, placed, placed_text, read_config
from bitdraft.quant.pack import to_compressed_tensors
from bitdraft.quant.recipe import Recipe
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.smallfloat import E4M3

_LARGEST_FILE = 5 * 2**30
_WEIGHT_FILES = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx)(\.index\.json)?|config\.json|\..*")


@dataclass(frozen=True)
class Written:
    """What was written."""

    folder: Path
    applied: Applied
    bytes_before: int
    bytes_after: int


def write_quantized(
    target: str,
    recipe: Recipe,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    calibration: Sequence[Tensor] = (),
    overwrite: bool = False,
    trust_remote_code: bool = False,
    baked: bool = False,
) -> Written:
    """Quantize the model folder or hub id ``target`` and write it to the folder ``out``, whole or not at all.

    ``dtype``: what the weights are loaded in before they are quantized, by default the checkpoint's own type.
    ``calibration``: token ids ``[1, T]`` each, for recipes with static activation scales. ``baked``: write an ordinary
    checkpoint whose weights, in ``dtype``, are the numbers that the codes stand for. Raises ``ValueError`` for a
    folder that exists (unless ``overwrite``), a target that is quantized already, formats without a layout or, baked,
    with more than weights or with weights that ``dtype`` cannot hold, and experts that the source keeps in one tensor.
    """
    (check_can_bake if baked else check_has_layout)(recipe)
    check_free(out, overwrite)
    config = read_config(target, trust_remote_code)
    if (declared := quantization_of(config, target)) is not None:
        raise ValueError(f"target {target!r} is already quantized ({method_of(declared)}): give its 16-bit checkpoint")
    source = model_folder(target)
    if out.resolve() == source.resolve():
        raise ValueError(f"--out {out} is the target's own folder: choose another")
    wanted = dtype or (config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16)
    model = placed(load_model(target, config, wanted, trust_remote_code, None), device)
    weights: dict[str, Encoded] = {}
    exactness = Exactness(wanted)

    def keep(name: str, q: Quantized) -> None:
        layer = low_bit_layer(model, name)
        if baked:
            exactness.add(layer)
        else:
            weights[name] = encoded(q, layer.weights)

    applied = apply_recipe(model, recipe, compiled=False, calibration=placed_text(model, calibration), watch=keep)
    exactness.check(recipe)
    head = model.get_output_embeddings()  # type: ignore[operator]
    if any(model.get_submodule(name) is head for name in applied.quantized):
        raise ValueError(
            f"recipe {recipe.name!r} quantizes the output head, which is not written here: "
            "give it a rule without formats"
        )
    files = TensorFiles(source)
    renamed = _checkpoint_names(model, applied, files)
    with folder_written_atomically(out) as folder:
        writer = _Shards(folder, _LARGEST_FILE)
        put = partial(_baked, model, wanted) if baked else partial(_stored, model, weights)
        for name, tensor in _tensors(files, renamed, put):
            writer.add(name, tensor)
        writer.finish()
        described = json.loads((source / "config.json").read_text(encoding="utf-8"))
        if baked:
            baked_config(described, recipe, wanted, digest_of(calibration) if recipe.looks_at_inputs else None)
        else:
            rules = {layer: applied.quantized[part.layer] for layer, part in renamed.items()}
            described["quantization_config"] = quantization_config(rules, _ignored(model, applied, files))
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        for path in source.iterdir():
            if path.is_file() and not _WEIGHT_FILES.fullmatch(path.name):
                shutil.copyfile(path, folder / path.name)
    sizes = [sum(f.stat().st_size for f in where.glob("*.safetensors")) for where in (source, out)]
    return Written(out, applied, *sizes)


def encoded(q: Quantized, scheme: Scheme) -> Encoded:
    """The codes and stored scales of a quantized weight ``[N, K]``, whichever method chose its scales.

    Exact: values are codes times a scale of at most four significant bits, and an outer scale that is itself the
    reciprocal of an fp32 number is that of its own reciprocal too. Raises ``ValueError`` for formats
    with zero points, which ``q`` does not keep.
    """
    if scheme.has_zero_point:
        raise ValueError(f"{scheme.name} has zero points, which cannot be recovered from a quantized weight")
    if scheme.scale_format == "fp32":
        return Encoded(scheme, scheme.element.encode(q.values), q.scale)
    assert scheme.block is not None
    codes = scheme.element.encode(q.values / spread(q.scale, scheme.block, q.values.shape[-1]))
    stored = e8m0_bytes(q.scale) if scheme.scale_format == "e8m0" else E4M3.encode(q.scale)
    return Encoded(scheme, codes, stored, None, None if q.outer is None else 1.0 / q.outer)


@dataclass(frozen=True)
class _Part:
    """A layer of the checkpoint: a layer of the model or some of its rows."""

    layer: str
    rows: slice


def _checkpoint_names(model: nn.Module, applied: Applied, files: TensorFiles) -> dict[str, _Part]:
    """For every layer of the source that was quantized, which rows of which layer of the model it is."""
    around = experts_around(model)
    renamed: dict[str, _Part] = {}
    for tensor in files:
        layer = tensor.removesuffix(".weight")
        if layer in applied.quantized:
            renamed[layer] = _Part(layer, slice(None))
        elif (
            (expert := stored_expert(layer))
            and expert.layer in applied.quantized
            and not model.get_submodule(expert.module).interleaved
        ):
            renamed[layer] = _Part(expert.layer, _rows(model, expert))
    covered = {part.layer for part in renamed.values()}
    if missing := [name for name in applied.quantized if name not in covered]:
        kept = f"the experts {around[missing[0]]} in one tensor" if missing[0] in around else f"no {missing[0]}.weight"
        raise ValueError(f"the source checkpoint keeps {kept}, for which compressed-tensors has no layout here")
    return renamed


def _rows(model: nn.Module, expert: StoredExpert) -> slice:
    half = low_bit_layer(model, expert.layer).out_features // 2
    return {"gate": slice(half), "up": slice(half, None), "down": slice(None)}[expert.part]


def _tensors(
    files: TensorFiles, renamed: dict[str, _Part], put: Callable[[_Part], dict[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """What the new checkpoint holds, in the order of the source's names; ``put``: the tensors in place of a weight."""
    for name in files:
        layer, _, leaf = name.rpartition(".")
        if leaf != "weight" or layer not in renamed:
            yield name, files[name]
            continue
        for new, tensor in put(renamed[layer]).items():
            yield f"{layer}.{new}", tensor


def _stored(model: nn.Module, weights: dict[str, Encoded], part: _Part) -> dict[str, Tensor]:
    """Codes and scales by the last parts of their names."""
    whole = weights[part.layer]
    one = Encoded(
        whole.scheme,
        whole.codes[part.rows],
        whole.scale[part.rows] if whole.scale.ndim and whole.scheme.rows == 1 else whole.scale,
        None,
        whole.global_scale,
    )
    if one.codes.shape != whole.codes.shape and whole.scheme.rows != 1:
        raise ValueError(f"{whole.scheme.name} has blocks over rows, which gate and up cannot be cut along here")
    tensors = {leaf: tensor.cpu().clone() for leaf, tensor in to_compressed_tensors(one).items()}
    input_scale = low_bit_layer(model, part.layer).input_global_scale
    if input_scale is not None:
        tensors["input_global_scale"] = input_scale.cpu().reshape(1).clone()
    return tensors


def _baked(model: nn.Module, written: torch.dtype, part: _Part) -> dict[str, Tensor]:
    """The weight that a layer stands for, or some of its rows."""
    rows = low_bit_layer(model, part.layer).dequantized()[part.rows]
    return {"weight": rows.to("cpu", written, copy=True)}


def _ignored(model: nn.Module, applied: Applied, files: TensorFiles) -> list[str]:
    """Every layer that an engine would take for linear and that stays in high precision, routers included."""
    kept = []
    for name in applied.left_alone:
        module = model.get_submodule(name)
        as_stored = name.replace(".mlp.", ".block_sparse_moe.")
        name = as_stored if f"{as_stored}.weight" in files else name
        if not isinstance(module, (nn.Embedding, nn.Conv1d, RoutedExperts)) and expert_projections(module) is None:
            kept.append(name)
    return kept


class _Shards:
    """Safetensors files of a bounded size, and their index where there is more than one."""

    def __init__(self, folder: Path, largest: int) -> None:
        self._folder, self._largest = folder, largest
        self._waiting: dict[str, Tensor] = {}
        self._written: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._bytes + size > self._largest:
            self._flush()
        self._waiting[name] = tensor
        self._bytes += size
        self._total += size

    def _flush(self) -> None:
        save_tensors(self._waiting, self._folder / f"part-{len(self._written)}")
        self._written.append(list(self._waiting))
        self._waiting, self._bytes = {}, 0

    def finish(self) -> None:
        self._flush()
        count = len(self._written)
        if count == 1:
            (self._folder / "part-0").rename(self._folder / "model.safetensors")
            return
        where: dict[str, str] = {}
        for number, names in enumerate(self._written):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / f"part-{number}").rename(self._folder / file)
            where |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": where}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self._folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
