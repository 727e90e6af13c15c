"""The processes of a run: accelerate's ``Accelerator`` for this launch, and what is refused because it would go wrong
in silence.

accelerate distributes: DDP, FSDP2 or DeepSpeed ZeRO, as its configuration says (``configs/accelerate``). Left alone,
accelerate 1.15 takes GPUs for granted with the last two: on CPUs FSDP becomes DDP, and DeepSpeed as many runs of one
process as there are processes. Here both work on CPUs too.
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers.integrations import unset_hf_deepspeed_config

from bitdraft.train.config import RunConfig
from bitdraft.train.environment import Environment, chosen_dtype

_LONGEST_WAIT = timedelta(days=1)  # for the first process, which writes answers and measures: hours for a large target


def make_accelerator(config: RunConfig, environment: Environment, folder: Path) -> Accelerator:
    """``ValueError`` for a launch that would not do what it was asked to, and for what is not here."""
    if environment.left_alone:
        raise ValueError(
            "accelerate launch was asked for several processes and started one: on CPUs launch with torchrun "
            "--nproc_per_node N, or with a configuration file of configs/accelerate"
        )
    trackers = [str(t.value) for t in get_available_trackers()]
    if config.tracker not in ("none", *trackers):
        raise ValueError(f"tracker {config.tracker!r} is not installed (there are: {', '.join(trackers)}, none)")
    cpu = config.device == "cpu" or (config.device == "auto" and not torch.accelerator.is_available())
    zero, fsdp = environment.asked_engine == "deepspeed", environment.asked_engine == "fsdp"
    shards = _fsdp2() if fsdp else None
    accelerator = Accelerator(
        cpu=cpu and not zero,
        # DeepSpeed would keep nothing but its masters in fp32; it is told of autocast in train/zero.py.
        mixed_precision="bf16" if wants_bf16(config, "cpu" if cpu else "accelerator") and not zero else "no",
        log_with=None if config.tracker == "none" else config.tracker,
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "tracker")),
        fsdp_plugin=shards,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo" if cpu and zero else None, timeout=_LONGEST_WAIT)],
    )
    if fsdp and accelerator.distributed_type == DistributedType.MULTI_CPU:
        accelerator.state.fsdp_plugin = shards
        for state in (PartialState(), accelerator.state):  # accelerate copies the first over the second now and then
            state.distributed_type = DistributedType.FSDP
    if config.device not in ("auto", accelerator.device.type):
        raise ValueError(f"device {config.device!r} is not here: accelerate finds {accelerator.device.type!r}")
    _check_processes(accelerator, environment)
    return accelerator


def wants_bf16(config: RunConfig, device: str) -> bool:
    return chosen_dtype(config.dtype, device) == torch.bfloat16


def _check_processes(accelerator: Accelerator, environment: Environment) -> None:
    if accelerator.num_processes != environment.launched_processes:
        raise ValueError(
            f"the launcher started {environment.launched_processes} processes but accelerate sees "
            f"{accelerator.num_processes}: every one would train alone; launch with torchrun"
        )
    asked, runs = environment.asked_engine, str(accelerator.distributed_type.value)
    if asked and runs != asked.upper():
        raise ValueError(
            f"the configuration of accelerate asks for {asked}, but accelerate would run {runs}: start it with "
            "accelerate launch, and without use_cpu"
        )
    if asked == "deepspeed":
        unset_hf_deepspeed_config()  # which accelerate has set: transformers would cut up the target as it is loaded
        plugin = accelerator.state.deepspeed_plugin
        _refuse(
            "deepspeed_config",
            [
                ("offload_optimizer_device: none", plugin.offload_optimizer_device not in (None, "none")),
                ("offload_param_device: none", plugin.offload_param_device not in (None, "none")),
            ],
        )


def _fsdp2() -> FullyShardedDataParallelPlugin:
    """What the launcher's configuration says, with all numbers in fp32: autocast chooses what is multiplied in bf16."""
    plugin = FullyShardedDataParallelPlugin()
    plugin.mixed_precision_policy = MixedPrecisionPolicy()
    _refuse(
        "fsdp_config",
        [
            ("fsdp_version: 2", plugin.fsdp_version != 2),
            ("fsdp_auto_wrap_policy: NO_WRAP (a head is cut up as a whole)", plugin.auto_wrap_policy is not None),
            ("fsdp_cpu_ram_efficient_loading: false", plugin.cpu_ram_efficient_loading),
            ("fsdp_offload_params: false", isinstance(plugin.cpu_offload, CPUOffloadPolicy)),
            ("fsdp_activation_checkpointing: false (--optim.checkpointing)", plugin.activation_checkpointing),
        ],
    )
    return plugin


def _refuse(section: str, needed: Sequence[tuple[str, object]]) -> None:
    if wrong := [setting for setting, other in needed if other]:
        raise ValueError(f"the configuration of accelerate needs, in {section}: {'; '.join(wrong)}")
