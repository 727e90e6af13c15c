"""An output head of low rank: ``H · r + r · D`` products per drafted token in place of ``H · D``.

SlimSpec (arXiv:2605.10453): the head's output projection is a large part of drafting, and most of what it says lies in
a few hundred directions. It starts as the best approximation of that rank to the projection it stands for (Eckart and
Young 1936), and both factors are trained.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# D draft vocabulary, H hidden, r rank.

_ROWS = 4096  # in fp64 at once


class LowRankOutput(nn.Linear):
    """Logits ``B (A x)``: ``weight`` is ``B`` ``[D, r]``, ``projection`` is ``A`` ``[r, H]``."""

    def __init__(self, hidden_size: int, rank: int, tokens: int) -> None:
        """Raises ``ValueError`` for a rank that no matrix ``[tokens, hidden_size]`` has."""
        if rank > min(hidden_size, tokens):
            raise ValueError(
                f"eagle3.output_rank is {rank}, but the output head of {tokens} tokens and hidden size {hidden_size} "
                "has no such rank: lower it, or leave it out for the whole output head"
            )
        super().__init__(rank, tokens, bias=False)
        self.projection = nn.Parameter(torch.zeros(rank, hidden_size))

    def project(self, x: Tensor) -> Tensor:
        """``[…, H]`` → ``[…, r]``, what ``weight`` turns into logits."""
        return linear(x, self.projection)

    def forward(self, input: Tensor) -> Tensor:
        """``[…, H]`` → ``[…, D]``."""
        return super().forward(self.project(input))

    @torch.no_grad()
    def start_as(self, weight: Tensor) -> None:
        """Become the best approximation to ``weight`` ``[D, H]``: ``A`` its leading right singular vectors, as they
        are, so that projected states are of the size of states, and ``B = weight Aᵀ``."""
        directions = leading_directions(weight, len(self.projection))  # [r, H]
        self.projection.copy_(directions)
        self.weight.copy_(torch.cat([part.double() @ directions.T for part in weight.split(_ROWS)]))

    @property
    def product(self) -> Tensor:
        """``B A`` ``[D, H]``, multiplied in fp32: the output head that engines load."""
        return self.weight.detach().float() @ self.projection.detach().float()

    def multiplied_out(self) -> nn.Linear:
        """An ordinary layer that computes the same."""
        whole = nn.Linear(self.projection.shape[1], len(self.weight), bias=False, device="meta")
        whole.weight = nn.Parameter(self.product.to(self.weight.dtype))
        return whole.train(self.training)


@torch.no_grad()
def leading_directions(weight: Tensor, rank: int) -> Tensor:
    """The ``rank`` leading right singular vectors of ``weight`` ``[D, H]``, ``[rank, H]`` in fp64, the greatest first.

    As eigenvectors of ``weightᵀ weight`` ``[H, H]``: an SVD of the large matrix itself takes many times as long.
    """
    gram = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64, device=weight.device)
    for part in weight.split(_ROWS):
        part = part.double()
        gram.addmm_(part.T, part)
    return torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1).T
