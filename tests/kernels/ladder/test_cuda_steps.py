"""CUDA steps of the matrix product without a GPU: their sources compiled by a C++ compiler, a block of threads at a time."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strata.kernels.ladder.cuda_source import FOLDER, SOURCES
from strata.kernels.ladder.steps import STEPS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
Multiply = Callable[[str, Tensor, Tensor], Tensor]

ENTRY = """
extern "C" void run_{name}(const bf16* a, const bf16* b, bf16* out, int M, int N, int K, int grid_x, int grid_y, int x, int y) {{
    launch({name}, {{grid_x, grid_y, 1}}, {{x, y, 1}}, a, b, out, M, N, K);
}}
"""


@pytest.fixture(scope="module")
def multiply(tmp_path_factory: pytest.TempPathFactory) -> Multiply:
    """Every source in a namespace of its own, in one library."""
    folder = tmp_path_factory.mktemp("cuda")
    parts = ['#include "cuda_on_cpu.hpp"']
    for name, source in SOURCES.items():
        parts.append(f"namespace in_{name} {{\n{source.path.read_text()}\n}}\nusing in_{name}::{name};{ENTRY.format(name=name)}")
    (folder / "steps.cpp").write_text("\n".join(parts))
    library = folder / "steps.so"
    includes = [f"-I{path}" for path in (Path(__file__).parent, FOLDER)]
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        "-pthread",
        *includes,
        "-o",
        str(library),
        str(folder / "steps.cpp"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))

    def run(name: str, a: Tensor, b: Tensor) -> Tensor:
        source, (rows, inner), columns = SOURCES[name], a.shape, b.shape[1]
        out = torch.full((rows, columns), torch.nan, dtype=torch.bfloat16)
        pointers = [ctypes.c_void_p(one.data_ptr()) for one in (a, b, out)]
        getattr(loaded, f"run_{name}")(*pointers, rows, columns, inner, *source.grid(rows, columns)[:2], *source.threads[:2])
        return out

    return run


def drawn(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 1000 + columns)).bfloat16()


def equal(ours: Tensor, a: Tensor, b: Tensor) -> None:
    truth = a.double() @ b.double()
    assert float((ours.double() - truth).norm() / truth.norm()) < 3e-3


@pytest.mark.parametrize("shape", [(32, 32, 32), (40, 72, 40), (130, 136, 72)])
@pytest.mark.parametrize("name", SOURCES)
def test_equals_torch(multiply: Multiply, name: str, shape: tuple[int, int, int]) -> None:
    rows, columns, inner = shape
    a, b = drawn(rows, inner), drawn(inner, columns)
    equal(multiply(name, a, b), a, b)


@pytest.mark.parametrize("name", [step.name for step in STEPS if step.name in SOURCES and not step.aligned])
def test_any_size_works_without_wide_loads(multiply: Multiply, name: str) -> None:
    a, b = drawn(33, 35), drawn(35, 37)
    equal(multiply(name, a, b), a, b)


def test_results_are_rounded_to_the_nearest_even(multiply: Multiply) -> None:
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-12, -1 - 2**-8, 3e38, float("nan"), 0.0])
    a = torch.stack([values.bfloat16(), (values - values.bfloat16().float()).bfloat16()], dim=1)  # exact as a sum of two
    rounded = multiply("naive", a.contiguous(), torch.ones(2, 1, dtype=torch.bfloat16)).flatten()
    assert torch.equal(rounded.isnan(), values.isnan())
    assert torch.equal(rounded.nan_to_num(), values.bfloat16().nan_to_num())
