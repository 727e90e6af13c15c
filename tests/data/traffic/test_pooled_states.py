"""Mean hidden states of a tiny target: equal to those of each record alone, whatever runs beside it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import HIDDEN, save_tiny_target

from bitdraft.data.chat import conversation_ids
from bitdraft.data.conversation import Conversation, Message
from bitdraft.data.traffic.pooled_states import target_vectors
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target, load_tokenizer

TEXTS = ["a", "what is this?", "a much longer question " * 4, "b", "and one more, to fill a batch"]
RECORDS = [
    Conversation(t, "", (Message("user", t), Message("assistant", f"answer to {t}")), "made.jsonl") for t in TEXTS
]


@pytest.fixture(scope="module")
def target_and_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[LowBitTarget, object]:
    folder: Path = save_tiny_target(tmp_path_factory.mktemp("target"))
    target = load_target(str(folder), load_recipe("none"), dtype=torch.float32, compile_quantizer="off")
    return target, load_tokenizer(str(folder))


def test_states_are_means_over_each_record_alone(target_and_tokenizer: tuple[LowBitTarget, object]) -> None:
    target, tokenizer = target_and_tokenizer
    found = target_vectors(target, tokenizer, RECORDS, answers=True, tokens=60)
    assert found.shape == (5, HIDDEN)
    for record, row in zip(RECORDS, found, strict=True):
        ids = torch.tensor([conversation_ids(tokenizer, record)[:60]])
        alone = target.states(ids, capture=[4]).captured[0, 1:, 0].mean(0)
        np.testing.assert_allclose(row, alone.numpy(), atol=1e-4)
    small = target_vectors(target, tokenizer, RECORDS, answers=True, tokens=60, tokens_at_once=1)
    np.testing.assert_allclose(small, found, atol=1e-4)


def test_on_prompts_alone_answers_make_no_difference(target_and_tokenizer: tuple[LowBitTarget, object]) -> None:
    target, tokenizer = target_and_tokenizer
    bare = target_vectors(target, tokenizer, [r.opening for r in RECORDS], answers=False)
    np.testing.assert_allclose(target_vectors(target, tokenizer, RECORDS, answers=False), bare, atol=1e-5)
    assert not np.allclose(target_vectors(target, tokenizer, RECORDS, answers=True), bare, atol=1e-2)
