"""Starting from data: better than random weights at once, and led by what is supervised alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from packs import outputs_at, packed_states
from torch import Tensor
from torch.nn.functional import cosine_similarity, linear

from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.base import StartBatches
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.eagle3_start import SELF_SCORE

MakeEagle3 = Callable[..., Eagle3Head]
B, T, PROMPT = 48, 24, 5


@pytest.fixture(scope="module")
def tokens(target: LowBitTarget) -> Tensor:
    """Text that the target wrote itself behind random prompts."""
    ids = torch.randint(0, 256, (B, PROMPT), generator=torch.Generator().manual_seed(6))
    for _ in range(T - PROMPT):
        ids = torch.cat([ids, target.logits(target.states(ids).last_hidden[:, -1:]).argmax(-1)], dim=1)
    return ids


def supervised() -> Tensor:
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[:, PROMPT - 1 : T - 1] = True
    return mask


def batches(head: Eagle3Head, target: LowBitTarget, tokens: Tensor, size: int, mask: Tensor) -> StartBatches:
    for part, of_part in zip(tokens.split(size), mask.split(size), strict=True):
        states = packed_states(target.states(part, capture=head.capture_layers))
        yield states, part.flatten(), of_part.flatten()


def started(head: Eagle3Head, given: StartBatches) -> dict[str, Tensor]:
    torch.manual_seed(0)
    head.start_from(given)
    return {name: p.detach().clone() for name, p in head.named_parameters()}


def first_step(head: Eagle3Head, target: LowBitTarget, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The head's vectors for the token after the next, and the target's own: both ``[B, R, H]``."""
    states = target.states(tokens, capture=head.capture_layers)
    rows = torch.arange(PROMPT, T - 2).expand(len(tokens), -1)
    with torch.no_grad():
        return outputs_at(head, states, tokens, rows)[0], states.last_hidden[:, PROMPT + 1 : T - 1]


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"norm_output": True},
        {"attention": "qwen3"},
        dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), True),
    ],
    ids=lambda switches: " ".join(switches) or "plain",
)
def test_a_head_that_starts_from_data_already_resembles_the_target(
    target: LowBitTarget, make_eagle3: MakeEagle3, tokens: Tensor, switches: dict[str, Any]
) -> None:
    likeness, agreement = {}, {}
    for start in ("random", "least-squares"):
        head = make_eagle3(target, steps=1, start=start, **switches)
        started(head, batches(head, target, tokens, 16, supervised()))
        mine, its = first_step(head, target, tokens)
        likeness[start] = float(cosine_similarity(mine, its, dim=-1).mean())
        choices = linear(mine, head.output_weight).argmax(-1), target.logits(its).argmax(-1)
        agreement[start] = float((choices[0] == choices[1]).float().mean())
    assert likeness["random"] < 0.2 < 0.4 < likeness["least-squares"]
    assert agreement["least-squares"] > 5 * agreement["random"]


def test_a_random_start_leaves_the_weights_alone(target: LowBitTarget, make_eagle3: MakeEagle3, tokens: Tensor) -> None:
    head = make_eagle3(target, start="random")
    before = {name: p.detach().clone() for name, p in head.named_parameters()}
    after = started(head, batches(head, target, tokens, 16, supervised()))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_how_the_data_is_cut_into_batches_does_not_matter(
    target: LowBitTarget, make_eagle3: MakeEagle3, tokens: Tensor
) -> None:
    results = []
    for size in (48, 7):
        head = make_eagle3(target)
        results.append(started(head, batches(head, target, tokens, size, supervised())))
    torch.testing.assert_close(results[0]["fc.weight"], results[1]["fc.weight"], rtol=1e-2, atol=1e-3)


def test_only_supervised_positions_are_looked_at(target: LowBitTarget, make_eagle3: MakeEagle3, tokens: Tensor) -> None:
    """States behind the end of an example are padding and may hold anything."""
    mask, end = supervised(), 15
    mask[:, end:] = False
    results = []
    for garbage in (0.0, 1e3):
        head = make_eagle3(target)
        states = target.states(tokens, capture=head.capture_layers)
        captured, last = states.captured.clone(), states.last_hidden.clone()
        captured[:, end:] += garbage
        last[:, end:] += garbage
        results.append(started(head, [(packed_states(TargetStates(captured, last)), tokens.flatten(), mask.flatten())]))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_the_output_head_and_the_final_norm_stay_the_target_s(
    target: LowBitTarget, make_eagle3: MakeEagle3, tokens: Tensor
) -> None:
    head = make_eagle3(target, size=96)
    started(head, batches(head, target, tokens, 48, supervised()))
    assert torch.equal(head.lm_head.weight, target.output_head.weight[head.vocab.target_ids])
    assert torch.equal(head.norm.weight, target.final_norm.weight)  # type: ignore[arg-type]


def test_a_norm_before_the_sum_keeps_the_size_of_what_was_fitted(
    target: LowBitTarget, make_eagle3: MakeEagle3, tokens: Tensor
) -> None:
    head, mask = make_eagle3(target, norm_before_residual=True), supervised()
    started(head, batches(head, target, tokens, 16, mask))
    captured = target.states(tokens, capture=head.capture_layers).captured[:, :-1][mask[:, 1:]]
    with torch.no_grad():
        g = head.fuse(captured)
        normed = head.layer.hidden_norm(g)
    torch.testing.assert_close(normed.square().mean(), g.square().mean(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("attention", ["llama", "qwen3"])
def test_a_row_attends_to_itself_and_hardly_to_others(
    target: LowBitTarget, make_eagle3: MakeEagle3, tokens: Tensor, attention: str
) -> None:
    head = make_eagle3(target, attention=attention)
    started(head, batches(head, target, tokens, 16, supervised()))
    positions, captured = torch.arange(T).expand(B, -1), target.states(tokens, capture=head.capture_layers).captured
    with torch.no_grad():
        u = head.layer.inputs(target.embedding(tokens), head.fuse(captured))
        q, (k, _) = head.layer.queries(u, positions), head.layer.keys_values(u, positions)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5  # [B, N, T, T]
    itself = scores.diagonal(dim1=-2, dim2=-1)
    assert abs(float(itself.mean()) - SELF_SCORE) < 0.15 * SELF_SCORE
    assert (scores.sum() - itself.sum()) / (scores.numel() - itself.numel()) < 0.1 * SELF_SCORE


def test_biases_start_at_zero(target: LowBitTarget, make_eagle3: MakeEagle3, tokens: Tensor) -> None:
    plain = make_eagle3(target)
    shape = replace(plain.shape, attention_bias=True)
    head = Eagle3Head(plain.config, shape, plain.capture_layers, plain.vocab, target.embedding.weight.detach())
    weights = started(head, batches(head, target, tokens, 16, supervised()))
    biases = [weight for name, weight in weights.items() if name.endswith(".bias")]
    assert len(biases) == 4 and not any(bias.any() for bias in biases)
