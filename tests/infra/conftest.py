"""What these tests share: kubectl's builds and the schemas of Kubernetes, each made or read once for all of them."""

import functools
from collections.abc import Iterator
from typing import Any

import kubernetes_validate.utils
import pytest

from strata.deploy import render


@pytest.fixture(scope="session", autouse=True)
def once_for_all() -> Iterator[None]:
    """A build takes up to a second, and most tests want the same ones. Nobody may change what comes out: `fill` copies it."""
    with pytest.MonkeyPatch.context() as patch:
        cached: Any = functools.cache(render.build)
        patch.setattr(render, "build", cached)
        patch.setattr(kubernetes_validate.utils, "schema_contents", functools.cache(kubernetes_validate.utils.schema_contents))
        yield
