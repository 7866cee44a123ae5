"""Model folder of a picture model in diffusers' layout: each component loads with its library's own `from_pretrained`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer
from torch import Tensor

from strata.platform.recipe import CHANNELS, ModelSection
from strata.training.data.pictures import captions
from strata.training.diffusion.model import PictureModel

INDEX = "model_index.json"
PIPELINE = "StrataPicturePipeline"
CARD = "README.md"


def whole_model(weights: dict[str, Tensor], section: ModelSection) -> PictureModel:
    """The model with all its weights, on the CPU, for pictures."""
    model = PictureModel(section, None)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    buffers = {name for name, _ in model.named_buffers()}
    assert not unexpected and set(missing) <= buffers, (missing, unexpected)
    return model.eval().requires_grad_(False)


def write_folder(folder: Path, weights: dict[str, Tensor], section: ModelSection, dtype: torch.dtype, words: Tokenizer) -> None:
    """Writes the transformer, the text encoder, the tokenizer and the scheduler, and an index that names their classes."""
    import diffusers

    assert section.picture
    model = whole_model(weights, section)
    model.to(dtype)
    model.transformer.save_pretrained(folder / "transformer")
    with quiet():
        model.text_encoder.save_pretrained(folder / "text_encoder")
    captions.save(words, folder / "tokenizer", section.picture.caption_tokens)
    diffusers.FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    index = {
        "_class_name": PIPELINE,
        "_diffusers_version": diffusers.__version__,
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "vae": [None, None],
        "picture": {"size": section.picture.size, "channels": CHANNELS, "range": [-1, 1]},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def quiet() -> Iterator[None]:
    """Hides transformers' progress bars, which would appear in the middle of this program's own output."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def write_card(folder: Path, run: str, recipe: dict[str, Any], step: int, data: str) -> None:
    """Model card with the sections of the recipe that decide about the model. Depends on the run alone."""
    header = {
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "tags": ["strata", "flow-matching"],
        "strata": {"step": step, "corpus": data},
    }
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {run}",
        "A text-to-image diffusion transformer on pixels, trained by flow matching with Strata. Its weights are averages.",
        f"```yaml\n{yaml.safe_dump(recipe, sort_keys=False)}```",
    ]
    (folder / CARD).write_text("\n\n".join(parts) + "\n")
