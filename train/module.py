"""The head with its loss as one module: what DDP, FSDP and DeepSpeed wrap, so that no weight is used outside of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitdraft.quant.target import TargetStates
from bitdraft.speculators.base import DraftHead
from bitdraft.train.loss_terms import LossConfig
from bitdraft.train.objective import Losses, objective
from bitdraft.train.states import Supervision

_MEMORY = 0.9  # of the running acceptance, per optimizer step


class TrainedHead(nn.Module):
    """``forward`` computes one pack's loss."""

    running_acceptance: Tensor  # [K] fp32: what steps accepted of late, by which LK losses mix
    seen: Tensor  # [] fp32: how many optimizer steps that is made of

    def __init__(self, head: DraftHead, teacher: Callable[[Tensor], Tensor], config: LossConfig) -> None:
        """``teacher``: from the target's hidden states ``[n, H]`` its logits of the draft vocabulary."""
        super().__init__()
        self.head, self.teacher, self.config = head, teacher, config
        device = next(head.parameters()).device
        self.register_buffer("running_acceptance", torch.zeros(head.draft_steps, device=device))
        self.register_buffer("seen", torch.zeros((), device=device))

    def forward(self, supervision: Supervision, divisor: float) -> Losses:
        """``divisor``: weight of the supervised positions of the whole step, over all packs and processes."""
        return self.losses(supervision, divisor, supervision.states)

    def losses(self, supervision: Supervision, divisor: float, inputs: TargetStates) -> Losses:
        """``inputs``: what the head reads."""
        return objective(self.head, self.teacher, supervision, self.config, self.acceptance_so_far, divisor, inputs)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """What is trained, as an optimizer takes it: parameters, and their ``share`` of the learning rate."""
        return [{"params": [p for p in self.parameters() if p.requires_grad], "share": 1.0}]

    @property
    def acceptance_so_far(self) -> Tensor:
        """``[K]``: an exponential mean over the steps before, free of its start at zero; zero before the first."""
        return self.running_acceptance / (1 - _MEMORY**self.seen).clamp(min=1e-6)

    def remember(self, acceptance: Tensor, terms: Tensor) -> None:
        """Take in one optimizer step's sums ``[K]`` over all packs and processes."""
        self.running_acceptance.lerp_(acceptance.float() / terms.clamp(min=1), 1 - _MEMORY)
        self.seen += 1
