"""Low-bit heads in both EAGLE-3 layouts: the same bits back, the same bytes again, names as the layout has them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packs import outputs_at
from safetensors.torch import load_file, save_file

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.export import export_head
from bitdraft.speculators.load import load_head
from bitdraft.speculators.low_bit import low_bit_layers, low_bit_tensors, quantize_head

Make = Callable[[str], DraftHead]
LAYOUTS = ["eagle3-speculators", "eagle3-original"]
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_format = pytest.mark.parametrize(
    ("layout", "recipe"),
    [*((layout, recipe) for layout in LAYOUTS for recipe in ("fp8", "nvfp4a16", "nvfp4")), (LAYOUTS[0], "mxfp4a16")],
)


@pytest.fixture
def make_low_bit(make_head: Make, rounded: LowBitTarget) -> Make:
    def of(recipe: str) -> DraftHead:
        text = [torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))]
        return quantize_head(make_head("eagle3"), load_recipe(recipe), target=rounded, calibration=text)

    return of


@every_format
def test_a_low_bit_head_comes_back_as_it_was(
    make_low_bit: Make, rounded: LowBitTarget, tmp_path: Path, recipe: str, layout: str
) -> None:
    head = make_low_bit(recipe)
    assert len(low_bit_layers(head)) == 7
    export_head(head, rounded, tmp_path / "first", draft_length=2, layout=layout)
    loaded = load_head(tmp_path / "first", rounded)
    tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    states, rows = rounded.states(tokens, capture=head.capture_layers), torch.tensor([[1, 5, 8]] * 2)
    with torch.no_grad():
        mine, its = (outputs_at(h, states, tokens, rows) @ h.output_weight.T for h in (head, loaded))
    assert torch.equal(mine, its)
    export_head(loaded, rounded, tmp_path / "second", draft_length=2, layout=layout)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


@every_format
def test_codes_and_scales_are_under_the_layouts_names(
    make_low_bit: Make, rounded: LowBitTarget, tmp_path: Path, recipe: str, layout: str
) -> None:
    head = make_low_bit(recipe)
    assert isinstance(head, Eagle3Head)
    export_head(head, rounded, tmp_path / "head", draft_length=2, layout=layout)
    weights = load_file(tmp_path / "head" / "model.safetensors")
    where = "layers.0." if layout == "eagle3-speculators" else "midlayer."
    for name, tensor in low_bit_tensors(head).items():
        stored = weights[name.replace("layers.0.", where)]
        assert stored.dtype == tensor.dtype
        assert torch.equal(stored.view(torch.uint8), tensor.view(torch.uint8))
    config = json.loads((tmp_path / "head" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4a16"])
def test_mxfp4_is_refused_where_sglang_would_have_to_compute_it(
    make_low_bit: Make, rounded: LowBitTarget, tmp_path: Path, recipe: str
) -> None:
    with pytest.raises(ValueError, match=r"SGLang has no dense kernel: use the format eagle3-speculators \(vLLM\)"):
        export_head(make_low_bit(recipe), rounded, tmp_path / "head", draft_length=2, layout="eagle3-original")
    assert list(tmp_path.iterdir()) == []


@every_layout
def test_a_scale_that_is_missing_is_noticed(
    make_low_bit: Make, rounded: LowBitTarget, tmp_path: Path, layout: str
) -> None:
    export_head(make_low_bit("fp8"), rounded, tmp_path / "head", draft_length=2, layout=layout)
    (tmp_path / "head" / "manifest.json").unlink()
    weights = load_file(tmp_path / "head" / "model.safetensors")
    del weights[next(name for name in weights if name.endswith("down_proj.weight_scale"))]
    save_file(weights, tmp_path / "head" / "model.safetensors")
    with pytest.raises(ValueError, match=r"head: .*down_proj"):
        load_head(tmp_path / "head", rounded)


@every_layout
def test_a_scale_that_is_not_finite_is_not_written(
    make_low_bit: Make, rounded: LowBitTarget, tmp_path: Path, layout: str
) -> None:
    head = make_low_bit("fp8")
    layer = next(iter(low_bit_layers(head).values()))
    layer.stored["weight_scale"][0] = float("inf")
    with pytest.raises(ValueError, match=r"not exported: \S+\.weight_scale holds NaN or infinity"):
        export_head(head, rounded, tmp_path / "head", draft_length=2, layout=layout)


def test_an_exponent_scale_that_is_no_number_is_not_written(
    make_low_bit: Make, rounded: LowBitTarget, tmp_path: Path
) -> None:
    head = make_low_bit("mxfp4a16")
    low_bit_layers(head)["layers.0.mlp.down_proj"].stored["weight_scale"][1, 0] = 255
    with pytest.raises(ValueError, match=r"not exported: \S+down_proj\.weight_scale holds NaN"):
        export_head(head, rounded, tmp_path / "head", draft_length=2)
