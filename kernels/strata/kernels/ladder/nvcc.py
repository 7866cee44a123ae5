"""CUDA C++ to machine code by nvcc, without a GPU."""

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

DEFAULT = Path("/usr/local/cuda/bin/nvcc")


@dataclass(frozen=True)
class Binary:
    cubin: bytes
    ptx: str


def nvcc() -> str | None:
    """The compiler on the path or in CUDA's default folder; None if there is none."""
    return shutil.which("nvcc") or (str(DEFAULT) if DEFAULT.is_file() else None)


def compile_cuda(path: Path, arch: int) -> Binary:
    """Compiles the kernels of a file for one architecture. Requires nvcc."""
    compiler = nvcc()
    assert compiler, "nvcc is not installed"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = folder / "kernel.cubin"
        command = [compiler, "-cubin", f"-arch=sm_{arch}", "--keep", f"--keep-dir={folder}", "-o", str(target), str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc cannot compile {path.name}: {done.stderr.strip() or done.stdout.strip()}")
        return Binary(target.read_bytes(), (folder / f"{path.stem}.ptx").read_text())
