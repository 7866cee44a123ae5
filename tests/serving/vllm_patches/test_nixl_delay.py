"""Delay of NIXL's progress thread: set through the assignment that NIXL's Python API makes."""

import inspect

import pytest

from strata.serving.vllm_patches import nixl_delay

api = pytest.importorskip("nixl._api")


def test_the_delay_replaces_the_one_that_nixl_assigns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nixl_delay.DELAY_US, "1000")
    monkeypatch.setattr(api.nixlBind, "nixlAgentConfig", api.nixlBind.nixlAgentConfig)  # restored after the test
    nixl_delay.install()
    config = api.nixlBind.nixlAgentConfig()
    config.pthrDelay, config.useProgThread = 0, True
    assert config.pthrDelay == 1000 and config.useProgThread


def test_without_the_variable_nixl_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nixl_delay.DELAY_US, raising=False)
    before = api.nixlBind.nixlAgentConfig
    nixl_delay.install()
    assert api.nixlBind.nixlAgentConfig is before


def test_nixl_still_needs_it() -> None:
    source = inspect.getsource(api.nixl_agent.__init__)
    assert "pthrDelay = 0" in source and "nixlBind.nixlAgentConfig()" in source, (
        "NIXL no longer hard-codes the delay of its progress thread in nixl_agent.__init__: review nixl_delay.py."
    )
    settings = inspect.signature(api.nixl_agent_config).parameters
    assert not [name for name in settings if "delay" in name.lower()], (
        "nixl_agent_config has a setting for the delay: use it and remove nixl_delay.py."
    )
