"""The target beside its head: the very checkpoint that an engine serves."""

import re
import shutil
from pathlib import Path
from typing import Any

from bitdraft.data.calibration import calibration_text
from bitdraft.quant.checkpoints.tensors import model_folder
from bitdraft.quant.checkpoints.write import write_quantized
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import AUTO
from bitdraft.quant.target import calibration_ids
from bitdraft.train.environment import chosen_dtype
from bitdraft.train.exporting.config import ExportConfig

_COPIED = re.compile(r".*\.(safetensors|json|jinja|txt|model|md)|(LICENSE|NOTICE).*", re.IGNORECASE)


def write_target(config: ExportConfig, source: str, quant: str, tokenizer: Any, out: Path) -> str:
    """Write ``source`` as it is served to the folder ``out``; returns the recipe to load what was written with.

    ``quant``: preset or file; without formats (`none`, `auto`) the source is copied as it is. Raises ``ValueError`` for
    what no checkpoint holds.
    """
    recipe = load_recipe(quant)  # the bytes, whoever computes with them
    if recipe.leaves_all_alone:
        if config.baked:
            raise ValueError(f"--baked needs a recipe with formats, and {quant} has none: leave it out")
        print("copying the target as it is", flush=True)
        _copy(model_folder(source), out)
        return quant
    print(f"writing the target in {recipe.name}{', baked into 16-bit weights' * config.baked}", flush=True)
    write_quantized(
        source,
        recipe,
        out,
        dtype=chosen_dtype(config.dtype, config.device),
        device=config.device,
        calibration=calibration_text(config.calibration, recipe, tokenizer) or calibration_ids(tokenizer),
        trust_remote_code=config.trust_remote_code,
        baked=config.baked,
    )
    return "none" if config.baked else AUTO.name


def _copy(source: Path, out: Path) -> None:
    out.mkdir()
    for path in sorted(source.iterdir()):
        if path.is_file() and _COPIED.fullmatch(path.name):
            shutil.copyfile(path, out / path.name)
