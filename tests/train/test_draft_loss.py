"""The chunked loss against formulas in fp64 that keep every logit and let autograd differentiate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from bitdraft.quant.first_choice import first_choice
from bitdraft.quant.fp32_products import times
from bitdraft.speculators.products import add_product
from bitdraft.train import draft_loss as module
from bitdraft.train.draft_loss import Coefficients, DraftLoss, Statistics, draft_loss

K, N, D, H, OUTSIDE = 3, 19, 128, 6, 9
TERMS = {
    "kl": (True, False, False),
    "tv": (False, True, False),
    "alpha": (False, False, True),
    "kl and tv": (True, True, False),
    "all": (True, True, True),
}
kinds = pytest.mark.parametrize("kind", TERMS)
shared_or_own = pytest.mark.parametrize("own", [False, True], ids=["shared weight", "a weight per step"])


class Inputs(NamedTuple):
    student: Tensor  # [K, N, H]
    weight: Tensor  # [D, H] or [K, D, H]
    teacher: Tensor  # [N, H]
    of_teacher: Tensor  # [D + OUTSIDE, H]
    abc: Tensor  # [3, K, N] coefficients
    exists: Tensor  # [K, N]
    normalisers: Tensor  # [N] over D + OUTSIDE

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.of_teacher[:D].to(hidden.dtype))

    def coefficients(self, kind: str) -> Coefficients:
        return Coefficients(*(x if there else None for x, there in zip(self.abc, TERMS[kind], strict=True)))

    def run(self, coefficients: Coefficients | Callable[[Statistics], Coefficients], **more: Any) -> DraftLoss:
        return draft_loss(self.student, self.weight, self.teacher, self.logits, self.normalisers, coefficients, **more)


def inputs(own: bool = False, d: int = D, positions: int = N, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(3 + own)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    exists = torch.rand(K, positions, generator=generator) > 0.4
    exists[0] = torch.arange(positions) % 19 != 3  # so few are missing that they are computed with the rest
    exists[1] = True
    exists[2, :8] = False
    abc = torch.rand(3, K, positions, generator=generator)
    abc[1, 0, :3] = 0  # some rows have one of the terms only, or none
    abc[:, 1, 5:7] = 0
    student, weight = random(K, positions, H), random(*((K,) if own else ()), d, H)
    teacher, of_teacher = random(positions, H), random(d + OUTSIDE, H)
    normalisers = linear(teacher.double(), of_teacher.double()).logsumexp(-1).float()
    return Inputs(student.requires_grad_(), weight.requires_grad_(), teacher, of_teacher, abc, exists, normalisers)


class Dense(NamedTuple):
    loss: Tensor
    cross_entropy: Tensor
    acceptance: Tensor
    agrees: Tensor


def dense(x: Inputs, kind: str, exists: Tensor | None = None) -> Dense:
    """Every logit at once, in fp64; ``exists`` strikes terms out."""
    weight = x.weight.double() if x.weight.ndim == 3 else x.weight.double().expand(K, -1, -1)
    logits = torch.einsum("knh,kdh->knd", x.student.double(), weight)
    whole = linear(x.teacher.double(), x.of_teacher.double())
    drafted = whole[:, : logits.shape[-1]]
    P, p, q = drafted.softmax(-1), whole.softmax(-1)[:, : logits.shape[-1]], logits.softmax(-1)
    entropy = -(P * logits.log_softmax(-1)).sum(-1)
    alpha = torch.minimum(p.expand_as(q), q).sum(-1)
    there = torch.ones_like(entropy) if exists is None else exists.double()
    a, b, c = (w.double() * there * on for w, on in zip(x.abc, TERMS[kind], strict=True))
    loss = (a * entropy + b * (1 - alpha) - c * alpha.log()).sum()
    return Dense(loss, entropy * there, alpha * there, (logits.argmax(-1) == drafted.argmax(-1)) & there.bool())


def gradients(loss: Tensor, x: Inputs) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [x.student, x.weight])


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Within a share of the largest entry: gradients are sums in which large terms cancel."""
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=0, atol=tolerance * float(expected.detach().abs().max())
    )


def assert_near_as_a_whole(found: Tensor, expected: Tensor) -> None:
    """In bfloat16 single entries jump where rounding carries ``q`` across ``p``."""
    assert float((found.double() - expected).norm()) < 0.05 * float(expected.norm())


@kinds
@shared_or_own
@pytest.mark.parametrize(("rows", "masked"), [(4, True), (7, False), (None, True)])
def test_values_and_gradients_are_those_of_the_formula(kind: str, own: bool, rows: int | None, masked: bool) -> None:
    x = inputs(own)
    exists = x.exists if masked else None
    expected = dense(x, kind, exists)
    for coefficients in (x.coefficients(kind), lambda _: x.coefficients(kind)):  # one pass and two
        found = x.run(coefficients, rows=rows, exists_KN=exists)
        assert_near(found.loss, expected.loss)
        assert_near(found.statistics.cross_entropy, expected.cross_entropy)
        assert found.statistics.acceptance is not None
        assert_near(found.statistics.acceptance, expected.acceptance)
        assert torch.equal(found.statistics.agrees, expected.agrees)
        for mine, its in zip(
            gradients(2.5 * found.loss, x), gradients(2.5 * dense(x, kind, exists).loss, x), strict=True
        ):
            assert_near(mine, its)


@pytest.mark.parametrize("library", ["onednn", "torch"])
@pytest.mark.parametrize("own", [False, True])
def test_both_matrix_libraries_give_the_same(library: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if library == "torch":
        for name in ("quant.fp32_products", "speculators.products", "train.draft_loss"):
            monkeypatch.setattr(f"bitdraft.{name}.prefers_onednn", lambda _: False)
    x = inputs(own)
    for mine, its in zip(
        gradients(x.run(x.coefficients("all")).loss, x), gradients(dense(x, "all").loss, x), strict=True
    ):
        assert_near(mine, its)
        assert mine.is_contiguous()


def test_products_are_those_of_the_formula() -> None:
    a, b = torch.randn(5, 7), torch.randn(4, 7)
    torch.testing.assert_close(times(a, b), a @ b.T)
    into = torch.ones(5, 4)
    add_product(into, a, b.T)
    torch.testing.assert_close(into, 1 + a @ b.T)


@pytest.mark.parametrize("d", [11, 384])
def test_the_vocabulary_may_have_any_size(d: int) -> None:
    x = inputs(d=d)._replace()
    teacher = x.of_teacher[:d]
    found = draft_loss(
        x.student, x.weight, x.teacher, lambda h: linear(h, teacher), x.normalisers, x.coefficients("all")
    )
    expected = dense(x, "all")
    assert_near(found.loss, expected.loss)
    assert torch.equal(found.statistics.agrees, expected.agrees)
    for mine, its in zip(gradients(found.loss, x), gradients(expected.loss, x), strict=True):
        assert_near(mine, its)


def test_of_equal_logits_the_first_is_the_choice() -> None:
    logits = torch.zeros(3, 384)
    logits[0, [150, 151, 300]] = 1.0
    logits[1, [383]] = 1.0
    assert first_choice(logits)[1].tolist() == logits.argmax(-1).tolist() == [150, 383, 0]


def test_coefficients_may_depend_on_the_statistics() -> None:
    x = inputs()

    def mix(statistics: Statistics) -> Coefficients:
        assert statistics.acceptance is not None
        assert not statistics.acceptance.requires_grad
        return Coefficients(statistics.acceptance, 1 - statistics.acceptance)

    found = x.run(mix, exists_KN=x.exists)
    alpha = found.statistics.acceptance
    assert alpha is not None
    again = x._replace(abc=torch.stack([alpha, 1 - alpha, torch.zeros_like(alpha)]))
    expected = dense(again, "kl and tv", x.exists)
    assert_near(found.loss, expected.loss)
    for mine, its in zip(gradients(found.loss, x), gradients(expected.loss, again), strict=True):
        assert_near(mine, its)


@kinds
def test_bfloat16_is_near_the_formula(kind: str) -> None:
    x = inputs(dtype=torch.bfloat16)
    found, expected = x.run(x.coefficients(kind)), dense(x, kind)
    assert_near(found.loss, expected.loss, 0.01)
    for mine, its in zip(gradients(found.loss, x), gradients(expected.loss, x), strict=True):
        assert mine.dtype == torch.bfloat16
        assert_near_as_a_whole(mine, its)


def test_fp32_parameters_are_multiplied_in_the_teacher_s_dtype() -> None:
    """Mixed precision: gradients come back in the parameters' own dtype."""
    x = inputs()
    low = x._replace(teacher=x.teacher.bfloat16(), of_teacher=x.of_teacher.bfloat16())
    found = low.run(x.coefficients("all"))
    for mine, its in zip(gradients(found.loss, x), gradients(dense(x, "all").loss, x), strict=True):
        assert mine.dtype == torch.float32
        assert_near_as_a_whole(mine, its)


def test_autocast_changes_nothing() -> None:
    x = inputs()
    plain = x.run(x.coefficients("all"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = x.run(x.coefficients("all"))
    assert torch.equal(cast.loss, plain.loss)
    for mine, its in zip(gradients(cast.loss, x), gradients(plain.loss, x), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("outright", [True, False])
def test_without_gradients_the_loss_is_the_same_and_has_none(outright: bool) -> None:
    x = inputs()
    coefficients = x.coefficients("all") if outright else lambda _: x.coefficients("all")
    with torch.no_grad():
        found = x.run(coefficients)
    assert not found.loss.requires_grad
    assert torch.equal(found.loss, x.run(coefficients).loss)


def test_a_frozen_weight_gets_no_gradient() -> None:
    x = inputs()
    frozen = x._replace(weight=x.weight.detach())
    frozen.run(x.coefficients("all")).loss.backward()
    assert frozen.weight.grad is None
    assert x.student.grad is not None
    assert_near(x.student.grad, gradients(dense(x, "all").loss, x)[0])


def test_a_weight_may_be_trained_alone() -> None:
    x = inputs()
    alone = x._replace(student=x.student.detach())
    (found,) = torch.autograd.grad(alone.run(x.coefficients("all")).loss, [x.weight])
    assert_near(found, gradients(dense(x, "all").loss, x)[1])


def test_what_stands_where_no_row_exists_does_not_matter() -> None:
    x = inputs()
    with torch.no_grad():
        other = torch.where(x.exists[..., None], x.student, 5.0)
    twin = x._replace(student=other.requires_grad_())
    mine, its = (y.run(x.coefficients("all"), exists_KN=x.exists) for y in (x, twin))
    assert torch.equal(mine.loss, its.loss)
    for a, b in zip(gradients(mine.loss, x), gradients(its.loss, twin), strict=True):
        assert_near(a, b)
        if a.shape == x.student.shape:
            assert not a[~x.exists].any()


def test_a_second_backward_is_refused() -> None:
    x = inputs()
    loss = x.run(x.coefficients("kl")).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()


def test_terms_of_acceptance_need_the_normalisers() -> None:
    x = inputs()
    for kind in ("tv", "alpha"):
        with pytest.raises(ValueError, match="need log_normalisers_N"):
            draft_loss(x.student, x.weight, x.teacher, x.logits, None, x.coefficients(kind))
    with pytest.raises(ValueError, match="at least one term"):
        x.run(Coefficients())


def test_cross_entropy_alone_needs_no_normalisers() -> None:
    x = inputs()
    found = draft_loss(x.student, x.weight, x.teacher, x.logits, None, x.coefficients("kl"))
    assert found.statistics.acceptance is None
    expected = dense(x, "kl")
    assert_near(found.loss, expected.loss)
    for mine, its in zip(gradients(found.loss, x), gradients(expected.loss, x), strict=True):
        assert_near(mine, its)


def test_no_positions_are_no_loss() -> None:
    x = inputs()
    empty = x._replace(student=x.student[:, :0].detach().requires_grad_(), teacher=x.teacher[:0], abc=x.abc[..., :0])
    found = empty.run(lambda _: empty.coefficients("all"), exists_KN=x.exists[:, :0])
    assert float(found.loss.detach()) == 0
    assert not gradients(found.loss, empty)[1].any()


@pytest.mark.parametrize("kind", ["kl", "alpha", "all"])
def test_a_head_far_from_the_teacher_stays_finite(kind: str) -> None:
    """Logits in the thousands: the acceptance underflows, its logarithm and gradient must not."""
    x = inputs()
    sure = linear(300 * x.teacher, x.of_teacher).logsumexp(-1)
    far = x._replace(student=(x.student.detach() * 1e3).requires_grad_(), teacher=300 * x.teacher, normalisers=sure)
    found = far.run(far.coefficients(kind))
    assert found.loss.isfinite()
    assert all(g.isfinite().all() for g in gradients(found.loss, far))
    assert found.statistics.acceptance is not None
    assert float(found.statistics.acceptance.min()) < module.LEAST_ACCEPTANCE


def test_the_teacher_itself_has_no_gradient_and_accepts_its_own_mass() -> None:
    x = inputs()
    twin = x._replace(
        student=x.teacher.expand(K, N, H).clone().requires_grad_(),
        weight=x.of_teacher[:D].clone().requires_grad_(),
    )
    found = twin.run(twin.coefficients("kl"))
    p = twin.logits(x.teacher).softmax(-1)
    assert_near(found.statistics.cross_entropy, -(p * p.log()).sum(-1).expand(K, N))
    assert found.statistics.agrees.all()
    mass = (twin.logits(x.teacher).logsumexp(-1) - x.normalisers).exp()
    assert found.statistics.acceptance is not None
    assert_near(found.statistics.acceptance, mass.expand(K, N))
    assert all(float(g.abs().max()) < 1e-4 for g in gradients(found.loss, twin))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(0.01, 30.0), teacher_scale=st.floats(0.01, 30.0))
def test_acceptance_is_a_chance_and_cross_entropy_at_least_the_entropy(
    seed: int, scale: float, teacher_scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, weight, teacher, other = (
        torch.randn(*s, generator=generator) for s in ((2, 9, H), (128, H), (9, H), (140, H))
    )
    other = other * teacher_scale
    found = draft_loss(
        student * scale,
        weight,
        teacher,
        lambda h: linear(h, other[:128]),
        linear(teacher, other).logsumexp(-1),
        Coefficients(torch.ones(2, 9)),
    ).statistics
    p = linear(teacher, other[:128]).double().log_softmax(-1)
    entropy = -(p.exp() * p).sum(-1)
    assert found.acceptance is not None
    assert (found.acceptance >= 0).all()
    assert (found.acceptance <= 1).all()
    size = linear(student * scale, weight).abs().amax(-1) + 1
    assert (found.cross_entropy >= entropy - 1e-5 * size).all()


class _Largest(TorchDispatchMode):
    """Remembers the size of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("outright", [True, False])
def test_no_tensor_is_larger_than_a_chunk_of_logits(outright: bool) -> None:
    positions, rows = 200, 16
    x = inputs(positions=positions)
    coefficients = x.coefficients("all") if outright else lambda _: x.coefficients("all")
    with _Largest() as largest:
        x.run(coefficients, rows=rows, exists_KN=x.exists).loss.backward()
    assert largest.elements <= max(rows * D, K * positions * H, D * H)
    assert max(K * positions * H, D * H) < N * D * K < K * positions * D
