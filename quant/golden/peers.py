"""Which scheme reproduces which reference implementation, and where the two are known to part.

Data for ``quant/golden/check.py``. Patterns are globs over ``<file>/<peer>/<set>/<field>``; a block is named as in the
``block_names_*.json`` beside the vectors, or ``row 3`` or ``block 29`` where there are no names.
"""

from dataclasses import dataclass

from bitdraft.quant.schemes import Scheme, scheme_named

LOG2 = "where log2 rounds up"
"""Instead of names: blocks whose largest magnitude is so near below a power of two that its ``log2``, rounded to the
input's dtype, is that of the power."""

ROW_OF_ZEROS = "where a row is zero"
NOT_SATURATED = "where a quotient is 7 or more"
"""Blocks whose E4M3 scale, subnormal, was rounded down so far that FourOverSix' reference leaves the grid."""
OVERFLOWS = "where (code · scale) · amax overflows"
"""Blocks whose error FourOverSix' reference computes as infinite."""
EQUAL_ERRORS = "where both scales err equally but for rounding"
"""Blocks in which the order of the error's sums decides between 4 and 6."""


@dataclass(frozen=True)
class Disagreement:
    """``keys`` differ in ``blocks`` ("*": in all) because of ``why``."""

    keys: str
    blocks: tuple[str, ...]
    why: str


def _peers(file: str, prefix: str, names: dict[str, str]) -> dict[str, Scheme]:
    return {f"{file}/{peer}": scheme_named(f"{prefix}-{rule}") for peer, rule in names.items()}


_TORCHAO = {f"torchao_{rule}": rule for rule in ("floor", "ceil", "even", "rceil")}
_WEIGHTS = ("tensor", "channel", "block128")
_MICROXCALING = {"microxcaling_even": "floor", "microxcaling_nearest": "floor-away"}

PEERS: dict[str, Scheme] = {
    **_peers("mxfp4", "mxfp4", _TORCHAO | _MICROXCALING),
    **_peers("mxfp6_e2m3", "mxfp6-e2m3", _TORCHAO | _MICROXCALING),
    **_peers("mxfp6_e3m2", "mxfp6-e3m2", _TORCHAO | _MICROXCALING),
    **_peers("mxfp8", "mxfp8", _TORCHAO | _MICROXCALING),
    **_peers("mxfp4", "mxfp4", {"compressed_tensors": "even", "vllm_csrc_moe_PORT": "even", "auto_round": "floor"}),
    **_peers("mxfp4", "mxfp4", {"flashinfer_trtllm_PORT": "rceil", "fouroversix": "rceil", "modelopt": "rceil-zero"}),
    **_peers("mxfp4", "mxfp4", {"triton_kernels_gptoss": "rceil-away", "fp_quant_ist": "fp-quant"}),
    **_peers("mxfp6_e2m3", "mxfp6-e2m3", {"compressed_tensors": "even", "auto_round": "floor"}),
    **_peers("mxfp8", "mxfp8", {"compressed_tensors": "even-ct", "auto_round": "floor", "modelopt": "rceil"}),
    **_peers("mxfp8", "mxfp8", {"triton_kernels_gptoss": "rceil", "vllm_torch": "rceil"}),
    **_peers("nvfp4", "nvfp4", {"compressed_tensors": "ct", "vllm_ref": "kernel", "auto_round": "kernel"}),
    **_peers("nvfp4", "nvfp4", {"modelopt": "modelopt", "torchao": "torchao", "torchao_single_level": "torchao"}),
    **_peers("fp8", "fp8", {f"ct_{kind}": f"{kind}-ct" for kind in (*_WEIGHTS, "token", "group128")}),
    **_peers("fp8", "fp8", {f"modelopt_{kind}": f"{kind}-ct" for kind in _WEIGHTS}),
    **_peers("fp8", "fp8", {f"torchao_{kind}": f"{kind}-torchao" for kind in _WEIGHTS}),
    **_peers("fp8", "fp8", {"torchao_token": "channel-torchao", "hf_block128": "block128-hf"}),
    **_peers("fp8", "fp8", {"sglang_token": "token-sglang", "sglang_group128": "group128-sglang"}),
    **_peers("fp8", "fp8", {"vllm_cuda_token": "token", "vllm_native_token": "token-native"}),
    **_peers("fp8", "fp8", {"vllm_cuda_group128": "group128", "vllm_native_group128": "group128-native"}),
    **_peers("fp8", "fp8", {"vllm_cuda_group128_ue8m0": "group128-ue8m0", "vllm_cuda_tensor_static": "tensor-static"}),
    **_peers("fp8", "fp8", {"vllm_per_block_cast": "block128", "vllm_per_block_cast_ue8m0": "block128-ue8m0"}),
    **_peers("int4", "int4", {"compressed_tensors_W4A16": "g128", "compressed_tensors_W4A16_ASYM": "g128-asym"}),
}

_ZEROS = ("zeros", "neg_zeros", "padding")

KNOWN: tuple[Disagreement, ...] = (
    # The exponent from log2, not from the bits.
    Disagreement("mx*/auto_round/*", (LOG2,), "log2 of the largest magnitude is rounded"),
    Disagreement("mx*/microxcaling_*/*", (LOG2,), "log2 of the largest magnitude is rounded, to bf16 for bf16 input"),
    Disagreement("mxfp4/fp_quant_ist/*", (LOG2,), "log2 of the largest magnitude is rounded, to bf16 for bf16 input"),
    Disagreement("mx*/auto_round/adv_f32/scale", _ZEROS, "stores byte 126 (FP4, FP6) or 120 (FP8) for zeros"),
    Disagreement("mxfp4/auto_round/adv_f32/dq", ("ties_down",), "floor(2|x| + 0.5) rounds the sum first"),
    Disagreement("mxfp4/microxcaling_*/adv_f32/dq", ("ties_down",), "floor(2|x| + 0.5) rounds the sum first"),
    # Subnormal scales.
    Disagreement("mx*/torchao_*/adv_f32/*", ("tiny_normals", "mixed_sub"), "divides by max(scale, 2^-126)"),
    Disagreement("mxfp4/flashinfer_trtllm_PORT/adv_f32/*", ("mixed_sub",), "scale byte 0 has inverse 0: codes 0"),
    Disagreement("mxfp4/fouroversix/adv_f32/*", ("subnormals", "mixed_sub"), "byte 1 instead of 0"),
    Disagreement("mx*/triton_kernels_gptoss/adv_f32/*", ("tiny_normals", "subnormals", "mixed_sub"), "byte 1, not 0"),
    Disagreement("mxfp4/fp_quant_ist/adv_f32/dq", ("mixed_sub",), "divides by max(scale, 2^-126)"),
    # The other end, and FP8's smallest excess over a power of two.
    Disagreement("mx*/compressed_tensors/adv_f32/*", ("huge", "f32max"), "adding half a unit overflows: byte 127"),
    Disagreement("mxfp8/torchao_rceil/adv_f32/*", ("amax_1.7500001",), "log2(amax / 448) rounds to a whole number"),
    Disagreement("mxfp8/modelopt/adv_f32/*", ("amax_1.7500001",), "log2(amax / 448) rounds to a whole number"),
    Disagreement("mxfp8/vllm_torch/adv_f32/*", ("amax_1.7500001",), "log2(amax / 448) rounds to a whole number"),
    # Infinity and NaN: no two implementations agree; here the whole block is NaN, byte 255.
    Disagreement("mx*/*/special_f32/*", ("inf", "-inf", "nan", "inf_nan"), "what a block with infinity or NaN becomes"),
    # All-zero tensors and rows.
    Disagreement("nvfp4/vllm_ref/zeros_f32/*", ("*",), "a global scale of 2688 / 0"),
    Disagreement("nvfp4/vllm_ref/advbig_f32/packed", ("e30",), "codes under a block scale of 0 mean nothing"),
    Disagreement("nvfp4/modelopt/zeros_f32/*", ("*",), "a global scale of 0"),
    Disagreement("nvfp4/torchao/zeros_f32/*", ("*",), "a global scale of 0"),
    # FourOverSix, which is compared with a transcription of its reference there.
    Disagreement("nvfp4/fouroversix_*", (NOT_SATURATED,), "does not saturate: 8 is packed as the code of -0"),
    Disagreement("nvfp4/fouroversix_*", (OVERFLOWS, EQUAL_ERRORS), "computes errors in another order"),
    Disagreement("fp8/torchao_token/*", (ROW_OF_ZEROS,), "0 / 0"),
    # Element casts: NaN has no FP4 or FP6 code, -0 none of ours, and not every cast saturates.
    Disagreement("casts/e?m?/spec_value", ("infinity",), "infinity becomes NaN"),
    Disagreement("casts/e?m?/*", ("nan",), "NaN keeps its sign"),
    Disagreement("casts/e8m0/ml_dtypes", ("zero or negative",), "E8M0 has neither zero nor sign: NaN"),
    Disagreement("casts/e2m?/torchao", ("nan",), "NaN becomes a number"),
    Disagreement("casts/e3m2/torchao", ("nan",), "NaN becomes a number"),
    Disagreement("casts/e4m3/ml_dtypes", ("464 and more",), "does not saturate"),
    Disagreement("casts/e5m2/torch", ("61440 and more",), "does not saturate"),
)

CHECKSUMS: dict[str, tuple[int, int]] = {
    "casts/*": (0x5F7214EE, 0x679D9602),
    "fp8/in/a_bf16": (0x51447B7D, 0x68E68558),
    "fp8/in/a_f32": (0xCEBE638F, 0x0F76C156),
    "fp8/in/kv_bf16": (0x6C9736BD, 0xA79D6137),
    "fp8/in/w_bf16": (0x85CE01D2, 0x535F2433),
    "fp8/in/w_f32": (0x7900096E, 0xBC17DEFC),
    "gptq/*": (0x8A7503B1, 0x2CCB9E64),
    "int4/in/w_bf16": (0x24655B9A, 0x551CB04D),
    "int4/in/w_f32": (0x744D4E0C, 0x9ED2B2AD),
    "mxfp4/in/adv_f32": (0x955D032D, 0xC3C620A8),
    "mxfp4/in/rand_bf16": (0x825606D5, 0x39B9EE9D),
    "mxfp4/in/rand_f32": (0x161589BE, 0x39D3E920),
    "mxfp4/in/special_f32": (0xD04A20FB, 0xBB2122DD),
    "mxfp6_e2m3/in/adv_f32": (0xC22443C7, 0x756103CD),
    "mxfp6_e2m3/in/rand_bf16": (0x43B5BD52, 0xBE0422E6),
    "mxfp6_e2m3/in/rand_f32": (0xE3EEB1B5, 0x93B5C645),
    "mxfp6_e2m3/in/special_f32": (0x5C690CD1, 0xD3533E10),
    "mxfp6_e3m2/in/adv_f32": (0xE58BD71A, 0x4BBD8A05),
    "mxfp6_e3m2/in/rand_bf16": (0x0680E59F, 0xE8B77AA1),
    "mxfp6_e3m2/in/rand_f32": (0x2358FAA9, 0x955BB419),
    "mxfp6_e3m2/in/special_f32": (0xE05202A3, 0x5F562B0A),
    "mxfp8/in/adv_f32": (0x8E2C5C4D, 0xF3CAAFC3),
    "mxfp8/in/rand_bf16": (0xB4822D10, 0xC35B7A74),
    "mxfp8/in/rand_f32": (0xA27C373D, 0xF7E02A24),
    "mxfp8/in/special_f32": (0x391B5D1A, 0x3988D3F2),
    "nvfp4/in/adv_f32": (0x3C214E31, 0x22CE798A),
    "nvfp4/in/advbig_f32": (0x7E3D284F, 0x22AAF4D5),
    "nvfp4/in/rand_f32": (0xFD72512D, 0xF4526A39),
    "nvfp4/in/subscale_f32": (0x975EAFE2, 0x162E01C2),
    "nvfp4/in/w_bf16": (0xE4C351FB, 0xEBF329C1),
    "nvfp4/in/w_f32": (0x50502848, 0xA1EFA940),
    "nvfp4/in/zeros_f32": (0x0F0DBD55, 0xA6DEE4CB),
    "soar_sweep/*": (0x62B59A6D, 0x04C5CC76),
    "wush/*": (0xA3146AC9, 0x83F347FB),
}
"""For an input of a file, checksums of it and of what was made of it (``quant/golden/check.py``)."""
