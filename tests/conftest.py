"""Shared fixtures: the tiny target everywhere, the real one where it is the point."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import save_tiny_target

from bitdraft.data.demo_target import demo_target
from bitdraft.quant.presets import load_recipe
from bitdraft.quant.target import LowBitTarget, load_target
from bitdraft.train.environment import read_environment

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Path) -> Callable[[str], LowBitTarget]:
    """``tiny_target("mxfp4")``: the tiny target under a preset, in fp32, loaded once."""
    loaded: dict[str, LowBitTarget] = {}

    def get(preset: str) -> LowBitTarget:
        if preset not in loaded:
            loaded[preset] = load_target(
                str(tiny_folder), load_recipe(preset), dtype=torch.float32, compile_quantizer="off"
            )
        return loaded[preset]

    return get


@pytest.fixture(scope="session")
def exact_target(tiny_folder: Path) -> LowBitTarget:
    """The tiny target in high precision, fp64: passes of other shapes differ by far less than any tolerance."""
    return load_target(str(tiny_folder), load_recipe("none"), dtype=torch.float64, compile_quantizer="off")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded default target's folder, made the first time."""
    return demo_target(read_environment().cache_dir)


@pytest.fixture
def shared() -> Path:
    """The folder of reference vectors and public data beside the project."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared folder beside the project")
    return SHARED
