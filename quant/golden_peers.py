"""Which scheme reproduces which reference implementation, and where the two are known to part.

Data for ``quant/golden.py``. Patterns are globs over ``<file>/<peer>/<set>/<field>``; a block is named as in the
``block_names_*.json`` beside the vectors, or ``row 3`` or ``block 29`` where there are no names.
"""

from dataclasses import dataclass

from bitdraft.quant.schemes import Scheme, scheme_named

LOG2 = "where log2 rounds up"
"""Instead of names: blocks whose largest magnitude is so near below a power of two that its ``log2``, rounded to the
input's dtype, is that of the power."""


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
    Disagreement("fp8/torchao_token/*", ("row 3",), "0 / 0 in a row of zeros"),
    # Element casts: NaN has no FP4 or FP6 code, -0 none of ours, and not every cast saturates.
    Disagreement("casts/e?m?/spec_value", ("infinity",), "infinity becomes NaN"),
    Disagreement("casts/e?m?/*", ("nan",), "NaN keeps its sign"),
    Disagreement("casts/e8m0/ml_dtypes", ("zero or negative",), "E8M0 has neither zero nor sign: NaN"),
    Disagreement("casts/e2m?/torchao", ("nan",), "NaN becomes a number"),
    Disagreement("casts/e3m2/torchao", ("nan",), "NaN becomes a number"),
    Disagreement("casts/e4m3/ml_dtypes", ("464 and more",), "does not saturate"),
    Disagreement("casts/e5m2/torch", ("61440 and more",), "does not saturate"),
)

NAMED: dict[str, tuple[int, int]] = {
    "casts/*": (0x1021A0D2, 0xA66D2E07),
    "fp8/*": (0x9A0C2D93, 0x884CE787),
    "mxfp4/*": (0xE01DB2A8, 0x92A7460F),
    "mxfp6_e2m3/*": (0xE01DB2A8, 0x6DE7D67F),
    "mxfp6_e3m2/*": (0xE01DB2A8, 0x62B739ED),
    "mxfp8/*": (0xE01DB2A8, 0x166CD2A6),
    "nvfp4/*": (0x811BEF61, 0x23256325),
}
"""For one checker's share of a file, checksums of its inputs and of what differs as named (``quant/golden.py``)."""
