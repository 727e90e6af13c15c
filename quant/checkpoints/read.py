"""What a quantized checkpoint declares and holds, as a plain state dict beside the scales that stay outside.

Every quantized weight enters the state dict as its *values* (codes times inner scales, exact in bf16) under the name
that the 16-bit weight would have. transformers then loads it as if it were an ordinary checkpoint, renaming and
fusing experts as usual, and ``quant/checkpoints/attach.py`` puts the *outer* scales back.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitdraft.quant.block import Quantized
from bitdraft.quant.checkpoints.cache_scales import CACHE_TENSORS, declares_fp8_cache
from bitdraft.quant.checkpoints.compressed import CompressedTensors
from bitdraft.quant.checkpoints.fine_grained import FineGrainedFp8
from bitdraft.quant.checkpoints.integers import Awq, Gptq
from bitdraft.quant.checkpoints.modelopt import ModelOpt
from bitdraft.quant.checkpoints.stored import Formats, Reader, StoredLayer, check_finite, check_shape
from bitdraft.quant.checkpoints.tensors import TensorFiles
from bitdraft.quant.codes import Encoded, e8m0_scales, to_quantized
from bitdraft.quant.pack import unpack_fp4
from bitdraft.quant.schemes import MXFP4_EVEN

_READERS: dict[str, Callable[[Mapping[str, Any]], Reader]] = {
    "compressed-tensors": CompressedTensors,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "modelopt_mixed": ModelOpt,
    "fp8": FineGrainedFp8,
    "gptq": Gptq,
    "awq": Awq,
}
_GPT_OSS = "mxfp4"
_MODELOPT_FILE = "hf_quant_config.json"

# The last parts of names that only quantized layers have.
_SCALES = {
    "weight_packed", "weight_scale", "weight_global_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_scale_2", "weight_scale_inv", "input_global_scale", "input_scale", "pre_quant_scale",
    "qweight", "qzeros", "scales", "g_idx",
}  # fmt: skip


@dataclass(frozen=True)
class StoredCheckpoint:
    """A quantized checkpoint, decoded."""

    method: str
    state_dict: dict[str, Tensor]
    """What a 16-bit checkpoint would hold, with values in place of quantized weights."""
    layers: dict[str, StoredLayer]
    """Quantized layers by the checkpoint's names, without their values."""
    formats: Callable[[str], Formats | None]
    """What the configuration declares for a linear layer of the model."""
    experts: dict[str, Formats] = field(default_factory=dict)
    """Experts modules whose experts are all in one format without outer scales (gpt-oss)."""
    has_fp8_cache: bool = False
    """Whether the configuration asks for an FP8 KV cache."""
    cache_tensors: dict[str, Tensor] = field(default_factory=dict)
    """Scales of keys and values by the checkpoint's names, asked for or not."""


def quantization_of(config: Any, target: str) -> dict[str, Any] | None:
    """What the model's configuration, or ModelOpt's file beside it, says about quantization; ``None`` for 16 bit."""
    text_config = config.get_text_config(decoder=True)
    declared = getattr(config, "quantization_config", None) or getattr(text_config, "quantization_config", None)
    if declared:
        return dict(declared if isinstance(declared, Mapping) else declared.to_dict())
    beside = Path(target) / _MODELOPT_FILE
    if beside.is_file():
        try:
            content = json.loads(beside.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{beside} is not JSON") from error
        return {"quant_method": "modelopt", **content}
    return None


def method_of(declared: Mapping[str, Any]) -> str:
    """The quantization method's name; ModelOpt's is known by its ``quant_algo`` too."""
    if "quant_method" not in declared and "quant_algo" in declared:
        return "modelopt"
    return str(declared.get("quant_method", "unknown"))


def read_checkpoint(folder: Path, declared: Mapping[str, Any], served: torch.dtype) -> StoredCheckpoint:
    """Decode all tensors of ``folder``. ``served``: the 16-bit type that the engine computes in.

    Raises ``ValueError`` in one sentence for an unknown method and, naming the tensor, for scales that are missing,
    of another shape or not finite, and for quantized layers that the configuration leaves alone.
    """
    method = method_of(declared)
    files = TensorFiles(folder)
    if method == _GPT_OSS:
        return _read_gpt_oss(files)
    if method not in _READERS:
        known = ", ".join([*_READERS, _GPT_OSS])
        raise ValueError(f"{folder} is quantized by {method!r}, which is not known here (there are: {known})")
    reader = _READERS[method](declared)
    state_dict: dict[str, Tensor] = {}
    layers: dict[str, StoredLayer] = {}
    has_fp8_cache = declares_fp8_cache(declared)
    grouped, cache_names = _grouped(files)
    for layer, leaves in grouped.items():
        if not _is_quantized(files, layer, leaves):
            state_dict |= {_join(layer, leaf): files[_join(layer, leaf)] for leaf in leaves}
            continue
        formats = reader.formats(layer)
        if formats is None:
            leaf = next(leaf for leaf in leaves if leaf != "bias")
            raise ValueError(f"tensor {layer}.{leaf} is quantized, but the configuration leaves this layer alone")
        stored = reader.read(layer, {leaf: files[_join(layer, leaf)] for leaf in leaves}, formats, served)
        state_dict[f"{layer}.weight"] = stored.weight.values
        if "bias" in leaves:
            state_dict[f"{layer}.bias"] = files[f"{layer}.bias"]
        layers[layer] = _without_values(stored)
    return StoredCheckpoint(
        method,
        state_dict,
        layers,
        reader.formats,
        has_fp8_cache=has_fp8_cache,
        cache_tensors={name: files[name] for name in cache_names},
    )


def _grouped(files: TensorFiles) -> tuple[dict[str, list[str]], list[str]]:
    """The last parts of names by layer, and the whole names of scales of a KV cache."""
    grouped: dict[str, list[str]] = defaultdict(list)
    cache_names = []
    for name in files:
        layer, _, leaf = name.rpartition(".")
        if leaf in CACHE_TENSORS:
            cache_names.append(name)
        else:
            grouped[layer].append(leaf)
    return dict(grouped), cache_names


def _is_quantized(files: TensorFiles, layer: str, leaves: list[str]) -> bool:
    if _SCALES & set(leaves):
        return True
    return "weight" in leaves and not _is_high_precision(files[_join(layer, "weight")].dtype)


def _is_high_precision(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _join(layer: str, leaf: str) -> str:
    return f"{layer}.{leaf}" if layer else leaf


def _without_values(stored: StoredLayer) -> StoredLayer:
    kept = replace(stored.weight, values=stored.weight.values.to("meta"))  # the shape stays
    return replace(stored, weight=kept)


def _read_gpt_oss(files: TensorFiles) -> StoredCheckpoint:
    """gpt-oss: ``…experts.gate_up_proj_blocks`` uint8 ``[E, N, K/32, 16]`` and ``…_scales`` uint8 ``[E, N, K/32]``.

    transformers keeps these experts transposed, ``[E, K, N]``. The inputs stay in 16 bit, as vLLM's Marlin and
    Triton kernels have them; other backends quantize them.
    """
    state_dict: dict[str, Tensor] = {}
    experts: dict[str, Formats] = {}
    formats = Formats(MXFP4_EVEN.name, None)  # the format of the bytes; who chose the exponents does not matter
    for name in files:
        if name.endswith("_blocks"):
            module, _, projection = name.removesuffix("_blocks").rpartition(".")
            if f"{module}.{projection}_scales" not in files:
                raise ValueError(f"tensor {module}.{projection}_scales is missing, which {name} needs")
            state_dict[f"{module}.{projection}"] = _mxfp4_experts(files, f"{module}.{projection}").transpose(1, 2)
            experts[module] = formats
        elif name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" not in files:
            raise ValueError(f"tensor {name.removesuffix('_scales')}_blocks is missing, which {name} belongs to")
        elif not name.endswith("_scales"):
            state_dict[name] = files[name]
    if not experts:
        raise ValueError(f"{files.folder} declares MXFP4 experts but holds none (tensors that end in _blocks)")

    def declared(layer: str) -> Formats | None:
        return formats if any(layer.startswith(f"{module}.") for module in experts) else None

    return StoredCheckpoint(_GPT_OSS, state_dict, {}, declared, experts)


def _mxfp4_experts(files: TensorFiles, name: str) -> Tensor:
    """``[E, N, K]`` fp32 values."""
    blocks, scales = files[f"{name}_blocks"], files[f"{name}_scales"]
    if blocks.ndim != 4 or blocks.shape[-1] != 16 or blocks.dtype != torch.uint8:
        raise ValueError(f"tensor {name}_blocks is {blocks.dtype} {list(blocks.shape)}, not uint8 [E, N, K/32, 16]")
    check_shape(f"{name}_scales", scales, blocks.shape[:3])
    check_finite(f"{name}_scales", e8m0_scales(scales))
    q: Quantized = to_quantized(Encoded(MXFP4_EVEN, unpack_fp4(blocks).flatten(-2), scales))
    return q.values
