"""What a compressed-tensors checkpoint's configuration says for the number formats of a recipe.

The words are those of compressed-tensors 0.20's presets; the package itself checks and completes them.
"""

from collections.abc import Mapping
from typing import Any

from bitdraft.quant.recipe import Recipe, Rule

_FLOAT = {"type": "float", "symmetric": True}
_FP8 = {**_FLOAT, "num_bits": 8}
_FP4 = {**_FLOAT, "num_bits": 4}
_NVFP4 = {**_FP4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
_MXFP4 = {**_FP4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_FP8_BLOCK = {**_FP8, "strategy": "block", "block_structure": [128, 128]}
_FP8_GROUP = {**_FP8, "strategy": "group", "group_size": 128, "dynamic": True}

WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8-channel": ("float-quantized", {**_FP8, "strategy": "channel"}),
    "fp8-channel-ct": ("float-quantized", {**_FP8, "strategy": "channel"}),
    "fp8-tensor": ("float-quantized", {**_FP8, "strategy": "tensor"}),
    "fp8-block128": ("float-quantized", _FP8_BLOCK),
    "fp8-block128-ct": ("float-quantized", _FP8_BLOCK),
    "nvfp4": ("nvfp4-pack-quantized", _NVFP4),
    "nvfp4-ct": ("nvfp4-pack-quantized", _NVFP4),
    "mxfp4-even": ("mxfp4-pack-quantized", _MXFP4),
    "mxfp4-rceil": ("mxfp4-pack-quantized", _MXFP4),
    "mxfp4-floor": ("mxfp4-pack-quantized", _MXFP4),
}
"""For weight formats: the name of the layout, and the arguments of the quantization."""

INPUTS: dict[str, dict[str, Any]] = {
    "fp8-token": {**_FP8, "strategy": "token", "dynamic": True},
    "fp8-group128": _FP8_GROUP,
    "nvfp4-kernel": {**_NVFP4, "dynamic": "local"},
    "mxfp4-rceil": {**_MXFP4, "dynamic": True},
    "mxfp4-even": {**_MXFP4, "dynamic": True},
}
"""For activation formats: the arguments. Engines compute them by their own kernels' rules, whatever wrote this."""


def check_has_layout(recipe: Recipe) -> None:
    """``ValueError`` naming the first rule that compressed-tensors has no layout for."""
    if recipe.kv is not None or recipe.attention is not None:
        raise ValueError(
            f"recipe {recipe.name!r}: checkpoints are written without the formats of the KV cache and of attention: "
            "leave them out, and serve with the engine's own option (vLLM: --kv-cache-dtype fp8)"
        )
    rules = [rule for rule in recipe.rules if not rule.leaves_alone]
    if not rules:
        raise ValueError(f"recipe {recipe.name!r} quantizes nothing: there is no checkpoint to write")
    for rule in rules:
        if rule.transform != "none":
            raise ValueError(
                f"recipe {recipe.name!r}, rule {rule.modules!r}: compressed-tensors has no place here for the "
                f"{rule.transform} transform of inputs, which the engine would have to apply: quantize without it"
            )
        if rule.residual:
            raise ValueError(
                f"recipe {recipe.name!r}, rule {rule.modules!r}: compressed-tensors has no place for residual "
                "corrections, and engines would not apply them: quantize without residual"
            )
        if rule.at_load != "decode":
            raise ValueError(
                f"recipe {recipe.name!r}, rule {rule.modules!r}: {rule.at_load} is what an engine does at load, which "
                "no checkpoint holds: quantize without it"
            )
        for name, known in ((rule.weights, WEIGHTS), (rule.activations, INPUTS)):
            if name is not None and name not in known:
                raise ValueError(
                    f"recipe {recipe.name!r}, rule {rule.modules!r}: {name} has no compressed-tensors layout here "
                    f"(there are: {', '.join(known)})"
                )


def quantization_config(quantized: Mapping[str, Rule], ignored: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of layers by their checkpoint names, as the package writes it.

    ``ignored``: linear layers that stay in high precision. Raises ``ValueError`` where the package is not installed.
    """
    try:
        from compressed_tensors.quantization import QuantizationConfig
    except ImportError as error:
        raise ValueError("writing quantized checkpoints needs `pip install 'bitdraft[checkpoints]'`") from error
    members: dict[tuple[str, str | None], list[str]] = {}
    for name, rule in quantized.items():
        assert rule.weights is not None
        members.setdefault((rule.weights, rule.activations), []).append(name)
    groups: dict[str, Any] = {}
    for number, ((weights, activations), names) in enumerate(members.items()):
        layout, args = WEIGHTS[weights]
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(members) == 1 else sorted(names),
            "weights": dict(args),
            "input_activations": dict(INPUTS[activations]) if activations else None,
            "format": layout,
        }
    layouts = {group["format"] for group in groups.values()}
    config = QuantizationConfig(
        config_groups=groups,
        ignore=sorted(ignored),
        format=layouts.pop() if len(layouts) == 1 else "mixed-precision",
        quantization_status="compressed",
    )
    return {**config.to_dict(), "quant_method": "compressed-tensors"}
