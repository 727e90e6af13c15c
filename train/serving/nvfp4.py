"""NVFP4 with 4-bit inputs on a CPU: vLLM has an emulation of it, but offers it to AMD's and NVIDIA's GPUs only.

A plugin of vLLM's own kind (entry point ``vllm.general_plugins``) puts the emulation on the CPU's list too. It is made
at run time, in a folder that only the engine's process has on its path. Per product the emulation rounds both factors
to the engine's dtype: inputs ``code · (scale / global)`` and weights ``code · (scale · (1 / global))``, codes and
scales by the rule of the GPU kernels (``nvfp4-kernel`` in ``quant/schemes.py``); then it multiplies them in that dtype.
In fp32 that is the simulation's arithmetic up to the last bits; in bf16 the factors are rounded as no GPU kernel does.
"""

import shutil
from pathlib import Path

PROFILE = "plain"
"""What computes the same in ``quant/profiles.py``: the formats as the checkpoint names them."""

_MODULE = "bitdraft_nvfp4_plugin"


def plugin_written(folder: Path) -> Path:
    """Write the plugin, with the metadata by which vLLM finds it, into ``folder`` and return that."""
    about = folder / f"{_MODULE}-1.0.dist-info"
    about.mkdir()
    shutil.copyfile(Path(__file__).with_name("nvfp4_plugin.py"), folder / f"{_MODULE}.py")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_MODULE}\nVersion: 1.0\n", encoding="utf-8")
    entry = f"[vllm.general_plugins]\nnvfp4_emulation = {_MODULE}:register\n"
    (about / "entry_points.txt").write_text(entry, encoding="utf-8")
    return folder
