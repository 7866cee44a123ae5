"""CUDA's Multi-Process Service for an endpoint. A script stands in for NVIDIA's daemon, which needs a GPU."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import ServeSection
from strata.serving import mps
from strata.serving.spec import EngineSpec, Network

STAND_IN = """#!/bin/sh
# Stands in for nvidia-cuda-mps-control: runs until it receives quit, and logs its input.
if [ "$1" = -f ]; then
  echo started >> "$0.log"
  while ! grep -q quit "$0.log"; do sleep 0.05; done
else
  cat >> "$0.log"
fi
"""


def sharing(*overrides: str) -> ServeSection:
    return recipe_file.load("h200", list(overrides)).serve


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return mps.pipes()


def test_engines_are_mps_clients_with_their_sm_share(tmp_path: Path, folder: Path) -> None:
    section, network = sharing("serve.prefill.sm_share=0.5"), Network.within(one_machine=True)
    prefill, decode = (EngineSpec.of(role, section, tmp_path, "m", network).environment() for role in ("prefill", "decode"))
    assert prefill["CUDA_MPS_PIPE_DIRECTORY"] == decode["CUDA_MPS_PIPE_DIRECTORY"] == str(folder)
    assert prefill["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in decode
    assert (prefill["CUDA_MPS_CLIENT_PRIORITY"], decode["CUDA_MPS_CLIENT_PRIORITY"]) == ("1", "0"), "1 is the lower one"


def test_ucx_reads_blocks_over_cuda_ipc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX would read them over TCP where it detects no NVLink. A value in the environment takes precedence."""
    switch, network = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY", Network.within(one_machine=True)
    monkeypatch.delenv(switch, raising=False)
    spec = EngineSpec.of("decode", sharing(), tmp_path, "m", network)
    assert spec.environment()[switch] == "on"
    monkeypatch.setenv(switch, "auto")
    assert spec.environment()[switch] == "auto"


def test_mps_daemon_is_started_and_stopped(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / mps.CONTROL
    program.parent.mkdir()
    program.write_text(STAND_IN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    log = program.with_suffix(".log")
    with mps.running(sharing("serve.prefill.sm_share=0.5")):
        assert folder.is_dir() and str(os.getpid()) in folder.name, "each endpoint has its own"
        while not log.exists():
            time.sleep(0.01)
    assert not folder.exists()
    assert log.read_text().split() == ["started", "quit", "-t", "5"]


def test_mps_daemon_runs_only_with_an_sm_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with mps.running(sharing()):
        assert not folder.exists()
    with (
        pytest.raises(UserError, match="nvidia-cuda-mps-control, which is not installed"),
        mps.running(sharing("serve.prefill.sm_share=0.5")),
    ):
        pass


def test_sm_share_requires_a_shared_gpu() -> None:
    with pytest.raises(UserError, match="for replicas that share a GPU"):
        recipe_file.load("h200", ["serve.prefill={gpus: 1, gpu_memory: 0.8, sm_share: 0.5}"])
