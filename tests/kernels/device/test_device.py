"""Device `strata`: its build, and its behaviour in a process of its own.

A device changes torch for a whole process: its accelerator, its seeds, what a fork may do. So the cases in `cases/` run in one
process beside this one, with two devices.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from strata.kernels.device import build

CASES = Path(__file__).parent / "cases"


@pytest.mark.slow
def test_cases(own_home: Path) -> None:
    environment = os.environ | {"STRATA_DEVICE_COUNT": "2"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "STRATA_LAUNCH_BLOCKING", "STRATA_DEVICE_MEMORY"):
        environment.pop(name, None)
    files = sorted(str(file) for file in CASES.glob("*_cases.py"))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--timeout=300", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout


def test_a_missing_compiler_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match=r"no 'no-such-compiler'.*apt-get install g\+\+"):
        build.library()


def compiler_that(folder: Path, command: str) -> str:
    """Path of a compiler that answers --version, and otherwise runs a command."""
    file = folder / "compiler"
    file.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1.0; exit; fi\n{command}\n')
    file.chmod(0o755)
    return str(file)


def test_a_missing_ninja_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", compiler_that(tmp_path, "exit 1"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *rest: None if name == "ninja" else which(name, *rest))
    with pytest.raises(build.BuildError, match="pip install ninja"):
        build.library()


def test_a_failed_build_shows_the_compilers_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", compiler_that(tmp_path, "echo 'x.cpp:1: error: no such luck' >&2; exit 1"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = os.environ["PATH"]
    with pytest.raises(build.BuildError, match=r"error: no such luck.*C\+\+20"):
        build.library()
    assert os.environ["PATH"] == path
    assert not list(tmp_path.rglob("*.so"))


def test_the_folder_depends_on_sources_compiler_and_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = compiler_that(tmp_path, "exit 1")
    keys = {build._key(compiler)}
    monkeypatch.setattr(build.torch, "__version__", "9.9")
    keys.add(build._key(compiler))
    Path(compiler).write_text(Path(compiler).read_text().replace("fake 1.0", "fake 1.1"))
    keys.add(build._key(compiler))
    sources = shutil.copytree(build.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build._key(compiler) in keys
    (sources / "copy.cpp").write_text((sources / "copy.cpp").read_text() + "\n")
    keys.add(build._key(compiler))
    assert len(keys) == 4


def test_one_of_many_builders_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builds: list[Path] = []

    def compile_once(folder: Path) -> None:
        builds.append(folder)
        assert len(builds) == 1
        (folder / f"{build.NAME}.so").touch()

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", tempfile.mkdtemp(dir=tmp_path))
    monkeypatch.setattr(build, "_compile", compile_once)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build.library(), range(4)))
    assert len(builds) == 1 and len(paths) == 1
