"""The environment, read once at the start; and how a script ends.

Nothing below ``train`` looks at environment variables.
"""

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch


@dataclass(frozen=True)
class Environment:
    cache_dir: Path
    """Where targets and answers are kept: ``$BITDRAFT_CACHE``, else ``$XDG_CACHE_HOME/bitdraft``, else
    ``~/.cache/bitdraft``."""
    launched_processes: int
    """How many processes the launcher says it started."""
    left_alone: bool = False
    """Whether the launcher was asked for several processes and started this one only."""
    asked_engine: Literal["", "fsdp", "deepspeed"] = ""
    """What accelerate's configuration asks to cut weights up with."""
    api_key: str = field(default="", repr=False)
    """What a server that answers prompts is shown: ``$BITDRAFT_API_KEY``."""


def read_environment() -> Environment:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = os.environ.get("BITDRAFT_CACHE") or str(Path(base) / "bitdraft")
    # `accelerate launch --cpu --num_processes 2` prepares where two processes would meet, and starts one (1.15).
    accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ
    left_alone = accelerate and "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ
    key = os.environ.get("BITDRAFT_API_KEY", "")
    return Environment(Path(cache), int(os.environ.get("WORLD_SIZE", "1")), left_alone, _asked_engine(), key)


def _asked_engine() -> Literal["", "fsdp", "deepspeed"]:
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return "fsdp"
    return "deepspeed" if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true" else ""


def machine_facts() -> dict[str, str | int]:
    """What a number needs beside it: versions, processor, threads."""
    capability = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "machine": platform.machine(),
        "device": capability,
        "threads": torch.get_num_threads(),
    }


def default_dtype(device: str) -> torch.dtype:
    """bf16 where the hardware multiplies it, fp32 on other CPUs (there bf16 is emulated and slower)."""
    # torch has no public query for these two CPU features.
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if device != "cpu" or fast else torch.float32


def give_memory_back() -> None:
    """Between two runs in one process: free what the first leaves in cycles, and what glibc keeps of it (gigabytes)."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes(what: Literal["VmRSS", "VmHWM"]) -> int:
    """What Linux says this process holds (``VmRSS``), or has held at most since ``forget_peak`` (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def forget_peak() -> None:
    """From now on the largest resident size counts anew; what earlier work left is freed first, or would hide it."""
    give_memory_back()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5)


def chosen_dtype(name: str, device: str) -> torch.dtype:
    """What a ``--dtype`` option means: ``auto`` is ``default_dtype``."""
    return default_dtype(device) if name == "auto" else getattr(torch, name)


class RunFailed(RuntimeError):
    """A run that ended with a result nobody should use: a loss that is not finite, an answer that differs."""


def stop_cleanly(main: Callable[[], None]) -> None:
    """Run ``main``; what a person has to know becomes one sentence instead of a traceback.

    Exit code 2 for a mistake of the user (``ValueError``) or of the machine (``OSError``: a full disk, a missing
    permission), 1 for a failed run, 130 for Ctrl-C. ``BITDRAFT_DEBUG=1`` shows the traceback.
    """
    try:
        main()
    except (ValueError, OSError, RunFailed, KeyboardInterrupt) as error:
        if os.environ.get("BITDRAFT_DEBUG"):
            raise
        if isinstance(error, KeyboardInterrupt):
            print(f"\n{error or 'stopped by the user'}", file=sys.stderr)
            sys.exit(130)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RunFailed) else 2)
