"""One training step over all processes: what DDP, FSDP2 and DeepSpeed ZeRO each need told, behind three functions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from bitdraft.train import zero
from bitdraft.train.config import OptimConfig
from bitdraft.train.sharding import runs_zero


def prepared(
    accelerator: Accelerator,
    module: nn.Module,
    optim: OptimConfig,
    dtype: torch.dtype,
    groups: list[dict[str, Any]] | None = None,
) -> tuple[nn.Module, Any]:
    """The module wrapped as accelerate's configuration says, and its optimizer. ``dtype``: what is multiplied in;
    ``groups``: of parameters, as an optimizer takes them, by default one of all that are trained."""
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        groups or trained,
        lr=optim.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
        fused=all(p.device.type == "cpu" for p in trained),  # several times as fast there
    )
    if runs_zero(accelerator):
        zero.configure(accelerator, optim.clip, dtype)
    wrapped, prepared_optimizer = accelerator.prepare(module, optimizer)
    return wrapped, prepared_optimizer


@contextmanager
def accumulating(accelerator: Accelerator, wrapped: Any, last: bool) -> Iterator[None]:
    """Around one pack's passes: gradients are averaged over processes in the ``last`` one of the step."""
    if runs_zero(accelerator):
        wrapped.set_gradient_accumulation_boundary(is_boundary=last)
    if last or runs_zero(accelerator):
        yield
    else:
        with accelerator.no_sync(wrapped):
            yield


def backward(accelerator: Accelerator, wrapped: Any, loss: Tensor) -> None:
    if runs_zero(accelerator):  # accelerator.backward would take an optimizer step too
        wrapped.backward(loss)
    else:
        accelerator.backward(loss)


def update(accelerator: Accelerator, wrapped: Any, optimizer: torch.optim.Optimizer, clip: float) -> float:
    """Clip the gradient, take one optimizer step, forget the gradient; its norm before clipping."""
    if runs_zero(accelerator):
        wrapped.step()
        return float(wrapped.get_global_grad_norm())
    norm = float(accelerator.clip_grad_norm_(wrapped.parameters(), clip))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def any_process(accelerator: Accelerator, flag: bool) -> bool:
    """Whether ``flag`` is set in any process: a signal may reach them in different steps."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), "sum") > 0)
