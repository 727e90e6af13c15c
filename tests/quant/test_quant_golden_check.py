"""The checker of reference vectors: it passes on the true ones and notices every flipped bit."""

import json
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitdraft.quant import golden
from bitdraft.quant.golden import CHECKERS, check_file, check_folder, flip_bit
from bitdraft.quant.golden_checks import Finding, Vectors
from bitdraft.quant.golden_peers import KNOWN, NAMED

ROOT = Path(__file__).resolve().parents[2]
CHECKED = ["casts", "fp8", "int4", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8", "nvfp4"]


@pytest.mark.parametrize("name", CHECKED)
def test_every_vector_agrees_but_for_the_named_disagreements(shared: Path, name: str) -> None:
    report = check_file(shared / "golden" / f"{name}.safetensors")
    assert report.wrong == []
    assert len(report.findings) >= 18
    assert [k for k in report.unchecked if not k.startswith("fouroversix_")] == []


def test_every_named_disagreement_happens(shared: Path) -> None:
    keys = {
        f"{report.file.removesuffix('.safetensors')}/{finding.key}"
        for report in check_folder(shared / "golden")
        for finding in report.findings
        if finding.named
    }
    assert [d.keys for d in KNOWN if not any(fnmatchcase(key, d.keys) for key in keys)] == []


def load(shared: Path, name: str) -> Vectors:
    path = shared / "golden" / f"{name}.safetensors"
    return Vectors(name, load_file(path), golden._block_names(path))


def check_one(vectors: Vectors, key: str) -> Finding | None:
    patterns = [p for p in CHECKERS if fnmatchcase(f"{vectors.file}/{key}", p)]
    findings = list(CHECKERS[max(patterns, key=len)](vectors, [key]))
    return findings[0] if findings else None


def entry_that_is_no_nan(x: Tensor, generator: torch.Generator) -> int:
    numbers = (~x.flatten().isnan()).nonzero().flatten()
    return int(numbers[torch.randint(len(numbers), (1,), generator=generator)]) if len(numbers) else -1


@pytest.mark.parametrize("name", CHECKED)
def test_a_flipped_bit_is_noticed_in_every_vector(shared: Path, name: str) -> None:
    """The lowest bit of a random entry: in FP4 bytes that of the even element, so never a sign of zero."""
    vectors, generator = load(shared, name), torch.Generator().manual_seed(0)
    unnoticed = []
    for key, x in vectors.tensors.items():
        place = -1 if key.startswith("in/") or key == "x" else entry_that_is_no_nan(x, generator)
        before = check_one(vectors, key) if place >= 0 else None
        if before is None:
            continue
        changed = Vectors(name, {**vectors.tensors, key: flip_bit(x, place * x.element_size(), 0)}, vectors.block_names)
        after = check_one(changed, key)
        assert after is not None
        if not after.wrong and after.named_crc == before.named_crc:
            unnoticed.append(key)
    # A static scale is the input of what is computed under it; its last bit may change no code.
    assert [k for k in unnoticed if "tensor_static" not in k] == []


def copied(shared: Path, tmp_path: Path, *, flip: tuple[str, int] | None = None) -> Path:
    """A folder with the MXFP4 vectors, perhaps with the lowest bit of one byte flipped."""
    tensors = load_file(shared / "golden" / "mxfp4.safetensors")
    if flip:
        tensors[flip[0]] = flip_bit(tensors[flip[0]], flip[1], 0)
    save_file(tensors, tmp_path / "mxfp4.safetensors")
    shutil.copy(shared / "golden" / "block_names_mx32.json", tmp_path)
    return tmp_path


def run_script(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "scripts" / "check_golden.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_script_passes_on_true_vectors_and_says_what_it_did_not_check(shared: Path, tmp_path: Path) -> None:
    folder = copied(shared, tmp_path)
    save_file({"something": torch.zeros(3)}, folder / "other.safetensors")
    result = run_script(folder)
    assert result.returncode == 0, result.stderr
    mx, other = result.stdout.splitlines()
    assert mx == "mxfp4.safetensors: 135 vectors (79054 entries) checked: 83 equal, 52 differ as named"
    assert other == "other.safetensors: 0 vectors (0 entries) checked: 0 equal, 0 differ as named; 1 NOT CHECKED"


def test_the_script_fails_on_one_flipped_bit_and_names_the_place(shared: Path, tmp_path: Path) -> None:
    result = run_script(copied(shared, tmp_path, flip=("compressed_tensors/rand_f32/scale", 5)))
    assert result.returncode == 1
    assert "1 WRONG" in result.stdout
    assert "first mismatch: compressed_tensors/rand_f32/scale: block 5, entry 0: 1" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("key", ["torchao_even/special_f32/data", "compressed_tensors/adv_f32/scale"])
def test_a_flipped_bit_inside_a_named_disagreement_is_noticed_too(shared: Path, tmp_path: Path, key: str) -> None:
    tensors = load_file(shared / "golden" / "mxfp4.safetensors")
    names = json.loads((shared / "golden" / "block_names_mx32.json").read_text())["adv_blocks"]
    place = names.index("f32max") if "adv" in key else 3
    report = check_file(copied(shared, tmp_path, flip=(key, place)) / "mxfp4.safetensors")
    assert [f.key for f in report.wrong] == ["mxfp*/*"]
    assert tensors[key].numel() > place


def test_other_inputs_of_the_same_layout_are_checked_by_what_is_computed_alone(shared: Path, tmp_path: Path) -> None:
    """New random numbers under the same names: the checksums of the known vectors say nothing about them."""
    folder = copied(shared, tmp_path)
    tensors = load_file(folder / "mxfp4.safetensors")
    doubled = {
        key: x * 2 if key.endswith(("in/rand_f32", "rand_f32/dq", "dq_decompress_bf16")) and "rand_f32" in key else x
        for key, x in tensors.items()
    }
    doubled |= {key: x + 1 for key, x in tensors.items() if key.endswith("rand_f32/scale")}
    save_file(doubled, folder / "mxfp4.safetensors")
    assert check_file(folder / "mxfp4.safetensors").wrong == []


def test_checksums_belong_to_files_that_have_a_checker() -> None:
    assert {key.partition("/")[0] for key in NAMED} <= set(CHECKED)


def test_a_folder_without_vectors_and_a_damaged_file_are_errors(shared: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \.safetensors files of reference vectors"):
        list(check_folder(tmp_path))
    (tmp_path / "mxfp4.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"mxfp4\.safetensors is not a safetensors file"):
        list(check_folder(tmp_path))
    save_file({"torchao_even/rand_f32/scale": torch.zeros(1)}, tmp_path / "mxfp4.safetensors")
    with pytest.raises(ValueError, match=r"mxfp4\.safetensors has no tensor 'in/rand_f32'"):
        list(check_folder(tmp_path))
