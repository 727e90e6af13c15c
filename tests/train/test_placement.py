"""A target split by a device map computes what it did, and maps that do not fit are refused in a sentence."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.hooks import AlignDevicesHook
from small_runs import ROOT, accelerate_launch

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target
from bitdraft.train.placement import first_device, place

IDS = torch.arange(1, 9)[None]


@pytest.fixture
def target(tiny_folder: Path) -> LowBitTarget:
    """One of the test's own: it is split in place."""
    return load_target(str(tiny_folder), load_recipe("mxfp8"), dtype=torch.float32, compile_quantizer="off")


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def written(folder: Path, parts: dict[str, str | int]) -> str:
    path = folder / "map.yaml"
    path.write_text(yaml.safe_dump(parts), encoding="utf-8")
    return str(path)


def by_layer() -> dict[str, str | int]:
    names = [
        "model.embed_tokens",
        *(f"model.layers.{k}" for k in range(8)),
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]
    return dict.fromkeys(names, "cpu")


@pytest.mark.parametrize("parts", [{"": "cpu"}, by_layer(), "auto"])
def test_a_split_target_computes_what_it_did(
    target: LowBitTarget, accelerator: Accelerator, tmp_path: Path, parts: dict[str, str | int] | str
) -> None:
    before = target.states(IDS, capture=(2, 4))
    logits = target.logits(before.last_hidden)
    device_map = parts if isinstance(parts, str) else written(tmp_path, parts)
    assert first_device(device_map, False, accelerator) == "cpu"
    place(target, device_map, False, accelerator)
    hooked = [m for m in target.model.modules() if isinstance(getattr(m, "_hf_hook", None), AlignDevicesHook)]
    assert hooked, "accelerate moves the inputs"
    after = target.states(IDS, capture=(2, 4))
    assert after.captured.equal(before.captured)
    assert after.last_hidden.equal(before.last_hidden)
    assert target.logits(after.last_hidden).equal(logits)


def test_every_layer_of_a_map_has_its_own_hook(target: LowBitTarget, accelerator: Accelerator, tmp_path: Path) -> None:
    place(target, written(tmp_path, by_layer()), False, accelerator)
    for layer in target.decoder.layers:
        assert layer._hf_hook.execution_device == "cpu"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.layers.3": "disk"}, r"'model\.layers\.3' is put on disk, but a target in low bit stays in memory"),
        ({"model.layers.3": "cuda:7"}, r"device 'cuda:7' of 'model\.layers\.3' is not here"),
        ({"model.layers.3": "gpu"}, r"device 'gpu' of 'model\.layers\.3' is not here"),
        ({"model.layers.9": "cpu"}, r"has no module 'model\.layers\.9'"),
        ({"model.layers.3": None}, r"gives no device to 9 weights, e\.g\. model\.layers\.3\."),
        ({"lm_head": "meta"}, r"the output head has to lie where the head is trained, on cpu"),
        ({"model.embed_tokens": "meta"}, r"the embedding has to lie where the head is trained, on cpu"),
        ({"model.layers.3": "meta"}, r"does not run split: "),
    ],
)
def test_maps_that_do_not_fit(
    target: LowBitTarget, accelerator: Accelerator, tmp_path: Path, change: dict[str, str | None], said: str
) -> None:
    parts = {name: device for name, device in (by_layer() | change).items() if device is not None}
    device_map = written(tmp_path, parts)
    with pytest.raises(ValueError, match=said) as caught:
        place(target, device_map, False, accelerator)
    assert str(caught.value).startswith(f"device map {device_map}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [("[1, 2]", "must hold a device for each module"), ("{a: [1]}", "must hold a device"), ("{a", "is not YAML")],
)
def test_files_that_are_no_maps(
    target: LowBitTarget, accelerator: Accelerator, tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        place(target, str(path), False, accelerator)
    with pytest.raises(ValueError, match="does not exist: give `auto` or a YAML file"):
        place(target, str(tmp_path / "none.yaml"), False, accelerator)


def test_a_target_that_does_not_fit_is_refused(
    target: LowBitTarget, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.utils.modeling.get_max_memory", lambda *_args: {"cpu": 300_000})
    with pytest.raises(ValueError, match=r"does not fit into the devices' free memory, \d+ modules are left over"):
        place(target, "auto", False, accelerator)


def test_what_cannot_be_placed_is_said_before_it_is_loaded(accelerator: Accelerator) -> None:
    with pytest.raises(ValueError, match="device_map and shard_target exclude each other"):
        first_device("auto", True, accelerator)
    with pytest.raises(ValueError, match="shard_target cuts the target up over processes, which FSDP2 does"):
        first_device(None, True, accelerator)
    assert first_device(None, False, accelerator) == "cpu"


@pytest.mark.slow
def test_processes_run_a_target_that_none_of_them_holds(tiny_folder: Path) -> None:
    launcher = accelerate_launch(ROOT / "configs" / "accelerate" / "fsdp2-2gpu.yaml")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    command = [*launcher, str(ROOT / "tests" / "cut_target.py"), str(tiny_folder)]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 processes ran what none of them holds" in done.stdout
