"""Eager fake-quantization works on strips of a tensor: the values of the whole, in little memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bits import bits
from torch import Tensor

from bitdraft.quant import fake as module
from bitdraft.quant.block import dequantize, quantize
from bitdraft.quant.codes import decode, encode
from bitdraft.quant.fake import fake
from bitdraft.quant.schemes import FP8_BLOCK, FP8_TENSOR_STATIC, FP8_TOKEN, MXFP4_RCEIL, SCHEMES, Scheme
from bitdraft.quant.target import can_compile

ALL = [pytest.param(s, id=s.name) for s in SCHEMES.values()]


@pytest.fixture
def _small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of 4096 elements, so that small tensors have many, the last one shorter."""
    monkeypatch.setattr(module, "_STRIP", 4096)


def hard(*shape: int, dtype: torch.dtype, bad: bool) -> Tensor:
    """Rows of sizes from 2^-12 to 2^11, zeros of both signs, values that are subnormal, and if ``bad`` NaN and inf."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = x * 2.0 ** (torch.arange(shape[-2]) % 24 - 12)[:, None]
    x[..., 3, :], x[..., 4, :], x[..., 7, :] = 0, -0.0, 1e-40
    if bad:
        x[..., 10, 3], x[..., 11, 40] = torch.nan, torch.inf
    return x.to(dtype)


@pytest.mark.usefixtures("_small_strips")
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "nan-inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ALL)
def test_strips_give_the_bits_of_the_whole(scheme: Scheme, dtype: torch.dtype, bad: bool) -> None:
    x = hard(2, 70, 256, dtype=dtype, bad=bad)
    for scale in [torch.tensor(0.37)] if scheme.scale == "static" else [None, torch.tensor(0.37)]:
        y = fake(x, scheme, global_scale=scale)
        assert y.dtype == dtype
        whole = dequantize(quantize(x, scheme, global_scale=scale)).to(dtype)
        assert torch.equal(bits(y), bits(whole)), scale


@pytest.mark.usefixtures("_small_strips")
@pytest.mark.parametrize("scheme", ALL)
def test_it_is_what_the_stored_codes_decode_to(scheme: Scheme) -> None:
    x = hard(40, 256, dtype=torch.bfloat16, bad=False)
    scale = torch.tensor(3.0) if scheme.scale == "static" else None
    assert torch.equal(fake(x, scheme, global_scale=scale), decode(encode(x, scheme, global_scale=scale)).bfloat16())


@pytest.mark.usefixtures("_small_strips")
@pytest.mark.parametrize("name", ["fp8-token", "fp8-tensor", "fp8-block128", "mxfp4-rceil", "nvfp4-kernel"])
def test_memory_layout_does_not_matter_and_the_input_stays(name: str) -> None:
    scheme, x = SCHEMES[name], hard(64, 256, dtype=torch.bfloat16, bad=False)
    expected, before = fake(x, scheme), x.clone()
    wide = torch.cat([x, x + 1], dim=1)[:, :256]
    for other in (x.T.contiguous().T, wide, x.view(2, 2, 16, 256).transpose(0, 1).contiguous().transpose(0, 1)):
        y = fake(other, scheme)
        assert y.is_contiguous()
        if other.shape == x.shape or name != "fp8-block128":  # blocks lie in the last two dimensions
            assert torch.equal(y.reshape(x.shape), expected)
    expected.zero_()
    assert torch.equal(x, before)


@pytest.mark.usefixtures("_small_strips")
def test_what_does_not_fit_is_refused_as_for_small_tensors() -> None:
    with pytest.raises(ValueError, match="48 columns do not divide into blocks of 32"):
        fake(torch.ones(1000, 48), MXFP4_RCEIL)
    with pytest.raises(ValueError, match="so a matrix is needed"):
        fake(torch.ones(8192), FP8_BLOCK)
    with pytest.raises(ValueError, match="needs a static scale"):
        fake(torch.ones(128, 64), FP8_TENSOR_STATIC)


def test_no_gradient_passes() -> None:
    x = torch.randn(600, 256, requires_grad=True)
    assert not fake(x, FP8_TOKEN).requires_grad
    assert not fake(x[:2], FP8_TOKEN).requires_grad


_PEAK = """
import ctypes, sys
from pathlib import Path
import torch
from bitdraft.quant.fake import fake
from bitdraft.quant.schemes import scheme_named

def status(field):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
mode, dtypes, *names = sys.argv[1:]
for name in names:
    scheme = scheme_named(name)
    scale = torch.tensor(0.5) if scheme.scale == "static" else None
    for dtype in dtypes.split(","):
        x = torch.randn(2048, 4096).to(getattr(torch, dtype))
        function = lambda x: fake(x, scheme, global_scale=scale)
        if mode == "compiled":
            torch._dynamo.reset()
            function = torch.compile(function, dynamic=False)
            function(x)
        function(x[:2])
        peaks = []
        for _ in range(3):  # what a library reads from its file for the first time counts too, and only adds
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = status("VmRSS")
            function(x)
            peaks.append((status("VmHWM") - before) / x.nbytes)
        print(name, dtype, min(peaks))
"""


def peaks(mode: str, dtypes: str, *names: str) -> dict[str, float]:
    """Peak memory beyond the input, in sizes of the input, measured in a fresh process."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process can only be reset on Linux")
    run = [sys.executable, "-c", _PEAK, mode, dtypes, *names]
    output = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in output.splitlines()}


KINDS = [
    "fp8-tensor", "fp8-tensor-static", "fp8-token", "fp8-group128", "fp8-block128", "fp8-channel-ct", "mxfp8-rceil",
    "mxfp4-even", "mxfp4-rceil-away", "nvfp4", "nvfp4-kernel", "int8-token", "int4-g128", "int4-g128-asym",
]  # fmt: skip


def test_peak_memory_is_at_most_twice_the_tensor() -> None:
    measured = peaks("eager", "float32,bfloat16", *KINDS)
    assert len(measured) == 2 * len(KINDS)
    assert min(measured.values()) >= 0.9, "the result itself must show"
    assert max(measured.values()) <= 2, measured


def test_compiled_peak_memory_is_at_most_twice_the_tensor() -> None:
    """The two that inductor once gave a whole tensor of fp32 in between, and groups of integers."""
    assert_compiled_peaks("bfloat16", ["mxfp4-rceil", "nvfp4-kernel", "int4-g128-asym"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_peak_memory_of_every_measured_format_is_at_most_twice_the_tensor(dtype: str) -> None:
    rows = json.loads((Path(__file__).parents[2] / "docs" / "results" / "fake_quant.json").read_text())["results"]
    names = [row["format"] for row in rows if row["dtype"] == dtype]
    assert len(names) >= 17
    assert_compiled_peaks(dtype, names)


def assert_compiled_peaks(dtype: str, names: list[str]) -> None:
    if not can_compile():
        pytest.skip("no C++ compiler on the PATH")
    measured = peaks("compiled", dtype, *names)
    assert len(measured) == len(names)
    assert min(measured.values()) >= 0.9, "the result itself must show"
    assert max(measured.values()) <= 2, measured
