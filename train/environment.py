"""The environment, read once at the start; and how a script ends.

Nothing below ``train`` looks at environment variables.
"""

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch


@dataclass(frozen=True)
class Environment:
    cache_dir: Path
    """Where targets and answers are kept: ``$BITDRAFT_CACHE``, else ``$XDG_CACHE_HOME/bitdraft``, else
    ``~/.cache/bitdraft``."""
    launched_processes: int
    """How many processes the launcher says it started."""


def read_environment() -> Environment:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = os.environ.get("BITDRAFT_CACHE") or str(Path(base) / "bitdraft")
    return Environment(Path(cache), int(os.environ.get("WORLD_SIZE", "1")))


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
