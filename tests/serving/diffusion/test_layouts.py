"""Layouts over two and four workers, held against one process."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from strata.planner.diffusion.layout_rules import PictureLayout
from strata.platform.errors import UserError
from strata.serving.diffusion.parallel.group import check_layout
from strata.serving.diffusion.parallel.sequence import shares
from strata.serving.diffusion.pipeline import Pipeline, load_pipeline
from strata.serving.diffusion.sampling import Picture, decode, sample_latents, to_pictures

from . import on_workers
from .workers import Workers

EXACT = {
    "ulysses2": PictureLayout(ulysses=2),
    "ring2": PictureLayout(ring=2),
    "cfg2": PictureLayout(cfg=2),
    "ulysses4": PictureLayout(ulysses=4),
    "ring4": PictureLayout(ring=4),
    "usp2x2": PictureLayout(ulysses=2, ring=2),
    "cfg2xulysses2": PictureLayout(cfg=2, ulysses=2),
    "cfg2xring2": PictureLayout(cfg=2, ring=2),
}
ALL = ["own", "sd3", "flux", "pixart", "dit"]
COMMON = {
    ("own", "usp2x2"),
    ("sd3", "usp2x2"),
    ("flux", "ring4"),
    ("flux", "ulysses4"),
    ("pixart", "cfg2xring2"),
    ("dit", "cfg2xulysses2"),
}
CASES = [
    pytest.param(family, name, marks=[pytest.mark.slow] if (family, name) in COMMON else [pytest.mark.rotation])
    for family in ALL
    for name in EXACT
]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    four = Workers(4)
    yield four
    four.close()


@pytest.fixture(scope="module")
def pipelines(picture_models: dict[str, Path]) -> dict[str, Pipeline]:
    torch.set_num_threads(1)
    return {family: load_pipeline(folder) for family, folder in picture_models.items()}


def batch(family: str, count: int = 2, **options: object) -> list[Picture]:
    """Odd numbers of tokens: 5 x 9 for the own model, 5 x 7 for the others."""
    prompts = ("white shark", "3") if family == "dit" else ("a red circle", "two small green square on a blue background")
    size = {"width": 36, "height": 20} if family == "own" else {"width": 56, "height": 40}
    defaults = size | {"steps": 3, "guidance": 3.0, "true_cfg": 2.0}
    return [Picture(prompts[i], seed=i + 1, **(defaults | options)) for i in range(count)]  # type: ignore[arg-type]


def alone(pipeline: Pipeline, pictures: list[Picture]) -> torch.Tensor:
    with torch.inference_mode():
        return sample_latents(pipeline, pictures).clone()


def distance(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference, relative to the largest value: random models of noise give latents far above 1."""
    return float((ours - reference).abs().max() / reference.abs().max().clamp(min=1.0))


def psnr(pipeline: Pipeline, ours: torch.Tensor, reference: torch.Tensor) -> float:
    """PSNR of pictures in 0 ... 255."""
    with torch.inference_mode():
        a, b = (np.stack(to_pictures(decode(pipeline, x))).astype(float) for x in (ours, reference))
    return float(10 * np.log10(255**2 / max(float(((a - b) ** 2).mean()), 1e-9)))


@pytest.mark.parametrize(("family", "name"), CASES)
def test_exact_layouts_give_the_latents_of_one_process(
    family: str, name: str, workers: Workers, picture_models: dict[str, Path], pipelines: dict[str, Pipeline]
) -> None:
    batches = [batch(family), batch(family, 1, guidance=1.0, true_cfg=1.0, steps=2)]
    references = [alone(pipelines[family], pictures) for pictures in batches]
    for found in workers.run(on_workers.latents, picture_models[family], EXACT[name], batches):
        for ours, reference in zip(found, references, strict=True):
            assert distance(ours, reference) < 1e-4


@pytest.mark.slow
def test_fewer_text_tokens_than_workers(workers: Workers, tmp_path: Path) -> None:
    """A worker may have no text at all."""
    q, k, v = (torch.randn(2, 7, 4, 8) for _ in range(3))
    found = workers.run(on_workers.split_attention, PictureLayout(ulysses=2, ring=2), q, k, v, 5, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    for ours in found:
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 7, 3])
def test_decoding_in_strips_is_that_of_one_process(
    rows: int, workers: Workers, picture_models: dict[str, Path], pipelines: dict[str, Pipeline]
) -> None:
    """Uneven strips; with fewer rows than workers, each decodes the whole."""
    latents = torch.randn(2, 4, rows, 5, generator=torch.Generator().manual_seed(rows)) * 3
    with torch.inference_mode():
        expected = decode(pipelines["sd3"], latents)
    for ours in workers.run(on_workers.decoded, picture_models["sd3"], EXACT["usp2x2"], latents):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_all_workers_return_the_pictures(
    workers: Workers, picture_models: dict[str, Path], pipelines: dict[str, Pipeline]
) -> None:
    pictures = batch("sd3")
    reference = to_pictures(decode(pipelines["sd3"], alone(pipelines["sd3"], pictures)))
    for found in workers.run(on_workers.pictures, picture_models["sd3"], PictureLayout(cfg=2, pipefusion=2, patches=1), pictures):
        for ours, expected in zip(found, reference, strict=True):
            assert ours.shape == (40, 56, 3)
            assert np.abs(ours.astype(int) - expected).max() <= 1  # rounding of equal pixels


# Least PSNR of PipeFusion in dB by family, with these random models: 6 steps, 2 of them warm-up, 2 patches.
PSNR = {"own": 36.0, "sd3": 44.0, "flux": 51.0, "pixart": 65.0, "dit": 18.0}


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL)
def test_pipefusion_is_within_its_stated_psnr(
    family: str, workers: Workers, picture_models: dict[str, Path], pipelines: dict[str, Pipeline]
) -> None:
    pictures = batch(family, steps=6)
    reference = alone(pipelines[family], pictures)
    found = []
    for layout in (PictureLayout(pipefusion=2), PictureLayout(pipefusion=2, cfg=2)):
        found += [ours for (ours,) in workers.run(on_workers.latents, picture_models[family], layout, [pictures])]
    assert all(distance(ours, found[0]) < 1e-5 for ours in found)
    assert distance(found[0], reference) > 1e-6, "no stale keys and values were used"
    assert psnr(pipelines[family], found[0], reference) >= PSNR[family]


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL)
def test_pipefusion_without_stale_values_is_exact(
    family: str, workers: Workers, picture_models: dict[str, Path], pipelines: dict[str, Pipeline]
) -> None:
    """All steps are warm-up, or there is one patch."""
    pictures = batch(family)
    reference = alone(pipelines[family], pictures)
    for layout, warm_up in ((PictureLayout(pipefusion=2, patches=3), 3), (PictureLayout(pipefusion=2, patches=1), 0)):
        for (ours,) in workers.run(on_workers.latents, picture_models[family], layout, [pictures], warm_up):
            assert distance(ours, reference) < 1e-4


@pytest.mark.slow
def test_the_number_of_stages_does_not_change_the_result(workers: Workers, picture_models: dict[str, Path]) -> None:
    """The patches alone decide which keys are stale."""
    pictures = batch("flux", steps=5)
    by_stages = [
        workers.run(on_workers.latents, picture_models["flux"], PictureLayout(pipefusion=stages, patches=3), [pictures], 1)[0][0]
        for stages in (2, 4)
    ]
    assert distance(*by_stages) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("layout", [EXACT["usp2x2"], EXACT["cfg2xring2"]], ids=["usp", "cfg"])
def test_the_step_cache_decides_alike_on_all_workers(
    layout: PictureLayout, workers: Workers, picture_models: dict[str, Path]
) -> None:
    pictures = batch("sd3", steps=8)
    reference, computed, skipped = on_workers.cached(picture_models["sd3"], PictureLayout(), pictures, 0.4)
    assert computed and skipped and computed + skipped == 16
    for ours, *counts in workers.run(on_workers.cached, picture_models["sd3"], layout, pictures, 0.4):
        assert counts == [computed, skipped]
        assert distance(ours, reference) < 1e-4


@pytest.mark.parametrize(
    "layout",
    [EXACT["usp2x2"], PictureLayout(cfg=2, pipefusion=2), PictureLayout(pipefusion=2, patches=4)],
    ids=lambda x: x.name(),
)
@pytest.mark.parametrize(
    ("at", "how"),
    [
        pytest.param(1, "cancel", marks=pytest.mark.rotation),
        pytest.param(3, "cancel", marks=pytest.mark.slow),
        pytest.param(4, "raise", marks=pytest.mark.slow),
        pytest.param(6, "cancel", marks=pytest.mark.rotation),
    ],
)
def test_a_cancelled_call_ends_on_all_workers_and_the_next_one_runs(
    layout: PictureLayout, at: int, how: str, workers: Workers, picture_models: dict[str, Path]
) -> None:
    outcomes = workers.run(on_workers.cancelled, picture_models["own"], layout, batch("own", 1, steps=6), at, how)
    leader = "RuntimeError" if how == "raise" else "Cancelled"
    assert outcomes == [leader if rank % layout.workers == 0 else "Cancelled" for rank in range(4)]


LOST = [
    pytest.param(PictureLayout(ring=2), on_workers.KILL, marks=pytest.mark.slow, id="ring-killed"),
    pytest.param(PictureLayout(pipefusion=2), on_workers.KILL, marks=pytest.mark.slow, id="pipefusion-killed"),
    pytest.param(PictureLayout(ulysses=2), on_workers.STOP, marks=pytest.mark.slow, id="ulysses-stopped"),
    pytest.param(PictureLayout(ulysses=2), on_workers.KILL, marks=pytest.mark.rotation, id="ulysses-killed"),
    pytest.param(PictureLayout(cfg=2), on_workers.KILL, marks=pytest.mark.rotation, id="cfg-killed"),
    pytest.param(PictureLayout(ring=2), on_workers.STOP, marks=pytest.mark.rotation, id="ring-stopped"),
    pytest.param(PictureLayout(pipefusion=2), on_workers.STOP, marks=pytest.mark.rotation, id="pipefusion-stopped"),
]


@pytest.mark.parametrize(("layout", "how"), LOST)
def test_a_lost_worker_is_an_error_within_the_deadline(layout: PictureLayout, how: int, picture_models: dict[str, Path]) -> None:
    """The groups' time limit is 3 seconds."""
    two = Workers(2)
    try:
        two.run(on_workers.latents, picture_models["own"], PictureLayout(), [batch("own", 1, steps=1)])
        two.start(on_workers.dying, picture_models["own"], layout, batch("own", 1, steps=6), 1, 6, how)
        survivor = two.result(0, deadline_s=15.0)
        assert isinstance(survivor, str) and survivor.startswith("error"), survivor
    finally:
        two.close()


def test_shares_differ_by_at_most_one() -> None:
    assert [shares(total, 4) for total in (0, 3, 4, 10)] == [[0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [3, 3, 2, 2]]


@pytest.mark.parametrize(
    ("layout", "cause"),
    [
        (PictureLayout(ulysses=3), "does not divide the 4 heads"),
        (PictureLayout(ring=8), "exceeds the 6 tokens"),
        (PictureLayout(pipefusion=2, patches=3), "3 patches exceed the 2"),
        (PictureLayout(pipefusion=4), "exceeds the 3 blocks"),
        (PictureLayout(pipefusion=2, ring=2), "combined with cfg only"),
        (PictureLayout(cfg=3), "two passes"),
    ],
)
def test_layouts_that_do_not_work_are_refused(layout: PictureLayout, cause: str) -> None:
    with pytest.raises(UserError, match=re.escape(cause)):
        check_layout(layout, heads=4, blocks=3, grid=(2, 3), two_passes=True)
