"""A target's files into a transformers model: ordinary checkpoints, and decoded ones that are already quantized."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from bitdraft.quant.attention.packed import PACKED_SDPA
from bitdraft.quant.checkpoints.read import StoredCheckpoint, method_of, quantization_of, read_checkpoint
from bitdraft.quant.checkpoints.tensors import model_folder
from bitdraft.quant.recipe import Recipe


def read_config(target: str, trust_remote_code: bool) -> Any:
    """The configuration of a model folder or hub id; ``ValueError`` where there is none."""
    path = Path(target)
    if path.exists() and not (path / "config.json").is_file():
        raise ValueError(f"target folder {target} has no config.json: give a transformers model folder")
    try:
        return AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"target {target!r} is neither a model folder nor a model id that can be reached: {first_line(error)}"
        ) from error


def stored_checkpoint(target: str, config: Any, recipe: Recipe, dtype: torch.dtype) -> StoredCheckpoint | None:
    """The decoded checkpoint under ``AUTO`` (with or without a suffix), nothing under other recipes.

    Takes the quantization out of ``config``, else transformers would decode the checkpoint in its own way. Raises
    ``ValueError`` where recipe and checkpoint do not go together and where ``read_checkpoint`` does.
    """
    declared = quantization_of(config, target)
    if not recipe.is_auto:
        if declared is not None:
            raise ValueError(
                f"target {target!r} is already quantized ({method_of(declared)}): serve it as it is with "
                "--target-quant auto, or give its 16-bit checkpoint, which --target-quant then quantizes"
            )
        return None
    folder = model_folder(target)
    declared = declared if declared is not None else quantization_of(config, str(folder))
    if declared is None:
        raise ValueError(f"target {target!r} is not quantized: --target-quant auto needs a quantized checkpoint")
    half = (torch.bfloat16, torch.float16)
    served = next((t for t in (dtype, getattr(config, "dtype", None)) if t in half), torch.bfloat16)
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return read_checkpoint(folder, declared, served)


def load_model(
    target: str, config: Any, dtype: torch.dtype, trust_remote_code: bool, stored: StoredCheckpoint | None
) -> nn.Module:
    """The frozen model, its weights the target's or the values of ``stored``; ``ValueError`` if any is missing."""
    how = {"dtype": dtype, "attn_implementation": _attention_for(config), "output_loading_info": True}
    try:
        if stored is None:
            model, info = AutoModelForCausalLM.from_pretrained(
                target, trust_remote_code=trust_remote_code, use_safetensors=True, **how
            )
        elif (model_class := _class_of(config)) is not None:
            model, info = model_class.from_pretrained(None, config=config, state_dict=stored.state_dict, **how)
        else:
            raise ValueError("quantized checkpoints of models that bring their own code are not read")
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ValueError(
            f"target {target!r} could not be loaded (damaged or incomplete checkpoint?): {first_line(error)}"
        ) from error
    absent = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
    if absent:
        raise ValueError(f"target {target!r} is incomplete: {len(absent)} weights are missing, e.g. {absent[0]}")
    if stored is not None:  # which transformers reads only beside the weights that it loads itself
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(target)
    model.eval().requires_grad_(False)
    return model


def placed(model: nn.Module, device: str) -> nn.Module:
    """``model`` on ``device``; ``ValueError`` where there is no such device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        raise ValueError(f"device {device!r} is not here: {first_line(error)}") from error
    return model.to(device)


def placed_text(model: nn.Module, calibration: Sequence[Tensor]) -> list[Tensor]:
    """Calibration text, token ids ``[B, T]`` each, where ``model`` is; rows end where its context does."""
    config: Any = model.config
    embedding: nn.Embedding = model.get_input_embeddings()  # type: ignore[operator]
    return [ids[:, : config.max_position_embeddings].to(embedding.weight.device) for ids in calibration]


def _attention_for(config: Any) -> str:
    """transformers' own attention where a model has what ``sdpa`` would silently leave out (gpt-oss: sinks)."""
    return PACKED_SDPA if getattr(_class_of(config), "_supports_sdpa", True) else "eager"


def _class_of(config: Any) -> Any:
    """transformers' own model class, ``None`` for models that bring their own code."""
    return AutoModelForCausalLM._model_mapping.get(type(config), None)


def first_line(error: Exception) -> str:
    """What an error says, without what follows it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
