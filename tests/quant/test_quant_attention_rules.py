"""KV cache and attention in a recipe: suffixes, YAML, fingerprints, and an error in one sentence for what is wrong."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bitdraft.quant.attention.rules import AttentionRule, KvRule
from bitdraft.quant.presets import PRESETS, load_recipe
from bitdraft.quant.recipe import AUTO, Recipe


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    return tmp_path / "recipe.yaml"


def written(path: Path, **more: Any) -> Recipe:
    path.write_text(yaml.safe_dump({"rules": [{"modules": "*.mlp.*", "weights": "mxfp4-even"}], **more}))
    return load_recipe(str(path))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_have_an_fp8_cache(preset: str) -> None:
    recipe, base = load_recipe(f"{preset}+kvfp8"), PRESETS[preset]
    assert recipe == replace(base, name=f"{preset}+kvfp8", kv=KvRule())
    assert recipe.fingerprint != base.fingerprint
    assert not recipe.has_static_inputs or base.has_static_inputs
    assert recipe.kv == KvRule(format="fp8-kv", scales="one", per="tensor")


def test_a_file_and_a_checkpoint_can_have_an_fp8_cache(recipe_file: Path) -> None:
    plain = written(recipe_file)
    recipe = load_recipe(f"{recipe_file}+kvfp8")
    assert (recipe.rules, recipe.kv) == (plain.rules, KvRule())
    assert load_recipe("auto+kvfp8") == replace(AUTO, name="auto+kvfp8", kv=KvRule())
    assert [load_recipe(name).is_auto for name in ("auto", "auto+kvfp8", "none", "none+kvfp8")] == [
        True,
        True,
        False,
        False,
    ]
    written(recipe_file, kv={"format": "fp8-kv"})
    with pytest.raises(ValueError, match=r"recipe\.yaml says already how keys and values are cached"):
        load_recipe(f"{recipe_file}+kvfp8")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mxfp4+kvfp", r"unknown suffix '\+kvfp': did you mean '\+kvfp8'\?"),
        ("auto+fp8", r"unknown suffix '\+fp8': did you mean '\+kvfp8'\?"),
        ("mxfp5+kvfp8", r"unknown quantization preset 'mxfp5': did you mean 'mxfp4'\?"),
        ("mxfp4+kvfp8+kvfp8", r"mxfp4\+kvfp8 says already how keys and values are cached"),
        ("mxfp4 + kvfp8", r"unknown quantization preset .*\+kvfp8 behind any of them"),
    ],
)
def test_what_is_not_known_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(name)


def test_rules_are_read_from_yaml(recipe_file: Path) -> None:
    recipe = written(
        recipe_file,
        kv={"scales": "calibrated", "per": "head"},
        attention={"queries": "int8-token", "keys": "int8-token", "head_scales": "fitted"},
    )
    assert recipe.kv == KvRule(scales="calibrated", per="head")
    assert recipe.attention == AttentionRule(queries="int8-token", keys="int8-token", head_scales="fitted")
    assert recipe.has_static_inputs


def test_the_fingerprint_follows_the_rules(recipe_file: Path) -> None:
    int8 = {"queries": "int8-token"}
    differing: list[dict[str, Any]] = [
        {},
        {"kv": {}},
        {"kv": {"format": "fp8-e5m2-kv"}},
        {"kv": {"scales": "calibrated"}},
        {"kv": {"scales": "calibrated", "per": "head"}},
        {"attention": int8},
        {"attention": {"keys": "int8-token"}},
        {"attention": {**int8, "temperature": "fitted"}},
        {"attention": {**int8, "head_scales": "fitted"}},
        {"attention": int8, "kv": {}},
    ]
    recipes = [written(recipe_file, **more) for more in differing]
    assert len({r.fingerprint for r in recipes}) == len(recipes)


@pytest.mark.parametrize(
    ("rule", "needs"),
    [
        (KvRule(), False),
        (KvRule(scales="calibrated"), True),
        (AttentionRule(queries="fp8-token", probabilities="nvfp4-kernel"), False),
        (AttentionRule(keys="nvfp4-kernel"), True),
        (AttentionRule(keys="int8-token", head_scales="fitted"), True),
        (AttentionRule(probabilities="fp8-tensor-static", temperature="fitted"), True),
    ],
)
def test_what_is_measured_needs_text(rule: KvRule | AttentionRule, needs: bool) -> None:
    assert rule.needs_calibration == needs
    key = "kv" if isinstance(rule, KvRule) else "attention"
    assert Recipe("x", (), **{key: rule}).has_static_inputs == needs  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv": "fp8"}, r"kv: text is needed under some of the keys format, scales, per"),
        ({"kv": {"form": "fp8-kv"}}, r"kv: text is needed under some of the keys format, scales, per"),
        ({"kv": {"scales": 1}}, r"kv: text is needed"),
        ({"kv": {"scales": "calibrate"}}, r"kv: unknown scales 'calibrate': did you mean 'calibrated'\?"),
        ({"kv": {"per": "heads"}}, r"kv: unknown per 'heads': did you mean 'head'\?"),
        ({"kv": {"per": "head"}}, r"kv: scales of one are the same for every head"),
        ({"kv": {"scales": "stored"}}, r"kv: stored scales come with a quantized checkpoint"),
        ({"kv": {"format": "fp8-k"}}, r"unknown number format 'fp8-k': did you mean 'fp8-kv'\?"),
        ({"kv": {"format": "int8-token", "per": "head"}}, r"kv: int8-token scales every token and head by itself"),
        ({"kv": {"format": "nvfp4"}}, r"kv: nvfp4 has a scale above its block scales"),
        ({"kv": {"format": "fp8-block128"}}, r"kv: format: fp8-block128 has scales that several tokens share"),
        ({"attention": {}}, r"attention: name a format for one of queries"),
        ({"attention": {"query": "int8-token"}}, r"attention: text is needed under some of the keys queries, keys"),
        ({"attention": {"keys": "fp8-tensor"}}, r"attention: keys: fp8-tensor has scales that several tokens share"),
        ({"attention": {"values": "fp8-kv"}}, r"a static format of values is that of the cache, under 'kv'"),
        ({"attention": {"keys": "int8"}}, r"unknown number format 'int8'"),
        (
            {"attention": {"keys": "int8-token", "temperature": "fit"}},
            r"unknown temperature 'fit': did you mean 'fitted'\?",
        ),
        (
            {"attention": {"values": "fp8-token", "head_scales": "fitted"}},
            r"head_scales correct the product of low-bit",
        ),
        ({"cache": {}}, r"unknown key 'cache' \(there are: name, ignore, rules, kv, attention\)"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(recipe_file: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        written(recipe_file, **more)
    assert str(caught.value).startswith(f"recipe file {recipe_file}: ")
