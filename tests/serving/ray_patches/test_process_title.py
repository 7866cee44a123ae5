"""Replacement of Ray's copy of setproctitle. Titles of forked replicas: tests/serving/fork_server."""

import pytest
import ray._raylet
import setproctitle

from strata.serving.ray_patches import process_title


def test_ray_sets_titles_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("getproctitle", "setproctitle"):
        own = getattr(ray._raylet, name, None)
        assert own is not None, f"ray._raylet has no {name}: if Ray uses the setproctitle package, remove process_title.py."
        monkeypatch.setattr(ray._raylet, name, own)  # restored after the test
    process_title.install()
    assert ray._raylet.setproctitle is setproctitle.setproctitle


def test_ray_still_needs_it() -> None:
    assert ray._raylet.setproctitle is not setproctitle.setproctitle, "Ray has no copy of setproctitle: remove process_title.py."
