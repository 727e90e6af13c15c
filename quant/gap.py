"""How far a low-bit target is from the same model in 16 bit, the *reference*.

Both read the same text. Where the next token was written by an assistant their distributions and hidden states are
compared, position by position. Two of the numbers are ceilings for a draft head that imitates the reference
perfectly: at temperature 0 the low-bit target accepts its drafts at the rate ``agrees``, at temperature 1 at the
rate ``1 − tv`` (Leviathan et al. 2023, arXiv:2211.17192: acceptance is ``Σ min(p, q)``).

Logits exist for a chunk of positions at a time; what is kept are a few numbers per position.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from bitdraft.quant.experts import kind_of, weight_of
from bitdraft.quant.linear import LowBitLinear
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.transforms import TransformedInput

# N position, S hidden state compared (captured layers and the last), H hidden, V vocabulary.

SIXTEEN_BIT = 16
"""Bits of a weight that stays in high precision, also where this machine computes it in fp32."""


@dataclass(frozen=True)
class Gap:
    """What differs, at each position."""

    agrees: Tensor  # [N] bool: the two first choices are the same token
    tv: Tensor  # [N] fp32, total variation distance ½ Σ |p − q|
    kl_low_reference: Tensor  # [N] fp32, KL(low-bit ‖ reference) in nats
    kl_reference_low: Tensor  # [N] fp32, KL(reference ‖ low-bit) in nats
    nll_reference: Tensor  # [N] fp32, −log probability of the token that follows, reference
    nll_low: Tensor  # [N] fp32, the same for the low-bit target
    cosine: Tensor  # [N, S] fp32, cosine similarity of the hidden states
    relative_error: Tensor  # [N, S] fp32, ‖low − reference‖ / ‖reference‖


def compare(
    reference_NSH: Tensor,
    low_NSH: Tensor,
    reference_logits: Callable[[Tensor], Tensor],
    low_logits: Callable[[Tensor], Tensor],
    next_tokens_N: Tensor,
    *,
    rows: int | None = None,
) -> Gap:
    """Compare the hidden states ``[N, S, H]`` of the two targets, and the distributions that follow from the last.

    ``reference_logits`` and ``low_logits`` map final states ``[n, H]`` to ``[n, V]``; they are called with at most
    ``rows`` positions (default: about four million logits). ``next_tokens_N``: the int64 tokens that follow.
    """
    if rows is None:
        vocabulary = reference_logits(reference_NSH[:1, -1]).shape[-1]
        rows = min(512, max(16, 2**22 // vocabulary))
    parts = []
    for reference, low, tokens in zip(
        reference_NSH.split(rows), low_NSH.split(rows), next_tokens_N.split(rows), strict=True
    ):
        logits = compare_logits(reference_logits(reference[:, -1]), low_logits(low[:, -1]), tokens)
        parts.append(Gap(*logits, *compare_states(reference, low)))
    return joined(parts)


def compare_logits(
    reference_NV: Tensor, low_NV: Tensor, next_tokens_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The first six fields of ``Gap`` for logits ``[N, V]`` of any float dtype; computed in fp32."""
    agrees = reference_NV.argmax(-1) == low_NV.argmax(-1)
    log_p, log_q = reference_NV.float().log_softmax(-1), low_NV.float().log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    nll = [-log.gather(-1, next_tokens_N[:, None]).squeeze(-1) for log in (log_p, log_q)]
    return agrees, (p - q).abs().sum(-1) / 2, _kl(q, log_q, log_p), _kl(p, log_p, log_q), nll[0], nll[1]


def _kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """``Σ p (log p − log q)``, where an impossible token counts nothing; rounding may not make it negative."""
    return (p * (log_p - log_q)).masked_fill(p == 0, 0.0).sum(-1).clamp(min=0.0)


def compare_states(reference: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine similarity and relative error of ``[..., H]`` states, each ``[...]``, computed in fp32."""
    a, b = reference.float(), low.float()
    error = (b - a).norm(dim=-1) / a.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.cosine_similarity(a, b, dim=-1), error


def joined(parts: Sequence[Gap]) -> Gap:
    """The positions of all parts, in order."""
    return Gap(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Gap)))


_SCALE_BITS = {"e8m0": 8, "e4m3": 8, "fp32": 32}


def stored_bits(scheme: Scheme, rows: int, columns: int) -> int:
    """Bits of a weight ``[rows, columns]`` in ``scheme``: codes, block scales, zero points and global scale."""
    blocks = math.ceil(rows / (scheme.rows or rows)) * math.ceil(columns / (scheme.block or columns))
    # Libraries that compute in the weights' own 16 bits store such scales in them.
    scale = 16 if scheme.scale_format == "fp32" and scheme.arithmetic != "fp32" else _SCALE_BITS[scheme.scale_format]
    zero_point = scheme.element.bits if scheme.has_zero_point else 0
    return scheme.element.bits * rows * columns + (scale + zero_point) * blocks + 32 * scheme.has_global_scale


@dataclass(frozen=True)
class WeightGap:
    """What the recipe did to the weights."""

    bits_of_quantized_layers: float | None
    """Bits per weight of the layers that were quantized, scales, WUSH matrices and residual corrections included;
    ``None`` where none was."""
    bits_of_model: float
    """Bits per weight of the whole model: what stays in high precision counts 16."""
    relative_error: dict[str, float]
    """``‖Ŵ − W‖ / ‖W‖`` (Frobenius norm) over all layers of a kind, e.g. ``q_proj``."""


@torch.no_grad()
def compare_weights(reference: nn.Module, low: nn.Module) -> WeightGap:
    """Compare the quantized layers of ``low`` with the same layers of ``reference``, module by module."""
    errors: dict[str, float] = defaultdict(float)
    sizes: dict[str, float] = defaultdict(float)
    weights = bits = 0
    transforms = {f"{name}.layer": m.transform for name, m in low.named_modules() if isinstance(m, TransformedInput)}
    for name, layer in low.named_modules():
        if isinstance(layer, LowBitLinear):
            transform = transforms.get(name)
            name = name if transform is None else name.removesuffix(".layer")
            kind, before = kind_of(name), weight_of(reference, name)
            now = layer.dequantized() if transform is None else transform.unfold(layer.dequantized())
            errors[kind] += (now - before.float()).double().square().sum().item()
            sizes[kind] += before.double().square().sum().item()
            weights += before.numel()
            bits += stored_bits(layer.weights, layer.out_features, layer.in_features)
            bits += SIXTEEN_BIT * sum(t.numel() for t in (layer.residual_in, layer.residual_out) if t is not None)
    # Layers that read one input share their transform; a Hadamard matrix is known without being stored.
    for matrix in {id(t): t.matrix for t in transforms.values()}.values():
        bits += SIXTEEN_BIT * matrix.numel() if len(matrix) > 1 else 0
    others = sum(p.numel() for p in low.parameters()) - weights  # tied weights count once
    return WeightGap(
        bits / weights if weights else None,
        (bits + SIXTEEN_BIT * others) / (weights + others),
        {kind: math.sqrt(errors[kind] / max(sizes[kind], 1e-300)) for kind in errors},
    )
