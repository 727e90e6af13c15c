"""Comparisons for weights whose scales or codes were searched for: FourOverSix, SOAR, the sweep, GPTQ, WUSH.

Scales and codes are compared bit for bit here too. What depends on the order of a sum cannot be: each such vector
says what it may differ by and why, always far less than any change of a code or a scale would make.
"""

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bitdraft.quant.block import Quantized
from bitdraft.quant.golden.checks import block_labels
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
from bitdraft.quant.golden.peers import EQUAL_ERRORS, NOT_SATURATED, OVERFLOWS
from bitdraft.quant.pack import unpack_fp4
from bitdraft.quant.scales.error import blocks_of
from bitdraft.quant.scales.four_over_six import Criterion, blocks_at_four, four_over_six
from bitdraft.quant.scales.soar import joint_fit
from bitdraft.quant.scales.sweep import sweep
from bitdraft.quant.schemes import NVFP4
from bitdraft.quant.smallfloat import E2M1, E4M3

# N blocks, E elements per block.

_CRITERIA: dict[str, Criterion | None] = {"mse": "mse", "mae": "mae", "absmax": "abs_max", "static6": None}
_SUM = 1e-12
"""Relative: fp64 sums of a few thousand squares in another order (the bound is their number times 1.1e-16)."""


def check_four_over_six(vectors: Vectors, keys: Sequence[str]) -> Iterator[Finding]:
    """FourOverSix as its authors' code computes it, faults included; elsewhere this package has to agree with it."""
    for start, names in fields(keys).items():
        peer, data = start.split("/")
        criterion = peer.removeprefix("fouroversix_")
        if criterion not in _CRITERIA:
            continue
        x = vectors[f"in/{data}"]
        reference = _reference(x, _CRITERIA[criterion])
        labels = [
            (*names_, *tags)
            for names_, tags in zip(block_labels(vectors, data, 16), _fault_tags(reference, x), strict=True)
        ]
        plain = [(f"block {i}",) for i in range(len(labels))]
        signs = _signs(reference, x)
        package = _package(x, _CRITERIA[criterion]) or reference
        for name in names:
            key, theirs = f"{start}/{name}", vectors[f"{start}/{name}"]
            if name not in ("packed", "scale_e4m3", "dq", "gscale_decode"):
                continue
            parts = (WHOLE, WHOLE) if name == "gscale_decode" else (plain, labels)
            exact, ours = (
                _compared(vectors.file, key, computed[name], theirs, signs, part)
                for computed, part in zip((reference, package), parts, strict=True)
            )
            yield exact if exact.wrong else ours


def _signs(reference: dict[str, Tensor], x: Tensor) -> Tensor:
    """Numbers of the sign that the reference's zeros have: + under a scale of 0, - where codes leave the range."""
    wide = E4M3.decode(reference["scale_e4m3"]).repeat_interleave(16, dim=-1)
    unsaturated = (reference["codes"].abs() > E2M1.max).reshape(x.shape)
    return torch.where(unsaturated, -1.0, torch.where(wide == 0, x.float().abs(), x.float()))


def _compared(file: str, key: str, ours: Tensor, theirs: Tensor, signs: Tensor, labels: Labels) -> Finding:
    if key.endswith("/packed"):
        ours, theirs = comparable_codes(ours, unpack_fp4(theirs), signs, 4)
    elif key.endswith("/dq"):
        ours, theirs = comparable_values(ours, theirs, signs, 16)
    return compare(file, key, ours, theirs, labels)


def _reference(x: Tensor, criterion: Criterion | None) -> dict[str, Tensor]:
    """The reference's order of operations: codes may leave the range, and become the code of -0 when packed."""
    largest = E4M3.max if criterion is None else 256.0
    amax = x.abs().amax().float()
    span = largest * E2M1.max
    encode = torch.where(amax == 0, 1.0, span / amax)
    decode = 1.0 / encode
    blocks_NE = x.float().reshape(-1, 16)
    unrounded_N1 = blocks_NE.abs().amax(-1, keepdim=True) / E2M1.max * encode
    chosen: tuple[Tensor, ...] = ()
    equal_N1 = torch.zeros_like(unrounded_N1, dtype=torch.bool)
    for stretch in (1.0,) if criterion is None else (1.0, 1.5):
        scale_N1 = E4M3.round(unrounded_N1 * stretch)
        inverse_N1 = torch.where(scale_N1 == 0, 0.0, 1.0 / (decode * scale_N1))
        codes_NE = E2M1.round(blocks_NE * inverse_N1, saturate=False)
        error_N1 = _error((codes_NE * scale_N1) * amax / span - blocks_NE, criterion)
        if chosen:
            better = error_N1 < chosen[2]
            equal_N1 = (error_N1 - chosen[2]).abs() <= 1e-5 * torch.maximum(error_N1, chosen[2])
            both = zip((scale_N1, codes_NE, error_N1), chosen, strict=True)
            chosen = tuple(torch.where(better, new, old) for new, old in both)
        else:
            chosen = scale_N1, codes_NE, error_N1
    scale_N1, codes_NE, _ = chosen
    return {
        "codes": codes_NE,
        "equal": equal_N1,
        **_stored(x, scale_N1, torch.where(codes_NE.abs() > 6, 0.0, codes_NE), largest),
    }


def _stored(x: Tensor, scale_N1: Tensor, codes_NE: Tensor, largest: float) -> dict[str, Tensor]:
    amax, span = x.abs().amax().float(), largest * E2M1.max
    return {
        "packed": E2M1.encode(codes_NE).reshape(x.shape),
        "scale_e4m3": E4M3.encode(scale_N1).reshape(*x.shape[:-1], -1),
        "dq": ((codes_NE * scale_N1) * amax / span).reshape(x.shape),
        "gscale_decode": (amax / span).reshape(1),
    }


def _error(difference_NE: Tensor, criterion: Criterion | None) -> Tensor:
    if criterion == "mae":
        return difference_NE.abs().sum(-1, keepdim=True)
    return (
        difference_NE.abs().amax(-1, keepdim=True)
        if criterion == "abs_max"
        else (difference_NE.square().sum(-1, keepdim=True))
    )


def _fault_tags(reference: dict[str, Tensor], x: Tensor) -> list[tuple[str, ...]]:
    """Which of the reference's faults each block meets."""
    amax = x.abs().amax().float()
    scale_N1 = E4M3.decode(reference["scale_e4m3"]).reshape(-1, 1)
    unsaturated_N = (reference["codes"].abs() > 6).any(-1)
    overflows_N = (E2M1.max * scale_N1 * amax).isinf().any(-1)
    flags_N3 = torch.stack([unsaturated_N, overflows_N, reference["equal"].flatten()], dim=-1).tolist()
    names = (NOT_SATURATED, OVERFLOWS, EQUAL_ERRORS)
    return [tuple(name for name, holds in zip(names, flags, strict=True) if holds) for flags in flags_N3]


def _package(x: Tensor, criterion: Criterion | None) -> dict[str, Tensor] | None:
    """What ``quant/scales/four_over_six.py`` stores, dequantized in the reference's order."""
    if criterion is None:
        return None  # FourOverSix without its choice: no scheme of this package multiplies in that order
    q = four_over_six(x, NVFP4, criterion=criterion)
    return _stored(x, q.scale.reshape(-1, 1), _codes(q).reshape(-1, 16), 256.0)


def _codes(q: Quantized) -> Tensor:
    """``[N, K]``: code values of an NVFP4 tensor; those under a scale of 0 are 0."""
    wide = q.scale.repeat_interleave(16, dim=-1)
    return torch.where(wide == 0, 0.0, q.values / wide)


def check_searches(vectors: Vectors, keys: Sequence[str]) -> Iterator[Finding]:
    """FourOverSix, SOAR's joint fit, its decoupled search, and the sweep of all block scales, on one weight ``w``."""
    w = vectors["w"]
    for method, names in fields(keys).items():
        computed = _searched(vectors, w, method)
        for name in names:
            if name in computed:
                ours, within = computed[name]
                theirs = vectors[f"{method}/{name}"]
                ours = ours.reshape(theirs.shape).to(theirs.dtype) if ours.numel() == theirs.numel() else ours
                if name in ("dq", "q"):
                    ours, theirs = comparable_values(ours.reshape(w.shape), theirs.reshape(w.shape), w, 16)
                yield compare(vectors.file, f"{method}/{name}", ours, theirs, WHOLE, within=within)


def _searched(vectors: Vectors, w: Tensor, method: str) -> dict[str, tuple[Tensor, Tensor | float]]:
    """For every field, what is computed here and the difference that its order of summation excuses.

    Errors and SOAR's global scale are recomputed in fp64 from the *file's* scales and codes: they are laws that these
    fulfil. The codes and scales themselves are compared exactly.
    """
    if re.fullmatch(r"46_(mse|mae|absmax)", method):
        q = four_over_six(w, NVFP4, criterion=_CRITERIA[method[3:]] or "mse")
        stored = _stored(w, q.scale.reshape(-1, 1), _codes(q).reshape(-1, 16), 256.0)
        sse = (vectors[f"{method}/dq"].double() - w.double()).square().sum()
        exact = {"q": _codes(q), "scale": q.scale, "selected4": blocks_at_four(q), "dq": stored["dq"]}
        return {**{name: (value, 0.0) for name, value in exact.items()}, "sse": (sse, sse * _SUM)}
    blocks_NE = w.double().reshape(-1, 16)
    if method == "cjso":
        _, fit = joint_fit(blocks_of(w, NVFP4), E2M1, None, 20)
        delta_N1, q_NE = vectors["cjso/delta_e4m3"].double()[:, None], vectors["cjso/q"].double()
        alpha = (delta_N1 * blocks_NE * q_NE).sum() / (delta_N1 * q_NE).square().sum()
        sse = (vectors["cjso/alpha"] * delta_N1 * q_NE - blocks_NE).square().sum()
        fitted = {"delta_e4m3": (fit.scale, 0.0), "q": (fit.codes, 0.0)}
        return {**fitted, "alpha": (alpha, alpha * _SUM), "sse": (sse, sse * _SUM)}
    if method == "dss":
        delta_q, delta_d, sse = _decoupled(vectors, blocks_NE)
        # The grid's 1.01 is 101 / 100 or 0.5 + 51 · 0.01: two units in the last place.
        return {"delta_q": (delta_q, delta_q * 2.0**-51), "delta_d": (delta_d, 0.0), "sse": (sse, sse * _SUM)}
    if match := re.fullmatch(r"sweep(\d+)", method):
        largest = float(match[1])
        alpha = w.double().abs().amax() / (largest * E2M1.max)
        delta_N1 = vectors[f"{method}/delta"].double()[:, None]
        codes_NE = E2M1.round((blocks_NE / (alpha * delta_N1)).float()).double()
        sse = (alpha * delta_N1 * codes_NE - blocks_NE).square().sum()
        found: dict[str, tuple[Tensor, Tensor | float]] = {"alpha": (alpha, 0.0), "sse": (sse, sse * _SUM)}
        return {**found, "delta": (sweep(w, NVFP4).scale, 0.0)} if largest == E4M3.max else found
    return {}


def _decoupled(vectors: Vectors, blocks_NE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best assigning scale (0.50 to 1.50 times the joint fit's), the best stored one (that or the next below), and
    the error: in fp64, earlier candidates winning ties."""
    alpha, start_N1 = vectors["cjso/alpha"], vectors["cjso/delta_e4m3"].double()[:, None]
    grid = E4M3.magnitudes.double()
    below_N1 = grid[(torch.searchsorted(grid, start_N1) - 1).clamp(min=1)]
    least_N1 = torch.full_like(start_N1, torch.inf)
    assigning_N1, stored_N1 = start_N1, start_N1
    for percent in range(50, 151):
        scale_N1 = start_N1 * (percent / 100)
        codes_NE = E2M1.round((blocks_NE / (alpha * scale_N1)).float()).double()
        for candidate_N1 in (start_N1, below_N1):
            error_N1 = (alpha * candidate_N1 * codes_NE - blocks_NE).square().sum(-1, keepdim=True)
            better_N1 = error_N1 < least_N1
            least_N1 = torch.where(better_N1, error_N1, least_N1)
            assigning_N1 = torch.where(better_N1, scale_N1, assigning_N1)
            stored_N1 = torch.where(better_N1, candidate_N1, stored_N1)
    return assigning_N1[:, 0], stored_N1[:, 0], least_N1.sum()
