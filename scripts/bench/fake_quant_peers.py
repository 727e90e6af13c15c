"""How other libraries fake-quantize, for ``fake_quant.py``: each by its own public path, from tensor to tensor.

Scales are computed from the tensor in the call, as ours are. A format is listed under the name that ours has
(``quant/schemes.py``); where a peer knows only another scale rule of the same format, its nearest one stands in, and
the benchmark checks that the results lie close together. Peers that are not installed are left out.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

Quantizer = Callable[[Tensor], Tensor]


def torchao() -> dict[str, Quantizer]:
    """``torchao.quantization.qat`` for FP8 rows and integers, its prototype tensor classes for MX and NVFP4."""
    mx: Any = import_module("torchao.prototype.mx_formats.mx_tensor")
    nv: Any = import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    qat: Any = import_module("torchao.quantization.qat")
    steps: Any = import_module("torchao.quantization.quant_primitives")
    e4m3, int4 = torch.float8_e4m3fn, vars(torch)["int4"]  # which torch has, and its type stubs do not

    def microscaled(element: Any, rule: str) -> Quantizer:
        mode = mx.ScaleCalculationMode[rule]
        return lambda x: mx.MXTensor.to_mx(x, element, 32, mode).dequantize(x.dtype)

    def nvfp4(x: Tensor) -> Tensor:
        scale = nv.per_tensor_amax_to_scale(x.abs().amax())
        return nv.NVFP4Tensor.to_nvfp4(x, 16, scale).dequantize(x.dtype)

    def fp8_blocks(block: list[int]) -> Quantizer:
        def call(x: Tensor) -> Tensor:
            scale = steps._choose_scale_float8(x, block, e4m3)
            return steps._dequantize_affine_float8(steps._quantize_affine_float8(x, scale, e4m3), scale, x.dtype)

        return call

    def integers(dtype: torch.dtype, **how: Any) -> Quantizer:
        return qat.IntxFakeQuantizer(qat.IntxFakeQuantizeConfig(dtype, **how))

    rows = qat.Float8FakeQuantizer(qat.Float8FakeQuantizeConfig())
    int8_rows = integers(torch.int8, granularity="per_channel")
    return {
        "fp8-token": rows,
        "fp8-channel": rows,
        "fp8-group128": fp8_blocks([1, 128]),
        "fp8-block128": fp8_blocks([128, 128]),
        "mxfp8-rceil": microscaled(e4m3, "RCEIL"),
        "mxfp6-e2m3-even": microscaled("fp6_e2m3", "EVEN"),
        "mxfp6-e3m2-floor": microscaled("fp6_e3m2", "FLOOR"),
        "mxfp4-floor": microscaled(torch.float4_e2m1fn_x2, "FLOOR"),
        "mxfp4-ceil": microscaled(torch.float4_e2m1fn_x2, "CEIL"),
        "mxfp4-even": microscaled(torch.float4_e2m1fn_x2, "EVEN"),
        "mxfp4-rceil": microscaled(torch.float4_e2m1fn_x2, "RCEIL"),
        "nvfp4": nvfp4,
        "nvfp4-kernel": nvfp4,
        "int8-token": int8_rows,
        "int8-channel": int8_rows,
        "int4-g128": integers(int4, group_size=128),
        "int4-g128-asym": integers(int4, group_size=128, is_symmetric=False),
    }


def compressed_tensors() -> dict[str, Quantizer]:
    """What a linear layer with quantized inputs runs, and an observer of minimum and maximum for weights."""
    q: Any = import_module("compressed_tensors.quantization")
    forward: Any = import_module("compressed_tensors.quantization.lifecycle.forward")
    helpers: Any = import_module("compressed_tensors.quantization.utils.helpers")
    module = torch.nn.Identity()

    def call(num_bits: int, kind: str, strategy: str, *, dims: tuple[int, ...] = (-1,), **more: Any) -> Quantizer:
        args = q.QuantizationArgs(num_bits=num_bits, type=kind, strategy=strategy, **more)

        def dynamic(x: Tensor) -> Tensor:
            rows = x[None]  # a sequence of tokens
            top = None
            if strategy == "tensor_group":
                top = helpers.generate_gparam(x.amin(), x.amax())
            scale, zero = helpers.compute_dynamic_scales_and_zp(rows, args, module, top)
            return forward.fake_quantize(rows, scale, zero, args, top)[0]

        def observed(x: Tensor) -> Tensor:
            parts = x if strategy == "channel" else x.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
            keep = strategy == "channel"
            scale, zero = helpers.calculate_qparams(parts.amin(dims, keep), parts.amax(dims, keep), args)
            return forward.fake_quantize(x, scale, zero, args)

        return observed if strategy in ("channel", "block") else dynamic

    def microscaled(num_bits: int) -> Quantizer:
        return call(num_bits, "float", "group", group_size=32, dynamic=True, scale_dtype=torch.uint8)

    fp8_block = call(8, "float", "block", dims=(1, 3), block_structure=[128, 128])
    nvfp4 = call(4, "float", "tensor_group", group_size=16, dynamic=True, scale_dtype=torch.float8_e4m3fn)
    return {
        "fp8-token": call(8, "float", "token", dynamic=True),
        "fp8-channel": call(8, "float", "channel"),
        "fp8-group128": call(8, "float", "group", group_size=128, dynamic=True),
        "fp8-block128": fp8_block,
        "mxfp8-rceil": microscaled(8),
        "mxfp6-e2m3-even": microscaled(6),
        "mxfp4-even": microscaled(4),
        "nvfp4": nvfp4,
        "nvfp4-kernel": nvfp4,
        "int8-token": call(8, "int", "token", dynamic=True),
        "int8-channel": call(8, "int", "channel"),
        "int4-g128": call(4, "int", "group", group_size=128, dynamic=True),
        "int4-g128-asym": call(4, "int", "group", group_size=128, dynamic=True, symmetric=False),
    }


def modelopt() -> dict[str, Quantizer]:
    """NVIDIA's quantized tensor classes: quantize, dequantize."""
    tensors: Any = import_module("modelopt.torch.quantization.qtensor")

    def scaled(kind: Any, **how: Any) -> Quantizer:
        def call(x: Tensor) -> Tensor:
            stored, scale = kind.quantize(x, **how)
            return stored.dequantize(x.dtype, scale=scale, block_sizes=how.get("block_sizes"))

        return call

    def mxfp4(x: Tensor) -> Tensor:
        stored, scale = tensors.MXFP4QTensor.quantize(x, 32)
        return stored.dequantize(x.dtype, scale=scale, block_sizes={-1: 32})

    def nvfp4(x: Tensor) -> Tensor:
        stored, scale, top = tensors.NVFP4QTensor.quantize(x, 16)
        return stored.dequantize(x.dtype, scale=scale, double_scale=top, block_sizes={-1: 16})

    fp8_rows, int8_rows = scaled(tensors.FP8QTensor, axis=0), scaled(tensors.INT8QTensor, axis=0)
    return {
        "fp8-token": fp8_rows,
        "fp8-channel": fp8_rows,
        "fp8-group128": scaled(tensors.FP8QTensor, block_sizes={-1: 128}),
        "fp8-block128": scaled(tensors.FP8QTensor, block_sizes={-1: 128, -2: 128}),
        "mxfp8-rceil": scaled(tensors.MXFP8QTensor),
        "mxfp4-rceil": mxfp4,
        "nvfp4": nvfp4,
        "nvfp4-kernel": nvfp4,
        "int8-token": int8_rows,
        "int8-channel": int8_rows,
    }


def auto_round() -> dict[str, Quantizer]:
    """The functions of ``auto_round.data_type`` that quantize and dequantize at once."""
    mx: Any = import_module("auto_round.data_type.mxfp")
    nv: Any = import_module("auto_round.data_type.nvfp")
    fp8: Any = import_module("auto_round.data_type.fp8")
    integer: Any = import_module("auto_round.data_type.int")

    def first(function: Any, **how: Any) -> Quantizer:
        return lambda x: function(x, **how)[0]

    def microscaled(data_type: str, bits: int, function: Any = mx.quant_mx) -> Quantizer:
        return first(function, bits=bits, group_size=32, data_type=data_type)

    fp8_rows, nvfp4 = first(fp8.quant_fp8_sym, group_size=-1), first(nv.nv_fp4)
    int8_rows = first(integer.quant_tensor_sym, bits=8, group_size=-1)
    return {
        "fp8-token": fp8_rows,
        "fp8-channel": fp8_rows,
        "fp8-group128": first(fp8.quant_fp8_sym, group_size=128),
        "fp8-block128": first(fp8.quant_block_fp_sym, group_size=(128, 128)),
        "mxfp8-rceil": microscaled("mx_fp_rceil", 8, mx.quant_mx_rceil),
        "mxfp4-floor": microscaled("mx_fp", 4),
        "mxfp4-rceil": microscaled("mx_fp_rceil", 4, mx.quant_mx_rceil),
        "nvfp4": nvfp4,
        "nvfp4-kernel": nvfp4,
        "int8-token": int8_rows,
        "int8-channel": int8_rows,
        "int4-g128": first(integer.quant_tensor_sym, bits=4, group_size=128),
        "int4-g128-asym": first(integer.quant_tensor_asym, bits=4, group_size=128),
    }


_PEERS = {
    "torchao": ("torchao", torchao),
    "compressed-tensors": ("compressed_tensors", compressed_tensors),
    "nvidia-modelopt": ("modelopt", modelopt),
    "auto-round": ("auto_round", auto_round),
}


def installed_peers() -> tuple[dict[str, dict[str, Quantizer]], dict[str, str], list[str]]:
    """Quantizers by peer and format, the peers' versions, and the names of those that are not installed."""
    found = {name: make() for name, (module, make) in _PEERS.items() if importlib.util.find_spec(module)}
    versions = {name: importlib.metadata.version(name) for name in found}
    return found, versions, [name for name in _PEERS if name not in found]
