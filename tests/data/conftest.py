"""The tiny target and its tokenizer for the tests of the data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitdraft.quant.target import LowBitTarget, load_tokenizer


@pytest.fixture(scope="session")
def target(tiny_target: Callable[[str], LowBitTarget]) -> LowBitTarget:
    """The tiny target in high precision, fp32."""
    return tiny_target("none")


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))
