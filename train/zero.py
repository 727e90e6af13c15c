"""DeepSpeed ZeRO: what it is told, and whole tensors of what it cuts up.

ZeRO keeps flat fp32 masters and moments of all trained weights, a part in each process. Checkpoints hold whole tensors
by name, as every run's do. deepspeed is an extra and imported where it is used.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import pad

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, besides its step count


def configure(accelerator: Accelerator, clip: float, dtype: torch.dtype) -> None:
    """Settings that follow from ours, before ``prepare``."""
    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    settings["train_micro_batch_size_per_gpu"] = settings["gradient_accumulation_steps"] = 1  # the loop cuts the steps
    settings["gradient_clipping"] = clip
    settings["zero_optimization"].setdefault("reduce_bucket_size", 50_000_000)  # of 500 million, 4 GB of buffers
    # fp32 weights and gradients as in every other run; autocast chooses what is multiplied in bf16.
    settings["bf16"] = settings["fp16"] = {"enabled": False}
    if dtype == torch.bfloat16:
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}


def whole_weights(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer by name, one after the other; all processes have to ask together."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            yield name, safe_get_full_fp32_param(parameter)
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
                yield name, parameter.detach().clone()
    yield from engine.module.named_buffers()


def whole_optimizer_state(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """AdamW's state tensors by ``parameter/state``."""
    from deepspeed.utils import safe_get_full_optimizer_state

    steps = next(iter(engine.optimizer.optimizer.state.values()))["step"]
    for name, parameter in _trained(engine.module):
        yield f"{name}/step", torch.as_tensor(steps, dtype=torch.float32).clone()
        for key in MOMENTS:
            yield f"{name}/{key}", safe_get_full_optimizer_state(parameter, key)


def restore_optimizer_state(engine: Any, saved: Mapping[str, Tensor]) -> None:
    """Put whole state tensors, checked to be of the parameters' shapes, into the parts that processes keep."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state, safe_set_full_optimizer_state

    zero, adamw, third = engine.optimizer, engine.optimizer.optimizer, engine.zero_optimization_stage() == 3
    flats = zero.fp32_partitioned_groups_flat if third else zero.single_partition_of_fp32_groups
    steps = next(tensor for name, tensor in saved.items() if name.endswith("/step"))
    for flat in flats:  # AdamW makes its state in the first step, which here is not the run's first
        adamw.state[flat] = {"step": steps.clone(), **{key: torch.zeros_like(flat) for key in MOMENTS}}
    if not third:
        for parameters, flat in zip(zero.bit16_groups, flats, strict=True):
            lazy_init_hp_params_optimizer_state(parameters, flat, adamw.state)
    for name, parameter in _trained(engine.module):
        for key in MOMENTS:
            value = saved[f"{name}/{key}"].to(engine.device)
            if third:
                _set_part(engine, parameter, value, key)
            else:
                safe_set_full_optimizer_state(parameter, value, key)


def _set_part(engine: Any, parameter: Any, value: Tensor, key: str) -> None:
    """This process's part of a tensor that stage 3 cuts into equal parts, the last one padded."""
    from deepspeed.utils import safe_set_local_optimizer_state

    size = parameter.ds_tensor.numel()
    padded = pad(value.flatten(), (0, size * engine.dp_world_size - value.numel()))
    safe_set_local_optimizer_state(parameter, padded.split(size)[engine.global_rank], key)


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
