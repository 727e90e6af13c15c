"""The checker of reference vectors: it passes on the true ones and notices every flipped bit."""

import json
import random
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitdraft.quant.golden import check as golden
from bitdraft.quant.golden.check import CHECKERS, CHECKSUMS, check_file, check_folder, flip_bit, is_input
from bitdraft.quant.golden.compare import Finding, Vectors, comparable_codes, comparable_values, compare
from bitdraft.quant.golden.peers import KNOWN
from bitdraft.quant.smallfloat import E2M1

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    "casts", "fp8", "gptq", "int4", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8", "nvfp4", "soar_sweep", "wush",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_vector_agrees_but_for_the_named_disagreements(shared: Path, name: str) -> None:
    report = check_file(shared / "golden" / f"{name}.safetensors")
    assert report.wrong == []
    assert report.unchecked == ()
    inputs = sum(is_input(key) for key in load_file(shared / "golden" / f"{name}.safetensors"))
    stored = (shared / "golden" / "KEYS.txt").read_text().partition(f"## {name}.safetensors")[2].partition("##")[0]
    assert len(report.findings) + inputs == len(stored.strip().splitlines()) - 1


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


def check_one(vectors: Vectors, key: str) -> Finding:
    patterns = [p for p in CHECKERS if fnmatchcase(f"{vectors.file}/{key}", p)]
    (finding,) = CHECKERS[max(patterns, key=len)](vectors, [key])
    return finding


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_of_any_vector_fails_the_whole_file(shared: Path, tmp_path: Path, name: str) -> None:
    """Any byte, any bit: the sign of a zero and the last digit of a sum too, because the inputs are the known ones."""
    tensors, chosen = load_file(shared / "golden" / f"{name}.safetensors"), random.Random(name)
    shutil.copy(shared / "golden" / "block_names_mx32.json", tmp_path)
    shutil.copy(shared / "golden" / "block_names_nv16.json", tmp_path)
    for key in chosen.sample([k for k in tensors if not is_input(k)], 4):
        position, bit = chosen.randrange(tensors[key].numel() * tensors[key].element_size()), chosen.randrange(8)
        save_file({**tensors, key: flip_bit(tensors[key], position, bit)}, tmp_path / f"{name}.safetensors")
        assert len(check_file(tmp_path / f"{name}.safetensors").wrong) >= 1, (key, position, bit)


SIGNS = {"mxfp4": {3, 7}, "nvfp4": {3, 7}, "mxfp6_e2m3": {5, 7, 3, 1}, "mxfp6_e3m2": {5, 7, 3, 1}, "soar_sweep": set()}
"""Bits of a byte that may be the sign of a zero."""
LEAST_BIT = {"T_official": 37, "T_ref": 37, "alpha": 13, "sse": 13, "delta_q": 3, "H": 16, "Sx": 0}
"""The lowest bit that the comparison alone has to notice where it allows for the order of sums: of T relative to its
largest entry, of H on its diagonal."""


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_noticed_by_the_comparison_alone(shared: Path, name: str) -> None:
    """As it must be for inputs that were never seen: one random bit of every vector.

    Not compared: the bits of NaN, what lies in named disagreements, signs of zeros whose input is zero.
    """
    vectors, chosen = load(shared, name), random.Random(name)
    unnoticed, tried = [], 0
    for key, x in vectors.tensors.items():
        before = None if is_input(key) else check_one(vectors, key)
        if before is None or (before.named and "/special_f32/" in key) or before.named == before.total:
            continue
        least, width = LEAST_BIT.get(key.rpartition("/")[2], 0), 8 * x.element_size()
        entry, bit = chosen.randrange(x.numel()), chosen.randrange(least, width)
        number = x.flatten()[entry]
        if x.is_floating_point() and (number.isnan() or (number == 0 and bit == width - 1)):
            continue
        if x.dtype == torch.uint8 and bit in SIGNS.get(name, {5, 7}):
            continue
        if key.startswith("T_"):
            entry = int(x.abs().argmax())
        flipped = flip_bit(x, entry * x.element_size() + bit // 8, bit % 8)
        tried += 1
        after = check_one(Vectors(name, {**vectors.tensors, key: flipped}, vectors.block_names), key)
        if not after.wrong and after.named <= before.named:
            unnoticed.append((key, entry, bit))
    assert unnoticed == []
    assert tried >= 3


def test_the_sign_of_what_rounds_to_zero_counts_and_that_of_zero_does_not() -> None:
    x = torch.tensor([[-0.1, 0.1, -0.0, 0.0, -3.0, 1.0, -0.05, 2.0]])
    ours = E2M1.encode(E2M1.round(x))
    signed = torch.tensor([[8, 0, 0, 0, 13, 2, 8, 4]], dtype=torch.uint8)
    for theirs in (signed, signed | torch.tensor([[0, 0, 8, 8, 0, 0, 0, 0]], dtype=torch.uint8)):
        assert compare("f", "k", *comparable_codes(ours, theirs, x, 4), [("all",)]).wrong == 0
    for entry in (0, 1, 6):
        theirs = flip_bit(signed, entry, 3)
        assert compare("f", "k", *comparable_codes(ours, theirs, x, 4), [("all",)]).wrong == 1


@pytest.mark.parametrize("keeps_sign", [True, False])
def test_values_keep_the_sign_of_zeros_everywhere_or_nowhere(keeps_sign: bool) -> None:
    x = torch.tensor([[-0.1, 0.1, -0.2, 0.2, -0.1, 4.0, -6.0, -0.0]])
    ours = E2M1.round(x)
    theirs = torch.where(ours == 0, ours.abs().copysign(x) if keeps_sign else 0.0, ours)
    assert compare("f", "k", *comparable_values(ours, theirs, x, 8), [("all",)]).wrong == 0
    theirs[0, 2] = -theirs[0, 2]
    assert compare("f", "k", *comparable_values(ours, theirs, x, 8), [("all",)]).wrong == 1


def copied(shared: Path, tmp_path: Path, *, flip: tuple[str, int] | None = None) -> Path:
    """A folder with the MXFP4 vectors, perhaps with the lowest bit of one byte flipped."""
    tensors = load_file(shared / "golden" / "mxfp4.safetensors")
    if flip:
        tensors[flip[0]] = flip_bit(tensors[flip[0]], flip[1], 0)
    save_file(tensors, tmp_path / "mxfp4.safetensors")
    shutil.copy(shared / "golden" / "block_names_mx32.json", tmp_path)
    return tmp_path


def run_script(folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "scripts" / "check_golden.py"), str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_script_passes_on_true_vectors_and_says_what_it_did_not_check(shared: Path, tmp_path: Path) -> None:
    folder = copied(shared, tmp_path)
    save_file({"something": torch.zeros(3)}, folder / "other.safetensors")
    result = run_script(folder)
    assert result.returncode == 0, result.stderr
    mx, other = result.stdout.splitlines()
    assert mx == "mxfp4.safetensors: 135 vectors (79054 entries) checked: 81 equal, 54 differ as named"
    assert other == "other.safetensors: 0 vectors (0 entries) checked: 0 equal, 0 differ as named; 1 NOT CHECKED"
    complete = run_script(folder, "--complete")
    assert complete.returncode == 1
    assert "not checked: something" in complete.stdout
    assert complete.stderr.strip() == "error: 1 vectors have no checker"


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
    assert [f.key for f in report.wrong] == [f"vectors of in/{key.split('/')[1]}"]
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


def test_every_input_has_a_checksum(shared: Path) -> None:
    vectors = [load(shared, name) for name in FILES]
    written = [(v, [k for k in v.tensors if not is_input(k)]) for v in vectors]
    assert {f"{v.file}/{given}" for v, keys in written for given in golden.by_input(v, keys)} == set(CHECKSUMS)


def test_a_known_input_beside_new_ones_is_still_held_against_its_checksum(shared: Path, tmp_path: Path) -> None:
    """New random numbers in one set, one flipped bit in the NaN of another."""
    folder = copied(shared, tmp_path)
    tensors = load_file(folder / "mxfp4.safetensors")
    kept = {key: x for key, x in tensors.items() if "rand_f32" not in key}
    save_file(kept, folder / "mxfp4.safetensors")
    assert check_file(folder / "mxfp4.safetensors").wrong == []
    key = "compressed_tensors/special_f32/dq"
    save_file({**kept, key: flip_bit(kept[key], 0, 0)}, folder / "mxfp4.safetensors")
    assert [f.key for f in check_file(folder / "mxfp4.safetensors").wrong] == ["vectors of in/special_f32"]


def test_a_folder_without_vectors_and_a_damaged_file_are_errors(shared: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \.safetensors files of reference vectors"):
        list(check_folder(tmp_path))
    (tmp_path / "mxfp4.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"mxfp4\.safetensors is not a safetensors file"):
        list(check_folder(tmp_path))
    save_file({"torchao_even/rand_f32/scale": torch.zeros(1)}, tmp_path / "mxfp4.safetensors")
    with pytest.raises(ValueError, match=r"mxfp4\.safetensors has no tensor 'in/rand_f32'"):
        list(check_folder(tmp_path))
