"""Codes in the bytes of checkpoints, and back.

Low-level packing works on codes alone. ``to_compressed_tensors``, ``to_gptq`` and ``to_awq`` name the tensors of one
linear layer as those checkpoints do; their inverses give an ``Encoded`` again, bit for bit. Layouts as read in the
sources of compressed-tensors 0.20, vLLM 0.33 and AutoAWQ; all of them put the first element in the lowest bits.

========== ======================= ===============================================================
codes      bytes                   layout
========== ======================= ===============================================================
FP4        uint8 ``[..., K/2]``    even element in the low nibble
FP6        uint8 ``[..., 3K/4]``   4 codes in 3 bytes, little endian
FP8        float8 ``[..., K]``     the code is the byte
INT4, INT8 int32 ``[N, ⌈K·b/32⌉]`` compressed-tensors: ``code + 2^(b-1)``, filled up with zeros
INT4       int32 ``[K/8, N]``      GPTQ: the same words, along K of the transposed matrix
INT4       int32 ``[K, N/8]``      AWQ: along N, in the order 0, 2, 4, 6, 1, 3, 5, 7
========== ======================= ===============================================================
"""

import torch
from torch import Tensor

from bitdraft.quant.codes import Encoded
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.smallfloat import E4M3, SmallFloat
from bitdraft.quant.smallint import SmallInt

# N output channel, K input channel, G group of input channels.

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_fp4(codes: Tensor) -> Tensor:
    """uint8 codes ``[..., K]`` → uint8 ``[..., K/2]``; ``ValueError`` where K is odd."""
    low, high = _in_tuples(codes, 2, "FP4").unbind(-1)
    return low | high << 4


def unpack_fp4(packed: Tensor) -> Tensor:
    """uint8 ``[..., K/2]`` → uint8 codes ``[..., K]``."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def pack_fp6(codes: Tensor) -> Tensor:
    """uint8 codes ``[..., K]`` → uint8 ``[..., 3K/4]``; ``ValueError`` where K is no multiple of 4."""
    a, b, c, d = _in_tuples(codes, 4, "FP6").unbind(-1)
    # Shifts of uint8 drop what leaves the byte at the top.
    return torch.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], dim=-1).flatten(-2)


def unpack_fp6(packed: Tensor) -> Tensor:
    """uint8 ``[..., 3K/4]`` → uint8 codes ``[..., K]``."""
    x, y, z = _in_tuples(packed, 3, "packed FP6").unbind(-1)
    codes = [x & 0x3F, x >> 6 | (y & 0xF) << 2, y >> 4 | (z & 0x3) << 4, z >> 2]
    return torch.stack(codes, dim=-1).flatten(-2)


def _in_tuples(x: Tensor, size: int, what: str) -> Tensor:
    if x.shape[-1] % size:
        raise ValueError(f"{what} is packed {size} at a time, which {x.shape[-1]} columns do not divide into")
    return x.unflatten(-1, (x.shape[-1] // size, size))


def pack_words(unsigned: Tensor, bits: int) -> Tensor:
    """Integers ``[..., K]`` from 0 to ``2^bits - 1`` → int32 ``[..., ⌈K·bits/32⌉]``, the first in the lowest bits."""
    per_word = 32 // bits
    missing = -unsigned.shape[-1] % per_word
    filled = torch.nn.functional.pad(unsigned.long(), (0, missing))
    shifts = torch.arange(0, 32, bits, device=unsigned.device)
    words = (filled.unflatten(-1, (filled.shape[-1] // per_word, per_word)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """int32 ``[..., ⌈columns·bits/32⌉]`` → int32 ``[..., columns]`` from 0 to ``2^bits - 1``."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)[..., :columns]


def pack(e: Encoded) -> Tensor:
    """The codes of ``e`` as compressed-tensors stores them (the table above); ``ValueError`` where K does not fit."""
    element = e.scheme.element
    if isinstance(element, SmallInt):
        return pack_words(e.codes.int() - int(element.min), element.bits)
    if element.bits == 8:
        return e.codes.view(_float8(element))
    return pack_fp4(e.codes) if element.bits == 4 else pack_fp6(e.codes)


def unpack(packed: Tensor, scheme: Scheme, columns: int) -> Tensor:
    """The codes ``[..., columns]`` that ``pack`` packed."""
    element = scheme.element
    if isinstance(element, SmallInt):
        return (unpack_words(packed, element.bits, columns) + int(element.min)).to(torch.int8)
    if element.bits == 8:
        return packed.view(torch.uint8)
    return unpack_fp4(packed) if element.bits == 4 else unpack_fp6(packed)


def _float8(element: SmallFloat) -> torch.dtype:
    return torch.float8_e4m3fn if element == E4M3 else torch.float8_e5m2


def to_compressed_tensors(e: Encoded) -> dict[str, Tensor]:
    """The tensors of a weight ``[N, K]`` under compressed-tensors' names, without the layer's prefix.

    ``weight`` (FP8) or ``weight_packed``, ``weight_scale`` (E8M0 as uint8, E4M3 as float8, else fp32: it may be
    cast to the model's dtype where the scheme's arithmetic is that dtype), ``weight_zero_point``,
    ``weight_global_scale`` (encode, ``[1]``), and ``weight_shape`` of packed integers. Raises ``ValueError`` for
    codes that are no matrix and for schemes whose owner stores another global scale.
    """
    _check_matrix(e)
    scheme = e.scheme
    if scheme.stores_decode_scale:
        raise ValueError(f"{scheme.name} keeps a decode scale; compressed-tensors stores an encode scale")
    scale = e.scale.view(torch.float8_e4m3fn) if scheme.scale_format == "e4m3" else e.scale
    tensors = {"weight" if scheme.element.bits == 8 and not _is_int(scheme) else "weight_packed": pack(e)}
    tensors["weight_scale"] = scale.reshape(1) if scale.ndim == 0 else scale
    if e.zero_point is not None:
        unsigned = e.zero_point.int() - int(scheme.element.min)
        tensors["weight_zero_point"] = pack_words(unsigned.T, scheme.element.bits).T.contiguous()
    if e.global_scale is not None:
        tensors["weight_global_scale"] = e.global_scale.reshape(1)
    if _is_int(scheme):
        tensors["weight_shape"] = torch.tensor(e.codes.shape)
    return tensors


def from_compressed_tensors(tensors: dict[str, Tensor], scheme: Scheme) -> Encoded:
    """The inverse of ``to_compressed_tensors``; ``ValueError`` names a tensor that is missing."""
    packed_name = "weight" if scheme.element.bits == 8 and not _is_int(scheme) else "weight_packed"
    wanted = [packed_name, "weight_scale"]
    wanted += ["weight_shape"] * _is_int(scheme) + ["weight_zero_point"] * scheme.has_zero_point
    wanted += ["weight_global_scale"] * scheme.has_global_scale
    if missing := [name for name in wanted if name not in tensors]:
        raise ValueError(f"a layer in {scheme.name} needs {missing[0]!r} (found: {', '.join(sorted(tensors))})")
    packed = tensors[packed_name]
    columns = int(tensors["weight_shape"][1]) if _is_int(scheme) else packed.shape[-1] * 8 // scheme.element.bits
    codes = unpack(packed, scheme, columns)
    scale = tensors["weight_scale"]
    scale = scale.float() if scheme.scale_format == "fp32" else scale.view(torch.uint8)
    zero = None
    if scheme.has_zero_point:
        unsigned = unpack_words(tensors["weight_zero_point"].T, scheme.element.bits, len(codes)).T
        zero = (unsigned + int(scheme.element.min)).to(torch.int8).contiguous()
    encode = tensors["weight_global_scale"].reshape(()) if scheme.has_global_scale else None
    return Encoded(scheme, codes, scale.reshape(()) if scheme.rows is None else scale, zero, encode)


def to_gptq(e: Encoded) -> dict[str, Tensor]:
    """The tensors of an INT4 or INT8 weight ``[N, K]`` as GPTQ (format 1) has them.

    ``qweight`` int32 ``[K·b/32, N]``, ``qzeros`` int32 ``[G, N·b/32]`` (zero points less one), ``scales`` fp32
    ``[G, N]`` (checkpoints cast it to fp16), ``g_idx`` int32 ``[K]``. Raises ``ValueError`` where N or K does
    not fill whole words.
    """
    bits = _check_words(e, "GPTQ")
    unsigned = e.codes.int() - int(e.scheme.element.min)
    group = e.scheme.block or e.codes.shape[1]
    return {
        "qweight": pack_words(unsigned, bits).T.contiguous(),
        "qzeros": pack_words((_unsigned_zeros(e).T - 1) % 2**bits, bits),
        "scales": e.scale.T.contiguous(),
        "g_idx": torch.arange(e.codes.shape[1], dtype=torch.int32) // group,
    }


def from_gptq(tensors: dict[str, Tensor], scheme: Scheme) -> Encoded:
    """The inverse of ``to_gptq``; zero points that ``scheme`` does not have must all be the middle code.

    Raises ``ValueError`` where they are not, and where ``g_idx`` is not in order.
    """
    bits, offset = scheme.element.bits, int(scheme.element.min)
    rows, columns = tensors["qweight"].shape[1], tensors["qweight"].shape[0] * 32 // bits
    group = scheme.block or columns
    in_order = torch.arange(columns, device=tensors["qweight"].device) // group
    if "g_idx" in tensors and not torch.equal(tensors["g_idx"].long(), in_order):
        raise ValueError("g_idx is not in order: activation order is not supported")
    codes = unpack_words(tensors["qweight"].T, bits, columns) + offset
    zeros = (unpack_words(tensors["qzeros"], bits, rows) + 1) % 2**bits + offset
    return _from_integers(codes, tensors["scales"].T, zeros.T, scheme)


def to_awq(e: Encoded) -> dict[str, Tensor]:
    """The tensors of an INT4 weight ``[N, K]`` as AWQ has them.

    ``qweight`` int32 ``[K, N/8]``, ``qzeros`` int32 ``[G, N/8]``, ``scales`` fp32 ``[G, N]`` (checkpoints cast it
    to fp16). Raises ``ValueError`` for another element and where N is no multiple of 8.
    """
    if _check_words(e, "AWQ") != 4:
        raise ValueError(f"AWQ holds 4-bit integers, not {e.scheme.element.name}")
    unsigned = e.codes.int() - int(e.scheme.element.min)
    return {
        "qweight": pack_words(_awq_order(unsigned.T), 4),
        "qzeros": pack_words(_awq_order(_unsigned_zeros(e).T), 4),
        "scales": e.scale.T.contiguous(),
    }


def from_awq(tensors: dict[str, Tensor], scheme: Scheme) -> Encoded:
    """The inverse of ``to_awq``; errors as ``from_gptq`` has them."""
    rows, offset = tensors["scales"].shape[1], int(scheme.element.min)
    codes = _awq_order(unpack_words(tensors["qweight"], 4, rows), back=True) + offset
    zeros = _awq_order(unpack_words(tensors["qzeros"], 4, rows), back=True) + offset
    return _from_integers(codes.T, tensors["scales"].T, zeros.T, scheme)


def _awq_order(x: Tensor, *, back: bool = False) -> Tensor:
    order = torch.tensor(_AWQ_ORDER)
    order = order.argsort() if back else order
    return x.unflatten(-1, (x.shape[-1] // 8, 8))[..., order.to(x.device)].flatten(-2)


def _from_integers(codes: Tensor, scale: Tensor, zeros: Tensor, scheme: Scheme) -> Encoded:
    if not scheme.has_zero_point and zeros.any():
        raise ValueError(f"the zero points are not those of {scheme.name}, which is symmetric")
    zero_point = zeros.to(torch.int8).contiguous() if scheme.has_zero_point else None
    return Encoded(scheme, codes.to(torch.int8).contiguous(), scale.float().contiguous(), zero_point)


def _unsigned_zeros(e: Encoded) -> Tensor:
    zero = torch.zeros_like(e.scale) if e.zero_point is None else e.zero_point
    return zero.int() - int(e.scheme.element.min)


def _is_int(scheme: Scheme) -> bool:
    return isinstance(scheme.element, SmallInt)


def _check_matrix(e: Encoded) -> None:
    if e.codes.ndim != 2:
        raise ValueError(f"a weight is a matrix, got codes of shape {list(e.codes.shape)}")


def _check_words(e: Encoded, layout: str) -> int:
    """Bits per integer, if rows and columns fill whole 32-bit words."""
    _check_matrix(e)
    element = e.scheme.element
    if not isinstance(element, SmallInt):
        raise ValueError(f"{layout} holds integers, not {element.name}")
    if any(size % (32 // element.bits) for size in e.codes.shape):
        raise ValueError(f"{layout} needs sizes that divide by {32 // element.bits}, got {list(e.codes.shape)}")
    return element.bits
