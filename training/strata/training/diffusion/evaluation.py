"""Pictures of held-out captions by an exported model, and the judge's accuracy on them."""

from pathlib import Path

from strata.platform.recipe import FlowSection, ModelSection
from strata.training.data.pictures import captions, prepare, scenes
from strata.training.data.pictures.rendering import render, to_bytes
from strata.training.diffusion.export import quiet
from strata.training.diffusion.judge import accuracy, judge
from strata.training.diffusion.model import PictureModel
from strata.training.diffusion.sampling import sample

SEED = 1  # of the judged scenes: others than those of the validation loss


def judged(export: Path, prepared: Path, model: ModelSection, flow: FlowSection) -> dict[str, float] | None:
    """Accuracy on `flow.judged` held-out captions; None for a user's pictures, whose captions the judge does not know. The entry
    `renderer` is the judge's accuracy on the renderer's own pictures of these captions."""
    meta = prepare.read_meta(prepared)
    if not meta.generated or not flow.judged:
        return None
    assert model.picture
    some = [scenes.scene("validation", meta.holdout, SEED, index) for index in range(flow.judged)]
    words = captions.load(prepared, model.picture.caption_tokens)
    tokens, empty = captions.encode(words, [scene.caption for scene in some]), captions.encode(words, [""])
    pictures = sample(load(export, model), tokens, empty, range(len(some)), flow.sample_steps, flow.guidance)
    found = accuracy([judge(picture, scene.combination, scene.position) for picture, scene in zip(pictures, some, strict=True)])
    drawn = accuracy([judge(to_bytes(render(scene, meta.size)), scene.combination, scene.position) for scene in some])
    return found | {"renderer": drawn["all"]}


def load(export: Path, section: ModelSection) -> PictureModel:
    """The model of an exported folder."""
    from diffusers import SD3Transformer2DModel
    from transformers import CLIPTextModel

    model = PictureModel(section, None)
    model.transformer = SD3Transformer2DModel.from_pretrained(export / "transformer", low_cpu_mem_usage=False)
    with quiet():
        model.text_encoder = CLIPTextModel.from_pretrained(export / "text_encoder")
    return model.eval().requires_grad_(False)


def line(found: dict[str, float], count: int) -> str:
    """Accuracy for the user."""
    parts = ", ".join(f"{name} {share:.0%}" for name, share in found.items() if name not in ("all", "renderer"))
    return (
        f"{found['all']:.0%} of {count} pictures of held-out captions are right ({parts});"
        f" the judge accepts {found['renderer']:.0%} of the renderer's own"
    )
