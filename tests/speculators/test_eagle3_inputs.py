"""Products of halves, once per token, give the steps and gradients that whole inputs give."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bitdraft.quant.target import LowBitTarget, TargetStates
from bitdraft.speculators import eagle3
from bitdraft.speculators.documents import Documents
from bitdraft.speculators.eagle3 import Eagle3Head
from bitdraft.speculators.eagle3_inputs import HalvedInputs, WholeInputs, training_inputs

MakeEagle3 = Callable[..., Eagle3Head]


def outputs_and_gradients(head: Eagle3Head, states: TargetStates, tokens: Tensor, documents: Documents) -> list[Tensor]:
    head.zero_grad()
    outputs = head.training_outputs(states, tokens, documents)
    (outputs * torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)).sum().backward()
    return [outputs.detach(), *(p.grad.clone() for p in head.parameters() if p.grad is not None)]


@pytest.mark.parametrize("attention", ["llama", "qwen3"])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_halves_give_what_the_whole_gives(
    exact_target: LowBitTarget,
    make_eagle3: MakeEagle3,
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    norm_before_residual: bool,
) -> None:
    """In fp64, over documents of several lengths, the head's own embedding included."""
    settings = {"attention": attention, "norm_before_residual": norm_before_residual, "train_embedding": True}
    head = make_eagle3(exact_target, steps=4, **settings)
    torch.manual_seed(1)
    for p in (head.layer.self_attn.q_proj, head.layer.self_attn.k_proj, head.layer.self_attn.v_proj):
        p.bias = torch.nn.Parameter(torch.randn(p.out_features, dtype=p.weight.dtype))
    tokens = torch.randint(0, 256, (19,))
    states = exact_target.states(tokens[None], capture=head.capture_layers)
    packed = TargetStates(states.captured[0], states.last_hidden[0])
    documents = Documents((0, 7, 8, 19), ((2, 6), (7, 7), (8, 17)))
    found = []
    for kind in (HalvedInputs, WholeInputs):
        monkeypatch.setattr(eagle3, "training_inputs", kind)
        found.append(outputs_and_gradients(head, packed, tokens, documents))
    for halved, whole in zip(*found, strict=True):
        torch.testing.assert_close(halved, whole)


def test_layers_that_somebody_listens_to_get_whole_inputs(target: LowBitTarget, make_eagle3: MakeEagle3) -> None:
    head, embedded = make_eagle3(target), torch.zeros(3, target.hidden_size)
    assert isinstance(training_inputs(head.layer, embedded), HalvedInputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(training_inputs(head.layer, embedded), WholeInputs)
    head.layer.self_attn.k_proj.register_forward_pre_hook(lambda *_: None)
    assert isinstance(training_inputs(head.layer, embedded), WholeInputs)
