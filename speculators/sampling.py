"""How tokens are chosen from a model's logits: temperature, top-k, top-p, and the draw itself."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# V vocabulary.


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The options of sampling, in the order in which vLLM and transformers apply them."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Keep the k likeliest tokens and those as likely as the last of them; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens that hold this share of the probability; 1 keeps all."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 1, or 0 to keep every token, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that tokens are drawn from: ``[..., V]`` → fp32 ``[..., V]``.

        At temperature 0, one token has it all: the first of the highest. Where equally likely tokens straddle the
        border of top-p, the lower ids stay.
        """
        if self.is_greedy:
            best = likeliest(logits)[..., None]
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
        scaled = logits.to(torch.float32, copy=True)
        # Less the maximum first: at temperatures near 0 the quotient would overflow.
        scaled.sub_(scaled.amax(-1, keepdim=True)).div_(self.temperature)
        if 0 < self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k).values[..., -1:]
            scaled.masked_fill_(scaled < least, -math.inf)
        probabilities = scaled.softmax(-1)
        return probabilities if self.top_p == 1 else _nucleus(probabilities, self.top_p)

    def choose(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """One token id per row: ``[..., V]``, numbers in [0, 1) ``[...]`` → int64 ``[...]``."""
        return likeliest(logits) if self.is_greedy else draw(self.probabilities(logits), uniforms)


def likeliest(logits: Tensor) -> Tensor:
    """The token of the highest logit, the first of equally high ones: ``[..., V]`` → int64 ``[...]``."""
    return logits.max(-1).indices  # ``argmax`` gives the same, in bf16 on a CPU much slower


def _nucleus(probabilities: Tensor, share: float) -> Tensor:
    """Only the tokens before which, counted from the likeliest, less than ``share`` lies (Holtzman et al. 2020)."""
    rows = probabilities.reshape(-1, probabilities.shape[-1])  # [R, V]
    least, surplus = _border(rows, share)
    kept = rows.masked_fill(rows < least, 0)
    (tied,) = surplus.squeeze(1).nonzero(as_tuple=True)
    equal = rows[tied] == least[tied]
    place = equal.cumsum(-1, dtype=torch.int32)
    kept[tied] = kept[tied].masked_fill_(equal & (place > place[:, -1:] - surplus[tied]), 0)
    return kept.div_(kept.sum(-1, keepdim=True)).view_as(probabilities)


def _border(probabilities: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Of each row ``[R, V]`` the least likely token that stays, as its probability ``[R, 1]``, and how many tokens that
    are as likely ``[R, 1]`` do not."""
    vocabulary = probabilities.shape[-1]
    least = probabilities.new_empty(len(probabilities), 1)
    surplus = torch.zeros_like(least, dtype=torch.int64)
    row, width = torch.arange(len(probabilities), device=probabilities.device), 64
    # Most rows need few tokens and some need thousands: only those go on to more. With a real target's logits on a CPU
    # much faster than to go as far as the flattest row for all.
    while True:
        ordered = probabilities.topk(min(width, vocabulary)).values
        before = ordered.cumsum(-1) - ordered
        count = (before < share).sum(-1, keepdim=True)
        border = ordered.gather(-1, count - 1)
        least[row], surplus[row] = border, (ordered >= border).sum(-1, keepdim=True) - count
        beyond = ordered[:, -1] == border.squeeze(1)  # more tokens may stay, or be as likely as the last that does
        if width >= vocabulary or not beyond.any():
            return least, surplus
        probabilities, row, width = probabilities[beyond], row[beyond], 8 * width


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """One token id per row by the inverse of the cumulative distribution: ``[..., V]``, ``[...]`` → int64 ``[...]``.

    ``uniforms`` lie in [0, 1). Rows need not sum to 1. A token of probability 0 is never drawn, wherever the sums
    round to; only a row of zeros, which has nothing to draw, gives id 0.
    """
    # fp64: the sums of a large vocabulary's fp32 probabilities are off by more than a rare token's probability.
    # Parallel sums need not ascend where they should stand still, so tokens of probability 0 are taken out.
    cumulative = probabilities.cumsum(-1, dtype=torch.float64).masked_fill_(probabilities <= 0, -1.0)
    wanted = uniforms[..., None] * cumulative.amax(-1, keepdim=True)
    return (cumulative > wanted).max(-1).indices  # the first that is larger
