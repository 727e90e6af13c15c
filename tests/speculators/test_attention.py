"""Attention of the training-time test over packed documents against the formula written out row by row."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_formula import LAYOUTS, assert_is_the_formula, doubled, inputs, row_by_row, with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bitdraft.speculators import attention, attention_kernels
from bitdraft.speculators.attention import training_time_test_attention
from bitdraft.speculators.attention_kernels import CHUNKED, CPU
from bitdraft.speculators.attention_parts import AttentionKernel
from bitdraft.speculators.documents import Documents

KERNELS = {"cpu": CPU, "chunked": CHUNKED}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionKernel:
    """Each of the kernels that run on a CPU, taken by everything in the test."""
    chosen = KERNELS[request.param]
    monkeypatch.setattr(attention, "kernel_for", lambda q: chosen)
    return chosen


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_those_of_the_formula(layout: str, k: int) -> None:
    documents = LAYOUTS[layout]
    assert_is_the_formula(inputs(documents, k), documents, 1e-5)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 1), (6, 3)])
def test_query_heads_may_share_key_heads(heads: tuple[int, int]) -> None:
    documents = LAYOUTS["prefixes"]
    assert_is_the_formula(inputs(documents, 2, heads), documents, 1e-5)


@st.composite
def layouts(draw: st.DrawFn) -> Documents:
    bounds, drafts = [0], []
    for length in draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)):
        first = draw(st.integers(0, length))
        drafts.append((bounds[-1] + first, bounds[-1] + draw(st.integers(first, length))))
        bounds.append(bounds[-1] + length)
    return Documents(tuple(bounds), tuple(drafts))


@settings(max_examples=40, deadline=None)
@given(layouts(), st.integers(0, 3), st.sampled_from(list(KERNELS)), st.integers(1, 5))
def test_every_layout_gives_the_formula(documents: Documents, k: int, name: str, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "kernel_for", lambda q: KERNELS[name])
        patch.setattr(attention_kernels, "_CHUNK", chunk)
        assert_is_the_formula(inputs(documents, k), documents, 1e-5)


@pytest.mark.usefixtures("kernel")
def test_gradients_are_those_of_finite_differences() -> None:
    documents = LAYOUTS["prefixes"]
    q, keys, values = inputs(documents, 2, (2, 1), torch.float64, size=3)

    def attention(q: Tensor, *both: Tensor) -> Tensor:
        return training_time_test_attention(q, both[:3], both[3:], documents)

    torch.autograd.gradcheck(attention, (q, *keys, *values))


@pytest.mark.usefixtures("kernel")
def test_another_document_does_not_change_a_bit() -> None:
    """Neither its keys, values and queries nor its length reach the rest, forwards or backwards."""
    before = Documents((0, 6, 9, 30), ((2, 5), (7, 8), (9, 25)))
    after = Documents((0, 6, 13, 34), ((2, 5), (8, 12), (13, 29)))  # the second is another
    rest = {"N": ([*range(6), *range(9, 30)], [*range(6), *range(13, 34)])}
    rest["R"] = ([*range(3), *range(4, 20)], [*range(3), *range(7, 23)])
    small, large = inputs(before, 2), inputs(after, 2)
    with torch.no_grad():
        for mine, other in zip([small[0], *small[1], *small[2]], [large[0], *large[1], *large[2]], strict=True):
            here, there = rest["N" if len(mine) == 30 else "R"]
            other[there] = mine[here]
    outs = [training_time_test_attention(*x, documents) for x, documents in ((small, before), (large, after))]
    here, there = rest["R"]
    assert torch.equal(outs[0][here], outs[1][there])
    weight = torch.randn(outs[0].shape)
    weights = [weight, torch.ones_like(outs[1])]
    weights[1][there] = weight[here]
    grads = [
        torch.autograd.grad((out * w).sum(), [x[0], *x[1], *x[2]])
        for out, w, x in zip(outs, weights, (small, large), strict=True)
    ]
    for mine, other in zip(*grads, strict=True):
        here, there = rest["N" if len(mine) == 30 else "R"]
        assert torch.equal(mine[here], other[there])


@pytest.mark.usefixtures("kernel")
def test_rows_behind_the_drafting_ones_are_not_seen() -> None:
    documents = LAYOUTS["holes"]
    q, keys, values = inputs(documents, 1)
    unseen = torch.tensor([*range(6), 8, 9])  # documents without drafts, and the row behind the second's draft
    with torch.no_grad():
        for x in (keys[0], values[0]):
            x[unseen] = float("nan")
    out, *grads = with_gradients(training_time_test_attention, (q, keys, values), documents)
    assert all(x.isfinite().all() for x in (out, *grads))
    assert not grads[1][unseen].any() and not grads[3][unseen].any()


@pytest.mark.usefixtures("kernel")
def test_later_rows_are_not_seen() -> None:
    documents = Documents.whole([5, 8])
    q, keys, values = inputs(documents, 1)
    before = training_time_test_attention(q, keys, values, documents)
    with torch.no_grad():
        for x in (keys[0], values[0]):
            x[10:] = 1e4
    after = training_time_test_attention(q, keys, values, documents)
    assert torch.equal(before[:10], after[:10])
    assert not torch.equal(before[10:], after[10:])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("layout", ["prefixes", "long"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_within_its_rounding(layout: str, dtype: torch.dtype) -> None:
    documents = LAYOUTS[layout]
    assert_is_the_formula(inputs(documents, 3, dtype=dtype), documents, 8 * torch.finfo(dtype).eps)


@pytest.mark.usefixtures("kernel")
def test_large_scores_overflow_nowhere() -> None:
    documents = LAYOUTS["prefixes"]
    tensors = inputs(documents, 2)
    with torch.no_grad():
        tensors[0].mul_(60)  # scores of up to about 200, whose exponential fp32 does not hold
    out, *grads = with_gradients(training_time_test_attention, tensors, documents)
    exact = row_by_row(*doubled(tensors), documents)
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)  # a score of 200 is exact to 1e-5
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.usefixtures("kernel")
def test_keys_and_values_of_other_types_are_taken_in_that_of_the_queries() -> None:
    documents = LAYOUTS["prefixes"]
    q, keys, values = inputs(documents, 1, dtype=torch.bfloat16)
    mixed = (q, [key.detach().float().requires_grad_() for key in keys], values)
    results = [with_gradients(training_time_test_attention, x, documents) for x in ((q, keys, values), mixed)]
    for same, its in zip(*results, strict=True):
        assert torch.equal(same, its.to(same))
    assert {x.dtype for x in results[1][2:4]} == {torch.float32}


@pytest.mark.usefixtures("kernel")
def test_autocast_chooses_the_type_as_it_does_for_other_attention() -> None:
    documents = LAYOUTS["whole"]
    tensors = inputs(documents, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out, *grads = with_gradients(training_time_test_attention, tensors, documents)
        assert out.dtype == torch.bfloat16
    exact = with_gradients(row_by_row, tensors, documents)
    for mine, its in zip([out, *grads], exact, strict=True):
        torch.testing.assert_close(mine.float(), its, rtol=0.05, atol=0.05)
    assert {x.dtype for x in grads} == {torch.float32}


@pytest.mark.usefixtures("kernel")
def test_strides_do_not_matter() -> None:
    documents = LAYOUTS["prefixes"]
    tensors = inputs(documents, 2)
    plain = with_gradients(training_time_test_attention, tensors, documents)

    def elsewhere(x: Tensor) -> Tensor:  # the heads first, and each number of a head far from the next
        return x.detach().permute(1, 2, 0).contiguous().permute(2, 0, 1).requires_grad_()

    q, keys, values = tensors
    strided = (elsewhere(q), [elsewhere(x) for x in keys], [elsewhere(x) for x in values])
    for mine, its in zip(with_gradients(training_time_test_attention, strided, documents), plain, strict=True):
        assert torch.equal(mine, its)
    q, keys, values = tensors
    sums = []
    for ones in (torch.ones(q.shape), torch.ones(()).expand(q.shape)):  # the second is the gradient of a sum
        out = training_time_test_attention(q, keys, values, documents)
        sums.append(torch.autograd.grad(out, [q, *keys, *values], ones))
    assert all(torch.equal(mine, its) for mine, its in zip(*sums, strict=True))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(reentrant: bool) -> None:
    documents = LAYOUTS["prefixes"]

    def checkpointed(q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents) -> Tensor:
        def attention(q: Tensor, *both: Tensor) -> Tensor:
            return training_time_test_attention(q, both[:3], both[3:], documents)

        result = checkpoint(attention, q, *keys, *values, use_reentrant=reentrant)
        assert isinstance(result, Tensor)
        return result

    results: list[list[Tensor]] = []
    for computed in (training_time_test_attention, checkpointed):
        q, keys, values = inputs(documents, 2)
        computed(q, keys, values, documents).square().sum().backward()  # reentrant: allows no torch.autograd.grad
        results.append([x.grad for x in (q, *keys, *values) if x.grad is not None])
    assert len(results[0]) == len(results[1]) == 7
    assert all(torch.equal(mine, its) for mine, its in zip(*results, strict=True))


@pytest.mark.usefixtures("kernel")
def test_frozen_keys_are_left_alone() -> None:
    documents = LAYOUTS["prefixes"]
    q, keys, values = inputs(documents, 1)
    frozen = [key.detach() for key in keys]
    out = training_time_test_attention(q, frozen, values, documents)
    (grad,) = torch.autograd.grad(out.sum(), [values[1]])
    assert grad.isfinite().all()


_PEAK = """
import ctypes
from pathlib import Path
import torch
from bitdraft.speculators import attention
from bitdraft.speculators.attention_kernels import CHUNKED, CPU
from bitdraft.speculators.documents import Documents

def status(field):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field))
    return int(line.split()[1]) * 1024

def run(tokens):
    documents = Documents((0, tokens), ((tokens // 4, tokens),))
    rows = tokens - tokens // 4
    q = torch.randn(rows, 4, 16, requires_grad=True)
    keys, values = ([torch.randn(n, 2, 16, requires_grad=True) for n in (tokens, rows, rows)] for _ in range(2))
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    attention.training_time_test_attention(q, keys, values, documents).sum().backward()
    return status("VmHWM") - before

torch.set_num_threads(1)
for kernel in (CPU, CHUNKED):
    attention.kernel_for = lambda q: kernel
    run(64)
    print(run(4096))
"""


def test_no_matrix_of_rows_by_keys_is_ever_held() -> None:
    """Forwards and backwards together; the scores of 3,072 rows with 4,096 keys are 48 MiB for each of 4 heads."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process can only be reset on Linux")
    run = subprocess.run([sys.executable, "-c", _PEAK], check=True, capture_output=True, text=True)
    fused, chunked = (int(line) / 2**20 for line in run.stdout.split())
    assert 1 < fused < 24
    assert 1 < chunked < 48
