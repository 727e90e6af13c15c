"""Output heads of low rank and embeddings of the head's own: where they start, what is trained, what is exported."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packs import outputs_at
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear

from bitdraft.quant.target import LowBitTarget
from bitdraft.speculators import low_rank
from bitdraft.speculators.eagle3 import Eagle3Config, Eagle3Head
from bitdraft.speculators.export import LAYOUTS, export_head
from bitdraft.speculators.load import load_head
from bitdraft.speculators.low_rank import LowRankOutput
from bitdraft.speculators.vocab import DraftVocab

MakeEagle3 = Callable[..., Eagle3Head]
RANK = 24


def best_approximation(weight: Tensor, rank: int) -> Tensor:
    u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
    return u[:, :rank] * s[:rank] @ v[:rank]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("tokens", "hidden", "rank"), [(300, 40, 8), (300, 40, 40), (30, 40, 12), (30, 40, 30)])
def test_it_starts_as_the_best_approximation(
    monkeypatch: pytest.MonkeyPatch, tokens: int, hidden: int, rank: int, dtype: torch.dtype
) -> None:
    """Of a matrix with one direction far greater than the others, in parts that do not divide it."""
    monkeypatch.setattr(low_rank, "_ROWS", 77)
    generator = torch.Generator().manual_seed(tokens + rank)
    weight = torch.randn(tokens, hidden, generator=generator) + 3 * torch.randn(hidden, generator=generator)
    weight = weight.to(dtype)
    head = LowRankOutput(hidden, rank, tokens)
    head.start_as(weight)
    expected = best_approximation(weight, rank)
    torch.testing.assert_close(head.product.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.projection @ head.projection.T, torch.eye(rank), rtol=0, atol=1e-5)
    x = torch.randn(3, 2, hidden, generator=generator)
    torch.testing.assert_close(head(x), x @ head.product.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head(x), linear(head.project(x), head.weight))


def test_a_fresh_head_of_full_rank_drafts_as_the_whole_output_does(
    target: LowBitTarget, make_eagle3: MakeEagle3
) -> None:
    whole, full, cut = (make_eagle3(target, size=96, output_rank=rank) for rank in (None, 64, RANK))
    x = torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(full.lm_head(x), whole.lm_head(x), rtol=1e-4, atol=1e-4)
    expected = best_approximation(whole.output_weight.detach(), RANK).float()
    torch.testing.assert_close(cut.whole_output, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(cut.whole_output, whole.whole_output, atol=1e-2), "else nothing was cut"


def test_both_factors_are_trained_through_what_training_returns(target: LowBitTarget, make_eagle3: MakeEagle3) -> None:
    head = make_eagle3(target, size=96, steps=2, output_rank=RANK)
    assert not head.config.train_output
    tokens = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(3))
    states, rows = target.states(tokens, capture=head.capture_layers), torch.tensor([[1, 4]])
    outputs = outputs_at(head, states, tokens, rows)
    assert outputs.shape == (2, 1, 2, RANK) and head.output_weight.shape == (96, RANK)
    logits = linear(outputs, head.output_weight)
    whole = head.multiplied_out()
    assert whole.config.output_rank is None and type(whole.lm_head) is torch.nn.Linear
    torch.testing.assert_close(
        logits, linear(outputs_at(whole, states, tokens, rows), whole.output_weight), rtol=1e-4, atol=1e-4
    )
    head = make_eagle3(target, size=96, steps=2, output_rank=RANK)
    linear(outputs_at(head, states, tokens, rows), head.output_weight).square().sum().backward()
    assert {name for name, p in head.named_parameters() if p.grad is None or not p.grad.any()} == set()


@pytest.mark.parametrize(("rank", "message"), [(0, "must be at least 1, got 0"), (65, "65, but the output head of 96")])
def test_a_rank_that_cannot_be_is_refused(
    target: LowBitTarget, make_eagle3: MakeEagle3, rank: int, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"eagle3\.output_rank .*{message}"):
        make_eagle3(target, size=96, output_rank=rank)


@pytest.mark.parametrize("layout", ["eagle3-speculators", "eagle3-original"])
def test_engines_get_the_product(make_eagle3: MakeEagle3, rounded: LowBitTarget, tmp_path: Path, layout: str) -> None:
    head = make_eagle3(rounded, size=96, output_rank=RANK).float()
    export_head(head, rounded, tmp_path / "head", draft_length=2, layout=layout)
    stored = load_file(tmp_path / "head" / LAYOUTS[layout].WEIGHTS)
    assert isinstance(head.lm_head, LowRankOutput)
    product = head.lm_head.weight.detach() @ head.lm_head.projection.detach()
    torch.testing.assert_close(stored["lm_head.weight"].float(), product, rtol=2**-8, atol=1e-6)
    assert "lm_head.projection" not in stored
    loaded = load_head(tmp_path / "head", rounded)
    assert isinstance(loaded, Eagle3Head) and loaded.config.output_rank is None
    assert torch.equal(loaded.output_weight, stored["lm_head.weight"].float())


# --- an embedding of its own ------------------------------------------------------------------------------------------


def test_an_own_embedding_starts_as_the_target_s_and_is_trained(target: LowBitTarget, make_eagle3: MakeEagle3) -> None:
    plain, head = (make_eagle3(target, size=96, steps=2, train_embedding=own) for own in (False, True))
    its = target.embedding.weight
    before = its.detach().clone()
    assert head.embed_tokens is not None and plain.embed_tokens is None
    assert torch.equal(head.embed_tokens.weight, its) and head.embed_tokens.weight.data_ptr() != its.data_ptr()
    tokens = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(3))
    states, rows = target.states(tokens, capture=head.capture_layers), torch.tensor([[1, 4]])
    outputs, expected = (outputs_at(h, states, tokens, rows) for h in (head, plain))
    assert torch.equal(outputs, expected), "the rest of a fresh head is the same"

    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    outputs.square().sum().backward()
    optimizer.step()
    changed = (head.embed_tokens.weight != before).any(1).nonzero()[:, 0]
    assert set(changed.tolist()) == set(tokens[0, 1:7].tolist()), "tokens that some row reads"
    assert torch.equal(its, before)


def test_a_trained_embedding_is_exported_for_vllm_alone(
    make_eagle3: MakeEagle3, rounded: LowBitTarget, tmp_path: Path
) -> None:
    head = make_eagle3(rounded, size=96, train_embedding=True)
    assert head.embed_tokens is not None
    with torch.no_grad():
        head.embed_tokens.weight[7] += 1.0
    export_head(head, rounded, tmp_path / "head", draft_length=2)
    loaded = load_head(tmp_path / "head", rounded)
    assert isinstance(loaded, Eagle3Head) and loaded.embed_tokens is not None
    assert torch.equal(loaded.embed_tokens.weight, head.embed_tokens.weight.to(torch.bfloat16).float())
    with pytest.raises(ValueError, match=r"an embedding of its own.*: use the format eagle3-speculators"):
        export_head(head, rounded, tmp_path / "other", draft_length=2, layout="eagle3-original")


def test_a_loaded_embedding_is_not_trained_unless_asked(target: LowBitTarget, make_eagle3: MakeEagle3) -> None:
    head = make_eagle3(target)
    for asked in (False, True):
        settings = Eagle3Config(train_embedding=asked)
        own = torch.zeros_like(head.embedding_weight)
        made = Eagle3Head(
            settings, head.shape, head.capture_layers, DraftVocab.full(target.vocab_size), head.embedding_weight, own
        )
        assert made.embed_tokens is not None and made.embed_tokens.weight.requires_grad is asked
        assert not made.embedding_weight.any()
