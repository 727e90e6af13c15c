"""Codes to the bytes of checkpoints and back: every code, odd sizes, and the layouts by their definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.quant.codes import Encoded, encode
from bitdraft.quant.pack import (
    from_awq,
    from_compressed_tensors,
    from_gptq,
    pack,
    pack_fp4,
    pack_fp6,
    pack_words,
    to_awq,
    to_compressed_tensors,
    to_gptq,
    unpack,
    unpack_fp4,
    unpack_fp6,
    unpack_words,
)
from bitdraft.quant.schemes import (
    FP8_BLOCK,
    FP8_CHANNEL,
    INT4_GROUP,
    MXFP4_EVEN,
    MXFP6_E2M3_EVEN,
    NVFP4,
    NVFP4_MODELOPT,
    SCHEMES,
    Scheme,
    scheme_named,
)

LAW = settings(max_examples=50, deadline=None)
PACKABLE = [pytest.param(s, id=s.name) for s in SCHEMES.values() if s.scale != "static"]


def codes_of(bits: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 2**bits, (3, columns), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_same(a: Encoded, b: Encoded) -> None:
    assert a.scheme == b.scheme
    for name in ("codes", "scale", "zero_point", "global_scale"):
        ours, theirs = getattr(a, name), getattr(b, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert ours.dtype == theirs.dtype, name
            assert torch.equal(ours, theirs), name


def test_fp4_nibbles_come_low_first() -> None:
    assert pack_fp4(torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)).tolist() == [[0x21, 0x8F]]


def test_every_pair_of_fp4_codes_survives() -> None:
    codes = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    packed = pack_fp4(codes)
    assert sorted(packed.flatten().tolist()) == list(range(256))
    assert torch.equal(unpack_fp4(packed), codes)


def test_four_fp6_codes_are_24_bits_little_endian() -> None:
    a, b, c, d = 0b000001, 0b100010, 0b110100, 0b101011
    word = a | b << 6 | c << 12 | d << 18
    packed = pack_fp6(torch.tensor([[a, b, c, d]], dtype=torch.uint8))
    assert packed.tolist() == [list(word.to_bytes(3, "little"))]


def test_every_fp6_code_survives_in_every_place() -> None:
    codes = torch.arange(64, dtype=torch.uint8)
    rows = torch.stack([codes, codes.roll(1), codes.flip(0), codes.roll(17)], dim=-1)
    for shift in range(4):
        assert torch.equal(unpack_fp6(pack_fp6(rows.roll(shift, dims=-1))), rows.roll(shift, dims=-1))


@LAW
@given(k=st.integers(0, 9), seed=st.integers(0, 99))
def test_packing_loses_nothing(k: int, seed: int) -> None:
    assert torch.equal(unpack_fp4(pack_fp4(codes_of(4, 2 * k, seed))), codes_of(4, 2 * k, seed))
    assert torch.equal(unpack_fp6(pack_fp6(codes_of(6, 4 * k, seed))), codes_of(6, 4 * k, seed))
    for bits in (4, 8):
        codes = codes_of(bits, k, seed)
        packed = pack_words(codes, bits)
        assert packed.shape == (3, -(-k * bits // 32))
        assert packed.dtype == torch.int32
        assert torch.equal(unpack_words(packed, bits, k), codes.int())


def test_words_hold_the_first_integer_in_the_lowest_bits_and_the_sign_bit_in_the_last() -> None:
    words = pack_words(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15], [15] * 8]), 4)
    assert (words & 0xFFFFFFFF).long().remainder(2**32).tolist()[0][0] == 0xF7654321
    assert words[1, 0] == -1
    assert pack_words(torch.tensor([[9]]), 4).tolist() == [[9]], "missing places are zeros"


@pytest.mark.parametrize(("function", "columns"), [(pack_fp4, 3), (pack_fp6, 6), (unpack_fp6, 4)])
def test_sizes_that_do_not_fit_are_refused(function: object, columns: int) -> None:
    with pytest.raises(ValueError, match=f"which {columns} columns do not divide into"):
        function(codes_of(4, columns))  # type: ignore[operator]


@pytest.mark.parametrize("scheme", PACKABLE)
def test_pack_and_unpack_are_inverse_for_every_scheme(scheme: Scheme) -> None:
    e = encode(sample(4, 256), scheme)
    assert torch.equal(unpack(pack(e), scheme, 256), e.codes)
    bits = pack(e).element_size() * 8 * pack(e).numel()
    assert bits == e.codes.numel() * scheme.element.bits


@pytest.mark.parametrize("scheme", PACKABLE)
def test_a_layer_survives_the_names_of_compressed_tensors(scheme: Scheme) -> None:
    e = encode(sample(8, 256), scheme)
    if scheme.stores_decode_scale:
        with pytest.raises(ValueError, match="keeps a decode scale"):
            to_compressed_tensors(e)
    else:
        assert_same(from_compressed_tensors(to_compressed_tensors(e), scheme), e)


def test_the_tensors_are_those_of_the_checkpoint_formats() -> None:
    x = sample(256, 384)
    names = ["nvfp4", "mxfp4-even", "mxfp6-e2m3-even", "mxfp8-rceil", "fp8-channel", "fp8-block128", "int4-g64-asym"]
    shapes = {
        name: {key: (list(t.shape), t.dtype) for key, t in to_compressed_tensors(encode(x, scheme_named(name))).items()}
        for name in names
    }
    u8, f8, f32, i32 = torch.uint8, torch.float8_e4m3fn, torch.float32, torch.int32
    assert shapes == {
        "nvfp4": {
            "weight_packed": ([256, 192], u8),
            "weight_scale": ([256, 24], f8),
            "weight_global_scale": ([1], f32),
        },
        "mxfp4-even": {"weight_packed": ([256, 192], u8), "weight_scale": ([256, 12], u8)},
        "mxfp6-e2m3-even": {"weight_packed": ([256, 288], u8), "weight_scale": ([256, 12], u8)},
        "mxfp8-rceil": {"weight": ([256, 384], f8), "weight_scale": ([256, 12], u8)},
        "fp8-channel": {"weight": ([256, 384], f8), "weight_scale": ([256, 1], f32)},
        "fp8-block128": {"weight": ([256, 384], f8), "weight_scale": ([2, 3], f32)},
        "int4-g64-asym": {
            "weight_packed": ([256, 48], i32),
            "weight_scale": ([256, 6], f32),
            "weight_zero_point": ([32, 6], i32),
            "weight_shape": ([2], torch.int64),
        },
    }


@pytest.mark.parametrize("columns", [4, 12, 36, 100])
def test_integer_rows_that_do_not_fill_their_last_word_survive(columns: int) -> None:
    scheme = scheme_named("int4-g4-asym")
    e = encode(sample(5, columns), scheme)
    tensors = to_compressed_tensors(e)
    assert tensors["weight_packed"].shape == (5, -(-columns // 8))
    assert_same(from_compressed_tensors(tensors, scheme), e)


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym", "int8-g32", "int8-g32-asym", "int4-channel"])
def test_a_layer_survives_gptq(name: str) -> None:
    scheme = scheme_named(name)
    e = encode(sample(16, 64), scheme)
    tensors = to_gptq(e)
    bits = scheme.element.bits
    groups = 64 // (scheme.block or 64)
    assert tensors["qweight"].shape == (64 * bits // 32, 16)
    assert tensors["qzeros"].shape == (groups, 16 * bits // 32)
    assert tensors["scales"].shape == (groups, 16)
    assert_same(from_gptq(tensors, scheme), e)


def test_symmetric_gptq_zeros_are_sevens() -> None:
    """The middle code 8, less one, in every nibble."""
    assert (to_gptq(encode(sample(8, 128), INT4_GROUP))["qzeros"] == 0x77777777).all()


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym", "int4-channel"])
def test_a_layer_survives_awq(name: str) -> None:
    scheme = scheme_named(name)
    e = encode(sample(16, 64), scheme)
    tensors = to_awq(e)
    assert tensors["qweight"].shape == (64, 2)
    assert tensors["qzeros"].shape == (64 // (scheme.block or 64), 2)
    assert_same(from_awq(tensors, scheme), e)


def test_awq_words_interleave_output_channels() -> None:
    codes = torch.arange(-8, 0, dtype=torch.int8)[:, None]  # unsigned 0 to 7 down the output channels
    word = to_awq(Encoded(scheme_named("int4-channel"), codes.expand(8, 8), torch.ones(8, 1)))["qweight"][0, 0]
    assert word.item() == 0x75316420


def test_what_a_layout_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="AWQ holds integers, not e2m1"):
        to_awq(encode(sample(8, 64), MXFP4_EVEN))
    with pytest.raises(ValueError, match="AWQ holds 4-bit integers, not int8"):
        to_awq(encode(sample(8, 64), scheme_named("int8-g32")))
    with pytest.raises(ValueError, match=r"GPTQ needs sizes that divide by 8, got \[7, 64\]"):
        to_gptq(encode(sample(7, 64), scheme_named("int4-g32")))
    with pytest.raises(ValueError, match="a weight is a matrix"):
        to_compressed_tensors(encode(sample(2, 4, 64), FP8_CHANNEL))
    with pytest.raises(ValueError, match="keeps a decode scale"):
        to_compressed_tensors(encode(sample(4, 64), NVFP4_MODELOPT))
    with pytest.raises(ValueError, match=r"nvfp4 needs 'weight_global_scale' \(found: weight_packed, weight_scale\)"):
        from_compressed_tensors({"weight_packed": torch.empty(0), "weight_scale": torch.empty(0)}, NVFP4)
    with pytest.raises(ValueError, match="FP6 is packed 4 at a time"):
        pack(Encoded(MXFP6_E2M3_EVEN, codes_of(6, 6), torch.empty(0)))


def test_gptq_files_that_mean_something_else_are_refused() -> None:
    asymmetric, symmetric = scheme_named("int4-g32-asym"), scheme_named("int4-g32")
    tensors = to_gptq(encode(sample(16, 64).abs(), asymmetric))
    with pytest.raises(ValueError, match="zero points are not those of int4-g32"):
        from_gptq(tensors, symmetric)
    with pytest.raises(ValueError, match="g_idx is not in order"):
        from_gptq({**tensors, "g_idx": tensors["g_idx"].flip(0)}, asymmetric)


def test_scale_bytes_of_two_dimensional_blocks_are_one_per_block() -> None:
    e = encode(sample(200, 300), FP8_BLOCK)
    assert e.scale.shape == (2, 3)
    assert_same(from_compressed_tensors(to_compressed_tensors(e), FP8_BLOCK), e)
