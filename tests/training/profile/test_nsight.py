"""Profiles by nsys and ncu: the command of each rank, and the recording of the requested steps."""

import stat
from pathlib import Path
from unittest import mock

import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe
from strata.training.profile import nsight, request
from strata.training.profile.nsight import CudaProfile
from strata.training.profile.request import Request


@pytest.fixture
def recipe() -> Recipe:
    return recipe_file.load("h200", [])


def installed(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = folder / name
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder))
    return program


def test_each_rank_runs_under_the_program(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nsight.command("torch", recipe, tmp_path) == ()
    program = installed(tmp_path, "nsys", monkeypatch)
    words = nsight.command("nsys", recipe, tmp_path / "out")
    assert words[:2] == (str(program), "profile") and "--capture-range=cudaProfilerApi" in words
    assert words[-2:] == ("-o", f"{tmp_path}/out/rank%q{{RANK}}"), "the program reads the rank from the environment"


@pytest.mark.parametrize("tool", ["nsys", "ncu"])
def test_a_missing_program_is_named_with_its_installation(
    tool: nsight.Tool, tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=rf"{tool} is not on PATH.\nInstall Nsight"):
        nsight.command(tool, recipe, tmp_path)


def test_cpus_are_left_to_torchs_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "ncu", monkeypatch)
    with pytest.raises(UserError, match=r"parallel.device=cpu"):
        nsight.command("ncu", recipe_file.load("laptop", []), tmp_path)


def test_ncu_refuses_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "ncu", monkeypatch)
    assert nsight.command("ncu", recipe_file.load("h200", ["parallel.workers=1"]), tmp_path)[1:3] == (
        "--profile-from-start",
        "off",
    )
    with pytest.raises(UserError, match=r"collectives of parallel.workers=2 would hang"):
        nsight.command("ncu", recipe_file.load("h200", ["parallel.workers=2"]), tmp_path)


def test_requests_carry_the_program(tmp_path: Path) -> None:
    wanted = Request("a", 3, 5, (), "nsys")
    request.write(tmp_path, wanted)
    assert request.read(tmp_path) == wanted
    with pytest.raises(UserError, match="no profiler 'perf'"):
        nsight.parse("perf")


def test_only_the_requested_steps_are_recorded() -> None:
    """The first call is that of the step before them, which warms torch's profiler up. A stand-in for CUDA: CI has none."""
    calls = mock.Mock()
    with mock.patch("torch.cuda.cudart", return_value=calls), mock.patch("torch.autograd.profiler.emit_nvtx") as nvtx:
        profile = CudaProfile()
        profile.start()
        assert not calls.cudaProfilerStart.called
        profile.step()
        profile.step()
        profile.stop()
        profile.stop()
    assert calls.cudaProfilerStart.call_count == calls.cudaProfilerStop.call_count == 1
    assert nvtx.return_value.__enter__.call_count == nvtx.return_value.__exit__.call_count == 1
