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
            best = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
        logits = logits.float()
        # Less the maximum first: at temperatures near 0 the quotient would overflow.
        scaled = (logits - logits.amax(-1, keepdim=True)).div_(self.temperature)
        if 0 < self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k).values[..., -1:]
            scaled.masked_fill_(scaled < least, -math.inf)
        probabilities = scaled.softmax(-1)
        return probabilities if self.top_p == 1 else _nucleus(probabilities, self.top_p)


def _nucleus(probabilities: Tensor, share: float) -> Tensor:
    """Only the tokens before which, counted from the likeliest, less than ``share`` lies (Holtzman et al. 2020)."""
    # All tokens below (1 - share) / V together hold less than 1 - share, so none of them stays and only the others are
    # sorted: 2 to 9 times faster on a CPU at V = 150,000 (Zipf exponents 1.2 to 2). Half of that bound, for rounding.
    bound = (1 - share) / probabilities.shape[-1] / 2
    ordered = probabilities.topk(int((probabilities >= bound).sum(-1).max())).values
    count = (ordered.cumsum(-1) - ordered < share).sum(-1, keepdim=True)  # [..., 1] tokens that stay
    least = ordered.gather(-1, count - 1)
    above, equal = probabilities > least, probabilities == least
    places = count - above.sum(-1, keepdim=True)  # for those as likely as the last
    kept = probabilities.masked_fill(~(above | equal & (equal.cumsum(-1) <= places)), 0)
    return kept.div_(kept.sum(-1, keepdim=True))


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """One token id per row by the inverse of the cumulative distribution: ``[..., V]``, ``[...]`` → int64 ``[...]``.

    ``uniforms`` lie in [0, 1). Rows need not sum to 1. A token of probability 0 is never drawn, wherever the sums
    round to; only a row of zeros, which has nothing to draw, gives id 0.
    """
    # fp64: the sums of a large vocabulary's fp32 probabilities are off by more than a rare token's probability.
    # Parallel sums need not ascend where they should stand still, so tokens of probability 0 are taken out.
    cumulative = probabilities.cumsum(-1, dtype=torch.float64).masked_fill_(probabilities <= 0, -1.0)
    wanted = uniforms[..., None] * cumulative.amax(-1, keepdim=True)
    return (cumulative > wanted).to(torch.uint8).argmax(-1)  # the first that is larger
