"""Heads and their target's adapters in one module: what Medusa-2 trains (``train/adapted_target.py``)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bitdraft.speculators.base import DraftHead
from bitdraft.train.adapted_target import TargetAdapters
from bitdraft.train.checkpoint import Checkpoint
from bitdraft.train.draft_loss import Coefficients, draft_loss
from bitdraft.train.loss_terms import LossConfig
from bitdraft.train.module import TrainedHead
from bitdraft.train.objective import Losses
from bitdraft.train.states import Supervision

# N packed token, n supervised position, H hidden.

_ADAPTERS = "adapters."  # of the names that the trained module gives the adapters' tensors


class AdaptedHead(TrainedHead):
    """``forward`` runs the adapted target over the pack; to the heads' loss comes ``keep · KL(original ‖ adapted)``."""

    def __init__(
        self, head: DraftHead, teacher: Callable[[Tensor], Tensor], config: LossConfig, adapters: TargetAdapters
    ) -> None:
        super().__init__(head, teacher, config)
        self.of_target = adapters
        # The very parameters in the target's layers, so that optimizer, DDP and checkpoints see them.
        self.adapters = nn.ParameterDict({_key(name): p for name, p in adapters.parameters.items()})

    def forward(self, supervision: Supervision, divisor: float) -> Losses:
        adapted = self.of_target.last_hidden(supervision.pack)  # [N, H]
        losses = self.losses(supervision, divisor, replace(supervision.states, last_hidden=adapted))
        keep = self.of_target.config.keep
        if keep == 0:
            return losses
        return losses._replace(loss=losses.loss + self._divergence(supervision, adapted, keep / divisor))

    def _divergence(self, supervision: Supervision, adapted: Tensor, weight: float) -> Tensor:
        """``weight · Σ KL(original ‖ adapted)`` over the supervised positions; exactly 0 where both are equal."""
        at = supervision.supervised.nonzero()[:, 0]  # [n]
        bounds = torch.tensor(supervision.pack.bounds[1:], device=at.device)
        of_document = supervision.weights[torch.bucketize(at, bounds, right=True)]
        weights = Coefficients(cross_entropy=(weight * of_document)[None])
        original, output = supervision.states.last_hidden[at], self.of_target.target.output_head.weight
        crossed = draft_loss(adapted[at][None], output, original, self.teacher, None, weights).loss
        return crossed - draft_loss(original[None], output, original, self.teacher, None, weights).loss

    @property
    def groups(self) -> list[dict[str, Any]]:
        heads = [p for p in self.head.parameters() if p.requires_grad]
        return [
            {"params": heads, "share": 1.0},
            {"params": list(self.adapters.parameters()), "share": self.of_target.config.lr_share},
        ]


def trained_head(
    head: DraftHead, teacher: Callable[[Tensor], Tensor], config: LossConfig, adapters: TargetAdapters
) -> TrainedHead:
    """The module that is trained, with the adapters as a part of it if there are any."""
    return AdaptedHead(head, teacher, config, adapters) if adapters else TrainedHead(head, teacher, config)


def load_adapters(adapters: TargetAdapters, saved: Checkpoint) -> None:
    """Give the adapters, if there are any, the weights of a checkpoint."""
    module = saved.module if adapters else {}
    adapters.load({name: module[_ADAPTERS + _key(name)] for name in adapters.parameters})


def _key(name: str) -> str:
    return name.replace(".", "/")  # torch allows no dots in names of parameters
