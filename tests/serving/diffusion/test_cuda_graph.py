"""Blocks as a CUDA graph, with a stand-in for the capture: the same latents, buffers that are reused, one capture per shape."""

from collections.abc import Callable

import pytest
import torch

from strata.serving.diffusion import cuda_graph
from strata.serving.diffusion.bench.contenders import encode, pictures, scheduler_of
from strata.serving.diffusion.bench.models import SMALL, PictureModel
from strata.serving.diffusion.cuda_graph import GraphedBlocks, cloned, tensors
from strata.serving.diffusion.families import Modulation, Tokens
from strata.serving.diffusion.parallel.group import Axis
from strata.serving.diffusion.pipeline import Pipeline
from strata.serving.diffusion.sampling import sample_latents


def replayed(compute: Callable[[], Tokens]) -> tuple[Callable[[], None], Tokens]:
    """Repeats the computation into the buffers of the first one, as a graph does."""
    out = cloned(compute())

    def launch() -> None:
        out.image.copy_(compute().image)

    return launch, out


def small() -> tuple[PictureModel, Pipeline]:
    config = {**SMALL.config, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "caption_projection_dim": 16}
    model = PictureModel("small", SMALL.transformer, config, size=64, steps=3, guidance=4.0, text=5)
    torch.manual_seed(0)
    transformer = model.build(torch.device("cpu"), torch.float32)
    pipeline = Pipeline(model.family, transformer, scheduler_of(model), None, lambda prompts: encode(model, transformer, prompts))
    return model, pipeline


def test_latents_of_a_graph_are_those_of_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Tokens] = []

    def capture(compute: Callable[[], Tokens]) -> tuple[Callable[[], None], Tokens]:
        found = replayed(compute)
        captures.append(found[1])
        return found

    monkeypatch.setattr(cuda_graph, "capture", capture)
    model, pipeline = small()
    graphed = GraphedBlocks()
    with torch.inference_mode():
        for batch in (1, 2, 1):
            wanted = pictures(model, 3, batch)
            assert torch.equal(sample_latents(pipeline, wanted, step_cache=graphed), sample_latents(pipeline, wanted))
    assert len(captures) == 2  # one for each batch size


def test_inputs_are_copied_and_tables_of_rotations_belong_to_them() -> None:
    rope = (torch.ones(2, 3), torch.zeros(2, 3))
    modulation = Modulation(torch.ones(1, 4), image_rope=rope)
    copy = cloned(modulation)
    assert len(tensors(modulation)) == 3 and copy.caption is None
    for given, buffer in zip(tensors(modulation), tensors(copy), strict=True):
        assert torch.equal(given, buffer) and given.data_ptr() != buffer.data_ptr()


def test_a_graph_is_for_one_worker() -> None:
    GraphedBlocks().begin(1, Axis())
    with pytest.raises(ValueError, match="one worker, not 2"):
        GraphedBlocks().begin(1, Axis(ranks=(0, 1)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_graph_on_a_gpu() -> None:
    out = torch.zeros(4, device="cuda")
    launch, found = cuda_graph.capture(lambda: Tokens(out + 1))
    out.fill_(2.0)
    launch()
    assert found.image.tolist() == [3.0] * 4
