"""The number formats a recipe can name: an element grid, a block and a rule for the scale.

A scheme is data; ``quant/scale_rules.py`` holds the rules and ``quant/block.py`` the arithmetic around them.
Adding a format is adding a row here, and a scale rule there if it needs a new one. Where engines or libraries
compute the same format differently, each way is a row of its own, and ``used_by`` says whose it is.
"""

import difflib
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from bitdraft.quant.smallfloat import E2M1, E2M3, E3M2, E4M3, E5M2, SmallFloat, Ties
from bitdraft.quant.smallint import INT4, INT8, SmallInt

Element = SmallFloat | SmallInt
ScaleRule = Literal[
    "amax", "amax-floored", "amax-or-zero", "amax-1e-10", "amax-1e-4", "amax-reciprocal", "hf-inverse", "static",
    "pow2-1e-10", "pow2-1e-4",
    "floor", "floor-stretched", "ceil", "even", "even-fp4", "rceil",
    "two-level", "two-level-kernel", "two-level-modelopt", "two-level-torchao",
    "range", "range-zero-point",
]  # fmt: skip
_E8M0_RULES = ("floor", "floor-stretched", "ceil", "even", "even-fp4", "rceil")


@dataclass(frozen=True)
class Scheme:
    """One number format.

    ``block`` counts elements along the last dimension (the contraction dimension of a linear layer) and
    ``rows`` the rows that share a scale; ``None`` means all of them. The scale rules, with ``A`` the block's
    largest magnitude and ``M`` the element's largest value:

    ====================== ============================================================================
    ``amax``               fp32 ``A / M``; for zeros 1, or the dtype's epsilon (``arithmetic="input"``)
    ``amax-floored``       fp32 ``max(A / M, 1 / (M · 512))``
    ``amax-or-zero``       fp32 ``A / M``; zeros have scale 0 and code 0
    ``amax-1e-10``         fp32 ``max(A, 1e-10) / M``; ``amax-1e-4`` likewise
    ``amax-reciprocal``    fp32 ``a · fl(1/M)``, codes from ``x · (M / a)``, with ``a = max(A, 1e-10)``
    ``hf-inverse``         fp32 ``1 / (M / A)``, codes from ``x · (M / A)``
    ``static``             fp32, given by the caller
    ``pow2-1e-10``         fp32 ``2^ceil(log2 max(s, 1e-10))``, ``s`` from ``amax-1e-10``; ``pow2-1e-4`` likewise
    ``floor``              E8M0: exponent of ``A``, minus that of ``M`` (OCP MX v1.0 §6.3)
    ``floor-stretched``    E8M0: ``floor``, and the whole grid times 4/3, so that nothing is clipped
    ``ceil``               E8M0: exponent of ``A`` rounded up, minus that of ``M``
    ``even``               E8M0: exponent of ``A`` rounded to the element's mantissa, minus that of ``M``
    ``even-fp4``           ``even`` with one mantissa bit, whatever the element's
    ``rceil``              E8M0: ``2^ceil(log2(A · fl(1/M)))``
    ``two-level``          E4M3 per block under one fp32 scale per tensor, codes by division
    ``two-level-kernel``   the same storage, codes by reciprocals
    ``two-level-modelopt`` the same storage, block scales not below 2^-9 and 1 for zeros
    ``two-level-torchao``  the same storage, block scales not below 2^-6
    ``range``              ``A`` over half the number of steps: 7.5 for INT4
    ``range-zero-point``   ``(max - min)`` over the number of steps, and an integer zero point
    ====================== ============================================================================

    ``reciprocal``: codes from ``x · (1 / scale)`` instead of ``x / scale`` (one-level fp32 scales).
    ``arithmetic``: ``fp32`` from the input's exact values; ``scale`` rounds the scale to the input's dtype,
    ``input`` rounds every result to it, as libraries do that never leave the weights' bf16.
    """

    name: str
    element: Element
    block: int | None
    scale: ScaleRule
    rows: int | None = 1
    ties: Ties = "even"
    reciprocal: bool = False
    arithmetic: Literal["fp32", "scale", "input"] = "fp32"
    used_by: str = ""

    @property
    def has_global_scale(self) -> bool:
        """Whether an fp32 scale of the whole tensor stands above the block scales (NVFP4)."""
        return self.scale.startswith("two-level")

    @property
    def stores_decode_scale(self) -> bool:
        """Whether its owner multiplies by the global scale (``amax / 2688``) instead of dividing by it."""
        return self.scale in ("two-level-modelopt", "two-level-torchao", "floor-stretched")

    @property
    def has_zero_point(self) -> bool:
        return self.scale == "range-zero-point"

    @property
    def scale_format(self) -> Literal["e8m0", "e4m3", "fp32"]:
        """How block scales are stored."""
        if self.scale in _E8M0_RULES:
            return "e8m0"
        return "e4m3" if self.has_global_scale else "fp32"

    @property
    def allows_short_blocks(self) -> bool:
        """Whether the last block of a row or column may be shorter: only engines' two-dimensional blocks are."""
        return self.rows is not None and self.rows > 1


_CT = "compressed-tensors (llm-compressor)"

# FP8. Weights: per tensor, per output channel, 128 x 128. Activations: per tensor, per token, 1 x 128.
FP8_TENSOR = Scheme("fp8-tensor", E4M3, None, "amax", rows=None, used_by="modelopt and torchao, fp32 weights")
FP8_TENSOR_DYNAMIC = replace(
    FP8_TENSOR, name="fp8-tensor-dynamic", scale="amax-or-zero", reciprocal=True, used_by="vLLM's CUDA kernel"
)
FP8_TENSOR_STATIC = Scheme(
    "fp8-tensor-static", E4M3, None, "static", rows=None, reciprocal=True, used_by="vLLM's CUDA kernel"
)
FP8_KV = Scheme("fp8-kv", E4M3, None, "static", rows=None, used_by="vLLM's KV cache, kv_cache_dtype fp8_e4m3")
FP8_CHANNEL = Scheme("fp8-channel", E4M3, None, "amax", used_by=f"{_CT}, modelopt, torchao: fp32 weights")
FP8_TOKEN = Scheme("fp8-token", E4M3, None, "amax-floored", used_by="vLLM's CUDA kernel, per-token activations")
FP8_TOKEN_NATIVE = replace(
    FP8_TOKEN, name="fp8-token-native", reciprocal=True, used_by="vLLM without its CUDA kernel (torch.compile)"
)
FP8_TOKEN_SGLANG = Scheme(
    "fp8-token-sglang", E4M3, None, "amax-or-zero", reciprocal=True, used_by="SGLang's per_token_quant_fp8"
)
FP8_GROUP = Scheme("fp8-group128", E4M3, 128, "amax-1e-10", used_by="vLLM's CUDA kernel, 1x128 activation groups")
FP8_GROUP_NATIVE = replace(
    FP8_GROUP, name="fp8-group128-native", scale="amax-floored", used_by="vLLM without its CUDA kernel"
)
FP8_GROUP_SGLANG = replace(
    FP8_GROUP, name="fp8-group128-sglang", scale="amax-reciprocal", used_by="SGLang's per_token_group_quant_fp8"
)
FP8_GROUP_UE8M0 = replace(
    FP8_GROUP, name="fp8-group128-ue8m0", scale="pow2-1e-10", used_by="vLLM with DeepGEMM on Blackwell"
)
FP8_BLOCK = Scheme(
    "fp8-block128", E4M3, 128, "amax-1e-4", rows=128, reciprocal=True, used_by="vLLM's per_block_cast_to_fp8"
)
FP8_BLOCK_HF = Scheme(
    "fp8-block128-hf", E4M3, 128, "hf-inverse", rows=128, used_by="transformers' fine-grained FP8 (weight_scale_inv)"
)
FP8_BLOCK_UE8M0 = replace(
    FP8_BLOCK, name="fp8-block128-ue8m0", scale="pow2-1e-4", used_by="vLLM with DeepGEMM on Blackwell, at load"
)

# FP8 in the weights' own dtype: what those libraries write for a bf16 checkpoint.
FP8_TENSOR_CT = replace(FP8_TENSOR, name="fp8-tensor-ct", arithmetic="input", used_by=f"{_CT}, modelopt")
FP8_CHANNEL_CT = replace(FP8_CHANNEL, name="fp8-channel-ct", arithmetic="input", used_by=f"{_CT}, modelopt")
FP8_TOKEN_CT = replace(FP8_CHANNEL, name="fp8-token-ct", arithmetic="input", used_by=f"{_CT}, fake-quantization")
FP8_GROUP_CT = Scheme("fp8-group128-ct", E4M3, 128, "amax", arithmetic="input", used_by=f"{_CT}, fake-quantization")
FP8_BLOCK_CT = replace(FP8_GROUP_CT, name="fp8-block128-ct", rows=128, used_by=f"{_CT}, modelopt")
FP8_TENSOR_TORCHAO = replace(FP8_TENSOR, name="fp8-tensor-torchao", arithmetic="scale", used_by="torchao")
FP8_CHANNEL_TORCHAO = replace(FP8_CHANNEL, name="fp8-channel-torchao", arithmetic="scale", used_by="torchao")
FP8_BLOCK_TORCHAO = replace(FP8_BLOCK_CT, name="fp8-block128-torchao", arithmetic="scale", used_by="torchao")

_E5M2_USE = "the E5M2 form of the E4M3 rule of that name"
E5M2_TENSOR = replace(FP8_TENSOR, name="fp8-e5m2-tensor", element=E5M2, used_by=_E5M2_USE)
E5M2_CHANNEL = replace(FP8_CHANNEL, name="fp8-e5m2-channel", element=E5M2, used_by=_E5M2_USE)
E5M2_TOKEN = replace(FP8_TOKEN, name="fp8-e5m2-token", element=E5M2, used_by=_E5M2_USE)
E5M2_GROUP = replace(FP8_GROUP, name="fp8-e5m2-group128", element=E5M2, used_by=_E5M2_USE)
E5M2_BLOCK = replace(FP8_BLOCK, name="fp8-e5m2-block128", element=E5M2, used_by=_E5M2_USE)
E5M2_KV = replace(FP8_KV, name="fp8-e5m2-kv", element=E5M2, used_by="vLLM's KV cache, kv_cache_dtype fp8_e5m2")

# MX: blocks of 32 under a power of two. The rule decides the byte; the elements differ in ties only.
MXFP4_FLOOR = Scheme("mxfp4-floor", E2M1, 32, "floor", used_by="torchao FLOOR, auto-round mx_fp, microxcaling 'even'")
MXFP4_FLOOR_AWAY = replace(MXFP4_FLOOR, name="mxfp4-floor-away", ties="away", used_by="microxcaling 'nearest'")
MXFP4_CEIL = Scheme("mxfp4-ceil", E2M1, 32, "ceil", used_by="torchao CEIL")
MXFP4_EVEN = Scheme("mxfp4-even", E2M1, 32, "even", used_by=f"{_CT}, torchao EVEN, vLLM's CUTLASS MoE activations")
MXFP4_RCEIL = Scheme(
    "mxfp4-rceil", E2M1, 32, "rceil", used_by="FlashInfer and TensorRT-LLM activations, torchao RCEIL, fouroversix"
)
MXFP4_RCEIL_AWAY = replace(MXFP4_RCEIL, name="mxfp4-rceil-away", ties="away", used_by="gpt-oss triton_kernels")
MXFP4_RCEIL_ZERO = replace(MXFP4_RCEIL, name="mxfp4-rceil-zero", ties="zero", used_by="modelopt MXFP4QTensor")

MXFP4_FP_QUANT = Scheme("mxfp4-fp-quant", E2M1, 32, "floor-stretched", arithmetic="input", used_by="FP-Quant, QuTLASS")

MXFP6_E2M3_FLOOR = Scheme("mxfp6-e2m3-floor", E2M3, 32, "floor", used_by="torchao FLOOR, auto-round, microxcaling")
MXFP6_E2M3_FLOOR_AWAY = replace(
    MXFP6_E2M3_FLOOR, name="mxfp6-e2m3-floor-away", ties="away", used_by="microxcaling 'nearest'"
)
MXFP6_E2M3_CEIL = Scheme("mxfp6-e2m3-ceil", E2M3, 32, "ceil", used_by="torchao CEIL")
MXFP6_E2M3_EVEN = Scheme("mxfp6-e2m3-even", E2M3, 32, "even", used_by=f"{_CT}, torchao EVEN")
MXFP6_E2M3_RCEIL = Scheme("mxfp6-e2m3-rceil", E2M3, 32, "rceil", used_by="torchao RCEIL")
MXFP6_E3M2_FLOOR = Scheme("mxfp6-e3m2-floor", E3M2, 32, "floor", used_by="torchao FLOOR, microxcaling 'even'")
MXFP6_E3M2_FLOOR_AWAY = replace(
    MXFP6_E3M2_FLOOR, name="mxfp6-e3m2-floor-away", ties="away", used_by="microxcaling 'nearest'"
)
MXFP6_E3M2_CEIL = Scheme("mxfp6-e3m2-ceil", E3M2, 32, "ceil", used_by="torchao CEIL")
MXFP6_E3M2_EVEN = Scheme("mxfp6-e3m2-even", E3M2, 32, "even", used_by="torchao EVEN")
MXFP6_E3M2_RCEIL = Scheme("mxfp6-e3m2-rceil", E3M2, 32, "rceil", used_by="torchao RCEIL")

MXFP8_FLOOR = Scheme("mxfp8-floor", E4M3, 32, "floor", used_by="torchao FLOOR, auto-round, microxcaling 'even'")
MXFP8_FLOOR_AWAY = replace(MXFP8_FLOOR, name="mxfp8-floor-away", ties="away", used_by="microxcaling 'nearest'")
MXFP8_CEIL = Scheme("mxfp8-ceil", E4M3, 32, "ceil", used_by="torchao CEIL")
MXFP8_EVEN = Scheme("mxfp8-even", E4M3, 32, "even", used_by="torchao EVEN")
MXFP8_EVEN_CT = Scheme("mxfp8-even-ct", E4M3, 32, "even-fp4", used_by=_CT)
MXFP8_RCEIL = Scheme(
    "mxfp8-rceil", E4M3, 32, "rceil", used_by="vLLM, SGLang and FlashInfer activations, modelopt, torchao RCEIL"
)

# NVFP4: blocks of 16 under an E4M3 scale, under one fp32 scale per tensor.
NVFP4 = Scheme("nvfp4", E2M1, 16, "two-level", used_by=f"{_CT}, fp32 weights")
NVFP4_KERNEL = Scheme("nvfp4-kernel", E2M1, 16, "two-level-kernel", used_by="vLLM's and FlashInfer's kernels")
NVFP4_CT = replace(NVFP4, name="nvfp4-ct", arithmetic="scale", used_by=f"{_CT}, scales in the weights' own dtype")
NVFP4_MODELOPT = Scheme("nvfp4-modelopt", E2M1, 16, "two-level-modelopt", used_by="modelopt NVFP4QTensor")
NVFP4_TORCHAO = Scheme("nvfp4-torchao", E2M1, 16, "two-level-torchao", used_by="torchao")

# Integers, in the weights' own dtype because the scale is stored in it.
_INT_USE = f"{_CT} W4A16, GPTQ"
INT4_GROUP = Scheme("int4-g128", INT4, 128, "range", arithmetic="input", used_by=_INT_USE)
INT4_GROUP_ASYM = replace(INT4_GROUP, name="int4-g128-asym", scale="range-zero-point", used_by=f"{_CT} W4A16_ASYM")
INT4_CHANNEL = replace(INT4_GROUP, name="int4-channel", block=None)
INT8_GROUP = replace(INT4_GROUP, name="int8-g128", element=INT8, used_by=f"{_CT} W8A16")
INT8_GROUP_ASYM = replace(INT8_GROUP, name="int8-g128-asym", scale="range-zero-point")
INT8_CHANNEL = replace(INT8_GROUP, name="int8-channel", block=None, used_by=f"{_CT} W8A8, W8A16")
INT8_TOKEN = replace(INT8_CHANNEL, name="int8-token", arithmetic="fp32", used_by=f"{_CT} W8A8 activations")

SCHEMES = {s.name: s for s in list(globals().values()) if isinstance(s, Scheme)}

_GROUP_SIZE = re.compile(r"(int[48])-g([1-9][0-9]*)(-asym)?")


@cache  # one object per name: callers compare schemes by identity
def _with_group_size(element: str, size: int, asym: str) -> Scheme:
    base = SCHEMES[f"{element}-g128{asym}"]
    return base if size == base.block else replace(base, name=f"{element}-g{size}{asym}", block=size)


def scheme_named(name: str) -> Scheme:
    """The scheme called ``name``; integer groups may have any size (``int4-g64-asym``).

    ``ValueError`` names the nearest one otherwise.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    if match := _GROUP_SIZE.fullmatch(name):
        element, size, asym = match.groups()
        return _with_group_size(element, int(size), asym or "")
    near = difflib.get_close_matches(name, SCHEMES, n=1, cutoff=0.0)[0]
    raise ValueError(f"unknown number format {name!r}: did you mean {near!r}? (known: {', '.join(SCHEMES)})")
