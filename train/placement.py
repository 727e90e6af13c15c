"""Where a large frozen target lies: split over the devices of one process, or cut up over processes as FSDP2 does it.

Loaded and quantized on the CPU first. A target in parts is run by all processes at once: each collects a layer's parts
from the others when it comes to it.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator, dispatch_model, infer_auto_device_map
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from bitdraft.quant.loading import first_line
from bitdraft.quant.target import LowBitTarget

DeviceMap = dict[str, str | int | torch.device]


def first_device(device_map: str | None, shard: bool, accelerator: Accelerator) -> str:
    """Where the target is loaded to; ``ValueError`` where it could not be placed afterwards."""
    if device_map and shard:
        raise ValueError("device_map and shard_target exclude each other: give one of them")
    if device_map and accelerator.num_processes > 1:
        raise ValueError(
            f"device_map splits the target over the devices of one process, but {accelerator.num_processes} were "
            "launched: launch one, or give shard_target under FSDP2"
        )
    if shard and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(
            "shard_target cuts the target up over processes, which FSDP2 does: launch with "
            "configs/accelerate/fsdp2-2gpu.yaml"
        )
    return "cpu" if device_map or shard else str(accelerator.device)


def place(target: LowBitTarget, device_map: str | None, shard: bool, accelerator: Accelerator) -> None:
    """Bring a target from ``first_device`` to its place, in place; ``ValueError`` for a map that does not fit it."""
    if shard:
        _cut_up(target, accelerator)
    elif device_map:
        _split(target, device_map, accelerator.device)


def keep_in_step(target: LowBitTarget, passes: Sequence[int], rank: int) -> None:
    """Where the target is in parts, run it as often as the process that runs it most: ``passes`` says how often each
    one has. Processes that run it no more would be waited for."""
    if isinstance(target.decoder.layers[0], FSDPModule):
        for _ in range(max(passes) - passes[rank]):
            target.states(torch.zeros(1, 1, dtype=torch.int64, device=target.device))


def _cut_up(target: LowBitTarget, accelerator: Accelerator) -> None:
    """Layer by layer, so that no device ever holds more than one whole layer."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    inner = set()
    for layer in target.decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        inner |= set(layer.modules())
    for module in set(target.model.modules()) - inner:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.data = tensor.data.to(accelerator.device)


def _split(target: LowBitTarget, device_map: str, main: torch.device) -> None:
    model = target.model
    parts = _automatic(model, target, main) if device_map == "auto" else _read(Path(device_map))
    names = {name for name, _ in model.named_modules()}
    if unknown := sorted(set(parts) - names):
        raise ValueError(f"device map {device_map}: {target.name} has no module {unknown[0]!r}")
    if bare := [name for name, _ in model.named_parameters() if _device_of(name, parts) is None]:
        raise ValueError(f"device map {device_map}: it gives no device to {len(bare)} weights, e.g. {bare[0]}")
    for name, device in parts.items():
        _check_device(device_map, name, device)
    names_of = {id(p): name for name, p in model.named_parameters()}
    for what, module in (("the embedding", target.embedding), ("the output head", target.output_head)):
        its = _device_of(names_of[id(next(module.parameters()))], parts)
        if its is None or torch.device(its) not in (main, torch.device(main.type)):
            raise ValueError(f"device map {device_map}: {what} has to lie where the head is trained, on {main}")
    dispatch_model(model, parts, main_device=str(main), force_hooks=True)
    try:
        target.logits(target.states(torch.zeros(1, 2, dtype=torch.int64, device=target.device)).last_hidden)
    except RuntimeError as error:
        raise ValueError(f"device map {device_map}: {target.name} does not run split: {first_line(error)}") from error


def _automatic(model: nn.Module, target: LowBitTarget, main: torch.device) -> DeviceMap:
    """By the devices' free memory, whole layers each; ``ValueError`` where it does not suffice."""
    layer = type(target.decoder.layers[0]).__name__
    parts: DeviceMap = dict(infer_auto_device_map(model, no_split_module_classes=[layer]))
    if left := [name for name, device in parts.items() if device == "disk"]:
        raise ValueError(
            f"device map auto: {target.name} does not fit into the devices' free memory, {len(left)} modules are left "
            f"over, e.g. {left[0]}: give it more devices"
        )
    heads = {id(target.embedding), id(target.output_head)}
    return parts | {name: main for name, module in model.named_modules() if id(module) in heads and name in parts}


def _read(path: Path) -> DeviceMap:
    if not path.is_file():
        raise ValueError(f"device map {path} does not exist: give `auto` or a YAML file of devices by module")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"device map {path} is not YAML: {first_line(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(v, str | int) for v in content.values()):
        raise ValueError(f"device map {path} must hold a device for each module, like `model.layers.0: cuda:1`")
    return {str(name): device for name, device in content.items()}


def _device_of(name: str, parts: DeviceMap) -> str | int | torch.device | None:
    """The device of a weight: that of the innermost module which the map names."""
    while name not in parts:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return parts[name]


def _check_device(device_map: str, name: str, device: str | int | torch.device) -> None:
    if device == "disk":
        raise ValueError(f"device map {device_map}: {name!r} is put on disk, but a target in low bit stays in memory")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        raise ValueError(f"device map {device_map}: device {device!r} of {name!r} is not here") from error
