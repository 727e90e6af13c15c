"""The check that drafts changed nothing: it must fail when they did."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bitdraft.quant.attention.rules import AttentionRule
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import Recipe
from bitdraft.quant.target import LowBitTarget, load_target
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.decode import generate
from bitdraft.speculators.drafting import DraftPlan
from bitdraft.speculators.lossless import Lossless, compare_with_plain, gap_and_noise, must_be_identical

Prompts = list[list[int]]


def plain_answers(target: LowBitTarget, prompts: Prompts) -> Prompts:
    done, _ = generate(target, None, prompts, max_new_tokens=8, end_ids=set(), batch_size=len(prompts))
    return [g.tokens for g in done]


@pytest.fixture(scope="module")
def few(prompts: Prompts) -> Prompts:
    return prompts[:3]


@pytest.fixture(scope="module")
def plain(target: LowBitTarget, few: Prompts) -> Prompts:
    return plain_answers(target, few)


def compare(target: LowBitTarget, prompts: Prompts, drafted: Prompts, plain: Prompts) -> Lossless:
    return compare_with_plain(target, ["a", "b", "c"], prompts, drafted, plain)


def test_equal_answers_pass(target: LowBitTarget, few: Prompts, plain: Prompts) -> None:
    assert compare(target, few, plain, plain) == Lossless(checked=3, excused=0, failures=())


@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_wrong_token_fails_and_is_named(target: LowBitTarget, few: Prompts, plain: Prompts, at: int) -> None:
    drafted = [list(answer) for answer in plain]
    drafted[1][at] = (drafted[1][at] + 1) % 256
    result = compare(target, few, drafted, plain)
    assert (result.checked, result.excused, result.failed) == (3, 0, 1)
    assert result.failures[0].startswith(f"b: token {at} differs")


@pytest.mark.parametrize("longer", ["drafted", "plain"])
def test_a_missing_tail_fails(target: LowBitTarget, few: Prompts, plain: Prompts, longer: str) -> None:
    short = [plain[0], plain[1], plain[2][:5]]
    result = compare(target, few, plain, short) if longer == "drafted" else compare(target, few, short, plain)
    assert (result.excused, result.failed) == (0, 1)
    assert result.failures[0].startswith("c: one answer ends after 5 tokens")


def test_every_failing_prompt_is_listed(target: LowBitTarget, few: Prompts, plain: Prompts) -> None:
    drafted = [[(t + 1) % 256 for t in plain[0]], plain[1], plain[2][:1]]
    assert [f[0] for f in compare(target, few, drafted, plain).failures] == ["a", "c"]


def test_bf16_excuses_a_near_tie_and_nothing_else(
    load_rounded: Callable[[torch.dtype], LowBitTarget], few: Prompts
) -> None:
    target = load_rounded(torch.bfloat16)
    plain = plain_answers(target, few)
    states = target.states(torch.tensor([[*few[0], *plain[0][:4]]]))
    second, last = target.logits(states.last_hidden[0, -1]).float().sort(descending=True).indices[[1, -1]].tolist()

    far = [[*plain[0][:4], last], *plain[1:]]
    result = compare(target, few, far, plain)
    assert (result.excused, result.failed) == (0, 1), "far apart is no rounding, whatever the type"

    with torch.no_grad():  # make the second choice's logit the first's, up to nothing
        target.output_head.weight[second] = target.output_head.weight[plain[0][4]]
    near = [[*plain[0][:4], second], *plain[1:]]
    result = compare(target, few, near, plain)
    assert (result.excused, result.failed) == (1, 0)


def alone_and_helped(target: LowBitTarget, head: DraftHead) -> tuple[Prompts, Prompts, Prompts]:
    """32 prompts, their answers decoded plainly and with drafts, in batches of other shapes."""
    generator = torch.Generator().manual_seed(1)
    asked = [[257, *torch.randint(0, 256, (2 + i,), generator=generator).tolist()] for i in range(32)]
    shared: dict[str, Any] = {"max_new_tokens": 24, "end_ids": set()}
    alone, _ = generate(target, None, asked, batch_size=32, **shared)
    helped, _ = generate(target, head, asked, plan=DraftPlan(length=3), batch_size=16, **shared)
    return asked, [g.tokens for g in alone], [g.tokens for g in helped]


@pytest.mark.parametrize("preset", ["none", "mxfp4"])
def test_rounding_alone_is_no_failure(tiny_folder: Path, make_eagle3: Callable[..., DraftHead], preset: str) -> None:
    """The loop changes nothing in fp32 (below), so whatever parts here is rounding and must be excused."""
    target = load_target(str(tiny_folder), load_recipe(preset), dtype=torch.bfloat16, compile_quantizer="off")
    asked, alone, helped = alone_and_helped(target, make_eagle3(target))
    result = compare_with_plain(target, [str(i) for i in range(len(asked))], asked, helped, alone)
    assert result.failures == ()


ROUNDING = {name: load_recipe(name) for name in ("mxfp4", "mxfp4a4", "nvfp4", "mxfp4a16+kvfp8")} | {
    "attention": replace(load_recipe("none"), attention=AttentionRule(queries="int8-token", keys="int8-token"))
}


@pytest.mark.parametrize("name", ROUNDING)
def test_in_fp32_drafts_change_nothing_whatever_is_rounded(
    tiny_folder: Path, make_eagle3: Callable[..., DraftHead], name: str
) -> None:
    target = load_target(str(tiny_folder), ROUNDING[name], dtype=torch.float32, compile_quantizer="off")
    _, alone, helped = alone_and_helped(target, make_eagle3(target))
    assert helped == alone


def test_rounding_is_measured_where_the_answers_part(target: LowBitTarget, few: Prompts, plain: Prompts) -> None:
    prefix = [*few[0], *plain[0][:2]]
    logits = target.logits(target.states(torch.tensor([prefix])).last_hidden[0, -1])
    top, second = logits.sort(descending=True).indices[:2].tolist()
    gap, noise = gap_and_noise(target, prefix, top, second)
    assert gap == pytest.approx(float(logits[top] - logits[second]), rel=1e-3)
    largest = max(float(logits[top].abs()), float(logits[second].abs()), 1.0)
    assert noise == 4 * 2**-7 * 2.0 ** math.floor(math.log2(largest)), "in fp32 shapes agree: four bf16 units remain"


def test_most_second_choices_are_no_near_ties(tiny_folder: Path) -> None:
    """A loop that writes the second choice of a quantized target must not pass as rounding."""
    target = load_target(str(tiny_folder), load_recipe("mxfp4"), dtype=torch.bfloat16, compile_quantizer="off")
    generator = torch.Generator().manual_seed(1)
    asked = [[257, *torch.randint(0, 256, (2 + i,), generator=generator).tolist()] for i in range(16)]
    plain = plain_answers(target, asked)
    wrong = []
    for prompt, answer in zip(asked, plain, strict=True):
        states = target.states(torch.tensor([[*prompt, *answer[:4]]]))
        first, second = target.logits(states.last_hidden[0, -1]).float().topk(2).indices.tolist()
        wrong.append([*answer[:4], second if first == answer[4] else first, *answer[5:]])
    result = compare_with_plain(target, [str(i) for i in range(16)], asked, wrong, plain)
    assert result.failed >= 8


@pytest.mark.parametrize("recipe", ["mxfp4a16", "mxfp4a16+kvfp8", "mxfp4"])
def test_fp32_excuses_nothing_and_bf16_does(tiny_folder: Path, recipe: str) -> None:
    for dtype, identical in ((torch.float32, True), (torch.bfloat16, False)):
        target = load_target(str(tiny_folder), load_recipe(recipe), dtype=dtype, compile_quantizer="off")
        assert must_be_identical(target) == identical


def test_a_scale_over_the_whole_pass_may_flip_even_in_fp32(tiny_folder: Path) -> None:
    rule = replace(load_recipe("fp8").rules[-1], activations="fp8-tensor")
    target = load_target(str(tiny_folder), Recipe("whole", (rule,)), dtype=torch.float32, compile_quantizer="off")
    assert target.recipe.scales_whole_passes and not must_be_identical(target)
