"""Dynamo's caches are global: each test starts without graphs of another."""

from collections.abc import Iterator

import pytest
import torch

from strata.kernels.graph import register


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
