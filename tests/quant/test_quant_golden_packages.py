"""Other inputs than the stored vectors', as the installed compressed-tensors quantizes them: the checker agrees.

One file of vectors cannot tell two orders of arithmetic apart that differ in one block of a thousand.
"""

import pytest
import torch
from torch import Tensor

from bitdraft.quant.golden.checks import check_fp8, check_int4, check_mx, check_nvfp4
from bitdraft.quant.golden.compare import Checker, Vectors
from bitdraft.quant.pack import pack_fp4
from bitdraft.quant.smallfloat import E2M1

quantization = pytest.importorskip("compressed_tensors.quantization")
forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
parameters = pytest.importorskip("compressed_tensors.quantization.utils")

SEEDS = range(25)
DTYPES = [torch.float32, torch.bfloat16]


def sample(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def arguments(**settings: object) -> object:
    return quantization.QuantizationArgs(**{"symmetric": True, **settings})


def in_groups(x: Tensor, args: object, group: int, overall: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, quantized values and zero points of groups along the last dimension."""
    blocks = x.unflatten(-1, (-1, group))
    scale, zero = parameters.calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=overall)
    return scale, forward.quantize(x, scale, zero, args, global_scale=overall), zero


def fp4_bytes(values: Tensor) -> Tensor:
    codes = E2M1.encode(values.float())
    return pack_fp4(torch.where((values == 0) & values.signbit(), 8, codes).to(torch.uint8))


def assert_agrees(check: Checker, file: str, x: Tensor, name: str, written: dict[str, Tensor]) -> None:
    tensors = {f"in/{name}": x, **written}
    findings = list(check(Vectors(file, tensors, {}), list(written)))
    assert len(findings) == len(written)
    assert [(f.key, f.first) for f in findings if f.wrong or f.named] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4(dtype: torch.dtype) -> None:
    args = arguments(num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
    for seed in SEEDS:
        x = sample(seed, dtype, 8, 128)
        overall = parameters.generate_gparam(x.amin(), x.amax())
        scale, values, _ = in_groups(x, args, 16, overall)
        written = {
            "packed": fp4_bytes(values),
            "scale_e4m3": scale.to(torch.float8_e4m3fn).view(torch.uint8),
            "gscale_encode": overall.float(),
        }
        assert_agrees(check_nvfp4, "nvfp4", x, "w", {f"compressed_tensors/w/{k}": v for k, v in written.items()})


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4(dtype: torch.dtype) -> None:
    args = arguments(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
    for seed in SEEDS:
        x = sample(seed, dtype, 8, 128)
        _, values, _ = in_groups(x, args, 32)
        assert_agrees(check_mx, "mxfp4", x, "w", {"compressed_tensors/w/data": fp4_bytes(values)})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", ["tensor", "channel", "token", "group128"])
def test_fp8(strategy: str, dtype: torch.dtype) -> None:
    grouped = {"group_size": 128} if strategy == "group128" else {}
    dynamic = strategy == "token"  # else its validation refuses them
    args = arguments(num_bits=8, type="float", strategy=strategy.removesuffix("128"), dynamic=dynamic, **grouped)
    for seed in SEEDS:
        x = sample(seed, dtype, 16, 256)
        if strategy == "group128":
            scale, values, _ = in_groups(x, args, 128)
        else:
            dims = (0, 1) if strategy == "tensor" else (1,)
            low, high = (reduce(x, dim=dims, keepdim=strategy != "tensor") for reduce in (torch.amin, torch.amax))
            scale, zero = parameters.calculate_qparams(low, high, args)
            values = forward.quantize(x, scale, zero, args)
        data = values.to(torch.float8_e4m3fn).view(torch.uint8)
        written = {f"ct_{strategy}/w/data": data, f"ct_{strategy}/w/scale": scale}
        assert_agrees(check_fp8, "fp8", x, "w", written)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("peer", "symmetric"), [("W4A16", True), ("W4A16_ASYM", False)])
def test_int4(peer: str, symmetric: bool, dtype: torch.dtype) -> None:
    args = arguments(num_bits=4, type="int", strategy="group", group_size=128, symmetric=symmetric)
    name = "bf16" if dtype == torch.bfloat16 else "f32"
    for seed in SEEDS:
        x = sample(seed, dtype, 16, 256)
        scale, values, zero = in_groups(x, args, 128)
        dequantized = forward.dequantize(values, scale, zero, args=args)
        written = {"int8": values.to(torch.int8), "dq": dequantized}
        start = f"compressed_tensors_{peer}/{name}"
        assert_agrees(check_int4, "int4", x, f"w_{name}", {f"{start}/{k}": v for k, v in written.items()})
