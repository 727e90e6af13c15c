"""Attention over packed documents on GPUs: what can be checked without one, and the formula where there is one."""

import pytest
import torch
from attention_formula import LAYOUTS, D, H, doubled, inputs, row_by_row, with_gradients
from torch import Tensor

from bitdraft.speculators import attention
from bitdraft.speculators.attention import training_time_test_attention
from bitdraft.speculators.attention_cuda import CUDA_EFFICIENT, CUDA_FLASH, _all_rows, _seen, _stretches
from bitdraft.speculators.attention_kernels import CHUNKED, CPU, kernel_for
from bitdraft.speculators.documents import Documents


@pytest.mark.parametrize("layout", [*LAYOUTS, "empty"])
@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_calls_of_cuda_kernels_fit_their_signatures(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without data, for which PyTorch checks arguments and gives shapes; needs no GPU."""
    chosen, dtype = {"flash": (CUDA_FLASH, torch.bfloat16), "efficient": (CUDA_EFFICIENT, torch.float32)}[name]
    monkeypatch.setattr(attention, "kernel_for", lambda q: chosen)
    documents = LAYOUTS.get(layout, Documents((0, 4), ((4, 4),)))
    q, keys, values = inputs(documents, 2, dtype=dtype)
    q = q.detach().to("meta").requires_grad_()
    keys, values = ([x.detach().to("meta").requires_grad_() for x in both] for both in (keys, values))
    out, *grads = with_gradients_on_meta(q, keys, values, documents)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, dtype) for x in (q, *keys, *values)]


def with_gradients_on_meta(q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents) -> list[Tensor]:
    out = training_time_test_attention(q, keys, values, documents)
    return [out, *torch.autograd.grad(out.sum(), [q, *keys, *values])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_flash_kernel_gets_each_document_up_to_its_last_drafting_row(layout: str) -> None:
    documents = LAYOUTS[layout]
    x = torch.arange(1, documents.tokens + 1)
    seen = _seen(x, documents)
    rows, keys, most_rows, most_keys = _stretches(documents, torch.device("cpu"))
    assert rows.dtype == keys.dtype == torch.int32
    drafting = [
        (begin, *draft)
        for begin, draft in zip(documents.bounds[:-1], documents.drafts, strict=True)
        if draft[0] < draft[1]
    ]
    for i, (begin, first, behind) in enumerate(drafting):
        assert documents.rows[rows[i] : rows[i + 1]].tolist() == list(range(first, behind))
        assert seen[keys[i] : keys[i + 1]].tolist() == list(range(begin + 1, behind + 1))
    assert (most_rows, most_keys) == (int(rows.diff().max()), int(keys.diff().max()))
    assert (len(rows), len(keys), int(keys[-1])) == (len(drafting) + 1, len(drafting) + 1, len(seen))
    kept = torch.zeros_like(x)
    for begin, _, behind in drafting:
        kept[begin:behind] = x[begin:behind]
    assert torch.equal(_all_rows(seen, documents), kept)


def test_devices_without_a_fused_kernel_of_their_own_take_the_one_written_in_pytorch() -> None:
    assert kernel_for(torch.empty(3, H, D, device="meta")) is CHUNKED
    assert kernel_for(torch.empty(3, H, D)) is CPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_on_cuda_are_those_of_the_formula(layout: str, k: int, dtype: torch.dtype) -> None:
    documents = LAYOUTS[layout]
    tensors = inputs(documents, k, dtype=dtype)

    def on_cuda(q: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents) -> Tensor:
        on_device = [[x.cuda() for x in both] for both in (keys, values)]
        return training_time_test_attention(q.cuda(), on_device[0], on_device[1], documents).cpu()

    exact = with_gradients(
        lambda q, keys, values, _: row_by_row(*doubled((q, keys, values)), documents), tensors, documents
    )
    tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else 8 * torch.finfo(dtype).eps
    for mine, its in zip(with_gradients(on_cuda, tensors, documents), exact, strict=True):
        torch.testing.assert_close(mine.double(), its.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_matrix_of_rows_by_keys_is_ever_held_on_cuda(dtype: torch.dtype) -> None:
    documents = Documents((0, 8192), ((1024, 8192),))
    q, keys, values = inputs(documents, 2, dtype=dtype)
    q, keys, values = q.detach().cuda().requires_grad_(), [x.cuda() for x in keys], [x.cuda() for x in values]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training_time_test_attention(q, keys, values, documents).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 7168 * 8192 * dtype.itemsize / 2
