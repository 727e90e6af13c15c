"""The draft vocabulary of a run: counted in the text that it trains on, with every special token and its share said."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import VOCAB, tiny_tokenizer

from bitdraft.data.chat import Example
from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators.eagle3 import Eagle3Config
from bitdraft.speculators.export import export_head
from bitdraft.speculators.load import load_head
from bitdraft.train.config import RunConfig
from bitdraft.train.starting import make_head

SPECIAL = {256, 257, 258}
SIZE = 20


@pytest.fixture(scope="module")
def target(tiny_target: Callable[[str], LowBitTarget]) -> LowBitTarget:
    return tiny_target("none")


def examples() -> list[Example]:
    """Prompts of tokens that no answer has, answers in which high ids are frequent, and no special token."""
    generator = torch.Generator().manual_seed(8)
    skewed = 255 - torch.randint(0, 40, (6, 50), generator=generator) * torch.randint(
        0, 3, (6, 50), generator=generator
    )
    return [Example(f"e{i}", "", (0, 1, 2) * 40, tuple(answer)) for i, answer in enumerate(skewed.tolist())]


def test_it_holds_the_most_frequent_tokens_of_the_answers_and_every_special_one(
    target: LowBitTarget, tmp_path: Path
) -> None:
    text, said = examples(), list[str]()
    config = RunConfig(eagle3=Eagle3Config(draft_vocab_size=SIZE, steps=1))
    head = make_head(config, target, tiny_tokenizer(), text, said.append)

    counts = Counter(token for example in text for token in example.answer)
    ranked = sorted(set(range(VOCAB)) - SPECIAL, key=lambda token: (-counts[token], token))
    chosen = sorted({*SPECIAL, *ranked[: SIZE - len(SPECIAL)]})
    assert head.vocab.target_ids.tolist() == chosen
    assert not {0, 1, 2} & set(chosen), "prompts are not counted"

    covered = sum(counts[token] for token in chosen) / sum(counts.values())
    assert 0.1 < covered < 0.95
    assert f"draft vocabulary: {SIZE} of {VOCAB} tokens, {covered:.2%} of the answers" in said

    export_head(head, target, tmp_path / "head", draft_length=1)
    read = load_head(tmp_path / "head", target).vocab
    assert read.target_ids.tolist() == chosen, "draft token i is the i-th of them in the file too"
    assert read.t2d.nonzero()[:, 0].tolist() == chosen


def test_one_that_cannot_hold_the_special_tokens_is_refused(target: LowBitTarget) -> None:
    config = RunConfig(eagle3=Eagle3Config(draft_vocab_size=2))
    with pytest.raises(ValueError, match="draft vocabulary of 2 cannot hold the 3 special tokens"):
        make_head(config, target, tiny_tokenizer(), examples(), lambda _: None)
