"""Reading ModelOpt checkpoints: FP8 and NVFP4, uniform or mixed.

The configuration lies in ``hf_quant_config.json`` (``quantization: {quant_algo, exclude_modules, …}``) or in
config.json's ``quantization_config`` (``quant_algo``, ``ignore``); excluded names are globs. Unlike
compressed-tensors, global scales are *decode* scales: ``weight_scale_2 = amax / 2688``. Facts as read in modelopt
0.47 and vLLM 0.33.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from bitdraft.quant.checkpoints.stored import (
    Formats,
    StoredLayer,
    check_finite,
    check_shape,
    decoded,
    listed,
    need,
    one_number,
    scale_shapes,
    scheme_of,
)
from bitdraft.quant.codes import Encoded, e8m0_scales
from bitdraft.quant.pack import unpack_fp4

_ALGORITHMS = {
    "FP8": Formats("fp8-tensor", "fp8-tensor-static"),
    "FP8_PER_CHANNEL_PER_TOKEN": Formats("fp8-channel", "fp8-token"),
    "FP8_PB_WO": Formats("fp8-block128", "fp8-group128"),
    "NVFP4": Formats("nvfp4-modelopt", "nvfp4-kernel"),
    "W4A16_NVFP4": Formats("nvfp4-modelopt", None),
    "MXFP8": Formats("mxfp8-rceil", "mxfp8-rceil"),
}


class ModelOpt:
    """``quant_method: modelopt`` (also ``modelopt_fp4`` and ``modelopt_mixed``)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = config.get("quantization", config)
        self._excluded = listed(config, "exclude_modules", "ignore")
        algorithm = config.get("quant_algo")
        self._layers: dict[str, Formats] | None = None
        if algorithm == "MIXED_PRECISION":
            layers = config.get("quantized_layers") or {}
            self._layers = {str(name): _formats(args.get("quant_algo")) for name, args in layers.items()}
        else:
            self._everywhere = _formats(algorithm)

    def formats(self, layer: str) -> Formats | None:
        if any(fnmatchcase(layer, glob) or fnmatchcase(layer, f"{glob}.*") for glob in self._excluded):
            return None
        return self._everywhere if self._layers is None else self._layers.get(layer)

    def read(self, layer: str, parts: Mapping[str, Tensor], formats: Formats, served: torch.dtype) -> StoredLayer:
        if "pre_quant_scale" in parts:
            raise ValueError(f"tensor {layer}.pre_quant_scale: inputs that are scaled before (AWQ) are not supported")
        need(layer, parts, "weight", "weight_scale")
        scheme, packed = scheme_of(formats), parts["weight"]
        wanted = torch.uint8 if scheme.element.bits == 4 else torch.float8_e4m3fn
        if packed.dtype != wanted or packed.ndim != 2:
            shape = list(packed.shape)
            raise ValueError(f"tensor {layer}.weight is {packed.dtype} {shape}, where a matrix of {wanted} is needed")
        codes = unpack_fp4(packed) if scheme.element.bits == 4 else packed.view(torch.uint8)
        scale, rows, columns = parts["weight_scale"], *codes.shape
        if scale.ndim == 4:  # FP8_PB_WO: [N / 128, 1, K / 128, 1]
            scale = scale[:, 0, :, 0]
        check_shape(f"{layer}.weight_scale", scale, *scale_shapes(scheme, rows, columns))
        as_numbers = e8m0_scales(scale) if scheme.scale_format == "e8m0" else scale.float()
        check_finite(f"{layer}.weight_scale", as_numbers)
        if scheme.scale_format == "fp32":
            stored = as_numbers.reshape(()) if scheme.rows is None else as_numbers
            stored = stored.reshape(rows, 1) if scheme.block is None and scheme.rows is not None else stored
        else:
            stored = scale.view(torch.uint8)
        overall = one_number(layer, parts, "weight_scale_2") if scheme.has_global_scale else None
        input_scale = None
        if formats.activations in ("nvfp4-kernel", "fp8-tensor-static"):
            input_scale = one_number(layer, parts, "input_scale")
            if formats.activations == "nvfp4-kernel":
                input_scale = 1.0 / input_scale
        encoded = Encoded(scheme, codes, stored, None, overall)
        return decoded(f"{layer}.weight", encoded, formats, served, input_scale)


def _formats(algorithm: Any) -> Formats:
    if algorithm not in _ALGORITHMS:
        known = ", ".join(_ALGORITHMS)
        raise ValueError(f"ModelOpt's quant_algo {algorithm!r} is not supported (there are: {known}, MIXED_PRECISION)")
    return _ALGORITHMS[algorithm]
