"""Sampling by one process, held against diffusers' own pipelines and transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from strata.platform.errors import UserError
from strata.serving.diffusion import sampling
from strata.serving.diffusion.pipeline import Pipeline, load_pipeline
from strata.serving.diffusion.sampling import Cancelled, Picture, sample, sample_latents

PROMPTS = {"dit": ("white shark", "3")}
ALL = ["own", "sd3", "flux", "pixart", "dit"]
OFTEN = ["own", *(pytest.param(family, marks=pytest.mark.slow) for family in ALL[1:])]


@pytest.fixture(scope="module")
def pipelines(picture_models: dict[str, Path]) -> dict[str, Pipeline]:
    torch.set_num_threads(1)
    return {family: load_pipeline(folder) for family, folder in picture_models.items()}


def pictures(family: str, **options: object) -> list[Picture]:
    first, second = PROMPTS.get(family, ("a red circle", "two small green square on a blue background"))
    defaults = {"width": 48, "height": 32, "steps": 3, "guidance": 3.0, "negative": "" if family == "dit" else "large circle"}
    return [Picture(first, seed=5, **(defaults | options)), Picture(second, seed=6, **(defaults | options))]  # type: ignore[arg-type]


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("family", ["sd3", "pixart"])
def test_latents_are_those_of_diffusers(
    family: str, guidance: float, picture_models: dict[str, Path], pipelines: dict[str, Pipeline]
) -> None:
    whole = DiffusionPipeline.from_pretrained(picture_models[family])
    whole.set_progress_bar_config(disable=True)
    if family == "pixart":  # diffusers' pipeline gives the resolution to models of this size only
        whole.transformer.register_to_config(sample_size=128)
    batch = pictures(family, guidance=guidance)
    ours = sample_latents(pipelines[family], batch)
    options = {"use_resolution_binning": False, "clean_caption": False} if family == "pixart" else {}
    theirs = whole(
        [p.prompt for p in batch],
        negative_prompt=[p.negative for p in batch] if family == "sd3" else batch[0].negative,
        height=32,
        width=48,
        num_inference_steps=3,
        guidance_scale=guidance,
        latents=sampling.noise(pipelines[family], batch, sampling.prepare(pipelines[family], batch)),
        output_type="latent",
        **options,
    ).images
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("true_cfg", [1.0, 2.5])
def test_flux_latents_are_those_of_diffusers(
    true_cfg: float, picture_models: dict[str, Path], pipelines: dict[str, Pipeline]
) -> None:
    whole = DiffusionPipeline.from_pretrained(picture_models["flux"])
    whole.set_progress_bar_config(disable=True)
    batch = pictures("flux", true_cfg=true_cfg)
    ours = sample_latents(pipelines["flux"], batch)
    noise = sampling.noise(pipelines["flux"], batch, sampling.prepare(pipelines["flux"], batch))
    packed = whole._pack_latents(noise, *noise.shape)
    theirs = whole(
        [p.prompt for p in batch],
        negative_prompt=[p.negative for p in batch],
        true_cfg_scale=true_cfg,
        height=32,
        width=48,
        num_inference_steps=3,
        guidance_scale=3.0,
        latents=packed,
        output_type="latent",
    ).images
    torch.testing.assert_close(whole._pack_latents(ours, *ours.shape), theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_dit_pictures_are_those_of_diffusers(
    guidance: float, picture_models: dict[str, Path], pipelines: dict[str, Pipeline]
) -> None:
    whole = DiffusionPipeline.from_pretrained(picture_models["dit"])
    whole.set_progress_bar_config(disable=True)
    ours = sample(pipelines["dit"], [Picture("hen", steps=3, guidance=guidance, seed=5)])[0]
    seed = torch.Generator().manual_seed(5)
    theirs = whole([1], guidance_scale=guidance, generator=seed, num_inference_steps=3, output_type="np")
    assert np.abs(ours / 255 - theirs.images[0]).max() < 0.51 / 255 + 1e-4


@pytest.mark.parametrize("family", OFTEN)
def test_a_picture_does_not_depend_on_its_batch(family: str, picture_models: dict[str, Path]) -> None:
    """In double precision: products of other shapes are rounded otherwise, by how much is the CPU's affair."""
    pipeline, batch = load_pipeline(picture_models[family], dtype=torch.float64), pictures(family)
    together = sample_latents(pipeline, batch)
    for i, picture in enumerate(batch):
        torch.testing.assert_close(sample_latents(pipeline, [picture])[0], together[i])
    assert not torch.allclose(together[0], together[1], atol=0.1)


@pytest.mark.parametrize("family", OFTEN)
def test_prompt_guidance_and_seed_change_the_picture(family: str, pipelines: dict[str, Pipeline]) -> None:
    picture = pictures(family)[0]
    other = pictures(family)[1].prompt
    guided = {"true_cfg": 2.0} if family == "flux" else {"guidance": 5.0}
    base = sample_latents(pipelines[family], [picture])
    for change in ({"prompt": other}, {"seed": 9}, guided, {"steps": 4}):
        changed = sample_latents(pipelines[family], [Picture(**(picture.__dict__ | change))])
        assert not torch.allclose(base, changed, atol=1e-3), change


@pytest.mark.parametrize("family", ALL)
def test_pictures_have_the_asked_size(family: str, pipelines: dict[str, Pipeline]) -> None:
    got = sample(pipelines[family], pictures(family, steps=1))
    assert [(g.shape, g.dtype) for g in got] == [((32, 48, 3), np.uint8)] * 2
    if family != "flux":  # its own size is 128 latents, too many for a test
        own = pipelines[family].own_size
        assert sample(pipelines[family], [Picture("1" if family == "dit" else "", steps=1)])[0].shape == (*own, 3)


@pytest.mark.parametrize("family", OFTEN)
def test_bf16_is_close_to_fp32(family: str, picture_models: dict[str, Path], pipelines: dict[str, Pipeline]) -> None:
    half = load_pipeline(picture_models[family], dtype=torch.bfloat16)
    assert half.transformer.dtype == torch.bfloat16 and (half.vae is None or half.vae.dtype == torch.bfloat16)
    batch = pictures(family, steps=2, guidance=2.0)  # 1000 x 2 has no rounding in bf16, FLUX's embedding of it none either
    a, b = (np.stack(sample(p, batch)).astype(float) for p in (half, pipelines[family]))
    assert 0 < np.abs(a - b).mean() < 8


def test_mixed_guidance_in_a_batch_is_that_of_each_picture(pipelines: dict[str, Pipeline]) -> None:
    plain, guided = Picture("a red circle", steps=2, guidance=1.0), Picture("a red circle", steps=2, guidance=3.0)
    together = sample_latents(pipelines["own"], [plain, guided])
    torch.testing.assert_close(together[0], sample_latents(pipelines["own"], [plain])[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together[1], sample_latents(pipelines["own"], [guided])[0], atol=1e-5, rtol=1e-5)


def test_steps_are_reported_and_can_be_cancelled(pipelines: dict[str, Pipeline]) -> None:
    seen: list[tuple[int, int]] = []

    def on_step(step: int, steps: int, latents: torch.Tensor) -> bool:
        assert latents.shape == (1, 3, 32, 32)
        seen.append((step, steps))
        return step < 2

    with pytest.raises(Cancelled):
        sample(pipelines["own"], [Picture("a", steps=4)], on_step)
    assert seen == [(1, 4), (2, 4)]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"width": 33}, "multiple of 4"),
        ({"height": -4}, "multiple of 4"),
        ({"width": 68}, "exceeds the model's 64"),
        ({"steps": 0}, "0 steps"),
    ],
)
def test_bad_pictures_are_refused(change: dict[str, int], cause: str, pipelines: dict[str, Pipeline]) -> None:
    with pytest.raises(UserError, match=cause):
        sample(pipelines["own"], [Picture(**({"prompt": "a"} | change))])  # type: ignore[arg-type]


def test_mixed_sizes_and_unknown_classes_are_refused(pipelines: dict[str, Pipeline]) -> None:
    with pytest.raises(UserError, match="one size"):
        sample(pipelines["own"], [Picture("a"), Picture("a", width=16)])
    for prompt in ("1000", "-1", "a shark", "²"):
        with pytest.raises(UserError, match="no class"):
            sample(pipelines["dit"], [Picture(prompt)])


def test_bad_folders_are_refused(tmp_path: Path, picture_models: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"has no model_index\.json"):
        load_pipeline(tmp_path)
    index = tmp_path / "model_index.json"
    own = json.loads((picture_models["own"] / "model_index.json").read_text())
    for text, cause in (
        ("{", "not readable"),
        ("[]", "no _class_name"),
        (json.dumps(own | {"_class_name": "StableDiffusionPipeline"}), "not supported"),
        (json.dumps(own | {"transformer": ["diffusers", "UNet2DModel"]}), "not supported"),
        (json.dumps(own), "does not load"),
    ):
        index.write_text(text)
        with pytest.raises(UserError, match=cause):
            load_pipeline(tmp_path)
