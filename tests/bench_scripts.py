"""The benchmarks in ``scripts/bench`` as modules: no package holds them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def bench_script(name: str) -> ModuleType:
    """``scripts/bench/NAME.py``, under a name of its own."""
    path = Path(__file__).parents[1] / "scripts" / "bench" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"bench_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their types up
    spec.loader.exec_module(module)
    return module
