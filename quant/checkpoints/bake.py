"""Weights written as what their low-bit codes stand for, in an ordinary checkpoint.

For engines that have no kernel for a format (MXFP4 on a CPU). A weight-only kernel multiplies by the dequantized
weight, and so does an ordinary one, if the type that the weight is written in holds it. bf16 holds MX formats, and
integer groups, which kernels round to it anyway; where an fp32 scale stands above the codes (FP8, NVFP4), only fp32
does, to the rounding of that product.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bitdraft.quant.linear import LowBitLinear
from bitdraft.quant.recipe import Recipe


def check_can_bake(recipe: Recipe) -> None:
    """``ValueError`` naming the first rule that does more than put other values into weights."""
    if recipe.kv is not None or recipe.attention is not None:
        raise ValueError(
            f"recipe {recipe.name!r}: baked weights say nothing of the KV cache and of attention: leave those out, and "
            "serve with the engine's own option (vLLM: --kv-cache-dtype fp8)"
        )
    if recipe.leaves_all_alone:
        raise ValueError(f"recipe {recipe.name!r} quantizes nothing: there is nothing to bake")
    for rule in recipe.rules:
        what = None
        if rule.activations is not None:
            what = f"inputs in {rule.activations}"
        elif rule.transform != "none":
            what = f"a {rule.transform} transform of inputs"
        elif rule.residual:
            what = "a residual correction"
        elif rule.at_load != "decode":
            what = f"weights {rule.at_load} at load"
        if what is not None:
            raise ValueError(
                f"recipe {recipe.name!r}, rule {rule.modules!r}: baked weights cannot hold {what}: serve the quantized "
                "checkpoint (without --baked), or bake the weight-only form of the recipe (mxfp4a16, w4a16)"
            )


class Exactness:
    """Counts the weights that would not be what they stand for in the type that they are to be written in."""

    def __init__(self, written: torch.dtype) -> None:
        self.written = written
        self._weights = self._changed = 0

    def add(self, layer: LowBitLinear) -> None:
        meant = layer.dequantized()
        self._weights += meant.numel()
        self._changed += int((meant.to(self.written).float() != meant).sum())

    def check(self, recipe: Recipe) -> None:
        """``ValueError`` with the share of weights that would change, if any would."""
        if self._changed:
            kind = str(self.written).removeprefix("torch.")
            raise ValueError(
                f"recipe {recipe.name!r}: {self._changed / self._weights:.1%} of the baked weights would change when "
                f"they are rounded to {kind}: add --dtype float32, or serve the quantized checkpoint (without --baked)"
            )


def baked_config(config: dict[str, Any], recipe: Recipe, written: torch.dtype, calibrated_on: str | None) -> None:
    """Say in a ``config.json`` what was baked, and in which type engines are to load it.

    ``calibrated_on``: digest of the text that rounding looked at, which is a part of the recipe's fingerprint.
    """
    field = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    config[field] = str(written).removeprefix("torch.")
    whole = replace(recipe, calibrated_on=calibrated_on) if calibrated_on else recipe
    config["bitdraft"] = {"baked": True, "recipe": recipe.name, "recipe_fingerprint": whole.fingerprint}


def low_bit_layer(model: nn.Module, name: str) -> LowBitLinear:
    """The low-bit layer of that name."""
    layer = model.get_submodule(name)
    assert isinstance(layer, LowBitLinear)
    return layer
