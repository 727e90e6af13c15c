"""Targets and random heads for the tests of the heads."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB, tiny_config, tiny_tokenizer
from transformers import LlamaForCausalLM

from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.export import export_head
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead
from bitdraft.speculators.vocab import DraftVocab

MakeEagle3 = Callable[..., Eagle3Head]
MakeMedusa = Callable[..., MedusaHead]


@pytest.fixture(scope="session")
def target(tiny_target: Callable[[str], LowBitTarget]) -> LowBitTarget:
    """The tiny target in high precision, fp32."""
    return tiny_target("none")


@pytest.fixture(scope="session")
def rounded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target whose weights are bf16 values, so that an export in bf16 loses nothing."""
    folder = tmp_path_factory.mktemp("rounded") / "target"
    torch.manual_seed(5)
    LlamaForCausalLM(tiny_config()).to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def load_rounded(rounded_folder: Path) -> Callable[[torch.dtype], LowBitTarget]:
    def load(dtype: torch.dtype) -> LowBitTarget:
        return load_target(str(rounded_folder), load_recipe("none"), dtype=dtype, compile_quantizer="off")

    return load


@pytest.fixture(scope="session")
def rounded(load_rounded: Callable[[torch.dtype], LowBitTarget]) -> LowBitTarget:
    return load_rounded(torch.float32)


def some_vocab(size: int) -> DraftVocab:
    """A random draft vocabulary of ``size`` tokens."""
    chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(size))[:size]
    return DraftVocab(chosen.sort().values, VOCAB)


@pytest.fixture(scope="session")
def make_eagle3() -> MakeEagle3:
    """``make_eagle3(target, size=96, steps=4)``: a random head in the target's dtype."""

    def make(
        target: LowBitTarget,
        *,
        size: int = VOCAB,
        vocab: DraftVocab | None = None,
        layers: Sequence[int] | None = None,
        seed: int = 0,
        **config: Any,
    ) -> Eagle3Head:
        torch.manual_seed(seed)
        settings = Eagle3Config(capture_layers=tuple(layers) if layers else None, **config)
        return Eagle3Head.from_target(settings, target, vocab or some_vocab(size)).to(target.dtype)

    return make


@pytest.fixture(scope="session")
def make_medusa() -> MakeMedusa:
    """``make_medusa(target, heads=3, scale=0.3)``: heads whose blocks are random; ``scale=0`` is a fresh one."""

    def make(target: LowBitTarget, *, scale: float = 0.3, seed: int = 0, **config: Any) -> MedusaHead:
        torch.manual_seed(seed)
        head = MedusaHead.from_target(MedusaConfig(**config), target, DraftVocab.full(target.vocab_size))
        for block in head.blocks.parameters():
            torch.nn.init.normal_(block, std=scale)
        return head.to(target.dtype)

    return make


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Eight prompts of different lengths, all beginning with the same token."""
    generator = torch.Generator().manual_seed(1)
    return [[257, *torch.randint(0, 256, (n,), generator=generator).tolist()] for n in (3, 7, 12, 12, 19, 1, 5, 9)]


@pytest.fixture
def make_head(rounded: LowBitTarget, make_eagle3: MakeEagle3, make_medusa: MakeMedusa) -> Callable[[str], DraftHead]:
    """A random head of each kind, whose weights are bf16 values."""

    def of_kind(kind: str) -> DraftHead:
        head: DraftHead = {
            "eagle3": lambda: make_eagle3(rounded, size=96, steps=3, step_decay=0.7),
            "eagle3 full": lambda: make_eagle3(rounded),
            "eagle3 four layers": lambda: make_eagle3(rounded, size=96, layers=(0, 3, 4, 7)),
            "medusa": lambda: make_medusa(rounded, heads=3, blocks=2),
            "medusa own": lambda: make_medusa(rounded, heads=2, own_output=True),
        }[kind]()
        for name, weight in head.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            weight.data = weight.data.to(torch.bfloat16).float()
        return head

    return of_kind


@pytest.fixture
def exported(make_head: Callable[[str], DraftHead], rounded: LowBitTarget, tmp_path: Path) -> Callable[[str], Path]:
    """``exported("eagle3")``: the folder of an export of that kind."""

    def write(kind: str) -> Path:
        export_head(make_head(kind), rounded, tmp_path / "head", draft_length=2)
        return tmp_path / "head"

    return write
