"""Exports are tried before they leave: whole pairs, model cards, and every fault that engines would not notice."""

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published_heads import Change, rewrite
from tiny import save_tiny_target
from torch import Tensor

from bitdraft.quant.files import sha256_of
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.rotation import random_rotation, rotate_residual
from bitdraft.quant.target import load_target
from bitdraft.speculators import export as writing
from bitdraft.speculators.export import LAYOUTS, export_head, write_head
from bitdraft.speculators.formats.facts import TargetFacts
from bitdraft.speculators.load import load_head, recipe_of_head
from bitdraft.speculators.metrics import Acceptance, total
from bitdraft.train.config import RunConfig
from bitdraft.train.environment import Environment, RunFailed
from bitdraft.train.exporting import export as exporting
from bitdraft.train.exporting.card import license_of
from bitdraft.train.exporting.checked import refuse_if_worse
from bitdraft.train.exporting.commands import serve_texts, sglang_command, vllm_command
from bitdraft.train.exporting.config import ExportConfig
from bitdraft.train.exporting.export import export
from bitdraft.train.run import run

Configure = Callable[..., ExportConfig]


@pytest.fixture(scope="module")
def calm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target whose layers say little, so that it often repeats itself and short training is enough."""
    folder = tmp_path_factory.mktemp("calm") / "target"
    return save_tiny_target(folder, tie_word_embeddings=True, initializer_range=0.05)


@pytest.fixture(scope="module")
def trained(
    make_config: Callable[..., RunConfig],
    calm_folder: Path,
    environment: Environment,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """The export of a short run whose head is often right."""
    done: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in done:
            done[kind] = tmp_path_factory.mktemp("trained") / kind
            config = make_config(done[kind], head=kind, target=str(calm_folder))
            answers, optim = replace(config.answers, max_new_tokens=24), replace(config.optim, steps=20)
            run(replace(config, answers=answers, optim=optim), environment)
        return done[kind] / "export"

    return folder


@pytest.fixture
def configure(
    trained: Callable[[str], Path], calm_folder: Path, prompt_files: tuple[Path, Path], tmp_path: Path
) -> Configure:
    """``configure("eagle3", with_target=True, …)``: the export of a trained tiny head."""

    def make(kind: str, **changes: Any) -> ExportConfig:
        config = ExportConfig(
            head=trained(kind),
            out=tmp_path / "out",
            target=str(calm_folder),
            data=prompt_files,
            prompts=11,
            max_new_tokens=40,
            dtype="float32",
        )
        return replace(config, **changes)

    return make


def documents(folder: Path) -> tuple[dict[str, Any], str]:
    """acceptance.json and the model card."""
    return json.loads((folder / "acceptance.json").read_text(encoding="utf-8")), (folder / "README.md").read_text(
        encoding="utf-8"
    )


def check_sums(folder: Path) -> None:
    """The manifest names every file but manifests, with its sum."""
    sums = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["sha256"]
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {"manifest.json"}
    assert set(sums) == files
    assert all(sha256_of(folder / name) == found for name, found in sums.items())


@pytest.mark.parametrize("layout", ["eagle3-speculators", "eagle3-original", "medusa-vllm", "medusa-original"])
def test_every_layout_leaves_tried_with_its_card_and_sums(
    configure: Configure, environment: Environment, layout: str
) -> None:
    config = configure(layout.partition("-")[0], format=layout)
    export(config, environment)
    document, card = documents(config.out)
    (row,) = document["results"]
    assert row["passes"] >= 100
    assert row["accepted"] > 0
    assert document["trained_on"] == document["served_on"] == "mxfp4a16"
    assert f"{row['acceptance_length']:.3f}" in card
    for engine in LAYOUTS[layout].ENGINES:
        assert engine in card
    check_sums(config.out)
    target = load_target(str(config.target), load_recipe("mxfp4a16"), dtype=torch.float32, compile_quantizer="off")
    assert load_head(config.out, target).kind == layout.partition("-")[0]
    assert recipe_of_head(config.out)["recipe"] == "mxfp4a16"


@pytest.mark.parametrize(("quant", "baked"), [("mxfp4a16", False), ("mxfp4a16", True), ("fp8", False), ("none", False)])
def test_a_pair_holds_the_target_that_the_head_was_tried_on(
    configure: Configure, environment: Environment, quant: str, baked: bool
) -> None:
    config = configure("eagle3", with_target=True, target_quant=quant, baked=baked)
    export(config, environment)
    assert {p.name for p in config.out.iterdir()} == {"head", "target", "README.md", "acceptance.json", "manifest.json"}
    check_sums(config.out)
    check_sums(config.out / "head")
    described = json.loads((config.out / "target" / "config.json").read_text(encoding="utf-8"))
    assert ("quantization_config" in described) == (quant != "none" and not baked)
    served = load_target(
        str(config.out / "target"),
        load_recipe("none" if baked or quant == "none" else "auto"),
        dtype=torch.float32,
        compile_quantizer="off",
    )
    load_head(config.out / "head", served)
    assert (config.out / "target" / "tokenizer.json").is_file()
    document, card = documents(config.out)
    assert document["target_fingerprint"] == served.fingerprint
    assert "vllm serve target" in card
    assert recipe_of_head(config.out / "head")["recipe"] == "mxfp4a16", "what it was trained on stays in the files"


@pytest.mark.parametrize("head_quant", ["fp8", "nvfp4", "mxfp4a16"])
def test_a_head_in_low_bit_leaves_as_it_drafts(configure: Configure, environment: Environment, head_quant: str) -> None:
    config = configure("eagle3", head_quant=head_quant)
    export(config, environment)
    described = json.loads((config.out / "config.json").read_text(encoding="utf-8"))
    assert described["quantization_config"]["quant_method"] == "compressed-tensors"
    assert f"`{head_quant}`, quantized after training" in documents(config.out)[1]
    with pytest.raises(ValueError, match="medusa head is loaded by no engine"):
        export(configure("medusa", head_quant="fp8", out=config.out.with_name("medusa")), environment)


def other_layers(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [k - 1 for k in config["eagle_aux_hidden_state_layer_ids"]]


def shifted_maps(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Ascending and in range, and most drafts are the neighbours of what was meant."""
    ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    left_out = (~weights["t2d"]).nonzero()[0]
    other = torch.cat([ids[ids != ids[len(ids) // 2]], left_out]).sort().values
    weights["d2t"] = other - torch.arange(len(ids))
    weights["t2d"] = torch.zeros_like(weights["t2d"]).scatter(0, other, True)


def missing_map(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    del weights["d2t"], weights["t2d"]


def missing_output(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    del weights["lm_head.weight"]


def normed_residual(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["norm_before_residual"] = True


def other_rotation(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["transformer_layer_config"]["rope_parameters"]["rope_theta"] *= 2


def other_epsilon(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
    config["transformer_layer_config"]["rms_norm_eps"] *= 1000


def swapped_norms(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    names = [f"layers.0.{n}.weight" for n in ("hidden_norm", "input_layernorm")]
    weights[names[0]], weights[names[1]] = weights[names[1]] * 2, weights[names[0]]


def missing_scale(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    del weights["layers.0.mlp.up_proj.weight_scale"]


def wrong_scale(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    weights["layers.0.mlp.up_proj.weight_scale"] = torch.ones_like(weights["layers.0.mlp.up_proj.weight_scale"])


PLAIN_FAULTS: list[Change] = [
    other_layers,
    shifted_maps,
    missing_map,
    missing_output,
    normed_residual,
    other_rotation,
    other_epsilon,
    swapped_norms,
]
LOW_BIT_FAULTS: list[Change] = [missing_scale, wrong_scale]


def leave_export(folder: Path) -> None:
    """What an earlier export has left, as far as anybody looks at it."""
    folder.mkdir()
    (folder / "old").write_text("before", encoding="utf-8")
    (folder / "manifest.json").write_text("{}", encoding="utf-8")


@pytest.mark.parametrize("fault", [*PLAIN_FAULTS, *LOW_BIT_FAULTS], ids=lambda fault: fault.__name__)
def test_no_faulty_export_leaves_the_house(
    configure: Configure, environment: Environment, monkeypatch: pytest.MonkeyPatch, fault: Change
) -> None:
    """As if the writer were wrong: whatever it is, nothing is left behind, and what was there before stays."""
    config = configure("eagle3", head_quant="fp8" if fault in LOW_BIT_FAULTS else None, overwrite=True)
    leave_export(config.out)

    def write_wrongly(head: Any, target: TargetFacts, folder: Path, **told: Any) -> None:
        write_head(head, target, folder, **told)
        rewrite(folder, fault)

    monkeypatch.setattr(exporting, "write_head", write_wrongly)
    with pytest.raises((RunFailed, ValueError)):
        export(config, environment)
    assert {p.name for p in config.out.iterdir()} == {"old", "manifest.json"}
    assert [p.name for p in config.out.parent.iterdir()] == ["out"]


def test_the_spoiling_itself_is_no_fault(
    configure: Configure, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above rests on: files written anew without a fault pass."""
    config = configure("eagle3")

    def write_again(head: Any, target: TargetFacts, folder: Path, **told: Any) -> None:
        write_head(head, target, folder, **told)
        rewrite(folder, lambda config, weights: None)

    monkeypatch.setattr(exporting, "write_head", write_again)
    export(config, environment)


def negated(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    weights["lm_head.weight"] = -weights["lm_head.weight"]


def lying_map(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Ascending, in range and told by both maps alike, but nearly every token is its neighbour."""
    ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    left_out = (~weights["t2d"]).nonzero()[-1]
    other = torch.cat([ids[1:], left_out]).sort().values
    weights["d2t"] = other - torch.arange(len(ids))
    weights["t2d"] = torch.zeros_like(weights["t2d"]).scatter(0, other, True)


def noisy_output(_config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    output = weights["lm_head.weight"].float()
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    weights["lm_head.weight"] = (output + 2.0 * output.std() * noise).to(torch.bfloat16)


def publish(config: ExportConfig, folder: Path, fault: Change) -> ExportConfig:
    """The export of a head that somebody else has published, faults and all: a faithful copy of it is no better."""
    shutil.copytree(config.head, folder)
    (folder / "manifest.json").unlink()
    rewrite(folder, fault)
    return replace(config, head=folder)


@pytest.mark.parametrize("fault", [negated, lying_map])
def test_a_head_of_which_next_to_nothing_is_accepted_is_refused(
    configure: Configure, environment: Environment, tmp_path: Path, fault: Change
) -> None:
    config = publish(configure("eagle3"), tmp_path / "published", fault)
    with pytest.raises(
        RunFailed, match=r"accepts \d+ of \d+ first drafts on train\+heldout: this head does not belong"
    ):
        export(config, environment)
    assert not config.out.exists()


def test_a_head_that_accepts_far_less_than_it_did_is_refused(
    configure: Configure, environment: Environment, tmp_path: Path
) -> None:
    """It is right now and then, so only the earlier measurement of the same prompts tells."""
    good = configure("eagle3", out=tmp_path / "good")
    export(good, environment)
    noisy = publish(configure("eagle3"), tmp_path / "published", noisy_output)
    noisy = replace(noisy, acceptance=good.out / "acceptance.json")
    with pytest.raises(RunFailed, match=r"accepts \S+% of the first drafts, where \S+% were accepted when"):
        export(noisy, environment)
    export(replace(noisy, max_new_tokens=41), environment)  # other answers, of which nothing is known


def test_far_less_is_judged_by_the_passes_there_are() -> None:
    def counts(accepted: int, passes: int) -> Acceptance:
        good, bad = (Acceptance.of_pass(1, drafted=1, accepted=a, refused=not a) for a in (1, 0))
        return total([*[good] * accepted, *[bad] * (passes - accepted)], 1)

    refuse_if_worse(counts(60, 160), 1000, 0.5)
    with pytest.raises(RunFailed, match=r"25\.0% of the first drafts, where 50\.0%"):
        refuse_if_worse(counts(40, 160), 1000, 0.5)


def test_a_training_run_does_not_leave_a_faulty_export(
    make_config: Callable[..., RunConfig],
    calm_folder: Path,
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write_wrongly(head: Any, target: TargetFacts, folder: Path, **told: Any) -> None:
        write_head(head, target, folder, **told)
        rewrite(folder, swapped_norms)

    monkeypatch.setattr(writing, "write_head", write_wrongly)
    with pytest.raises(RunFailed, match="do not draft what the head drafts"):
        run(make_config(tmp_path / "run", target=str(calm_folder)), environment)
    assert not (tmp_path / "run" / "export").exists()
    assert list((tmp_path / "run" / "checkpoints").iterdir()), "what was trained is not lost"


def test_too_few_passes_show_nothing(configure: Configure, environment: Environment) -> None:
    with pytest.raises(ValueError, match=r"too few to show .*raise --prompts or --max-new-tokens"):
        export(configure("eagle3", prompts=1, max_new_tokens=4), environment)


def test_an_existing_folder_is_kept_unless_asked(configure: Configure, environment: Environment) -> None:
    config = configure("medusa")
    leave_export(config.out)
    with pytest.raises(ValueError, match="out exists: choose another --out, or add --overwrite"):
        export(config, environment)
    assert (config.out / "old").is_file()
    export(replace(config, overwrite=True), environment)
    assert not (config.out / "old").exists()
    (config.out / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"holds no export \(manifest.json is missing\), so it is not replaced"):
        export(replace(config, overwrite=True), environment)


@pytest.mark.parametrize("what", ["head", "target", "data", "acceptance"])
def test_what_is_read_is_not_overwritten(
    configure: Configure, environment: Environment, tmp_path: Path, what: str
) -> None:
    config = configure("medusa", overwrite=True)
    inside = tmp_path / "precious" / "inside"
    leave_export(inside.parent)
    if what == "head":
        shutil.copytree(config.head, inside)
    elif what == "target":
        shutil.copytree(config.target, inside)
    else:
        inside.write_text("{}", encoding="utf-8")
    given: Any = {"data": (inside,), "target": str(inside)}.get(what, inside)
    with pytest.raises(ValueError, match=f"holds what --{what} reads"):
        export(replace(config, out=inside.parent, **{what: given}), environment)


def test_what_cannot_be_is_said_before_anything_is_loaded(
    configure: Configure, environment: Environment, tmp_path: Path
) -> None:
    config = configure("eagle3")
    incomplete = tmp_path / "acceptance.json"
    incomplete.write_text(json.dumps({"results": [{}], "served_on": "x"}), encoding="utf-8")
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"head": config.head.parent}, r"holds no head: config.json is missing \(do you mean .*export\?\)"),
        (
            {"format": "medusa-vllm"},
            "another kind of head: eagle3 heads are written as eagle3-speculators or eagle3-orig",
        ),
        ({"acceptance": incomplete}, "is not an acceptance.json of one head"),
        ({"acceptance": tmp_path / "missing"}, "--acceptance .*missing does not exist"),
        ({"head_quant": "fp9"}, "did you mean 'fp8'"),
        ({"target_quant": "fp9"}, "did you mean 'fp8'"),
        ({"target_profile": "vllm"}, "profile 'vllm'"),
        ({"with_target": True, "baked": True, "target_quant": "none"}, "--baked needs a recipe with formats"),
    )
    for changes, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            export(replace(config, **{"target": "nowhere/at-all", **changes}), environment)


def test_a_full_disk_leaves_old_files_whole(
    configure: Configure, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure("eagle3", with_target=True, overwrite=True)
    export(config, environment)
    before = {p: sha256_of(p) for p in config.out.rglob("*") if p.is_file()}

    def full(_path: Path, _text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_text_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        export(config, environment)
    assert {p: sha256_of(p) for p in config.out.rglob("*") if p.is_file()} == before
    assert [p.name for p in config.out.parent.iterdir()] == ["out"]


def test_a_target_with_another_tokenizer_is_refused(
    configure: Configure, environment: Environment, calm_folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(calm_folder, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    a, b = list(vocab)[40:42]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ValueError, match="another tokenizer"):
        export(configure("eagle3", target=str(other)), environment)


def test_a_head_of_a_rotated_target_is_refused_for_the_plain_one(
    configure: Configure, environment: Environment, calm_folder: Path, tmp_path: Path
) -> None:
    rotated, plain = (load_target(str(calm_folder), load_recipe("none"), dtype=torch.float32) for _ in range(2))
    rotate_residual(rotated.model, random_rotation(rotated.hidden_size))
    export_head(load_head(configure("eagle3").head, plain), rotated, tmp_path / "rotated", draft_length=3)
    with pytest.raises(ValueError, match="basis"):
        export(configure("eagle3", head=tmp_path / "rotated", target_quant="none"), environment)


def test_a_head_that_does_not_say_its_recipe_needs_one(
    configure: Configure, environment: Environment, tmp_path: Path
) -> None:
    config = publish(configure("medusa"), tmp_path / "published", lambda config, weights: config.pop("bitdraft"))
    with pytest.raises(ValueError, match="does not say what it was trained on: say with --target-quant"):
        export(config, environment)
    export(replace(config, target_quant="none"), environment)


def test_a_recipe_of_the_same_name_with_other_rules_is_not_taken(
    configure: Configure, environment: Environment, tmp_path: Path
) -> None:
    def other_rules(config: dict[str, Any], _weights: dict[str, Tensor]) -> None:
        config["bitdraft"]["recipe_fingerprint"] = "0" * 16

    config = publish(configure("medusa"), tmp_path / "published", other_rules)
    with pytest.raises(ValueError, match="trained on other rules than 'mxfp4a16' has here: say with --target-quant"):
        export(config, environment)


def test_the_card_says_what_the_run_measured_and_what_these_files_did(
    configure: Configure, environment: Environment
) -> None:
    config = configure("eagle3")
    export(config, environment)
    table = [line.strip("| ").split(" | ") for line in documents(config.out)[1].splitlines() if line.startswith("| ")]
    assert [row[0] for row in table[2:]] == ["these files", "training run", "training run"]
    assert [row[7] for row in table[2:]] == ["3", "1", "3"]
    again = replace(config, head=config.out, out=config.out.with_name("again"))
    export(again, environment)
    card = documents(again.out)[1]
    assert "| these files |" in card
    assert "training run" not in card, "what lies beside an export is no training run's"


def test_the_cards_commands_are_those_of_the_docs() -> None:
    """Which the engines' own parsers check."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    documented = [shlex.split(line) for line in page.replace("\\\n", " ").splitlines() if line.count("'") % 2 == 0]
    assert vllm_command("TARGET", "HEAD", "eagle3", 3) in documented
    assert vllm_command("TARGET", "HEAD", "medusa", 3) in documented
    assert sglang_command("TARGET", "HEAD", 3) in documented
    text = serve_texts(["TensorRT-LLM"], "TARGET", "HEAD", "eagle3", 3, [2, 15, 27])["TensorRT-LLM"]
    for line in ("decoding_type: Eagle3", "max_draft_len: 3", "speculative_model: HEAD"):
        assert f"  {line}\n" in text
        assert f"  {line}\n" in page
    assert "eagle3_layers_to_capture: [1, 14, 26]" in text
    assert text.splitlines()[-1] in page


def test_licenses_come_from_the_targets_own_card(tmp_path: Path) -> None:
    assert license_of(tmp_path) == "unknown"
    (tmp_path / "README.md").write_text("---\nlanguage:\n- en\nlicense: llama3.2\n---\n# A model\n", encoding="utf-8")
    assert license_of(tmp_path) == "llama3.2"
    (tmp_path / "README.md").write_text("# license: mit\nno front matter\n", encoding="utf-8")
    assert license_of(tmp_path) == "unknown"
