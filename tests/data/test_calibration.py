"""The text that recipes are calibrated on: which, how much of it, and in what shape."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bitdraft.data.calibration import CalibrationConfig, calibration_text, rows_of_text
from bitdraft.data.chat import conversation_ids
from bitdraft.data.sources import demo_file, read_conversations
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import AUTO


def write(folder: Path, *conversations: list[tuple[str, str]]) -> Path:
    path = folder / "text.jsonl"
    records = [
        {"id": str(i), "conversations": [{"role": role, "content": content} for role, content in turns]}
        for i, turns in enumerate(conversations)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def test_a_record_is_rendered_whole(tokenizer: Any, tmp_path: Path) -> None:
    asked = [("user", "Who?")]
    path = write(tmp_path, asked, [*asked, ("assistant", "Me.")])
    open_end, closed = (tokenizer.decode(conversation_ids(tokenizer, c)) for c in read_conversations([path]))
    assert open_end == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert closed == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nMe.<|im_end|>\n"


def test_rows_hold_the_texts_behind_each_other() -> None:
    texts = [list(range(start, start + 700)) for start in (0, 700, 1400, 2100, 2800)]
    batches = rows_of_text(texts, 3400)
    assert [tuple(b.shape) for b in batches] == [(4, 512), (2, 512)]
    assert torch.equal(torch.cat(batches).flatten(), torch.arange(6 * 512))
    with pytest.raises(ValueError, match=r"has 511 tokens, but needs 512: give more under --calibration\.data"):
        rows_of_text([list(range(511))], 1000)


@pytest.mark.parametrize("preset", ["nvfp4a16-gptq", "mxfp4a4-wush"])
def test_methods_that_look_at_inputs_get_the_shipped_prompts(tokenizer: Any, preset: str) -> None:
    batches = calibration_text(CalibrationConfig(tokens=2048), load_recipe(preset), tokenizer)
    assert batches is not None
    assert [tuple(b.shape) for b in batches] == [(4, 512)]
    first = conversation_ids(tokenizer, read_conversations([demo_file("train")])[0])
    assert batches[0].flatten()[: len(first)].tolist() == first


def test_others_get_text_only_where_it_is_given_and_of_use(tokenizer: Any, tmp_path: Path) -> None:
    given = CalibrationConfig(data=(write(tmp_path, [("user", "x" * 600)]),))
    for preset in ("none", "mxfp4", "mxfp4a4-hadamard"):
        assert calibration_text(given, load_recipe(preset), tokenizer) is None
    assert calibration_text(given, AUTO, tokenizer) is None
    assert calibration_text(CalibrationConfig(), load_recipe("nvfp4"), tokenizer) is None, "the shipped page will do"
    assert calibration_text(given, load_recipe("nvfp4"), tokenizer) is not None


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"calibration\.tokens must be at least 512, got 511"):
        CalibrationConfig(tokens=511)
