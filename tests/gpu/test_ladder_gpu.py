"""Steps of the matrix product on a GPU: sizes that fill no tile, several tiles per program, and no element left unwritten."""

import pytest
import torch

from strata.kernels.ladder.steps import STEPS, Step, matmul, prepared

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPES = [(8, 8, 8), (129, 264, 72), (1000, 776, 1032), (3000, 4104, 520)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_equals_torch(step: Step, shape: tuple[int, int, int]) -> None:
    rows, columns, inner = shape
    a, b = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((rows, inner), (inner, columns)))
    out = torch.full((rows, columns), torch.nan, device="cuda", dtype=torch.bfloat16)
    prepared(step, a, b, out)()
    truth = a.double() @ b.double()
    assert float((out.double() - truth).norm() / truth.norm()) < 3e-3


@pytest.mark.parametrize("step", [step for step in STEPS if not step.aligned], ids=lambda step: step.name)
def test_any_size_works(step: Step) -> None:
    a, b = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((131, 67), (67, 257)))
    truth = a.double() @ b.double()
    assert float((matmul(step.name, a, b).double() - truth).norm() / truth.norm()) < 3e-3


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_repeated_products_are_the_same(step: Step) -> None:
    a, b = (torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    first = matmul(step.name, a, b)
    assert all(torch.equal(matmul(step.name, a, b), first) for _ in range(20))
