"""The comparisons behind ``quant/golden.py``, one function per kind of file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from zlib import crc32

import torch
from torch import Tensor

from bitdraft.quant.codes import Encoded, decode, encode
from bitdraft.quant.golden_peers import KNOWN, LOG2, PEERS
from bitdraft.quant.pack import to_awq, to_compressed_tensors, to_gptq, unpack_fp4, unpack_fp6
from bitdraft.quant.schemes import FP8_KV, INT4_GROUP
from bitdraft.quant.smallfloat import E2M1, E2M3, E3M2, E4M3, E5M2, SmallFloat, Ties


@dataclass(frozen=True)
class Vectors:
    """One file: its tensors, and the names of the blocks of its inputs."""

    file: str
    tensors: dict[str, Tensor]
    block_names: dict[str, list[str]]

    def __getitem__(self, key: str) -> Tensor:
        if key not in self.tensors:
            raise ValueError(f"{self.file}.safetensors has no tensor {key!r}")
        return self.tensors[key]


@dataclass(frozen=True)
class Finding:
    """What became of one stored vector of ``total`` entries."""

    key: str
    total: int
    wrong: int = 0
    """Entries that differ from what is computed here, named disagreements aside."""
    named: int = 0
    """Entries that differ where a ``Disagreement`` says so."""
    first: str = ""
    named_crc: int = 0
    """Checksum of what the file holds in the parts that differ as named."""


Checker = Callable[[Vectors, Sequence[str]], Iterator[Finding]]


Labels = Sequence[tuple[str, ...]]
"""For each of the equal parts that a tensor is compared in: its name, and what else a disagreement may call it."""
_WHOLE: Labels = [("tensor",)]


def compare(file: str, key: str, ours: Tensor, theirs: Tensor, labels: Labels) -> Finding:
    """Entry by entry; NaN equals NaN and -0 equals 0."""
    total = theirs.numel()
    if ours.shape != theirs.shape:
        return Finding(key, total, total, first=f"shape {list(theirs.shape)}, computed {list(ours.shape)}")
    differs = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    if not differs.any():
        return Finding(key, total)
    known = {b for d in KNOWN if fnmatchcase(f"{file}/{key}", d.keys) for b in d.blocks}
    excused = torch.tensor(["*" in known or not known.isdisjoint(names) for names in labels])
    parts = differs.reshape(len(labels), -1)
    wrong = parts & ~excused[:, None]
    first = ""
    if wrong.any():
        part, place = wrong.nonzero()[0].tolist()
        in_file, computed = (t.reshape(len(labels), -1)[part, place].item() for t in (theirs, ours))
        first = f"{labels[part][0]}, entry {place}: {in_file} in the file, {computed} computed"
    named = parts & excused[:, None]
    crc = crc32(as_bytes(theirs.reshape(len(labels), -1)[named.any(1)])) if named.any() else 0
    return Finding(key, total, int(wrong.sum()), int(named.sum()), first, crc)


def as_bytes(x: Tensor) -> bytes:
    """The memory of ``x``, whatever its dtype."""
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _without_sign_of_zero(codes: Tensor, bits: int) -> Tensor:
    codes = codes.int()
    return torch.where(codes & (2 ** (bits - 1) - 1) == 0, 0, codes)


def _fields(keys: Sequence[str]) -> dict[str, list[str]]:
    """``<peer>/<set>`` → the fields stored for it."""
    fields: dict[str, list[str]] = {}
    for key in keys:
        start, _, field = key.rpartition("/")
        fields.setdefault(start, []).append(field)
    return fields


def _block_labels(vectors: Vectors, data: str, width: int) -> Labels:
    """Names of the blocks of an input set; blocks where the rounded ``log2`` is off are called ``LOG2`` as well."""
    x = vectors[f"in/{data}"]
    count = x.numel() // width
    names = vectors.block_names.get(data, [f"block {i}" for i in range(count)])
    names = [*names, *["padding"] * (count - len(names))]
    amax = x.reshape(count, width).abs().amax(dim=1)
    exact = torch.frexp(amax.float()).exponent - 1
    rounded_up = torch.isfinite(amax) & (amax > 0) & (torch.log2(amax).floor() > exact)
    return [(name, LOG2) if up else (name,) for name, up in zip(names, rounded_up.tolist(), strict=True)]


def _row_labels(rows: int) -> Labels:
    return [(f"row {i}",) for i in range(rows)]


def check_mx(vectors: Vectors, keys: Sequence[str]) -> Iterator[Finding]:
    """MXFP4, MXFP6 and MXFP8: codes, E8M0 bytes, dequantized values."""
    for start, fields in _fields(keys).items():
        peer, data = start.split("/")
        if (scheme := PEERS.get(f"{vectors.file}/{peer}")) is None:
            continue
        e = encode(vectors[f"in/{data}"], scheme)
        labels = _block_labels(vectors, data, 32)
        for field in fields:
            theirs = vectors[f"{start}/{field}"]
            if field == "data":
                bits = scheme.element.bits
                theirs = unpack_fp4(theirs) if bits == 4 else theirs
                theirs = unpack_fp6(theirs) if theirs.shape[-1] * 4 == e.codes.shape[-1] * 3 else theirs
                ours = _without_sign_of_zero(e.codes, bits)
                theirs = _without_sign_of_zero(theirs, bits)
            elif field == "scale":
                ours = e.scale
            else:
                ours = decode(e).to(torch.bfloat16 if field == "dq_decompress_bf16" else theirs.dtype)
                ours = ours.to(theirs.dtype)
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
    for start, fields in _fields(keys).items():
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
        labels = _block_labels(vectors, data, 16)
        for field in fields:
            theirs = vectors[f"{start}/{field}"]
            if field == "packed":
                ours, theirs = _without_sign_of_zero(e.codes, 4), _without_sign_of_zero(unpack_fp4(theirs), 4)
            elif field == "scale_e4m3":
                ours = e.scale
            elif field.startswith("gscale"):
                ours = scales[field == "gscale_decode"].reshape(1)
            else:
                ours = _nvfp4_dequantized(peer, e, *scales)
                bf16 = field == "dq_decompress_bf16" or (peer in _DQ_IN_BF16 and x.dtype == torch.bfloat16)
                ours = ours.bfloat16().float() if bf16 else ours
            whole = field.startswith("gscale")
            yield compare(vectors.file, f"{start}/{field}", ours, theirs, _WHOLE if whole else labels)


def check_fp8(vectors: Vectors, keys: Sequence[str]) -> Iterator[Finding]:
    """FP8 weights and activations: codes and decode scales."""
    for start, fields in _fields(keys).items():
        peer, data = start.split("/")
        if (scheme := PEERS.get(f"{vectors.file}/{peer}")) is None:
            continue
        x = vectors[f"in/{data}"]
        static = vectors[f"{start}/scale"].squeeze() if scheme.scale == "static" else None
        e = encode(x, scheme, global_scale=static)
        for field in fields:
            theirs = vectors[f"{start}/{field}"]
            if field == "data":
                ours, theirs = _without_sign_of_zero(e.codes, 8), _without_sign_of_zero(theirs, 8)
            else:
                ours, theirs = e.scale.reshape(theirs.shape), theirs.float()
            rows = _row_labels(len(x)) if theirs.numel() % len(x) == 0 else _WHOLE
            yield compare(vectors.file, f"{start}/{field}", ours, theirs, rows)


_KV_SCALES = {"0.013393": 6.0 / 448.0, "0.023438": 6.0 / 256.0}  # the names round them


def check_kv(vectors: Vectors, keys: Sequence[str]) -> Iterator[Finding]:
    """The FP8 KV cache under static scales: what is written and what is read back."""
    x = vectors["in/kv_bf16"]
    rows = _row_labels(len(x))
    for key in keys:
        name = key.split("/scale_")[1].split("/")[0]
        e = encode(x, FP8_KV, global_scale=torch.tensor(_KV_SCALES.get(name, float(name))))
        theirs = vectors[key]
        if key.endswith("/data"):
            ours, theirs = _without_sign_of_zero(e.codes, 8), _without_sign_of_zero(theirs, 8)
        else:
            ours = decode(e).bfloat16()
        yield compare(vectors.file, key, ours, theirs, rows)


def check_int4(vectors: Vectors, keys: Sequence[str]) -> Iterator[Finding]:
    """INT4 groups: codes, scales, zero points, and the three packings."""
    for start, fields in _fields(keys).items():
        peer, data = start.split("/")
        scheme = PEERS.get(f"{vectors.file}/{peer}", INT4_GROUP)
        x = vectors[f"in/w_{data}"]
        e = encode(x, scheme)
        layouts = {"vllm_gptq_pack": to_gptq, "vllm_awq_pack": to_awq}
        computed = {
            **layouts.get(peer, to_compressed_tensors)(e),
            "int8": e.codes,
            "dq": decode(e).to(x.dtype),
        }
        for field in fields:
            if field in computed:
                theirs = vectors[f"{start}/{field}"]
                yield compare(vectors.file, f"{start}/{field}", computed[field], theirs, _WHOLE)


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
                ours = _without_sign_of_zero(codes, grid.bits)
                theirs = _without_sign_of_zero(theirs, grid.bits)
            else:
                ours = values
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
