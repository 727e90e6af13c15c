"""The cache of target states: what goes in comes out, whatever happens to the run or to the files in between."""

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import full_after
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.data import state_cache, state_shards
from bitdraft.data.capture import DocumentStates, capture
from bitdraft.data.chat import Example
from bitdraft.data.packing import document_length
from bitdraft.data.state_cache import CacheIdentity, StateCache, Storage, documents_digest, shard_documents, write_cache
from bitdraft.data.state_shards import decoded, encoded
from bitdraft.quant.files import sha256_of
from bitdraft.quant.smallfloat import E4M3
from bitdraft.quant.target import LowBitTarget

LAYERS, HIDDEN, SHARD_TOKENS = (1, 4, 7), 48, 40
LENGTHS = [(3, 9), (10, 0), (1, 15), (20, 20), (7, 7), (60, 30), (2, 1), (5, 11), (1, 0), (12, 13)]
EXAMPLES = [Example(f"d{i}", "", (i + 1,) * prompt, (i + 2,) * answer) for i, (prompt, answer) in enumerate(LENGTHS)]


def states_of(index: int, dtype: torch.dtype = torch.bfloat16) -> DocumentStates:
    """Random, always the same for a document, with a few large channels as residual streams have."""
    n, generator = document_length(EXAMPLES[index]), torch.Generator().manual_seed(index)
    captured = torch.randn(n, len(LAYERS), HIDDEN, generator=generator)
    captured[..., 5] *= 300
    return DocumentStates(
        captured.to(dtype),
        torch.randn(n, HIDDEN, generator=generator).to(dtype),
        torch.randint(0, 2**17, (n,), generator=generator),
        torch.randn(n, generator=generator) * 20,
    )


class Producer:
    """Yields the states of documents, backwards, and remembers which were asked for; stops before the ``ends``-th."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, ends: int | None = None) -> None:
        self.dtype, self.ends = dtype, ends
        self.asked: list[int] = []

    def __call__(self, indices: Sequence[int]) -> Iterator[tuple[int, DocumentStates]]:
        for index in reversed(indices):
            if len(self.asked) == self.ends:
                raise RuntimeError("the target stopped")
            self.asked.append(index)
            yield index, states_of(index, self.dtype)


def identity(storage: Storage = "target", dtype: torch.dtype = torch.bfloat16) -> CacheIdentity:
    name = str(dtype).removeprefix("torch.")
    return CacheIdentity("aaaa", "bbbb", LAYERS, HIDDEN, 2**17, name, storage, documents_digest(EXAMPLES))


write = partial(write_cache, examples=EXAMPLES, shard_tokens=SHARD_TOKENS)


def written(folder: Path, kind: CacheIdentity | None = None, produce: Producer | None = None) -> StateCache:
    kind = kind or identity()
    write(folder, kind, produce=produce or Producer(kind.torch_dtype))
    return StateCache.open(folder, kind)


def assert_equal(found: DocumentStates, expected: DocumentStates) -> None:
    for name, wanted in vars(expected).items():
        got = getattr(found, name)
        assert got.dtype == wanted.dtype and torch.equal(got, wanted), name


def sums(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256_of(p) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_goes_in_comes_out_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    cache = written(tmp_path / "c", identity("target", dtype))
    assert len(cache) == len(EXAMPLES)
    for i in [*range(len(EXAMPLES)), 3, 0]:
        assert_equal(cache.read(i), states_of(i, dtype))


def test_bf16_storage_of_bf16_states_is_exact_and_of_fp32_states_one_rounding(tmp_path: Path) -> None:
    cache = written(tmp_path / "16", identity("bf16"))
    for i in range(len(EXAMPLES)):
        assert_equal(cache.read(i), states_of(i))
    cache = written(tmp_path / "32", identity("bf16", torch.float32))
    for i in range(len(EXAMPLES)):
        full = states_of(i, torch.float32)
        rounded = replace(
            full, captured=full.captured.bfloat16().float(), last_hidden=full.last_hidden.bfloat16().float()
        )
        assert_equal(cache.read(i), rounded)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.floats(-30, 30))
def test_fp8_is_off_by_at_most_half_a_step_under_the_scale_of_token_and_layer(seed: int, size: float) -> None:
    """The oracle searches the whole grid: what is read is the nearest value that the token's scale allows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 2, 40, generator=generator) * torch.randn(4, 2, 1, generator=generator).exp() * 2**size
    x[0, 0] = 0
    states = DocumentStates(x, x[:, 0], torch.zeros(4, dtype=torch.int64), torch.zeros(4))
    stored = encoded(states, "fp8")
    assert stored["captured"].dtype == torch.float8_e4m3fn
    assert stored["scales"].shape == (4, 2, 1) and stored["scales"].dtype == torch.float32
    found = decoded(stored, torch.float32)
    scale = x.abs().amax(-1, keepdim=True).double() / E4M3.max
    grid = torch.cat([-E4M3.magnitudes, E4M3.magnitudes]).double() * scale[..., None]  # [4, 2, 1, codes]
    nearest = (x.double()[..., None] - grid).abs().amin(-1)
    error = (x.double() - found.captured.double()).abs()
    assert (error <= nearest + 1e-6 * x.abs().double()).all()
    assert torch.equal(found.last_hidden, x[:, 0].bfloat16().float()), "the teacher's state stays in 16 bit"


def test_what_is_stored_has_the_size_that_was_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = sum(document_length(e) for e in EXAMPLES)
    storages: tuple[Storage, ...] = ("target", "bf16", "fp8")
    for storage in storages:
        kind = identity(storage, torch.float32)
        written(tmp_path / storage, kind)
        files = [*(tmp_path / storage).glob("shard-*/states.safetensors")]
        stored = sum(p.stat().st_size - 8 - int.from_bytes(p.read_bytes()[:8], "little") for p in files)
        offsets = 8 * (len(EXAMPLES) + len(files))
        assert stored - offsets == tokens * kind.bytes_per_token
        assert f"{tokens} tokens, {tokens * kind.bytes_per_token / 2**30:.2f} GiB to write" in capsys.readouterr().out


def test_a_cache_without_captured_layers(tmp_path: Path) -> None:
    kind = replace(identity("fp8"), layers=())

    def bare(i: int) -> DocumentStates:
        return replace(states_of(i), captured=torch.empty(document_length(EXAMPLES[i]), 0, 0, dtype=torch.bfloat16))

    write(tmp_path / "c", kind, produce=lambda indices: ((i, bare(i)) for i in indices))
    cache = StateCache.open(tmp_path / "c", kind)
    for i in range(len(EXAMPLES)):
        assert_equal(cache.read(i), bare(i))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 100), max_size=50), st.integers(1, 200))
def test_shards_hold_every_document_once_within_their_size(lengths: list[int], shard_tokens: int) -> None:
    shards = shard_documents(lengths, shard_tokens)
    assert sorted(i for shard in shards for i in shard) == list(range(len(lengths)))
    order = [lengths[i] for shard in shards for i in shard]
    assert order == sorted(lengths, reverse=True)
    tokens = [sum(lengths[i] for i in shard) for shard in shards]
    assert all(n <= shard_tokens or len(shard) == 1 for n, shard in zip(tokens, shards, strict=True))
    assert all(n + lengths[following[0]] > shard_tokens for n, following in zip(tokens, shards[1:], strict=False))


def test_a_complete_cache_is_not_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "c")
    before = sums(tmp_path / "c")
    capsys.readouterr()
    again = Producer()
    written(tmp_path / "c", produce=again)
    assert again.asked == [] and sums(tmp_path / "c") == before
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("ends", [0, 1, 3, 7, 9])
def test_a_run_that_stops_goes_on_with_the_same_shards(tmp_path: Path, ends: int) -> None:
    written(tmp_path / "straight")
    with pytest.raises(RuntimeError, match="stopped"):
        write(tmp_path / "c", identity(), produce=Producer(ends=ends))
    there = [i for p in (tmp_path / "c").glob("shard-*") for i in state_shards.read_description(p).documents]
    with pytest.raises(ValueError, match=f"holds the states of {len(there)} documents instead of 10"):
        StateCache.open(tmp_path / "c", identity())
    rest = Producer()
    # What another size of shards would be is settled by the folder.
    write_cache(tmp_path / "c", identity(), EXAMPLES, rest, shard_tokens=7)
    assert sorted([*rest.asked, *there]) == list(range(len(EXAMPLES)))
    assert sums(tmp_path / "c") == sums(tmp_path / "straight")


def kill_in_child(folder: Path, moment: str, times: int) -> None:
    """Writes the cache and is killed when ``moment`` is reached for the ``times``-th time."""
    reached = 0

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal reached
            reached += 1
            if reached == times:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        return call

    places: dict[str, tuple[Any, str]] = {
        "while states are computed": (state_shards, "encoded"),
        "before the tensors are written": (state_shards, "save_tensors"),
        "before the sum is known": (state_shards, "sha256_of"),
        "before the shard is renamed": (Path, "rename"),
        "before the header is renamed": (Path, "replace"),
    }
    where, name = places[moment]
    setattr(where, name, dying(getattr(where, name)))
    write(folder, identity(), produce=Producer())


@pytest.mark.parametrize(
    ("moment", "times"),
    [
        ("while states are computed", 5),
        ("before the tensors are written", 1),
        ("before the tensors are written", 3),
        ("before the sum is known", 2),
        ("before the shard is renamed", 2),
        ("before the header is renamed", 1),
    ],
)
def test_a_killed_process_leaves_nothing_that_is_half_written(tmp_path: Path, moment: str, times: int) -> None:
    child = multiprocessing.get_context("fork").Process(target=kill_in_child, args=(tmp_path / "c", moment, times))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    cache = written(tmp_path / "c")
    for i in range(len(EXAMPLES)):
        assert_equal(cache.read(i), states_of(i))
    written(tmp_path / "straight")
    assert sums(tmp_path / "c") == sums(tmp_path / "straight"), "and no temporary files"


def flip(path: Path, place: int = -100) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def forget_a_document(path: Path) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "documents": content["documents"][:-1]}))


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a byte of the tensors": ("states.safetensors", flip, "another sha256"),
    "a byte of the tensors' header": ("states.safetensors", partial(flip, place=20), "another sha256"),
    "an end that is missing": ("states.safetensors", cut, "bytes instead of"),
    "no tensors": ("states.safetensors", Path.unlink, "is missing"),
    "no description": ("shard.json", Path.unlink, "FileNotFoundError"),
    "a description that ends early": ("shard.json", cut, "JSONDecodeError"),
    "an empty description": ("shard.json", lambda p: p.write_text("[]"), "TypeError"),
    "another description": ("shard.json", lambda p: p.write_text('{"sha256": 1}'), "TypeError"),
    "a document that is not told of": ("shard.json", forget_a_document, "other documents"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_shard_is_named_and_computed_again(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, spoil, reason = DAMAGES[what]
    written(tmp_path / "c")
    before = sums(tmp_path / "c")
    shard = tmp_path / "c" / "shard-00002"
    documents = state_shards.read_description(shard).documents
    spoil(shard / name)
    again = Producer()
    cache = written(tmp_path / "c", produce=again)
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and f"warning: {shard} is damaged" in warning and reason in warning
    assert sorted(again.asked) == sorted(documents), "the other shards stay"
    assert sums(tmp_path / "c") == before
    for i in documents:
        assert_equal(cache.read(i), states_of(i))


@pytest.mark.parametrize(
    "what", [w for w in DAMAGES if w not in ("a byte of the tensors", "a byte of the tensors' header")]
)
def test_what_shows_without_reading_everything_is_refused_by_readers(tmp_path: Path, what: str) -> None:
    name, spoil, _ = DAMAGES[what]
    written(tmp_path / "c")
    spoil(tmp_path / "c" / "shard-00002" / name)
    with pytest.raises(ValueError, match="start again the run that writes this cache"):
        StateCache.open(tmp_path / "c", identity())


def test_a_file_that_goes_while_the_cache_is_open_is_one_sentence(tmp_path: Path) -> None:
    cache = written(tmp_path / "c")
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(ValueError, match=r"shard-0000\d cannot be read"):
        cache.read(3)


OTHER: dict[str, Any] = {
    "target": "cccc",
    "recipe": "dddd",
    "layers": (1, 4, 6),
    "hidden_size": 64,
    "vocabulary": 99,
    "dtype": "float32",
    "storage": "fp8",
    "documents": documents_digest(EXAMPLES[:-1]),
}


def test_every_field_of_the_identity_is_tried() -> None:
    assert OTHER.keys() == {f.name for f in fields(CacheIdentity)}


@pytest.mark.parametrize("name", OTHER)
def test_states_of_another_run_are_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    written(tmp_path / "c")
    before = sums(tmp_path / "c")
    other = replace(identity(), **{name: OTHER[name]})
    examples = EXAMPLES[:-1] if name == "documents" else EXAMPLES
    for refused in (
        lambda: StateCache.open(tmp_path / "c", other),
        lambda: write_cache(tmp_path / "c", other, examples, Producer()),
    ):
        with pytest.raises(ValueError) as caught:
            refused()
        told = str(caught.value)
        assert f"with {name} {getattr(identity(), name)!r}, and this run has {OTHER[name]!r}" in told
        assert told.endswith(": give another folder or delete this one") and "\n" not in told
    assert sums(tmp_path / "c") == before


@pytest.mark.parametrize("part", [slice(0, 1), slice(0, 8)])
def test_the_digest_knows_every_token_and_where_answers_begin(part: slice) -> None:
    examples = EXAMPLES[part]
    seen = {documents_digest(examples), documents_digest([*examples, examples[0]]), documents_digest(examples[1:])}
    first = examples[0]
    for prompt, answer in (
        (first.prompt, (*first.answer[:-1], 0)),
        ((0, *first.prompt[1:]), first.answer),
        (first.prompt[:-1], (first.prompt[-1], *first.answer)),
    ):
        seen.add(documents_digest([Example("x", "", prompt, answer), *examples[1:]]))
    assert len(seen) == 6
    renamed = [replace(e, id="other", category="other") for e in examples]
    assert documents_digest(renamed) == documents_digest(examples)


def test_folders_that_are_no_cache_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    (tmp_path / "empty").mkdir()
    for name, told in (("file", "is a file"), ("full", "no cache of states: give another folder")):
        with pytest.raises(ValueError, match=told):
            write(tmp_path / name, identity(), produce=Producer())
    with pytest.raises(ValueError, match=r"has no cache\.json"):
        StateCache.open(tmp_path / "empty", identity())
    with pytest.raises(ValueError, match=r"has no cache\.json"):
        StateCache.open(tmp_path / "absent", identity())
    assert len(written(tmp_path / "empty")) == len(EXAMPLES)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "identity": {"layers": 3}}', "\udcff"])
def test_a_damaged_header_is_one_sentence(tmp_path: Path, text: str) -> None:
    written(tmp_path / "c")
    (tmp_path / "c" / "cache.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    for refused in (lambda: StateCache.open(tmp_path / "c", identity()), lambda: written(tmp_path / "c")):
        with pytest.raises(ValueError, match=r"cache\.json is damaged: give another folder or delete this one"):
            refused()


def test_a_header_of_another_version_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "c")
    header = json.loads((tmp_path / "c" / "cache.json").read_text())
    (tmp_path / "c" / "cache.json").write_text(json.dumps({**header, "version": 2}))
    with pytest.raises(ValueError, match="is of version 2"):
        StateCache.open(tmp_path / "c", identity())


@pytest.mark.parametrize("size", [0, 300, 5000])
def test_a_full_disk_stops_with_a_sentence_and_keeps_what_is_written(
    tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """``capsys`` keeps what is printed in memory, where no limit on files applies."""
    with pytest.raises(RuntimeError):
        write(tmp_path / "c", identity(), produce=Producer(ends=3))
    before = sums(tmp_path / "c")
    assert len(before) > 1
    with (
        full_after(size),
        pytest.raises(OSError, match=r"shard-0000\d could not be written .*: make room and start again"),
    ):
        write(tmp_path / "c", identity(), produce=Producer())
    assert sums(tmp_path / "c") == before, "and no temporary files"
    assert len(written(tmp_path / "c")) == len(EXAMPLES)


def test_a_disk_with_too_little_room_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(document_length(e) for e in EXAMPLES) * identity().bytes_per_token
    usage = shutil.disk_usage(tmp_path)
    produce = Producer()
    monkeypatch.setattr(state_cache.shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(ValueError, match=r"need 0\.00 GiB and the disk has 0\.00 GiB left: make room"):
        write(tmp_path / "c", identity(), produce=produce)
    assert produce.asked == []
    monkeypatch.setattr(state_cache.shutil, "disk_usage", lambda _: usage._replace(free=needed))
    write(tmp_path / "c", identity(), produce=produce)
    monkeypatch.setattr(state_cache.shutil, "disk_usage", lambda _: usage._replace(free=0))
    write(tmp_path / "c", identity(), produce=produce)  # complete: no room is needed


def test_few_files_are_open_and_views_outlive_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cache, "_MOST_OPEN", 2)
    cache = written(tmp_path / "c")
    assert len([*(tmp_path / "c").glob("shard-*")]) > 3
    found = [cache.read(i) for i in range(len(EXAMPLES))]
    assert len(cache._open) == 2
    for i, states in enumerate(found):
        assert_equal(states, states_of(i))


def read_in_child(cache: StateCache, first: int) -> None:
    for k in range(40):
        i = (first + k) % len(EXAMPLES)
        assert_equal(cache.read(i), states_of(i))


def test_forked_readers_share_an_open_cache(tmp_path: Path) -> None:
    cache = written(tmp_path / "c")
    cache.read(0)  # open before the fork
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=read_in_child, args=(cache, first)) for first in range(3)]
    for child in children:
        child.start()
    read_in_child(cache, 5)
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]


def test_a_targets_states_come_back_as_captured(tmp_path: Path, target: LowBitTarget) -> None:
    kind = CacheIdentity.of(target, EXAMPLES, LAYERS, "target")
    assert (kind.hidden_size, kind.vocabulary, kind.dtype) == (64, 320, "float32")
    write(tmp_path / "c", kind, produce=lambda i: capture(target, EXAMPLES, LAYERS, indices=i), label="states")
    cache = StateCache.open(tmp_path / "c", kind)
    for shard in shard_documents([document_length(e) for e in EXAMPLES], SHARD_TOKENS):
        for i, expected in capture(target, EXAMPLES, LAYERS, indices=shard):
            assert_equal(cache.read(i), expected)


def test_what_a_reader_writes_into_its_states_does_not_reach_the_file(tmp_path: Path) -> None:
    cache = written(tmp_path / "c")
    cache.read(3).captured.zero_()
    assert StateCache.open(tmp_path / "c", identity()).read(3).captured.any()
    again = Producer()
    written(tmp_path / "c", produce=again)
    assert again.asked == []


@pytest.mark.parametrize("storage", ["target", "bf16", "fp8"])
def test_states_are_decoded_on_the_device_that_asks_for_them(tmp_path: Path, storage: Storage) -> None:
    states = written(tmp_path / "c", identity(storage)).read(3, "meta")
    expected = states_of(3)
    for name, tensor in vars(states).items():
        wanted = getattr(expected, name)
        assert tensor.device.type == "meta" and (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype)


def test_a_shard_known_to_be_damaged_is_never_read_even_if_the_run_stops_again(tmp_path: Path) -> None:
    written(tmp_path / "c")
    flip(tmp_path / "c" / "shard-00002" / "states.safetensors")
    with pytest.raises(RuntimeError, match="stopped"):
        write(tmp_path / "c", identity(), produce=Producer(ends=0))
    with pytest.raises(ValueError, match="start again the run that writes this cache"):
        StateCache.open(tmp_path / "c", identity())
