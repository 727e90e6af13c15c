"""The weights of layers that read one input, as a rule of the recipe quantizes them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bitdraft.quant.block import Quantized, nvfp4_global_scale, quantize
from bitdraft.quant.gptq import gptq_quantize
from bitdraft.quant.recipe import Rule
from bitdraft.quant.scales.methods import quantize_together
from bitdraft.quant.schemes import Scheme
from bitdraft.quant.transforms import BlockTransform, hadamard_transform
from bitdraft.quant.wush import wush_transform


def block_transform_of(rule: Rule, weights: Sequence[Tensor], hessian: Tensor | None) -> BlockTransform | None:
    """The transform that ``rule`` puts before layers with these ``weights`` ``[M_i, K]``, applied in their dtype.

    ``hessian``: ``E[x xᵀ]`` ``[K, K]`` of their common input; WUSH needs it.
    """
    if rule.transform == "none":
        return None
    scheme = rule.weight_scheme
    assert scheme is not None and scheme.block is not None
    if rule.transform == "hadamard":
        return hadamard_transform(scheme.block, weights[0].dtype)
    assert hessian is not None
    return wush_transform(hessian, torch.cat(list(weights)), scheme.block, weights[0].dtype)


def scaled_weights(weights: Sequence[Tensor], rule: Rule) -> list[Quantized]:
    """Weights ``[M_i, K]`` rounded to nearest under the scales of the rule's method, one global scale for all."""
    scheme, method = rule.weight_scheme, rule.scale_method
    assert scheme is not None and method is not None
    if method.name != "amax":
        return quantize_together(weights, scheme, method)
    shared = _shared_global_scale(weights, scheme)
    return [quantize(w, scheme, global_scale=shared) for w in weights]


def compensated_weights(
    weights: Sequence[Tensor], rule: Rule, scaled: Sequence[Quantized], hessian: Tensor | None
) -> list[Quantized]:
    """The same weights rounded by GPTQ under the scales of ``scaled``. ``hessian``: ``[K, K]`` of their input."""
    scheme, method = rule.weight_scheme, rule.scale_method
    assert scheme is not None and method is not None and hessian is not None
    chosen, shared = method.name != "amax", _shared_global_scale(weights, scheme)
    return [
        gptq_quantize(
            w,
            hessian,
            scheme,
            global_scale=1.0 / q.outer if chosen and q.outer is not None else shared,
            scales=q.scale if chosen else None,
            act_order=rule.rounding == "gptq-act-order",
        )
        for w, q in zip(weights, scaled, strict=True)
    ]


def _shared_global_scale(weights: Sequence[Tensor], scheme: Scheme) -> Tensor | None:
    if not scheme.has_global_scale:
        return None
    return nvfp4_global_scale(torch.stack([w.abs().amax().float() for w in weights]).amax())
