"""Recipes: the presets, YAML files, and an error in one sentence for everything that can be written wrongly."""

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from bitdraft.quant.presets import PRESETS, load_recipe
from bitdraft.quant.recipe import AUTO, Recipe, Rule

NAMES = [
    "none",
    "fp8",
    "fp8-block",
    "mxfp4",
    "mxfp4a16",
    "mxfp4a4",
    "mxfp8",
    "nvfp4",
    "nvfp4a16",
    "w4a16",
    "nvfp4-4over6",
    "nvfp4-sweep",
    "nvfp4a16-4over6",
    "nvfp4a16-sweep",
    "nvfp4a16-gptq",
    "mxfp4a16-gptq",
    "mxfp4a4-hadamard",
    "mxfp4a4-wush",
]
LINEARS = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp.experts.3.gate_proj",
    "mlp.shared_expert.up_proj",
]
NEVER = [
    "lm_head",
    "model.embed_tokens",
    "model.norm",
    "model.layers.0.mlp.gate",
    "model.layers.11.mlp.router",
    "model.layers.0.block_sparse_moe.gate",
    "model.layers.0.mlp.shared_expert_gate",
]


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    return tmp_path / "recipe.yaml"


def test_the_presets_are_these() -> None:
    assert list(PRESETS) == NAMES
    assert all(load_recipe(name).name == name for name in NAMES)


@pytest.mark.parametrize(
    ("preset", "weights", "activations", "scales"),
    [
        ("fp8", "fp8-channel", "fp8-token", "amax"),
        ("fp8-block", "fp8-block128", "fp8-group128", "amax"),
        ("mxfp8", "mxfp8-rceil", "mxfp8-rceil", "amax"),
        ("w4a16", "int4-g128", None, "amax"),
        ("mxfp4", "mxfp4-even", "fp8-token", "amax"),
        ("mxfp4a16", "mxfp4-even", None, "amax"),
        ("mxfp4a4", "mxfp4-even", "mxfp4-rceil", "amax"),
        ("nvfp4", "nvfp4", "nvfp4-kernel", "amax"),
        ("nvfp4a16", "nvfp4", None, "amax"),
        ("nvfp4-4over6", "nvfp4", "nvfp4-kernel", "four-over-six"),
        ("nvfp4-sweep", "nvfp4", "nvfp4-kernel", "sweep"),
        ("nvfp4a16-4over6", "nvfp4", None, "four-over-six"),
        ("nvfp4a16-sweep", "nvfp4", None, "sweep"),
        ("nvfp4a16-gptq", "nvfp4", None, "four-over-six"),
        ("mxfp4a16-gptq", "mxfp4-even", None, "amax"),
        ("mxfp4a4-hadamard", "mxfp4-even", "mxfp4-rceil", "amax"),
        ("mxfp4a4-wush", "mxfp4-even", "mxfp4-rceil", "amax"),
    ],
)
def test_a_preset_takes_the_linear_layers_of_the_decoder_and_nothing_else(
    preset: str, weights: str, activations: str | None, scales: str
) -> None:
    recipe = load_recipe(preset)
    for name in LINEARS:
        for prefix in ("model.layers.0.", "model.language_model.layers.27."):
            rule = recipe.rule_for(prefix + name)
            assert rule is not None
            assert (rule.weights, rule.activations, rule.scales) == (weights, activations, scales)
    for name in NEVER:
        rule = recipe.rule_for(name)
        assert rule is None or rule.leaves_alone


def test_the_preset_none_does_nothing() -> None:
    assert load_recipe("none").leaves_all_alone
    assert not any(load_recipe(name).leaves_all_alone for name in NAMES if name != "none")


def test_the_first_rule_that_matches_decides() -> None:
    first, second = Rule("*.0.*", "fp8-channel"), Rule("*", "mxfp4-even")
    recipe = Recipe("two", (first, second))
    assert recipe.rule_for("layers.0.mlp") is first
    assert recipe.rule_for("layers.1.mlp") is second
    assert Recipe("none", ()).rule_for("layers.0.mlp") is None


def test_patterns_tell_upper_from_lower_case() -> None:
    assert Recipe("case", (Rule("*.MLP.*", "fp8-channel"),)).rule_for("layers.0.mlp.up_proj") is None


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_written_as_yaml_reads_back_equal(name: str, recipe_file: Path) -> None:
    preset = load_recipe(name)
    rules = [asdict(rule) for rule in preset.rules]
    recipe_file.write_text(yaml.safe_dump({"name": name, "rules": rules}), encoding="utf-8")
    assert load_recipe(str(recipe_file)) == preset
    assert load_recipe(str(recipe_file)).fingerprint == preset.fingerprint


def test_the_yaml_of_the_documentation_reads_as_it_says(recipe_file: Path) -> None:
    recipe_file.write_text(
        'name: mlp-only\nrules:\n  - {modules: "*.mlp.*", weights: mxfp4-even, activations: fp8-token}\n'
        '  - {modules: "*"}  # everything else stays as it is\n',
        encoding="utf-8",
    )
    expected = Recipe("mlp-only", (Rule("*.mlp.*", "mxfp4-even", "fp8-token"), Rule("*")))
    assert load_recipe(str(recipe_file)) == expected


def test_a_recipe_without_a_name_is_called_like_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    path.write_text('rules: [{modules: "*", weights: fp8-channel}]', encoding="utf-8")
    assert load_recipe(str(path)).name == "mine"


def test_the_fingerprint_follows_the_rules_and_not_the_name() -> None:
    rules = (Rule("a", "mxfp4-even", "fp8-token"), Rule("b"))
    base = Recipe("x", rules).fingerprint
    assert Recipe("y", rules).fingerprint == base
    others = [
        rules[::-1],
        rules[:1],
        (Rule("a", "mxfp4-even"), Rule("b")),
        (Rule("a", "nvfp4", "fp8-token"), Rule("b")),
        (Rule("c", "mxfp4-even", "fp8-token"), Rule("b")),
        (Rule("a", "mxfp4-even", "fp8-token", "sweep-exponent"), Rule("b")),
    ]
    assert len({base, *(Recipe("x", r).fingerprint for r in others)}) == 1 + len(others)
    assert len({PRESETS[name].fingerprint for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    ("preset", "fingerprint"),
    [("none", "4f53cda18c2baa0c"), ("mxfp4", "8a9cf4352e62ccb0"), ("nvfp4", "f003b99684df6783")],
)
def test_plain_scales_do_not_change_a_fingerprint_that_is_on_record(preset: str, fingerprint: str) -> None:
    assert PRESETS[preset].fingerprint == fingerprint


def test_auto_is_not_the_recipe_that_leaves_everything_alone() -> None:
    assert AUTO.fingerprint != load_recipe("none").fingerprint, "another target writes the answers"
    assert load_recipe("auto+kvfp8").fingerprint != load_recipe("none+kvfp8").fingerprint


@pytest.mark.parametrize("name", ["auto", "auto+kvfp8", "auto@vllm-sm90"])
def test_no_recipe_file_passes_for_auto(recipe_file: Path, name: str) -> None:
    recipe_file.write_text(f"name: {name}\nrules: []\nkv: {{format: int8-token}}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="name for checkpoints that are already quantized"):
        load_recipe(str(recipe_file))


def test_a_rule_reads_its_scale_method_from_yaml(recipe_file: Path) -> None:
    recipe_file.write_text('rules: [{modules: "*", weights: nvfp4, scales: soar}]', encoding="utf-8")
    (rule,) = load_recipe(str(recipe_file)).rules
    assert rule == Rule("*", "nvfp4", None, "soar")
    assert rule.scale_method is not None
    assert rule.scale_method.name == "soar"
    assert Rule("*").scale_method is None


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("mxpf4", "mxfp4"), ("mxfp5", "mxfp4"), ("nvfp", "nvfp4"), ("NONE", "none"), ("fp8 ", "fp8")]
)
def test_an_unknown_preset_names_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(ValueError, match="unknown quantization preset") as error:
        load_recipe(wrong)
    if wrong != "NONE":  # nothing in common with any preset, letter by letter
        assert f"did you mean {nearest!r}?" in str(error.value)
    assert all(name in str(error.value) for name in NAMES)


def test_a_missing_file_is_named(recipe_file: Path) -> None:
    with pytest.raises(ValueError, match=r"recipe\.yaml does not exist"):
        load_recipe(str(recipe_file))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rules: [", "is not YAML"),
        ("a: b: c", "is not YAML"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
        ("", "needs a list under 'rules'"),
        ("ignore: lm_head\nrules: []", "'ignore' is a list of patterns"),
        ("ignore: ['re:(']\nrules: []", "'ignore': 're:(' is no regular expression"),
        ("rules: [{modules: 're:*', weights: nvfp4}]", "rule 1: 're:*' is no regular expression"),
        ("just words", "needs a list under 'rules'"),
        ("- {modules: x}", "needs a list under 'rules'"),
        ("rules: {modules: x}", "needs a list under 'rules'"),
        ("rules:\n", "needs a list under 'rules'"),
        (
            "rules: [{weights: nvfp4}]",
            "rule 1: the keys are activations, at_load, modules, residual, rounding, scales, transform, ",
        ),
        (
            "rules: [nvfp4]",
            "rule 1: the keys are activations, at_load, modules, residual, rounding, scales, transform, ",
        ),
        ("rules: [{modules: a}, {modules: b, weight: nvfp4}]", "rule 2: the keys are"),
        ("rules: [{modules: a}, {modules: b, weights: nvfp5}]", "rule 2: unknown number format 'nvfp5'"),
        ("rules: [{modules: a, activations: fp8}]", "rule 1: unknown number format 'fp8': did you mean"),
        (
            "rules: [{modules: a, weights: nvfp4, scales: swep}]",
            "rule 1: unknown scale method 'swep': did you mean 'sweep'",
        ),
        ("rules: [{modules: a, weights: nvfp4, scales: null}]", "rule 1: patterns, formats and methods are text"),
        (
            "rules: [{modules: b}, {modules: a, weights: fp8-channel, scales: soar}]",
            "rule 2: scales 'soar' belong to NVFP4 weights ('nvfp4'), not to 'fp8-channel'",
        ),
        (
            "rules: [{modules: a, weights: nvfp4, scales: sweep-exponent}]",
            "rule 1: scales 'sweep-exponent' belong to MX weights",
        ),
        ("rules: [{modules: a, scales: sweep}]", "rule 1: scales 'sweep' need a format under 'weights'"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_file_and_rule(recipe_file: Path, text: str, complaint: str) -> None:
    recipe_file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"recipe\.yaml") as error:
        load_recipe(str(recipe_file))
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_ignore_lists_of_engines_go_before_the_rules(recipe_file: Path) -> None:
    text = 'ignore: [lm_head, "re:.*mlp[.]gate$", "model.layers.0.*"]\nrules: [{modules: "*", weights: mxfp4-even}]'
    recipe_file.write_text(text, encoding="utf-8")
    recipe = load_recipe(str(recipe_file))
    for name, quantized in {
        "lm_head": False,
        "model.layers.1.mlp.gate": False,
        "model.layers.1.mlp.gate_proj": True,
        "model.layers.0.mlp.up_proj": False,
        "model.layers.10.mlp.up_proj": True,
    }.items():
        rule = recipe.rule_for(name)
        assert rule is not None
        assert rule.leaves_alone != quantized, name


def test_a_regular_expression_matches_from_the_beginning_of_a_name() -> None:
    rule = Rule("re:layers", "mxfp4-even")
    assert rule.matches("layers.0.mlp")
    assert not rule.matches("model.layers.0.mlp")


SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_recipes_load_and_are_called_like_their_files(path: Path) -> None:
    assert load_recipe(str(path)).name == path.stem
