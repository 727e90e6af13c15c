"""Sampling: which tokens stay, with which probability, and that the draw follows them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.speculators.sampling import Sampling, draw, likeliest

logits_rows = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=8)  # few values, so that ties are common


def slow_probabilities(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Temperature, then top-k, then top-p, one token at a time."""
    weights = [math.exp(x / temperature) for x in logits]
    if top_k:
        least = sorted(weights, reverse=True)[min(top_k, len(weights)) - 1]
        weights = [w if w >= least else 0.0 for w in weights]
    p = [w / sum(weights) for w in weights]
    mass, kept = 0.0, [0.0] * len(p)
    for i in sorted(range(len(p)), key=lambda i: (-p[i], i)):
        if mass < top_p:
            kept[i] = p[i]
        mass += p[i]
    return [x / sum(kept) for x in kept]


@settings(max_examples=300, deadline=None)
@given(logits_rows, st.sampled_from([0.3, 1.0, 2.0]), st.integers(0, 9), st.sampled_from([0.123, 0.617, 0.931, 1.0]))
def test_probabilities_follow_the_slow_transcription(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    options = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    mine = options.probabilities(torch.tensor([logits, logits[::-1]]))
    assert mine.dtype == torch.float32
    for row, values in zip(mine.tolist(), (logits, logits[::-1]), strict=True):
        assert row == pytest.approx(slow_probabilities(values, temperature, top_k, top_p), rel=1e-5)


def sorted_nucleus(probabilities: Tensor, share: float) -> Tensor:
    """Sort everything; equally likely tokens by id."""
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    stays = ordered.cumsum(-1) - ordered < share
    kept = torch.zeros_like(probabilities).scatter_(-1, ids, ordered * stays)
    return kept / kept.sum(-1, keepdim=True)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("steps", [0.25, 1.0, 8.0], ids="ties {}".format)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 700, 5000])
def test_top_p_of_rows_that_need_few_tokens_and_rows_that_need_most(size: int, steps: float, share: float) -> None:
    logits = torch.randn(3, 4, size, generator=torch.Generator().manual_seed(size))
    logits *= torch.tensor([0.0, 0.3, 2.0, 6.0])[:, None]  # from no preference to a strong one
    logits = (logits * steps).round() / steps
    options = Sampling(temperature=1.0, top_p=share)
    assert torch.equal(options.probabilities(logits), sorted_nucleus(logits.softmax(-1), share))


@pytest.mark.parametrize("options", [Sampling(), Sampling(temperature=1.0, top_k=2, top_p=0.9)], ids=str)
def test_no_rows(options: Sampling) -> None:
    assert options.probabilities(torch.empty(0, 5)).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logits_are_left_as_they_are(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.5, -1.0]], dtype=dtype)
    before = logits.clone()
    Sampling(temperature=0.7, top_k=2, top_p=0.6).probabilities(logits)
    assert torch.equal(logits, before)


def test_low_precision_logits_are_computed_in_fp32() -> None:
    logits, options = torch.linspace(-3, 3, 50).bfloat16(), Sampling(temperature=0.7, top_p=0.9)
    assert torch.equal(options.probabilities(logits), options.probabilities(logits.float()))


def test_temperature_zero_is_the_limit() -> None:
    logits = torch.tensor([[300.0, -300.0, 299.0], [1.0, 2.0, 0.0]])
    assert Sampling().is_greedy
    assert Sampling().probabilities(logits).tolist() == [[1, 0, 0], [0, 1, 0]]
    assert Sampling(temperature=1e-37).probabilities(logits).tolist() == [[1, 0, 0], [0, 1, 0]]
    assert not Sampling(temperature=1e-37).is_greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_takes_the_first_of_equals(dtype: torch.dtype) -> None:
    """Also where the row is long enough to be searched in parts."""
    logits = torch.randn(200, 3000, generator=torch.Generator().manual_seed(0)).round().to(dtype)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert likeliest(logits).tolist() == expected == logits.argmax(-1).tolist()
    assert likeliest(torch.zeros(2, 3000, dtype=dtype)).tolist() == [0, 0]
    assert Sampling().probabilities(torch.tensor([1.0, 5.0, 5.0])).tolist() == [0, 1, 0]


def test_ties_at_the_border() -> None:
    equal = torch.zeros(4)
    assert Sampling(temperature=1.0, top_k=2).probabilities(equal).tolist() == [0.25] * 4
    assert Sampling(temperature=1.0, top_p=0.5).probabilities(equal).tolist() == [0.5, 0.5, 0, 0]


def test_forbidden_tokens_stay_forbidden() -> None:
    logits = torch.tensor([-math.inf, 1.0, -math.inf, 1.0])
    assert Sampling(temperature=0.5, top_k=3, top_p=0.99).probabilities(logits).tolist() == [0, 0.5, 0, 0.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature must be at least 0, got -1"),
        ({"temperature": math.nan}, "temperature must be at least 0, got nan"),
        ({"temperature": math.inf}, "temperature must be at least 0, got inf"),
        ({"top_k": -2}, "top_k must be at least 1, or 0 to keep every token, got -2"),
        ({"top_p": 0.0}, r"top_p must be above 0 and at most 1, got 0\.0"),
        ({"top_p": 1.5}, r"top_p must be above 0 and at most 1, got 1\.5"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)  # type: ignore[arg-type]


def slow_draw(probabilities: list[float], uniform: float) -> int:
    wanted, mass = uniform * sum(probabilities), 0.0
    for token, p in enumerate(probabilities):
        mass += p
        if p > 0 and mass > wanted:
            return token
    raise AssertionError("nothing to draw")


@settings(max_examples=300, deadline=None)
@given(
    # Eighths: every sum is exact, so borders are hit exactly too.
    st.lists(st.integers(0, 8).map(lambda i: i / 8), min_size=1, max_size=6).filter(any),
    st.integers(0, 63).map(lambda i: i / 64),
)
def test_draw_is_the_inverse_of_the_cumulative_distribution(probabilities: list[float], uniform: float) -> None:
    row = torch.tensor([[probabilities]])  # [1, 1, V]
    assert draw(row, torch.tensor([[uniform]])).tolist() == [[slow_draw(probabilities, uniform)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draw_never_returns_a_token_of_probability_zero(dtype: torch.dtype) -> None:
    """The smallest and the largest uniform there are, over rows whose sums round."""
    p = torch.rand(64, 1000, generator=torch.Generator().manual_seed(0), dtype=dtype)
    p[:, ::3], p[:, -5:] = 0, 0  # the first and the last tokens too
    largest = 1 - torch.finfo(dtype).eps / 2
    for uniform, expected in ((0.0, 1), (largest, 994)):
        tokens = draw(p, torch.full((64,), uniform, dtype=dtype))
        assert tokens.tolist() == [expected] * 64
    shares = p / p.sum(-1, keepdim=True)
    tokens = draw(shares, torch.full((64,), largest, dtype=dtype))
    assert (shares[torch.arange(64), tokens] > 0).all()


def test_rare_tokens_behind_likely_ones_are_drawn() -> None:
    """In fp32 the sum would stay where it was."""
    tokens = draw(torch.tensor([[1.0, 1e-9]] * 2), torch.tensor([1 - 1.5e-9, 1 - 5e-10], dtype=torch.float64))
    assert tokens.tolist() == [0, 1]


def test_draw_survives_sums_that_fall() -> None:
    """Parallel sums may fall where nothing is added; no token of probability 0 may come of it."""

    class Falling(torch.Tensor):
        def cumsum(self, *args: object, **kwargs: object) -> Tensor:
            return torch.tensor([[0.3, 0.3 - 1e-9, 0.3 + 1e-9, 1.0, 1.0 + 1e-9]], dtype=torch.float64)

    p = torch.tensor([[0.3, 0.0, 0.0, 0.7, 0.0]]).as_subclass(Falling)
    for uniform in (0.3, 0.3 + 5e-10, 1 - 1e-10):
        assert draw(p, torch.tensor([uniform], dtype=torch.float64)).tolist() == [3]


def test_draws_follow_the_probabilities() -> None:
    p = torch.tensor([0.1, 0.0, 0.6, 0.3])
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = torch.bincount(draw(p.expand(1000, -1), grid), minlength=4)
    assert counts.tolist() == pytest.approx([100, 0, 600, 300], abs=1)
