"""The scale methods a recipe can name, and which formats each belongs to."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bitdraft.quant.block import Quantized, quantize
from bitdraft.quant.scales.four_over_six import four_over_six
from bitdraft.quant.scales.mx_exponent import exponent_bias, exponent_search
from bitdraft.quant.scales.soar import soar
from bitdraft.quant.scales.sweep import sweep
from bitdraft.quant.schemes import Scheme


@dataclass(frozen=True)
class ScaleMethod:
    """One way to choose the block scales of a weight."""

    name: str
    quantize: Callable[[Tensor, Scheme], Quantized]
    """``[M, K]`` → the same weight in the scheme; layers that share a scale are stacked along M."""
    fits: Callable[[Scheme], bool]
    belongs_to: str
    """The formats it fits, in words."""


def _is_nvfp4(scheme: Scheme) -> bool:
    return scheme.scale in ("two-level", "two-level-kernel") and scheme.arithmetic == "fp32"


def _has_exponents(scheme: Scheme) -> bool:
    return scheme.scale_format == "e8m0" and scheme.scale != "floor-stretched" and scheme.ties == "even"


_NVFP4, _MX = "NVFP4 weights ('nvfp4')", "MX weights ('mxfp4-even' and others that round ties to even)"

SCALE_METHODS = {
    m.name: m
    for m in (
        ScaleMethod("amax", quantize, lambda _: True, "every format"),
        ScaleMethod("four-over-six", four_over_six, _is_nvfp4, _NVFP4),
        ScaleMethod("four-over-six-mae", partial(four_over_six, criterion="mae"), _is_nvfp4, _NVFP4),
        ScaleMethod("four-over-six-abs-max", partial(four_over_six, criterion="abs_max"), _is_nvfp4, _NVFP4),
        ScaleMethod("soar", soar, _is_nvfp4, _NVFP4),
        ScaleMethod("sweep", sweep, _is_nvfp4, _NVFP4),
        ScaleMethod("sweep-exponent", exponent_search, _has_exponents, _MX),
        ScaleMethod("exponent-bias", exponent_bias, _has_exponents, _MX),
    )
}


def scale_method(name: str, scheme: Scheme) -> ScaleMethod:
    """The method called ``name``; ``ValueError`` naming the nearest one, or if it does not belong to ``scheme``."""
    if name not in SCALE_METHODS:
        near = difflib.get_close_matches(name, SCALE_METHODS, n=1, cutoff=0.0)[0]
        known = ", ".join(SCALE_METHODS)
        raise ValueError(f"unknown scale method {name!r}: did you mean {near!r}? (known: {known})")
    method = SCALE_METHODS[name]
    if not method.fits(scheme):
        raise ValueError(f"scales {name!r} belong to {method.belongs_to}, not to {scheme.name!r}")
    return method


def quantize_together(weights: Sequence[Tensor], scheme: Scheme, method: ScaleMethod) -> list[Quantized]:
    """Weights ``[M_i, K]`` that share one global scale (layers that engines fuse), each quantized by ``method``.

    Raises ``ValueError`` if K does not divide into blocks.
    """
    joint = method.quantize(torch.cat(list(weights)), scheme)
    assert joint.outer is None or joint.outer.ndim == 0, "a scale of the whole tensor, or none"
    rows = [len(w) for w in weights]
    parts = zip(joint.values.split(rows), joint.scale.split(rows), strict=True)
    return [Quantized(values, joint.outer, scale) for values, scale in parts]
