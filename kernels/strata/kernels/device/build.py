"""Builds the C++ library of device `strata` on demand, once per source, torch, compiler and Python."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ["-O1"]
NAME = "strata_device"


class BuildError(RuntimeError):
    """The library could not be built. The message names the cause and the fix."""


def library() -> Path:
    """Path of the built library. Builds it if no process has; others wait for the one that does."""
    compiler = os.environ.get("CXX", "c++")
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    folder = Path(root) / NAME / _key(compiler)
    built = folder / f"{NAME}.so"
    if built.is_file():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "build.lock"):
        if not built.is_file():
            print(f"device strata: building it in {folder}, about a minute", file=sys.stderr)
            _compile(folder)
    return built


def _key(compiler: str) -> str:
    """Hash of everything that the library depends on."""
    digest = hashlib.sha256()
    for part in (torch.__version__, platform.machine(), sys.version, _compiler_version(compiler), " ".join(FLAGS)):
        digest.update(part.encode() + b"\0")
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _compiler_version(compiler: str) -> str:
    if shutil.which(compiler) is None:
        raise BuildError(
            f"device strata is built with a C++ compiler, and there is no '{compiler}'. "
            "Install one (Debian, Ubuntu: apt-get install g++), or set CXX to its name."
        )
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A lock that ends with its process: a build that was killed does not stop the next one."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("device strata: waiting for another process that builds it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(folder: Path) -> None:
    with _path_with_ninja():
        if shutil.which("ninja") is None:
            raise BuildError("device strata is built by ninja, which is not installed. Install it: pip install ninja.")
        try:
            # torch's own lock is a file that a killed build leaves behind. This process holds the only build.
            (folder / "lock").unlink(missing_ok=True)
            cpp_extension.load(
                NAME,
                [str(_one_source(folder))],
                extra_cflags=FLAGS,
                build_directory=str(folder),
                is_python_module=False,
            )
        except RuntimeError as error:
            errors = [line for line in str(error).splitlines() if "error:" in line] or [str(error)]
            raise BuildError(
                f"device strata could not be built in {folder}: {errors[0]} "
                "torch needs a compiler with C++20 (g++ 11 or later); CXX chooses another one."
            ) from error


def _one_source(folder: Path) -> Path:
    """A file that includes the sources: torch's headers, which take most of the time, are read once."""
    together = folder / f"{NAME}.cpp"
    together.write_text("".join(f'#include "{source}"\n' for source in sorted(SOURCES.glob("*.cpp"))))
    return together


@contextmanager
def _path_with_ninja() -> Iterator[None]:
    """The environment's ninja is beside its Python, which need not be on PATH."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = f"{before}{os.pathsep}{Path(sys.executable).parent}"
    try:
        yield
    finally:
        os.environ["PATH"] = before
