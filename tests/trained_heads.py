"""Heads trained in low bit: what they are trained on, and their layers in plain autograd."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from bitdraft.quant.block import nvfp4_global_scale
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.recipe import Recipe, Rule
from bitdraft.quant.straight_through import fake_quantize
from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators.base import DraftHead
from bitdraft.speculators.documents import Documents
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.qat import train_in_low_bit
from bitdraft.speculators.trained_linear import TrainedLinear

TEXT = [torch.arange(40)[None], torch.arange(60, 90)[None]]
DOWN = "layers.0.mlp.down_proj"
_LONG = 24  # tokens of a document


def trained(head: Eagle3Head, target: LowBitTarget, recipe: str | Recipe, **more: Any) -> Eagle3Head:
    """A copy of ``head`` that computes in low bit."""
    named = load_recipe(recipe) if isinstance(recipe, str) else recipe
    done = train_in_low_bit(copy.deepcopy(head), named, **{"target": target, "calibration": TEXT, **more})
    assert isinstance(done, Eagle3Head)
    return done


def layers(head: DraftHead) -> dict[str, TrainedLinear]:
    return {name: module for name, module in head.named_modules() if isinstance(module, TrainedLinear)}


class Batch:
    """Two documents with the target's states, and its choices."""

    def __init__(self, target: LowBitTarget, head: Eagle3Head, seed: int = 3) -> None:
        ids = torch.randint(256, (2, _LONG), generator=torch.Generator().manual_seed(seed))
        states = target.states(ids, capture=head.capture_layers)
        self.tokens = ids.flatten()
        self.states = TargetStates(states.captured.flatten(0, 1), states.last_hidden.flatten(0, 1))
        last = _LONG - head.config.steps - 1  # from which every step has a teacher
        self.documents = Documents((0, _LONG, 2 * _LONG), ((0, last), (_LONG, _LONG + last)))
        choices = self.states.last_hidden @ head.output_weight.detach().T  # [N, D]
        rows = self.documents.rows
        self.labels = torch.stack([choices[rows + 1 + k] for k in range(head.config.steps)]).argmax(-1)  # [K, R]

    def logits(self, head: Eagle3Head) -> Tensor:
        """``[K, R, D]``."""
        return head.training_outputs(self.states, self.tokens, self.documents) @ head.output_weight.T

    def loss(self, head: Eagle3Head) -> Tensor:
        return cross_entropy(self.logits(head).flatten(0, 1).float(), self.labels.flatten())


class Oracle(nn.Module):
    """The layer in plain autograd: products of fake-quantized tensors."""

    def __init__(self, group: list[nn.Linear], source: nn.Linear, rule: Rule, scale: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias, self.rule, self.scale = source.weight, source.bias, rule, scale
        self.group = [other.weight for other in group]  # a list of parameters, which registers nothing

    def forward(self, x: Tensor) -> Tensor:
        weights, inputs = self.rule.weight_scheme, self.rule.activation_scheme
        assert weights is not None
        largest = torch.stack([w.detach().abs().amax().float() for w in self.group]).amax()
        shared = nvfp4_global_scale(largest) if weights.has_global_scale else None
        w = fake_quantize(self.weight, weights, global_scale=shared, saturation="identity")
        return linear(x if inputs is None else fake_quantize(x, inputs, global_scale=self.scale), w, self.bias)


def adam_steps(head: Eagle3Head, batches: list[Batch], steps: int, rate: float) -> None:
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    for step in range(steps):
        optimizer.zero_grad()
        batches[step % len(batches)].loss(head).backward()
        optimizer.step()
