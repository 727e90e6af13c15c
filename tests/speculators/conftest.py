"""Targets and random heads for the tests of the heads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB, save_tiny_target, tiny_config, tiny_tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from bitdraft.quant.attention.kv_cache import SlotCache
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target
from bitdraft.speculators.base import DraftContext, Drafter, DraftHead, DraftState
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.export import export_head
from bitdraft.speculators.medusa import MedusaConfig, MedusaHead
from bitdraft.speculators.tree import DraftTree, chain_tree
from bitdraft.speculators.tree_shapes import TreeShape, cartesian
from bitdraft.speculators.vocab import DraftVocab

MakeEagle3 = Callable[..., Eagle3Head]
MakeMedusa = Callable[..., MedusaHead]
MakeHead = Callable[[str], DraftHead]
QUICK_VOCAB = 12


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
        head = Eagle3Head.from_target(settings, target, vocab or some_vocab(size)).placed(target.device, target.dtype)
        assert isinstance(head, Eagle3Head)
        return head

    return make


@pytest.fixture(scope="session")
def make_medusa() -> MakeMedusa:
    """``make_medusa(target, heads=3, scale=0.3)``: heads with random blocks and links; ``scale=0`` is a fresh one."""

    def make(target: LowBitTarget, *, scale: float = 0.3, seed: int = 0, **config: Any) -> MedusaHead:
        torch.manual_seed(seed)
        head = MedusaHead.from_target(MedusaConfig(**config), target, DraftVocab.full(target.vocab_size))
        for weight in (*head.blocks.parameters(), *head.links.parameters()):
            torch.nn.init.normal_(weight, std=scale)
        return head.to(target.dtype)

    return make


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Eight prompts of different lengths, all beginning with the same token."""
    generator = torch.Generator().manual_seed(1)
    return [[257, *torch.randint(0, 256, (n,), generator=generator).tolist()] for n in (3, 7, 12, 12, 19, 1, 5, 9)]


@pytest.fixture(scope="session")
def quick_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], LowBitTarget]:
    """Two narrow layers over 12 tokens: passes of a millisecond, drafts of random heads that are often right."""
    folder = save_tiny_target(
        tmp_path_factory.mktemp("quick") / "target",
        vocab_size=QUICK_VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        initializer_range=0.4,
    )
    loaded: dict[torch.dtype, LowBitTarget] = {}

    def get(dtype: torch.dtype) -> LowBitTarget:
        if dtype not in loaded:
            loaded[dtype] = load_target(str(folder), load_recipe("none"), dtype=dtype, compile_quantizer="off")
        return loaded[dtype]

    return get


@pytest.fixture(scope="session")
def quick_head(make_eagle3: MakeEagle3, make_medusa: MakeMedusa) -> Callable[[str, LowBitTarget], DraftHead]:
    """``quick_head("eagle3 reduced", target)``: a random head for the quick target that drafts up to 4 tokens."""

    def get(kind: str, target: LowBitTarget) -> DraftHead:
        if kind in ("medusa", "medusa linked"):
            return make_medusa(target, heads=4, link=kind == "medusa linked")
        ids = torch.arange(QUICK_VOCAB) if kind == "eagle3" else torch.tensor([0, 1, 2, 4, 5, 7, 8, 10])
        rank = 5 if kind == "eagle3 low rank" else None
        return make_eagle3(target, vocab=DraftVocab(ids, QUICK_VOCAB), output_rank=rank)

    return get


@pytest.fixture(scope="session")
def quick_prompts() -> list[list[int]]:
    """Eight prompts of different lengths for the quick target, none the beginning of another."""
    generator = torch.Generator().manual_seed(1)
    lengths = (3, 7, 12, 12, 17, 1, 5, 9)
    return [[0, 2 + i, *torch.randint(QUICK_VOCAB, (n,), generator=generator).tolist()] for i, n in enumerate(lengths)]


class Known(DraftState):
    """The tokens of every sequence so far, as the decoding loop has told them."""

    def __init__(self) -> None:
        self.sequences: list[list[int]] = []

    def keep_rows(self, rows: Tensor) -> None:
        if self.sequences:  # answers may end before anything is drafted
            self.sequences = [self.sequences[i] for i in rows.tolist()]


class Scripted(Drafter):
    """Drafts from ``texts``: at each depth the right token stands at the rank that ``ranks(position)`` names.

    ``position`` is where the first draft will stand, and depths behind the last named one have no right token. Behind
    wrong drafts stand the same tokens as behind the right ones. It finds its place by the tokens that the loop hands
    over, so a context that lies leads it astray.
    """

    kind = "scripted"
    capture_layers = (0, 1)

    def __init__(self, target: LowBitTarget, texts: Sequence[list[int]], ranks: Callable[[int], Sequence[int]]) -> None:
        self.target, self.texts, self.ranks = target, texts, ranks
        self.batches: list[int] = []

    def fits(self, target: LowBitTarget) -> None:
        assert target is self.target

    def new_state(self, slots: int, cache: SlotCache) -> Known:
        assert slots > 0
        return Known()

    def propose(self, context: DraftContext, state: DraftState, plan: DraftPlan, uniforms: Tensor) -> DraftTree:
        assert isinstance(state, Known)
        batch, rows = context.next_tokens.shape
        assert context.captured.shape == (batch, rows, len(self.capture_layers), self.target.hidden_size)
        assert context.last_hidden.shape == (batch, rows, self.target.hidden_size)
        assert uniforms.shape == (batch, plan.draws)
        self.batches.append(batch)
        state.sequences = state.sequences or [[self.texts[0][0]] for _ in range(batch)]  # every prompt begins so
        shape = plan.shape or cartesian([1] * plan.length)
        assert isinstance(shape, TreeShape)
        tokens = torch.tensor([self._row(context, row, known, shape) for row, known in enumerate(state.sequences)])
        if plan.shape is None:
            return chain_tree(context.newest_token, tokens)
        place = {node: i for i, node in enumerate([(), *shape.nodes])}
        parents = torch.tensor([-1, *(place[node[:-1]] for node in shape.nodes)]).expand(batch, -1)
        depth = torch.tensor([len(node) for node in place]).expand(batch, -1)
        tokens = torch.cat([context.newest_token[:, None], tokens], dim=1)
        return DraftTree(tokens, parents, depth, torch.ones_like(depth, dtype=torch.bool))

    def _row(self, context: DraftContext, row: int, known: list[int], shape: TreeShape) -> list[int]:
        seen = int(context.start[row]) + 1
        assert len(known) >= seen, "no token is skipped"
        del known[seen:]  # a finished sequence that rides along does not advance
        known += context.next_tokens[row, : int(context.newest[row]) + 1].tolist()
        text = next((t for t in self.texts if t[: len(known)] == known), None)
        if text is None:
            assert context.newest[row] == 0 and known[-1] == known[-2], "only the finished repeat their newest token"
            return [0] * len(shape)
        coming = text[len(known) :]
        assert len(coming) >= shape.depth, "the script ends too early"
        ranks = [*self.ranks(len(known)), *[-1] * shape.depth]
        drafts = []
        for node in shape.nodes:
            depth, rank = len(node) - 1, node[-1]
            wrong = (coming[depth] + 1 + rank) % self.target.vocab_size
            drafts.append(coming[depth] if rank == ranks[depth] else wrong)
        return drafts


@pytest.fixture(scope="session")
def scripted() -> type[Scripted]:
    return Scripted


def another(head: Eagle3Head, *, own_embedding: Tensor | None = None, **shape: Any) -> Eagle3Head:
    """A random head like ``head`` with an embedding of its own, or with other fields of its layer."""
    torch.manual_seed(0)
    changed = replace(head.shape, **shape)
    made = Eagle3Head(head.config, changed, head.capture_layers, head.vocab, head.embedding_weight, own_embedding)
    made.capture_scale.copy_(head.capture_scale)
    return made


@pytest.fixture
def make_head_for(make_eagle3: MakeEagle3, make_medusa: MakeMedusa) -> Callable[[str, LowBitTarget], DraftHead]:
    """A random fp32 head of each kind, whose weights are bf16 values."""

    def of_kind(kind: str, target: LowBitTarget) -> DraftHead:
        head: DraftHead = {
            "eagle3": lambda: make_eagle3(target, size=96, steps=3),
            "eagle3 full": lambda: make_eagle3(target),
            "eagle3 four layers": lambda: make_eagle3(target, size=96, layers=(1, 3, 4, 7)),
            "eagle3 first layer": lambda: make_eagle3(target, size=96, layers=(0, 4, 7)),
            "eagle3 one layer": lambda: make_eagle3(target, size=96, layers=(4,)),
            "eagle3 six heads": lambda: another(make_eagle3(target, size=96), num_attention_heads=6),
            "eagle3 norm_before_residual": lambda: make_eagle3(target, size=96, norm_before_residual=True),
            "eagle3 norm_before_fc": lambda: make_eagle3(target, size=96, norm_before_fc=True),
            "eagle3 fc_norm": lambda: make_eagle3(target, size=96, fc_norm=True),
            "eagle3 norm_output": lambda: make_eagle3(target, size=96, norm_output=True),
            "eagle3 both norms": lambda: make_eagle3(target, size=96, norm_before_fc=True, fc_norm=True),
            "eagle3 low rank": lambda: make_eagle3(target, size=96, output_rank=24),
            "eagle3 qwen3": lambda: make_eagle3(target, size=96, attention="qwen3"),
            "eagle3 biases": lambda: another(make_eagle3(target, size=96), attention_bias=True),
            "eagle3 qwen3 biases": lambda: another(
                make_eagle3(target, size=96, attention="qwen3"), attention_bias=True
            ),
            "eagle3 own embedding": lambda: another(
                make_eagle3(target, size=96), own_embedding=target.embedding.weight.detach().flip(0).contiguous()
            ),
            "eagle3 narrow": lambda: another(
                make_eagle3(target, size=96),
                hidden_size=32,
                target_hidden_size=64,
                own_embedding=torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(7))
                .to(torch.bfloat16)
                .float(),
            ),
            "medusa": lambda: make_medusa(target, heads=3, blocks=2),
            "medusa own": lambda: make_medusa(target, heads=2, own_output=True),
            "medusa bias": lambda: make_medusa(target, heads=2, blocks=2, bias=True),
            "medusa linked": lambda: make_medusa(target, heads=3, blocks=2, link=True),
            "medusa linked own": lambda: make_medusa(target, heads=2, bias=True, own_output=True, link=True),
        }[kind]()
        for name, weight in head.float().named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            weight.data = weight.data.to(torch.bfloat16).float()
        return head

    return of_kind


@pytest.fixture
def make_head(make_head_for: Callable[[str, LowBitTarget], DraftHead], rounded: LowBitTarget) -> MakeHead:
    """``make_head("eagle3")``: such a head for the target whose weights are bf16 values."""
    return lambda kind: make_head_for(kind, rounded)


@pytest.fixture
def exported(make_head: MakeHead, rounded: LowBitTarget, tmp_path: Path) -> Callable[..., Path]:
    """``exported("eagle3", "eagle3-original")``: the folder of an export of that kind, by default in vLLM's layout."""

    def write(kind: str, layout: str | None = None) -> Path:
        export_head(make_head(kind), rounded, tmp_path / "head", draft_length=2, layout=layout)
        return tmp_path / "head"

    return write
