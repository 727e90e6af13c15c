"""Training in low bit refuses what no export could hold, in the words of the export."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from trained_heads import DOWN, trained

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.profiles import profile_named
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.low_bit import quantize_head
from bitdraft.speculators.medusa import MedusaHead
from bitdraft.speculators.qat import static_input_scales, train_in_low_bit

Make = Callable[..., Eagle3Head]


REFUSED = [
    Recipe("fc", (Rule("*.fc", "fp8-channel", "fp8-token"),)),
    Recipe("lm_head", (Rule("*.lm_head", "fp8-channel", "fp8-token"),)),
    Recipe("q alone", (Rule("*.q_proj", "fp8-channel"), Rule("*.v_proj", "mxfp4-even"))),
    Recipe("gptq", (Rule("*.mlp.*", "mxfp4-even", rounding="gptq"),)),
    Recipe("even", (Rule("*.mlp.*", "mxfp4-even", "mxfp4-even"),)),
    Recipe("nothing", ()),
    Recipe("int4", (Rule("*.mlp.*", "int4-group32"),)),
    Recipe("hadamard", (Rule("*.mlp.*", "mxfp4-even", transform="hadamard"),)),
    Recipe("no such layer", (Rule("*.experts.*", "mxfp4-even"),)),
    load_recipe("fp8-block"),
    load_recipe("nvfp4"),
]


@pytest.fixture
def head(make_eagle3: Make, rounded: LowBitTarget) -> Eagle3Head:
    return make_eagle3(rounded, size=96, steps=3)


def refusal(of: Callable[..., DraftHead], head: DraftHead, recipe: Recipe, **more: Any) -> str:
    with pytest.raises(ValueError) as caught:
        of(copy.deepcopy(head), recipe, **more)
    return str(caught.value)


@pytest.mark.parametrize("recipe", REFUSED, ids=lambda recipe: recipe.name)
def test_what_cannot_be_exported_is_not_trained_either(head: Eagle3Head, recipe: Recipe) -> None:
    assert refusal(train_in_low_bit, head, recipe) == refusal(quantize_head, head, recipe)


def test_other_heads_and_profiles_are_refused_in_the_same_words(
    head: Eagle3Head, make_medusa: Callable[..., MedusaHead], rounded: LowBitTarget
) -> None:
    medusa, cpu = make_medusa(rounded), profile_named("vllm-cpu")
    for of, recipe, more in ((medusa, "fp8", {}), (head, "mxfp4", {"profile": cpu})):
        named = load_recipe(recipe)
        assert refusal(train_in_low_bit, of, named, **more) == refusal(quantize_head, of, named, **more)
    quantized = quantize_head(copy.deepcopy(head), load_recipe("fp8"))
    assert "in low bit already" in refusal(train_in_low_bit, quantized, load_recipe("fp8"))
    again = train_in_low_bit(copy.deepcopy(head), load_recipe("fp8"))
    assert "trained in low bit already" in refusal(train_in_low_bit, again, load_recipe("mxfp4"))


def test_scales_that_do_not_fit_are_named(head: Eagle3Head, rounded: LowBitTarget) -> None:
    scales, nvfp4 = static_input_scales(trained(head, rounded, "nvfp4")), load_recipe("nvfp4")
    up = "layers.0.mlp.up_proj"
    for change, complaint in (
        ({"layers.0.mlp.other": torch.ones(())}, "input_scales names layers.0.mlp.other, whose inputs have no static"),
        ({DOWN: torch.tensor(-1.0)}, f"input_scales: that of {DOWN} is not one positive number"),
        ({DOWN: torch.ones(2)}, f"input_scales: that of {DOWN} is not one positive number"),
        ({DOWN: torch.tensor(torch.inf)}, f"input_scales: that of {DOWN} is not one positive number"),
        ({up: scales[up] * 2}, "differ, but engines fuse them and keep one"),
    ):
        for of in (train_in_low_bit, quantize_head):
            assert complaint in refusal(of, head, nvfp4, input_scales={**scales, **change})
    del scales[up]
    assert "need the target and calibration" in refusal(train_in_low_bit, head, nvfp4, input_scales=scales)
