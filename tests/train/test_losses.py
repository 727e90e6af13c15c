"""The chunked loss against a transcription that keeps every logit and lets autograd differentiate."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from bitdraft.train.losses import soft_cross_entropy, step_weights

K, N, D, H = 3, 7, 11, 5
shared_or_own = pytest.mark.parametrize("shape", [(D, H), (K, D, H)], ids=["shared weight", "a weight per step"])
chunks = pytest.mark.parametrize("rows", [1, 3, 7, 64, None])


def inputs(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor], Tensor]:
    generator = torch.Generator().manual_seed(len(shape))

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    student, weight, teacher, of_teacher = random(K, N, H), random(*shape), random(N, H), random(D, H)
    weights = random(K, N).abs() * (torch.arange(K * N).view(K, N) % 4 != 0)
    return student.requires_grad_(), weight.requires_grad_(), teacher, lambda h: 3 * linear(h, of_teacher), weights


def transcription(
    student: Tensor, weight: Tensor, teacher: Tensor, teacher_logits: Callable[[Tensor], Tensor], weights: Tensor
) -> tuple[Tensor, Tensor]:
    """``Σ_n w_kn · −Σ_v P_n(v) log softmax(W_k s_kn)(v)`` per step, and where the first choices agree."""
    losses, agrees = [], []
    for k in range(len(student)):
        w = weight if weight.ndim == 2 else weight[k]
        loss, same = torch.zeros(()), []
        for n in range(len(teacher)):
            logits, its = w @ student[k, n], teacher_logits(teacher[n])
            probability = its.exp() / its.exp().sum()
            loss = loss - weights[k, n] * (probability * (logits - logits.exp().sum().log())).sum()
            same.append(bool(weights[k, n] > 0) and int(logits.argmax()) == int(its.argmax()))
        losses.append(loss)
        agrees.append(same)
    return torch.stack(losses), torch.tensor(agrees)


@shared_or_own
@chunks
def test_values_and_gradients_are_those_of_the_formula(shape: tuple[int, ...], rows: int | None) -> None:
    student, weight, teacher, logits, weights = inputs(shape)
    expected, agrees = transcription(student, weight, teacher, logits, weights)
    found = soft_cross_entropy(student, weight, teacher, logits, weights, rows=rows)
    torch.testing.assert_close(found.per_step, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.agrees, agrees)
    for mine, its in zip(
        torch.autograd.grad(2.5 * found.per_step.sum(), [student, weight]),
        torch.autograd.grad(2.5 * expected.sum(), [student, weight]),
        strict=True,
    ):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_steps_with_weights_of_their_own_may_count_differently() -> None:
    student, weight, teacher, logits, weights = inputs((K, D, H))
    factor = torch.tensor([0.5, -2.0, 0.0])
    expected, _ = transcription(student, weight, teacher, logits, weights)
    found = soft_cross_entropy(student, weight, teacher, logits, weights)
    for mine, its in zip(
        torch.autograd.grad((found.per_step * factor).sum(), [student, weight]),
        torch.autograd.grad((expected * factor).sum(), [student, weight]),
        strict=True,
    ):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_steps_that_share_a_weight_must_count_alike() -> None:
    """Their gradients are one sum already: another factor per step can only be refused."""
    student, weight, teacher, logits, weights = inputs((D, H))
    found = soft_cross_entropy(student, weight, teacher, logits, weights)
    with pytest.raises(ValueError, match="put step weights into weights_KN"):
        (found.per_step * torch.tensor([1.0, 2.0, 3.0])).sum().backward()


@shared_or_own
def test_a_borrowed_weight_gets_no_gradient(shape: tuple[int, ...]) -> None:
    student, weight, teacher, logits, weights = inputs(shape)
    frozen = weight.detach()
    soft_cross_entropy(student, frozen, teacher, logits, weights).per_step.sum().backward()
    assert frozen.grad is None
    assert student.grad is not None
    again = inputs(shape)[0]
    transcription(again, frozen, teacher, logits, weights)[0].sum().backward()
    assert again.grad is not None
    torch.testing.assert_close(student.grad, again.grad, rtol=1e-4, atol=1e-5)


def test_a_position_with_no_weight_gets_no_gradient() -> None:
    student, weight, teacher, logits, weights = inputs((D, H))
    found = soft_cross_entropy(student, weight, teacher, logits, weights)
    found.per_step.sum().backward()
    assert student.grad is not None
    assert torch.equal(student.grad.abs().sum(-1) > 0, weights > 0)


def test_the_least_loss_is_the_teacher_s_entropy() -> None:
    """A head that is the teacher has no gradient, and its loss is what cannot be learned."""
    _, _, teacher, logits, _ = inputs((D, H))
    weight = logits(torch.eye(H)).T
    student = teacher.expand(K, N, H).clone().requires_grad_()
    found = soft_cross_entropy(student, weight.contiguous(), teacher, logits, torch.ones(K, N))
    p = logits(teacher).softmax(-1)
    torch.testing.assert_close(found.per_step, -(p * p.log()).sum().expand(K), rtol=1e-5, atol=1e-5)
    found.per_step.sum().backward()
    assert student.grad is not None
    assert float(student.grad.abs().max()) < 1e-5
    assert found.agrees.all()


def test_large_logits_stay_finite() -> None:
    student, weight, teacher, logits, weights = inputs((D, H))
    big = (student.detach() * 1e3).requires_grad_()
    found = soft_cross_entropy(big, weight, teacher, logits, weights)
    found.per_step.sum().backward()
    assert torch.isfinite(found.per_step).all()
    assert big.grad is not None
    assert torch.isfinite(big.grad).all()
    exact = linear(big.detach().double(), weight.detach().double()).log_softmax(-1)
    expected = -(logits(teacher).double().softmax(-1) * exact).sum(-1).mul(weights).sum(-1)
    torch.testing.assert_close(found.per_step.double(), expected, rtol=1e-5, atol=0.0)


@settings(max_examples=40, deadline=None)
@given(steps=st.integers(1, 9), decay=st.floats(0.1, 1.0))
def test_step_weights_decay_and_sum_to_one(steps: int, decay: float) -> None:
    weights = step_weights(steps, decay).tolist()
    assert math.isclose(sum(weights), 1.0, rel_tol=1e-5)
    total = sum(decay**i for i in range(steps))
    assert weights == pytest.approx([decay**k / total for k in range(steps)], rel=1e-5)
