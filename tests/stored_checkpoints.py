"""Random quantized checkpoints of the tiny target, and by tables and loops what their codes stand for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_tokenizer
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bitdraft.quant.linear import LowBitLinear
from bitdraft.quant.recipe import AUTO
from bitdraft.quant.target import LowBitTarget, load_target

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
VOCAB = 320
UP = "model.layers.1.mlp.up_proj"
GLOBAL = torch.tensor([37.5])  # one number for all: layers that engines fuse must share it

EXPERTS = "model.layers.0.mlp.experts"
MOE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "num_experts_per_tok": 2, "bos_token_id": 257, "eos_token_id": 258,
    "pad_token_id": 258,
}  # fmt: skip

Make = Callable[[int, int, torch.Generator], tuple[dict[str, Tensor], Tensor]]
"""Random stored tensors of a weight [N, K], and the weight that they stand for (fp32)."""


def random_fp8(*shape: int, generator: torch.Generator) -> Tensor:
    """E4M3 codes of either sign, NaN excluded."""
    codes = torch.randint(0, 127, shape, generator=generator) + 128 * torch.randint(0, 2, shape, generator=generator)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def random_scales(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator) * 0.002 + 1e-4


def random_fp4(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Packed bytes and the numbers that they stand for: the even element lies in the low nibble."""
    codes = torch.randint(0, 16, (rows, columns), generator=generator)
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    return packed, torch.tensor(E2M1)[codes]


def wide(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Block scales [a, b], one number for every element."""
    down, right = -(-rows // scales.shape[0]), -(-columns // scales.shape[1])
    return scales.repeat_interleave(down, 0)[:rows].repeat_interleave(right, 1)[:, :columns]


def fp8(scale_shape: Callable[[int, int], tuple[int, ...]], name: str, **more: Tensor) -> Make:
    def make(rows: int, columns: int, g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales = random_fp8(rows, columns, generator=g), random_scales(*scale_shape(rows, columns), generator=g)
        as_matrix = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(len(scales), -1)
        return {"weight": codes, name: scales, **more}, codes.float() * wide(as_matrix, rows, columns)

    return make


def blocks(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // 128), -(-columns // 128)


def nvfp4_ct(rows: int, columns: int, g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    packed, numbers = random_fp4(rows, columns, g)
    scales = random_fp8(rows, columns // 16, generator=g).float().abs().to(torch.float8_e4m3fn)
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": GLOBAL}
    return tensors, numbers * wide(scales.float(), rows, columns) * (1 / GLOBAL)


def nvfp4_a4_ct(rows: int, columns: int, g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    tensors, expected = nvfp4_ct(rows, columns, g)
    return {**tensors, "input_global_scale": torch.tensor([300.0])}, expected


def nvfp4_modelopt(rows: int, columns: int, g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    tensors, _ = nvfp4_ct(rows, columns, g)
    decode = torch.tensor(0.013)
    packed = tensors["weight_packed"]
    numbers = torch.stack([torch.tensor(E2M1)[(packed & 15).long()], torch.tensor(E2M1)[(packed >> 4).long()]], dim=-1)
    values = numbers.flatten(1) * wide(tensors["weight_scale"].float(), rows, columns)
    stored = {"weight": packed, "weight_scale": tensors["weight_scale"], "weight_scale_2": decode}
    return {**stored, "input_scale": torch.tensor(1 / 256)}, values * decode


def mxfp4(rows: int, columns: int, g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    packed, numbers = random_fp4(rows, columns, g)
    scales = torch.randint(117, 123, (rows, columns // 32), generator=g).to(torch.uint8)
    return {"weight_packed": packed, "weight_scale": scales}, numbers * wide(
        2.0 ** (scales.float() - 127), rows, columns
    )


def words(numbers: Tensor) -> Tensor:
    """Unsigned 4-bit numbers [..., 8 n] → int32 [..., n], the first in the lowest bits; by Python's integers."""
    flat = numbers.reshape(-1, 8).tolist()
    packed = [sum(n << 4 * i for i, n in enumerate(row)) for row in flat]
    signed = [p - 2**32 if p >= 2**31 else p for p in packed]
    return torch.tensor(signed, dtype=torch.int32).reshape(*numbers.shape[:-1], -1)


def int4_parts(rows: int, columns: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned codes [N, K], scales [N, G] in fp16, zero points [N, G]; groups of 128."""
    codes = torch.randint(0, 16, (rows, columns), generator=g)
    scales = (torch.rand(rows, columns // 128, generator=g) * 0.05 + 0.01).half()
    return codes, scales, torch.randint(0, 15, (rows, columns // 128), generator=g)


def int4_values(codes: Tensor, scales: Tensor, zeros: Tensor | int) -> Tensor:
    """``bf16((code - zero) · bf16(scale))``: what a model served in bf16 multiplies by."""
    zeros = wide(zeros, *codes.shape) if isinstance(zeros, Tensor) else zeros
    return ((codes - zeros) * wide(scales.bfloat16().float(), *codes.shape)).bfloat16().float()


def int4_ct(rows: int, columns: int, g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, _ = int4_parts(rows, columns, g)
    tensors = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor([rows, columns])}
    return tensors, int4_values(codes, scales, 8)


def gptq(symmetric: bool, version: int = 1) -> Make:
    def make(rows: int, columns: int, g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros = int4_parts(rows, columns, g)
        zeros = torch.full_like(zeros, 8) if symmetric else zeros + 1
        tensors = {
            "qweight": words(codes).T.contiguous(),  # packed along K
            "qzeros": words(zeros.T - int(version == 1)),
            "scales": scales.T.contiguous(),
            "g_idx": torch.arange(columns, dtype=torch.int32) // 128,
        }
        return tensors, int4_values(codes, scales, zeros)

    return make


def awq(rows: int, columns: int, g: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros = int4_parts(rows, columns, g)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    shuffled = [x.T.reshape(x.shape[1], -1, 8)[..., order].flatten(1) for x in (codes, zeros)]
    tensors = {"qweight": words(shuffled[0]), "qzeros": words(shuffled[1]), "scales": scales.T.contiguous()}
    return tensors, int4_values(codes, scales, zeros)


FP8_ARGS = {"num_bits": 8, "type": "float", "symmetric": True}
FP4_ARGS = {"num_bits": 4, "type": "float", "symmetric": True}
NV_ARGS = {**FP4_ARGS, "strategy": "tensor_group", "group_size": 16}
MX_ARGS = {**FP4_ARGS, "strategy": "group", "group_size": 32}
TOKEN = {**FP8_ARGS, "strategy": "token", "dynamic": True}
STATIC = {**FP8_ARGS, "strategy": "tensor", "dynamic": False}


def ct(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **more}


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}


ONE = torch.tensor(0.01)
FORMATS: dict[str, tuple[dict[str, Any], Make, str, str | None]] = {
    "ct-fp8-channel": (
        ct({**FP8_ARGS, "strategy": "channel"}, TOKEN),
        fp8(lambda n, k: (n, 1), "weight_scale"), "fp8-channel", "fp8-token",
    ),
    "ct-fp8-tensor-static": (
        ct({**FP8_ARGS, "strategy": "tensor"}, STATIC),
        fp8(lambda n, k: (1,), "weight_scale", input_scale=ONE.reshape(1)), "fp8-tensor", "fp8-tensor-static",
    ),
    "ct-fp8-block": (
        ct(
            {**FP8_ARGS, "strategy": "block", "block_structure": "128x128"},
            {**FP8_ARGS, "strategy": "group", "group_size": 128, "dynamic": True},
        ),
        fp8(blocks, "weight_scale"), "fp8-block128", "fp8-group128",
    ),
    "ct-nvfp4": (ct(NV_ARGS, {**NV_ARGS, "dynamic": "local"}), nvfp4_a4_ct, "nvfp4", "nvfp4-kernel"),
    "ct-nvfp4a16": (ct(NV_ARGS), nvfp4_ct, "nvfp4", None),
    "ct-mxfp4": (ct(MX_ARGS, {**MX_ARGS, "dynamic": True}), mxfp4, "mxfp4-even", "mxfp4-rceil"),
    "ct-mxfp4a16": (ct(MX_ARGS), mxfp4, "mxfp4-even", None),
    "ct-int4": (
        ct({"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}),
        int4_ct, "int4-g128", None,
    ),
    "fp8-fine-grained": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
         "modules_to_not_convert": ["lm_head"]},
        fp8(blocks, "weight_scale_inv"), "fp8-block128", "fp8-group128",
    ),
    "fp8-one-scale": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8(lambda n, k: (), "weight_scale", input_scale=ONE), "fp8-tensor", "fp8-tensor-static",
    ),
    "modelopt-nvfp4": (modelopt("NVFP4"), nvfp4_modelopt, "nvfp4-modelopt", "nvfp4-kernel"),
    "modelopt-fp8": (
        modelopt("FP8"), fp8(lambda n, k: (), "weight_scale", input_scale=ONE), "fp8-tensor", "fp8-tensor-static"
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, gptq(True), "int4-g128", None
    ),
    "gptq-asym": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}, gptq(False), "int4-g128-asym", None
    ),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(False, version=2), "int4-g128-asym", None,
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        awq, "int4-g128-asym", None,
    ),
}  # fmt: skip


def save_mixture(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    if family == "qwen3-moe":
        config = Qwen3MoeConfig(**MOE, intermediate_size=128, moe_intermediate_size=128, num_experts=4)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    else:
        MixtralForCausalLM(MixtralConfig(**MOE, intermediate_size=128, num_local_experts=4)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def store(folder: Path, out: Path, kind: str, seed: int = 0) -> tuple[Path, dict[str, Tensor]]:
    """A copy of ``folder`` whose linear layers (those of its decoder) hold random codes, and what they stand for."""
    declared, make = FORMATS[kind][:2]
    shutil.copytree(folder, out)
    weights, expected = load_file(out / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(seed)
    for name in [n for n in weights if "_proj" in n or ".experts." in n]:
        layer = name.removesuffix(".weight")
        rows, columns = weights.pop(name).shape
        tensors, expected[layer] = make(rows, columns, generator)
        weights |= {f"{layer}.{leaf}": tensor for leaf, tensor in tensors.items()}
    own = {n: t.clone().contiguous() for n, t in weights.items()}
    save_file(own, out / "model.safetensors", metadata={"format": "pt"})
    edit_config(out, quantization_config=declared)
    return out, expected


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LowBitTarget:
    return load_target(str(folder), AUTO, dtype=dtype, compile_quantizer="off")


def layer_of(target: LowBitTarget, name: str) -> LowBitLinear:
    layer = target.model.get_submodule(name)
    assert isinstance(layer, LowBitLinear)
    return layer


def assert_refused(folder: Path, complaint: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        load(folder)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)
