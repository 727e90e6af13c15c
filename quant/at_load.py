"""What an engine does to the stored weight of a layer at load, beyond decoding it.

* ``marlin``: vLLM's kernel for GPUs without FP4 units keeps NVFP4's block scales as 16-bit floats without subnormals
  (``nvfp4_marlin_process_scales``, vLLM 0.33). With ``sf = 2^floor(log2(448 / max s))``, block scales with
  ``s · sf < 2^-6`` become 0, and with them their blocks. A checkpoint whose largest block scale lies in E4M3's top
  binade, as usual, has ``sf = 1``: it loses exactly its subnormal scales. Served in fp16, ``sf`` is 1 always.
* ``requantize-ue8m0``: DeepGEMM on Blackwell wants power-of-two scales, so block FP8 is decoded to fp32 and quantized
  again (``requant_weight_ue8m0_inplace``, vLLM 0.33).
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from bitdraft.quant.block import Quantized, dequantize, quantize
from bitdraft.quant.schemes import FP8_BLOCK_UE8M0, Scheme
from bitdraft.quant.smallfloat import E4M3

# M output channel, K input channel, G block of input channels.

AtLoad = Literal["decode", "marlin", "requantize-ue8m0"]


def check_at_load(at_load: str, weights: Scheme | None) -> None:
    """``ValueError`` where the treatment does not belong to the weights' format."""
    if at_load == "marlin" and (weights is None or not weights.has_global_scale):
        raise ValueError("at_load 'marlin' belongs to NVFP4 weights ('nvfp4')")
    if at_load == "requantize-ue8m0" and (weights is None or (weights.rows, weights.block) != (128, 128)):
        raise ValueError("at_load 'requantize-ue8m0' belongs to FP8 weights in blocks of 128 x 128 ('fp8-block128')")


def loaded(weights: Sequence[Quantized], at_load: str, served: torch.dtype) -> list[Quantized]:
    """The weights ``[M_i, K]`` of layers that engines fuse, as the engine multiplies by them; computed in ``served``.

    What is decoded comes back as it is.
    """
    if at_load == "marlin":
        factor = 1.0 if served == torch.float16 else marlin_factor([q.scale for q in weights])
        return [_without_small_scales(q, factor) for q in weights]
    if at_load == "requantize-ue8m0":
        return [quantize(dequantize(_in_fp32(q)), FP8_BLOCK_UE8M0) for q in weights]
    return list(weights)


def marlin_factor(scales: Sequence[Tensor]) -> float:
    """``sf`` for block scales (decoded E4M3, any shapes); 1 where all of them are 0."""
    largest = max(float(scale.max()) for scale in scales)
    if largest == 0:
        return 1.0
    return 2.0 ** math.floor(math.log2(E4M3.max / largest))  # exact: the quotient is no power of two but 1.75 / 1.75


def _without_small_scales(q: Quantized, factor: float) -> Quantized:
    small_MG = q.scale * factor < E4M3.min_normal
    small_MK = small_MG.repeat_interleave(q.values.shape[-1] // small_MG.shape[-1], dim=-1)
    return Quantized(q.values.masked_fill(small_MK, 0), q.outer, q.scale.masked_fill(small_MG, 0), q.block)


def _in_fp32(q: Quantized) -> Quantized:
    return Quantized(q.values.float(), q.outer, q.scale, q.block)
