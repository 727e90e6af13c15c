"""What several tests of formats stand on."""

from collections.abc import Iterator

import pytest
import torch

from bitdraft.quant.target import can_compile


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """A compiler without memory of other tests."""
    if not can_compile():
        pytest.skip("no C++ compiler on the PATH")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
