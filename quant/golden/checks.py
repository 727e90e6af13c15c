"""The comparisons behind ``quant/golden/check.py``, one function per kind of file."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bitdraft.quant.codes import Encoded, decode, encode
from bitdraft.quant.golden.compare import (
    WHOLE,
    Finding,
    Labels,
    Vectors,
    comparable_codes,
    comparable_values,
    compare,
    fields,
)
from bitdraft.quant.golden.peers import LOG2, PEERS, ROW_OF_ZEROS
from bitdraft.quant.pack import to_awq, to_compressed_tensors, to_gptq, unpack_fp4, unpack_fp6
from bitdraft.quant.schemes import FP8_KV, INT4_GROUP
from bitdraft.quant.smallfloat import E2M1, E2M3, E3M2, E4M3, E5M2, SmallFloat, Ties


def block_labels(vectors: Vectors, data: str, width: int) -> Labels:
    """Names of the blocks of an input set; blocks where the rounded ``log2`` is off are called ``LOG2`` as well."""
    x = vectors[f"in/{data}"]
    count = x.numel() // width
    names = vectors.block_names.get(data, [f"block {i}" for i in range(count)])
    names = [*names[:count], *["padding"] * (count - len(names))]
    amax = x.reshape(count, width).abs().amax(dim=1)
    exact = torch.frexp(amax.float()).exponent - 1
    rounded_up = torch.isfinite(amax) & (amax > 0) & (torch.log2(amax).floor() > exact)
    return [(name, LOG2) if up else (name,) for name, up in zip(names, rounded_up.tolist(), strict=True)]


def _row_labels(x: Tensor) -> Labels:
    zero = (x == 0).all(dim=-1).tolist()
    return [(f"row {i}", ROW_OF_ZEROS) if z else (f"row {i}",) for i, z in enumerate(zero)]


def check_mx(vectors: Vectors, keys: Sequence[str]) -> Iterator[Finding]:
    """MXFP4, MXFP6 and MXFP8: codes, E8M0 bytes, dequantized values."""
    for start, names in fields(keys).items():
        peer, data = start.split("/")
        if (scheme := PEERS.get(f"{vectors.file}/{peer}")) is None:
            continue
        x = vectors[f"in/{data}"]
        e = encode(x, scheme)
        labels = block_labels(vectors, data, 32)
        for field in names:
            theirs = vectors[f"{start}/{field}"]
            if field == "data":
                bits = scheme.element.bits
                theirs = unpack_fp4(theirs) if bits == 4 else theirs
                theirs = unpack_fp6(theirs) if theirs.shape[-1] * 4 == e.codes.shape[-1] * 3 else theirs
                ours, theirs = comparable_codes(e.codes, theirs, x, bits)
            elif field == "scale":
                ours = e.scale
            elif field in ("dq", "dq_decompress_bf16"):
                ours = decode(e).to(torch.bfloat16 if field == "dq_decompress_bf16" else theirs.dtype)
                ours, theirs = comparable_values(ours.to(theirs.dtype), theirs, x, 32)
            else:
                continue
            yield compare(vectors.file, f"{start}/{field}", ours, theirs, labels)


def _nvfp4_dequantized(peer: str, e: Encoded, encode_scale: Tensor, decode_scale: Tensor) -> Tensor:
    """Codes times both scales, in the peer's own order."""
    codes = E2M1.decode(e.codes)
    scale = E4M3.decode(e.scale).repeat_interleave(16, dim=-1)
    if peer == "auto_round":
        return codes * (1 / torch.where(scale == 0, torch.inf, 1.0 / (scale * (1.0 / encode_scale))))
    if peer in ("compressed_tensors", "vllm_ref"):
        return codes * (scale / encode_scale)
    return codes * (scale * decode_scale)


_DQ_IN_BF16 = ("compressed_tensors", "auto_round")  # for bf16 input


def check_nvfp4(vectors: Vectors, keys: Sequence[str]) -> Iterator[Finding]:
    """NVFP4 of peers that scale by the largest magnitude: codes, E4M3 bytes, the global scale, dequantized values."""
    for start, names in fields(keys).items():
        peer, data = start.split("/")
        if (scheme := PEERS.get(f"{vectors.file}/{peer}")) is None:
            continue
        x = vectors[f"in/{data}"]
        given = None
        if peer == "torchao_single_level":
            given = torch.tensor(1.0)
        elif peer == "vllm_ref":
            given = torch.tensor(2688.0).div(x.abs().amax().float())  # one division, not a reciprocal and a product
        e = encode(x, scheme, global_scale=given)
        assert e.global_scale is not None
        inverse = 1.0 / e.global_scale
        scales = (inverse, e.global_scale) if scheme.stores_decode_scale else (e.global_scale, inverse)
        labels = block_labels(vectors, data, 16)
        for field in names:
            theirs = vectors[f"{start}/{field}"]
            if field == "packed":
                ours, theirs = comparable_codes(e.codes, unpack_fp4(theirs), x, 4)
            elif field == "scale_e4m3":
                ours = e.scale
            elif field.startswith("gscale"):
                ours = scales[field == "gscale_decode"].reshape(1)
            elif field in ("dq", "dq_decompress_bf16"):
                ours = _nvfp4_dequantized(peer, e, *scales)
                bf16 = field == "dq_decompress_bf16" or (peer in _DQ_IN_BF16 and x.dtype == torch.bfloat16)
                ours = ours.bfloat16().float() if bf16 else ours
                if peer == "auto_round":  # the sign of its zeros follows no rule
                    ours, theirs = ours + 0.0, theirs + 0.0
                else:
                    ours, theirs = comparable_values(ours, theirs, x, 16)
            else:
                continue
            whole = field.startswith("gscale")
            yield compare(vectors.file, f"{start}/{field}", ours, theirs, WHOLE if whole else labels)


def check_fp8(vectors: Vectors, keys: Sequence[str]) -> Iterator[Finding]:
    """FP8 weights and activations: codes and decode scales."""
    for start, names in fields(keys).items():
        peer, data = start.split("/")
        if (scheme := PEERS.get(f"{vectors.file}/{peer}")) is None:
            continue
        x = vectors[f"in/{data}"]
        static = vectors[f"{start}/scale"].squeeze() if scheme.scale == "static" else None
        e = encode(x, scheme, global_scale=static)
        for field in names:
            theirs = vectors[f"{start}/{field}"]
            if field == "data":
                ours, theirs = comparable_codes(e.codes, theirs, x, 8)
            elif field == "scale":
                # A static scale is what the codes were made under: the vectors' is that of the largest magnitude.
                ours = e.scale if static is None else x.abs().amax().float() / scheme.element.max
                ours, theirs = ours.reshape(theirs.shape), theirs.float()
            else:
                continue
            rows = _row_labels(x) if theirs.numel() % len(x) == 0 else WHOLE
            yield compare(vectors.file, f"{start}/{field}", ours, theirs, rows)


def _kv_scales(name: str, x: Tensor) -> list[Tensor]:
    """The scales that a name of six decimals can mean: that of the largest magnitude, n / 448, n / 256, itself."""
    whole = [torch.tensor(n / largest) for largest in (E4M3.max, 256.0) for n in range(1, 1001)]
    found = [s for s in (x.abs().amax().float() / E4M3.max, *whole) if f"{s.item():.6f}" == name]
    return [*found, torch.tensor(float(name))]


def check_kv(vectors: Vectors, keys: Sequence[str]) -> Iterator[Finding]:
    """The FP8 KV cache under static scales: what is written and what is read back."""
    x = vectors["in/kv_bf16"]
    rows = _row_labels(x)
    for key in keys:
        name = key.split("/scale_")[1].split("/")[0]
        findings = []
        for scale in _kv_scales(name, x):
            e = encode(x, FP8_KV, global_scale=scale)
            if key.endswith("/data"):
                ours, theirs = comparable_codes(e.codes, vectors[key], x, 8)
            else:
                ours, theirs = comparable_values(decode(e).bfloat16(), vectors[key], x, x.shape[-1])
            findings.append(compare(vectors.file, key, ours, theirs, rows))
        yield min(findings, key=lambda f: f.wrong)


def check_int4(vectors: Vectors, keys: Sequence[str]) -> Iterator[Finding]:
    """INT4 groups: codes, scales, zero points, and the three packings."""
    for start, names in fields(keys).items():
        peer, data = start.split("/")
        layouts = {"vllm_gptq_pack": to_gptq, "vllm_awq_pack": to_awq}
        scheme = PEERS.get(f"{vectors.file}/{peer}", INT4_GROUP if peer in layouts else None)
        if scheme is None:
            continue
        x = vectors[f"in/w_{data}"]
        e = encode(x, scheme)
        computed = {
            **layouts.get(peer, to_compressed_tensors)(e),
            "int8": e.codes,
            "dq": decode(e).to(x.dtype),
        }
        for field in names:
            if field in computed:
                ours, theirs = computed[field], vectors[f"{start}/{field}"]
                if field == "dq":
                    ours, theirs = ours + 0.0, theirs + 0.0  # -0 comes from which side of the zero point a code lies
                yield compare(vectors.file, f"{start}/{field}", ours, theirs, WHOLE)


_ELEMENTS: dict[str, SmallFloat] = {e.name: e for e in (E2M1, E2M3, E3M2, E4M3, E5M2)}
_CAST_TIES: dict[str, Ties] = {"ties_away_gptoss_value": "away", "ties_zero_modelopt_mxfp4_value": "zero"}


def _e8m0_nearest(x: Tensor) -> Tensor:
    """E8M0 bytes of the nearest power of two, the middle going up; the sign is ignored and 255 is NaN."""
    bits = x.view(torch.int32) & 0x7FFFFFFF
    byte = ((bits + 0x400000) >> 23).clamp(max=255)
    return torch.where(x.isnan(), 255, byte).to(torch.uint8)


def check_casts(vectors: Vectors, keys: Sequence[str]) -> Iterator[Finding]:
    """Element casts of single numbers, as codes or as values."""
    x = vectors["x"]
    for key in keys:
        element, _, peer = key.partition("/")
        theirs = vectors[key]
        if element == "e8m0":
            yield compare(vectors.file, key, _e8m0_nearest(x), theirs, _cast_labels(x))
        elif element in _ELEMENTS:
            grid = _ELEMENTS[element]
            values = grid.round(x, ties=_CAST_TIES.get(peer, "even"))
            if theirs.dtype == torch.uint8:
                codes = grid.encode(values)
                ours, theirs = comparable_codes(codes, theirs, x, grid.bits)
            else:
                values_11, theirs_11 = comparable_values(values[None], theirs[None], x[None], len(x))
                ours, theirs = values_11[0], theirs_11[0]
            yield compare(vectors.file, key, ours, theirs, _cast_labels(x))


def _cast_labels(x: Tensor) -> Labels:
    tags: dict[str, Callable[[float], bool]] = {
        "nan": lambda v: v != v,
        "infinity": lambda v: abs(v) == float("inf"),
        "464 and more": lambda v: abs(v) >= 464,
        "61440 and more": lambda v: abs(v) >= 61440,
        "zero or negative": lambda v: v <= 0,
    }
    return [(f"x = {v:.9g}", *(tag for tag, holds in tags.items() if holds(v))) for v in x.tolist()]
