"""Whole weights and optimizer states, however a run keeps them: in one piece, or in parts over processes.

Every function is called by all processes of a run. One process and DDP keep whole copies, FSDP2 and DeepSpeed ZeRO
parts. What is saved and loaded is the same tensors under the same names in all of them.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from bitdraft.speculators.base import DraftHead
from bitdraft.train import zero
from bitdraft.train.checkpoint import Checkpoint

_HEAD = "head."  # of the names that the trained module gives the head's tensors


def runs_zero(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.DEEPSPEED)


def whole_state(
    accelerator: Accelerator, wrapped: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The module's tensors by name, and the optimizer's under ``parameter/state``: on the CPU of the first process,
    nothing on the others."""
    states = zero.whole_optimizer_state(wrapped) if runs_zero(accelerator) else _states(accelerator, wrapped, optimizer)
    here = accelerator.is_main_process
    return _gathered(_weights(accelerator, wrapped), here), _gathered(states, here)


def load_module(module: nn.Module, saved: Checkpoint) -> None:
    """Give the module, not yet wrapped, the weights and buffers of a checkpoint; ``ValueError`` where they do not
    fit."""
    try:
        module.load_state_dict(saved.module)
    except RuntimeError as error:
        raise _misfit(saved, error) from error


def restore(accelerator: Accelerator, wrapped: nn.Module, optimizer: torch.optim.Optimizer, saved: Checkpoint) -> None:
    """Put a checkpoint's optimizer states where they belong, and the random numbers' state; ``ValueError`` where they
    do not fit."""
    states = saved.optimizer
    parameters = dict(accelerator.unwrap_model(wrapped).named_parameters())
    for full, tensor in states.items():
        name = full.rsplit("/", 1)[0]
        if name not in parameters or (tensor.ndim and tensor.shape != _shape(parameters[name])):
            raise ValueError(f"checkpoint {saved.path}: the optimizer state of {name} does not fit this head")
    if runs_zero(accelerator):
        if absent := [n for n, p in parameters.items() if p.requires_grad and f"{n}/step" not in states]:
            raise ValueError(f"checkpoint {saved.path}: it holds no optimizer state of {absent[0]}, which is trained")
        zero.restore_optimizer_state(wrapped, states)
    else:
        for full, tensor in states.items():
            name, key = full.rsplit("/", 1)
            optimizer.state[parameters[name]][key] = _placed(tensor, parameters[name])
    saved.restore_rng()


def spare_head(accelerator: Accelerator, head: DraftHead) -> DraftHead:
    """A head to draft with while ``head`` is trained: itself, or where that is about to be cut up a copy, which shares
    what is borrowed from the target."""
    if not _is_cut(accelerator):
        return head
    borrowed = {id(x): x for x in vars(head).values() if isinstance(x, Tensor)}
    return copy.deepcopy(head, borrowed)


def refresh(accelerator: Accelerator, wrapped: nn.Module, spare: DraftHead) -> None:
    """Bring the head of ``spare_head`` up to date."""
    if _is_cut(accelerator):
        _load_head(spare, _gathered(_weights(accelerator, wrapped), True))


def load_head_weights(head: DraftHead, saved: Checkpoint) -> None:
    """Give ``head`` the weights of a checkpoint; ``ValueError`` where they do not fit."""
    try:
        _load_head(head, saved.module)
    except RuntimeError as error:
        raise _misfit(saved, error) from error


def _load_head(head: DraftHead, module: Mapping[str, Tensor]) -> None:
    head.load_state_dict({n.removeprefix(_HEAD): x for n, x in module.items() if n.startswith(_HEAD)})


def _weights(accelerator: Accelerator, wrapped: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """The tensors of the module's state dict, whole or in parts."""
    module = accelerator.unwrap_model(wrapped)
    if not runs_zero(accelerator):
        return module.state_dict().items()
    kept = module.state_dict().keys()  # not the buffers that are computed anew
    return ((name, tensor) for name, tensor in zero.whole_weights(wrapped) if name in kept)


def _states(
    accelerator: Accelerator, wrapped: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    names = {id(p): name for name, p in accelerator.unwrap_model(wrapped).named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            yield f"{names[id(parameter)]}/{key}", torch.as_tensor(value)


def _gathered(tensors: Iterable[tuple[str, Tensor]], here: bool) -> dict[str, Tensor]:
    """Make the tensors whole, one by one; kept on the CPU ``here``."""
    kept = {}
    for name, tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if here:
            kept[name] = whole.detach().cpu().contiguous()
    return kept


def _placed(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """A whole state tensor as the optimizer keeps it beside ``parameter``; AdamW's step count stays on the CPU."""
    if tensor.ndim == 0:
        return tensor
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return distribute_tensor(tensor.to(parameter.device), mesh, parameter.placements, src_data_rank=None)
    return tensor.to(parameter.device)


def _shape(parameter: nn.Parameter) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))  # stage 3 leaves an empty tensor behind


def _misfit(saved: Checkpoint, error: RuntimeError) -> ValueError:
    reason = str(error).splitlines()[-1].strip()
    return ValueError(f"checkpoint {saved.path} does not fit this head: {reason}")


def _is_cut(accelerator: Accelerator) -> bool:
    return runs_zero(accelerator) or bool(accelerator.distributed_type == DistributedType.FSDP)
