"""The target beside its head: the very checkpoint that an engine serves."""

import re
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from bitdraft.data.calibration import calibration_text
from bitdraft.quant.checkpoints.tensors import model_folder
from bitdraft.quant.checkpoints.write import write_quantized
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import AUTO
from bitdraft.quant.target import calibration_ids
from bitdraft.train.environment import chosen_dtype
from bitdraft.train.exporting.config import ExportConfig
from bitdraft.train.exporting.request import Request

_NOT_COPIED = re.compile(r".*\.(bin|pt|pth|ckpt|gguf|h5|msgpack|onnx)(\.index\.json)?|\..*")


def write_target(request: Request, source: str, tokenizer: Any, out: Path) -> str:
    """Write ``source`` as it is served to the folder ``out``; returns the recipe to load what was written with.

    Without formats (`none`, `auto`) the source is copied as it is. Raises ``ValueError`` for what no checkpoint holds.
    """
    config, recipe = request.config, load_recipe(request.quant)  # the bytes, whoever computes with them
    print(f"writing the target: {request.named}", flush=True)
    if recipe.leaves_all_alone:
        _copy(model_folder(source), out)
        return request.quant
    write_quantized(
        source,
        recipe,
        out,
        dtype=chosen_dtype(config.dtype, config.device),
        device=config.device,
        calibration=calibration_for(config, request.quant, tokenizer),
        trust_remote_code=config.trust_remote_code,
        baked=config.baked,
    )
    return "none" if config.baked else AUTO.name


def calibration_for(config: ExportConfig, quant: str, tokenizer: Any) -> list[Tensor]:
    """What the recipe of that name is calibrated on, if it is."""
    return calibration_text(config.calibration, load_recipe(quant), tokenizer) or calibration_ids(tokenizer)


def _copy(source: Path, out: Path) -> None:
    out.mkdir()
    for path in sorted(source.iterdir()):
        if path.is_file() and not _NOT_COPIED.fullmatch(path.name):
            shutil.copyfile(path, out / path.name)
