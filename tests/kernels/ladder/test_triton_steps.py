"""Triton steps of the matrix product in the interpreter, and the calls that each step refuses.

Gluon has no interpreter: warp_specialized is tested on a GPU.
"""

import interpreting  # noqa: F401  first: Triton reads the variable when a kernel is defined
import pytest
import torch
from torch import Tensor

from strata.kernels.ladder import l2_order, tma_persistent
from strata.kernels.ladder.steps import STEPS, matmul

TRITON = [step for step in STEPS if step.language == "Triton"]
# Rows, columns, inner: less than a tile, several tiles with rests, and rows of tiles that fill no group.
SHAPES = [(3, 8, 8), (130, 264, 72), (257, 520, 16)]


def drawn(rows: int, columns: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 1000 + columns)).to(dtype)


def distance(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", [step.name for step in TRITON])
def test_equals_torch(step: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tma_persistent, "processors", lambda device: 3)  # fewer than tiles: a program has several
    rows, columns, inner = shape
    a, b = drawn(rows, inner), drawn(inner, columns)
    assert distance(matmul(step, a, b), a.double() @ b.double()) < 1e-3


@pytest.mark.parametrize("step", [step.name for step in TRITON if not step.aligned])
def test_any_size_works_without_tma(step: str) -> None:
    a, b = drawn(67, 37), drawn(37, 131)
    assert distance(matmul(step, a, b), a.double() @ b.double()) < 1e-3


def test_a_sum_is_accumulated_in_fp32() -> None:
    a, b = torch.full((1, 1024), 1.0, dtype=torch.float16), torch.full((1024, 8), 3.3, dtype=torch.float16)
    for step in ("dot", "pipelined"):  # in fp16, every addition to a sum above 2048 would be rounded to a multiple of 2
        assert distance(matmul(step, a, b), a.double() @ b.double()) < 3e-4


@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 5), (8, 5), (9, 4), (21, 3)])
def test_every_tile_has_one_position(rows: int, columns: int) -> None:
    positions = [positioned(tile, rows, columns) for tile in range(rows * columns)]
    assert sorted(positions) == [(row, column) for row in range(rows) for column in range(columns)]
    together = positions[: min(l2_order.GROUP, rows)]
    assert together == [(row, 0) for row in range(len(together))]


def positioned(tile: int, rows: int, columns: int) -> tuple[int, int]:
    """`tile_position` for tiles of one element, through a kernel that stores it."""
    import triton
    import triton.language as tl

    @triton.jit
    def store(out, tile, rows, columns, GROUP: tl.constexpr):
        row, column = l2_order.tile_position(tile, rows, columns, 1, 1, GROUP)
        tl.store(out, row)
        tl.store(out + 1, column)

    out = torch.zeros(2, dtype=torch.int32)
    store[(1,)](out, tile, rows, columns, l2_order.GROUP)
    return int(out[0]), int(out[1])


def test_unsupported_matrices_are_refused() -> None:
    half = torch.zeros(16, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match="two matrices"):
        matmul("dot", half, torch.zeros(8, 16, dtype=torch.float16))
    with pytest.raises(ValueError, match="two matrices"):
        matmul("dot", half, half.float())
    with pytest.raises(ValueError, match="contiguous"):
        matmul("dot", half, half.t()[:, ::2])
    with pytest.raises(ValueError, match="multiple of 8 elements, got 16 and 12"):
        matmul("tma_persistent", half, torch.zeros(16, 12, dtype=torch.float16))
    with pytest.raises(ValueError, match="multiplies bf16"):
        matmul("naive", half, half)
    with pytest.raises(ValueError, match="with elements"):
        matmul("dot", half[:0], half)


def test_intensity_is_operations_per_byte_of_a_tile() -> None:
    by_name = {step.name: step.intensity for step in STEPS}
    assert by_name["naive"] == 0.5  # a multiply-add for two elements of two bytes
    assert by_name["pipelined"] == pytest.approx(2 * 128 * 256 / (2 * (128 + 256)))
    assert by_name["shared_tiles"] == 16
