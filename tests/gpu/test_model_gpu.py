"""Training model on a GPU: compiles without a graph break, with equal losses and gradients on all kernel providers."""

from importlib.util import find_spec

import pytest
import torch

from strata.platform.recipe import Kernels, ModelSection
from strata.training.model.llama import Llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = ModelSection(layers=2, hidden=512, heads=8, kv_heads=2, ffn=1024, vocab=5003, context=300)


def losses_and_gradients(kernels: Kernels, dtype: torch.dtype, compiled: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    tokens_bt = torch.randint(0, SHAPE.vocab, (3, SHAPE.context + 1), generator=torch.Generator().manual_seed(0)).cuda()
    model = Llama(SHAPE, seed=1, kernels=kernels).to("cuda", dtype)
    called = torch.compile(model, fullgraph=True) if compiled else model
    loss = called(tokens_bt[:, :-1], targets_bt=tokens_bt[:, 1:])
    loss.backward()
    return loss.detach(), torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernels", ["strata", "liger"])
def test_kernel_providers_train_alike_in_bf16(kernels: Kernels, compiled: bool) -> None:
    if kernels == "liger" and (compiled or not find_spec("liger_kernel")):
        pytest.skip("Liger's loss reads its targets on the host" if compiled else "liger-kernel is not installed")
    exact, true = losses_and_gradients("torch", torch.float32)
    _, usual = losses_and_gradients("torch", torch.bfloat16)
    loss, gradient = losses_and_gradients(kernels, torch.bfloat16, compiled)
    assert abs(loss - exact) < 2e-3 * exact
    off, usually_off = ((one - true).norm() / true.norm() for one in (gradient, usual))
    assert off < 1.2 * usually_off, (off, usually_off)  # as accurate as plain torch in bf16
