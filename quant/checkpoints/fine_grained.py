"""Reading ``quant_method: fp8``: DeepSeek's and Qwen's 128 x 128 blocks, and older checkpoints with one scale.

``weight_scale_inv`` is a decode scale in spite of its name. Facts as read in transformers 5.24
(``FineGrainedFP8Config``) and vLLM 0.33 (``Fp8Config``).
"""

from collections.abc import Mapping
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
    named_or_inside,
    need,
    one_number,
    scale_shapes,
    scheme_of,
)
from bitdraft.quant.codes import Encoded


class FineGrainedFp8:
    """``weight`` in E4M3 beside ``weight_scale_inv`` of blocks or, without ``weight_block_size``, ``weight_scale``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        block = config.get("weight_block_size")
        dynamic = config.get("activation_scheme", "dynamic") == "dynamic"
        if block is not None and (list(block) != [128, 128] or not dynamic):
            raise ValueError(f"FP8 weights in blocks of {block} with {config.get('activation_scheme')} inputs")
        if block is not None:
            self._formats = Formats("fp8-block128", "fp8-group128")
        else:
            self._formats = Formats("fp8-tensor", "fp8-token" if dynamic else "fp8-tensor-static")
        self._left_alone = listed(config, "modules_to_not_convert", "ignored_layers")

    def formats(self, layer: str) -> Formats | None:
        return None if named_or_inside(layer, self._left_alone) else self._formats

    def read(self, layer: str, parts: Mapping[str, Tensor], formats: Formats, served: torch.dtype) -> StoredLayer:
        scheme = scheme_of(formats)
        scale_name = "weight_scale_inv" if scheme.block else "weight_scale"
        need(layer, parts, "weight", scale_name)
        codes, scale = parts["weight"], parts[scale_name].float()
        if codes.dtype != torch.float8_e4m3fn or codes.ndim != 2:
            raise ValueError(f"tensor {layer}.weight is {codes.dtype} {list(codes.shape)}, where FP8 is needed")
        check_shape(f"{layer}.{scale_name}", scale, *scale_shapes(scheme, *codes.shape))
        check_finite(f"{layer}.{scale_name}", scale)
        static = formats.activations == "fp8-tensor-static"
        input_scale = one_number(layer, parts, "input_scale") if static else None
        scale = scale.reshape(()) if scheme.rows is None else scale
        encoded = Encoded(scheme, codes.view(torch.uint8), scale)
        return decoded(f"{layer}.weight", encoded, formats, served, input_scale)
