"""What this package computes, bit for bit against vectors that the reference implementations wrote.

Scales and codes are compared exactly, codes modulo the sign of zero. Dequantized NVFP4 values may differ in
the last bit, because peers multiply the three factors in different orders. Known disagreements are listed by
name, and a test fails when the list is too long as well as when it is too short.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bitdraft.quant.block import dequantize, nvfp4_global_scale, quantize
from bitdraft.quant.schemes import (
    FP8_CHANNEL,
    FP8_TOKEN,
    MXFP4_EVEN,
    MXFP4_RCEIL,
    NVFP4,
    NVFP4_KERNEL,
    Scheme,
)
from bitdraft.quant.smallfloat import E2M1

Golden = dict[str, Tensor]


@pytest.fixture
def mxfp4(shared: Path) -> Golden:
    return load_file(shared / "golden" / "mxfp4.safetensors")


@pytest.fixture
def nvfp4(shared: Path) -> Golden:
    return load_file(shared / "golden" / "nvfp4.safetensors")


@pytest.fixture
def fp8(shared: Path) -> Golden:
    return load_file(shared / "golden" / "fp8.safetensors")


def fp4_values(packed: Tensor) -> Tensor:
    """``[R, K/2]`` bytes → ``[R, K]`` code values: the low nibble comes first."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return torch.cat([E2M1.magnitudes, -E2M1.magnitudes])[codes.long()]


def e4m3_values(data: Tensor) -> Tensor:
    return data.view(torch.float8_e4m3fn).float()


def e8m0_bytes(scale: Tensor) -> Tensor:
    """fp32 powers of two → exponent bytes; 2^-127 (subnormal) is byte 0."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def differing_blocks(ours: Tensor, reference: Tensor, blocks: int) -> Tensor:
    """Which of ``blocks`` equal parts of the tensors hold a value that differs; NaN equals NaN, -0 equals 0."""
    differs = (ours != reference) & ~(ours.isnan() & reference.isnan())
    return differs.reshape(blocks, -1).any(dim=1)


def mx_disagreements(golden: Golden, peer: str, data: str, scheme: Scheme) -> Tensor:
    """One flag per block of 32: the scale byte or one of the values differs from the peer's."""
    q = quantize(golden[f"in/{data}"], scheme)
    scale_bytes = golden[f"{peer}/{data}/scale"]
    scales = 2.0 ** (scale_bytes.double() - 127)
    values = (fp4_values(golden[f"{peer}/{data}/data"]) * scales.repeat_interleave(32, dim=-1)).float()
    blocks = scale_bytes.numel()
    return differing_blocks(e8m0_bytes(q.scale), scale_bytes, blocks) | differing_blocks(dequantize(q), values, blocks)


def assert_mx_agrees(golden: Golden, peer: str, data: str, scheme: Scheme) -> None:
    flags = mx_disagreements(golden, peer, data, scheme)
    assert not flags.any(), f"{peer} on {data}: blocks {flags.nonzero().flatten().tolist()} differ"


@pytest.mark.parametrize("data", ["rand_f32", "rand_bf16"])
@pytest.mark.parametrize(
    ("peer", "scheme"),
    [
        ("compressed_tensors", MXFP4_EVEN),
        ("torchao_even", MXFP4_EVEN),
        ("vllm_csrc_moe_PORT", MXFP4_EVEN),
        ("flashinfer_trtllm_PORT", MXFP4_RCEIL),
        ("torchao_rceil", MXFP4_RCEIL),
    ],
)
def test_mxfp4_equals_its_peers_on_random_blocks(mxfp4: Golden, peer: str, scheme: Scheme, data: str) -> None:
    assert_mx_agrees(mxfp4, peer, data, scheme)


@pytest.mark.parametrize("data", ["rand_f32", "rand_bf16"])
def test_mxfp4_equals_the_dequantized_values_of_compressed_tensors(mxfp4: Golden, data: str) -> None:
    ours = dequantize(quantize(mxfp4[f"in/{data}"], MXFP4_EVEN))
    assert torch.equal(ours, mxfp4[f"compressed_tensors/{data}/dq"].float())


@pytest.mark.parametrize(
    ("peer", "scheme", "known"),
    [
        # Adding half a unit to the bits overflows there: byte 127 and garbage.
        ("compressed_tensors", MXFP4_EVEN, {"huge", "f32max"}),
        ("vllm_csrc_moe_PORT", MXFP4_EVEN, set()),
        # Divides by max(scale, 2^-126).
        ("torchao_even", MXFP4_EVEN, {"mixed_sub"}),
        # Treats scale byte 0 as an inverse scale of 0: all codes 0.
        ("flashinfer_trtllm_PORT", MXFP4_RCEIL, {"mixed_sub"}),
        ("torchao_rceil", MXFP4_RCEIL, {"mixed_sub"}),
    ],
)
def test_mxfp4_parts_from_its_peers_at_the_named_blocks_only(
    mxfp4: Golden, shared: Path, peer: str, scheme: Scheme, known: set[str]
) -> None:
    names = json.loads((shared / "golden" / "block_names_mx32.json").read_text())["adv_blocks"]
    flags = mx_disagreements(mxfp4, peer, "adv_f32", scheme).tolist()
    assert {name for name, differs in zip([*names, "padding"], flags, strict=True) if differs} == known


@pytest.mark.parametrize("scheme", [MXFP4_EVEN, MXFP4_RCEIL])
def test_mxfp4_makes_every_block_with_a_special_value_nan(mxfp4: Golden, scheme: Scheme) -> None:
    q = quantize(mxfp4["in/special_f32"], scheme)
    assert (e8m0_bytes(q.scale) == 255).all()
    assert dequantize(q).isnan().all()


def flips(golden: Golden, key: str, every: int = 1) -> Iterator[Golden]:
    """Copies of ``golden`` with one bit of ``key`` flipped: all bits of every ``every``-th byte."""
    for position in range(0, golden[key].numel(), every):
        for bit in range(8):
            changed = golden[key].clone()
            changed.view(-1)[position] ^= 1 << bit
            yield {**golden, key: changed}


def test_one_flipped_bit_in_an_mxfp4_vector_is_noticed(mxfp4: Golden) -> None:
    """Every bit of the scales; every bit of some payload bytes, but for the signs of zeros."""
    for changed in flips(mxfp4, "compressed_tensors/rand_f32/scale"):
        assert mx_disagreements(changed, "compressed_tensors", "rand_f32", MXFP4_EVEN).sum() == 1
    key = "compressed_tensors/rand_f32/data"
    for changed in flips(mxfp4, key, every=11):
        is_another_value = not torch.equal(fp4_values(changed[key]), fp4_values(mxfp4[key]))
        flags = mx_disagreements(changed, "compressed_tensors", "rand_f32", MXFP4_EVEN)
        assert flags.sum() == is_another_value


def ulps_apart(a: Tensor, b: Tensor) -> Tensor:
    """Steps on the fp32 number line between finite numbers of one sign; adding 0 makes -0 into 0."""
    return ((a + 0.0).view(torch.int32).long() - (b + 0.0).view(torch.int32).long()).abs()


def nvfp4_faults(golden: Golden, peer: str, data: str, scheme: Scheme, *, static: bool) -> list[str]:
    """What of a peer's result this package does not reproduce; ``static`` takes over the peer's global scale."""
    x = golden[f"in/{data}"]
    encode = golden[f"{peer}/{data}/gscale_encode"].squeeze()
    q = quantize(x, scheme, global_scale=encode if static else None)
    scales = e4m3_values(golden[f"{peer}/{data}/scale_e4m3"])
    values = fp4_values(golden[f"{peer}/{data}/packed"]) * scales.repeat_interleave(16, dim=-1)
    comparisons = {
        "global scale": static or torch.equal(nvfp4_global_scale(x.abs().amax().float()), encode),
        "block scales": torch.equal(q.scale, scales),
        "codes": torch.equal(q.values, values),
        "dequantized": bool((ulps_apart(dequantize(q), golden[f"{peer}/{data}/dq"]) <= 1).all()),
    }
    return [what for what, agrees in comparisons.items() if not agrees]


@pytest.mark.parametrize("data", ["rand_f32", "w_f32", "adv_f32", "advbig_f32", "subscale_f32", "zeros_f32"])
def test_nvfp4_equals_compressed_tensors_on_fp32(nvfp4: Golden, data: str) -> None:
    assert nvfp4_faults(nvfp4, "compressed_tensors", data, NVFP4, static=False) == []


@pytest.mark.parametrize("data", ["rand_f32", "w_f32", "w_bf16", "adv_f32", "advbig_f32", "subscale_f32"])
def test_nvfp4_kernel_equals_the_vllm_reference_under_its_static_scale(nvfp4: Golden, data: str) -> None:
    assert nvfp4_faults(nvfp4, "vllm_ref", data, NVFP4_KERNEL, static=True) == []


def test_compressed_tensors_computes_bf16_weights_in_bf16_and_this_package_does_not(nvfp4: Golden) -> None:
    """A known disagreement: its global scale is rounded to bf16, and 2 of 64 block scales differ."""
    x = nvfp4["in/w_bf16"]
    theirs = nvfp4["compressed_tensors/w_bf16/gscale_encode"]
    assert torch.equal(theirs, theirs.bfloat16().float())
    assert not torch.equal(nvfp4_global_scale(x.abs().amax().float()), theirs.squeeze())
    scales = e4m3_values(nvfp4["compressed_tensors/w_bf16/scale_e4m3"])
    assert (quantize(x, NVFP4).scale != scales).sum() == 2


def test_the_two_nvfp4_rules_part_where_the_peers_do(nvfp4: Golden) -> None:
    """compressed-tensors divides, vLLM multiplies by reciprocals: each scheme fits its own peer only."""
    assert nvfp4_faults(nvfp4, "vllm_ref", "subscale_f32", NVFP4, static=True) != []
    assert nvfp4_faults(nvfp4, "compressed_tensors", "subscale_f32", NVFP4_KERNEL, static=False) != []


def test_one_flipped_bit_in_an_nvfp4_vector_is_noticed(nvfp4: Golden) -> None:
    for changed in flips(nvfp4, "compressed_tensors/w_f32/scale_e4m3"):
        assert "block scales" in nvfp4_faults(changed, "compressed_tensors", "w_f32", NVFP4, static=False)
    key = "compressed_tensors/w_f32/packed"
    for changed in flips(nvfp4, key, every=17):
        is_another_value = not torch.equal(fp4_values(changed[key]), fp4_values(nvfp4[key]))
        faults = nvfp4_faults(changed, "compressed_tensors", "w_f32", NVFP4, static=False)
        assert faults == ["codes"] * is_another_value
    changed = {**nvfp4, "compressed_tensors/w_f32/gscale_encode": nvfp4["vllm_ref/w_f32/gscale_encode"]}
    assert nvfp4_faults(changed, "compressed_tensors", "w_f32", NVFP4, static=False) == ["global scale"]


def differing_rows(golden: Golden, peer: str, data: str, scheme: Scheme) -> list[int]:
    """Rows whose FP8 codes or scale differ from the peer's."""
    q = quantize(golden[f"in/{data}"], scheme)
    codes = e4m3_values(golden[f"{peer}/{data}/data"])
    scales = golden[f"{peer}/{data}/scale"].float()
    rows = len(codes)
    differs = differing_blocks(q.values, codes, rows) | differing_blocks(q.scale, scales, rows)
    return differs.nonzero().flatten().tolist()


@pytest.mark.parametrize("data", ["a_f32", "a_bf16"])
def test_fp8_tokens_equal_the_vllm_kernel(fp8: Golden, data: str) -> None:
    assert differing_rows(fp8, "vllm_cuda_token", data, FP8_TOKEN) == []


@pytest.mark.parametrize("data", ["a_f32", "a_bf16"])
def test_fp8_tokens_part_from_sglang_at_the_zero_and_the_tiny_row_only(fp8: Golden, data: str) -> None:
    """SGLang has no smallest scale: row 3 is zero, row 5 was multiplied by 1e-9."""
    assert differing_rows(fp8, "sglang_token", data, FP8_TOKEN) == [3, 5]


@pytest.mark.parametrize("peer", ["ct_channel", "modelopt_channel", "torchao_channel"])
def test_fp8_channels_equal_the_peers_on_fp32_weights(fp8: Golden, peer: str) -> None:
    assert differing_rows(fp8, peer, "w_f32", FP8_CHANNEL) == []


@pytest.mark.parametrize("peer", ["ct_channel", "modelopt_channel", "torchao_channel"])
def test_fp8_channels_of_bf16_weights_differ_from_the_peers_by_their_bf16_scale(fp8: Golden, peer: str) -> None:
    """A known disagreement: those peers round the scale to the weight's dtype, this package keeps fp32."""
    ours = quantize(fp8["in/w_bf16"], FP8_CHANNEL).scale
    assert torch.equal(fp8[f"{peer}/w_bf16/scale"].float(), ours.bfloat16().float())


@pytest.mark.parametrize("data", ["w_f32", "w_bf16"])
@pytest.mark.parametrize("peer", ["hf_block128", "vllm_per_block_cast"])
def test_fp8_rows_equal_the_peers_that_compute_in_fp32(fp8: Golden, peer: str, data: str) -> None:
    """Transformers and vLLM cast blocks of 128 x 128; such a block laid out as one row is the same problem."""
    blocks = fp8[f"in/{data}"].unflatten(1, (2, 128)).transpose(0, 1).reshape(2, -1)
    codes = fp8[f"{peer}/{data}/data"].unflatten(1, (2, 128)).transpose(0, 1).reshape(2, -1)
    q = quantize(blocks, FP8_CHANNEL)
    assert torch.equal(q.values, e4m3_values(codes))
    assert torch.equal(q.scale, fp8[f"{peer}/{data}/scale"].float().reshape(2, 1))


def test_one_flipped_bit_in_an_fp8_vector_is_noticed(fp8: Golden) -> None:
    key = "vllm_cuda_token/a_f32/data"
    for changed in flips(fp8, key, every=61):
        is_another_value = not torch.equal(e4m3_values(changed[key]), e4m3_values(fp8[key]))
        assert len(differing_rows(changed, "vllm_cuda_token", "a_f32", FP8_TOKEN)) == is_another_value
    scale = "vllm_cuda_token/a_f32/scale"
    for bit in range(32):
        changed_scale = fp8[scale].clone()
        changed_scale.view(torch.int32)[2] ^= torch.tensor(1).bitwise_left_shift(bit).to(torch.int32)
        assert differing_rows({**fp8, scale: changed_scale}, "vllm_cuda_token", "a_f32", FP8_TOKEN) == [2]
