"""Heads whose files hold less than the head does pass the look at their own files: a run exports them at its end."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import tiny_tokenizer

from bitdraft.data.conversation import Conversation, Message
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.export import export_head
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead
from bitdraft.speculators.vocab import DraftVocab
from bitdraft.train.exporting.checked import as_written, check_written
from bitdraft.train.measuring.acceptance import Decoding
from bitdraft.train.measuring.prompt_sets import PromptSet


def trained(kind: str, target: LowBitTarget) -> DraftHead:
    """A random fp32 head, as a run leaves it."""
    torch.manual_seed(0)
    full = DraftVocab.full(target.vocab_size)
    head: DraftHead = {
        "low rank": lambda: Eagle3Head.from_target(Eagle3Config(output_rank=24), target, full),
        "trained embedding": lambda: Eagle3Head.from_target(Eagle3Config(train_embedding=True), target, full),
        "linked": lambda: MedusaHead.from_target(MedusaConfig(heads=3, link=True), target, full),
    }[kind]().float()
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return head


@pytest.mark.parametrize("kind", ["low rank", "trained embedding", "linked"])
def test_the_written_files_draft_the_bits_of_the_head(
    tiny_target: Callable[[str], LowBitTarget], tmp_path: Path, kind: str
) -> None:
    target, folder = tiny_target("none"), tmp_path / "head"
    prompts = PromptSet("two", tuple(Conversation(str(i), "", (Message("user", "Say it."),), "") for i in range(2)))
    how = Decoding(max_new_tokens=6, batch_size=2)
    head = as_written(trained(kind, target), target)
    export_head(head, target, folder, draft_length=3)
    check_written(head, target, folder, tiny_tokenizer(), prompts, DraftPlan(length=3), how, least=0)
