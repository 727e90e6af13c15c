"""The measured gap against whole-sequence logits, and what a person is shown."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitdraft.data.chat import Example
from bitdraft.quant.target import LowBitTarget
from bitdraft.train.gap import gap_on, mean_interval, measure
from bitdraft.train.gap_report import draw, report

CAPTURE = (2, 4, 5)
EXAMPLES = [
    Example("a", "chat", tuple(range(40, 52)), (60, 61, 62)),
    Example("b", "chat", tuple(range(90, 95)), (100, 101, 102, 103, 104, 105, 106)),
    *(Example(f"c{i}", "chat", (70 + i, 71, 72), (80 + i, 258)) for i in range(8)),  # more than one forward pass
]


def naive(target: LowBitTarget, example: Example) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log probabilities [n, V] where an answer token follows and the states there, from transformers itself."""
    ids = torch.tensor([[*example.prompt, *example.answer]])
    with torch.no_grad():
        out = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    where = slice(len(example.prompt) - 1, ids.shape[1] - 1)
    return out.logits[0, where].double().log_softmax(-1), [out.hidden_states[k][0, where] for k in (*CAPTURE, -1)]


def test_equals_what_whole_sequences_give(tiny_target: Callable[[str], LowBitTarget]) -> None:
    reference, low = tiny_target("none"), tiny_target("mxfp4a16")
    gap = gap_on(reference, low, EXAMPLES, CAPTURE)
    done = 0
    for example in EXAMPLES:
        n = len(example.answer)
        part = slice(done, done + n)
        done += n
        (p, states), (q, other) = naive(reference, example), naive(low, example)
        answer = torch.tensor(example.answer)[:, None]
        assert torch.equal(gap.agrees[part], p.argmax(-1) == q.argmax(-1))
        torch.testing.assert_close(gap.tv[part].double(), (p.exp() - q.exp()).abs().sum(-1) / 2, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(gap.nll_low[part].double(), -q.gather(1, answer)[:, 0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(gap.nll_reference[part].double(), -p.gather(1, answer)[:, 0], rtol=1e-3, atol=1e-3)
        for i, (a, b) in enumerate(zip(states, other, strict=True)):
            error = (b - a).norm(dim=-1) / a.norm(dim=-1)
            torch.testing.assert_close(gap.relative_error[part, i], error, rtol=1e-3, atol=1e-3)
    assert len(gap.tv) == done


def measured(tiny_target: Callable[[str], LowBitTarget], preset: str) -> dict[str, Any]:
    texts = {"own": EXAMPLES[:3], "reference": EXAMPLES}
    return measure(tiny_target("none"), tiny_target(preset), texts, capture=CAPTURE, seed=0)


def test_the_reference_against_itself_is_all_ones_and_zeros(tiny_target: Callable[[str], LowBitTarget]) -> None:
    entry = measured(tiny_target, "none")
    numbers = entry["texts"]["reference"]
    assert numbers["top1_agreement"] == 1.0
    assert numbers["one_minus_tv_ci95"] == [1.0, 1.0]
    assert numbers["tv"] == numbers["kl_low_reference"] == numbers["kl_reference_low"] == 0.0
    assert numbers["perplexity_low"] == numbers["perplexity_reference"]
    assert [s["layer"] for s in numbers["states"]] == [2, 4, 5, "final"]
    assert entry["weights"]["bits_of_model"] == 16.0


def test_prompts_are_reported_as_they_are_read(tiny_target: Callable[[str], LowBitTarget]) -> None:
    seen: list[int] = []
    gap_on(tiny_target("none"), tiny_target("none"), EXAMPLES, CAPTURE, seen.append)
    assert seen == [8, 2]


@pytest.fixture
def document(tiny_target: Callable[[str], LowBitTarget]) -> dict[str, Any]:
    facts = {"python": "3", "torch": "2", "transformers": "5", "machine": "m", "device": "d", "threads": 1}
    return {
        "command": "python x.py",
        "date": "2026-01-01",
        "seed": 0,
        "target": "tiny",
        "reference": "fp32",
        "data": ["heldout"],
        "prompts": 10,
        "max_new_tokens": 8,
        "machine": facts,
        "results": [measured(tiny_target, preset) for preset in ("none", "fp8", "mxfp4a16")],
    }


def test_the_report_has_every_recipe_in_every_table(document: dict[str, Any]) -> None:
    lines = report(document).splitlines()
    for name in ("none", "fp8", "mxfp4a16"):
        assert sum(line.startswith(f"| {name} ") for line in lines) == 4
    tables = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables} >= {9, 6}
    assert "Σ min(p, q)" in report(document), "the legend says what 1 − TV means"
    assert "python x.py" in lines[-1]
    (untouched,) = (line for line in lines if line.startswith("| none ") and "–" in line)
    assert "16.000" in untouched


def test_four_over_six_reports_how_often_it_chose_four(
    document: dict[str, Any], tiny_target: Callable[[str], LowBitTarget]
) -> None:
    assert "scaled to 4" not in report(document)
    entry = measured(tiny_target, "nvfp4a16-4over6")
    shares = entry["weights"]["blocks_at_four"]
    assert set(shares) == set(entry["weights"]["relative_error"])
    assert all(0 < share < 1 for share in shares.values())
    document["results"].append(entry)
    assert f"- nvfp4a16-4over6: q_proj {shares['q_proj']:.1%}" in report(document)


def test_the_picture_is_one(document: dict[str, Any], tmp_path: Any) -> None:
    draw(document, tmp_path / "gap.png")
    assert (tmp_path / "gap.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["gap.png"]


def test_the_interval_of_a_constant_is_a_point() -> None:
    assert mean_interval(torch.full((9,), 0.5), [2, 3, 4], 0) == (0.5, 0.5)


def test_the_interval_draws_prompts_and_weighs_them_by_their_positions() -> None:
    # Two prompts: all draws are (a, a), (a, b), (b, b), with means 1, 4/5 and 0.
    values = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    assert mean_interval(values, [4, 1], 0) == (0.0, 1.0)
    narrow = mean_interval(values.repeat(200), [4, 1] * 200, 0)
    assert 0.74 < narrow[0] < 0.8 < narrow[1] < 0.86


def test_the_interval_follows_the_seed() -> None:
    values = torch.rand(60, generator=torch.Generator().manual_seed(0))
    assert mean_interval(values, [3] * 20, 1) == mean_interval(values, [3] * 20, 1)
    assert mean_interval(values, [3] * 20, 1) != mean_interval(values, [3] * 20, 2)


def test_the_interval_takes_booleans() -> None:
    assert mean_interval(torch.tensor([True, True, True]), [1, 2], 0) == (1.0, 1.0)
