"""Checks of a distillation run before its workers start: the teacher is complete, and has the run's tokens."""

import json
from pathlib import Path
from typing import Any

from strata.platform.errors import UserError
from strata.platform.recipe import ModelSection, Recipe, TrainSection
from strata.platform.runs import Run
from strata.training.checkpoint import pretrained
from strata.training.checkpoint.export import TOKENIZER
from strata.training.checkpoint.pretrained import Pretrained
from strata.training.distillation.teacher import section_of

TEACHER_WEIGHTS = "teacher_weights"  # file in a run with the identity of its teacher's weights
TOKENIZER_FILE = "tokenizer.json"
DECIDING = ("normalizer", "pre_tokenizer", "model", "added_tokens")  # parts of a tokenizer that decide a text's tokens


def require_weights(model: ModelSection, train: TrainSection) -> None:
    """Refuses a teacher with missing weights, a shorter context or another vocabulary, by its own files."""
    section = section_of(model, train)
    assert section.source
    if section.vocab != model.vocab:
        cause = f"The teacher {train.distill} has {section.vocab} tokens, and the model has {model.vocab} (model.vocab)."
        fix = "Import a model with the same tokenizer." if model.family else f"Set model.vocab={section.vocab}."
        raise UserError(cause, fix)
    Pretrained(pretrained.resolve(section.source), section).require_complete()


def require_same_tokens(run: Run, recipe: Recipe) -> None:
    """Refuses a teacher with another tokenizer than the run's and, in a resumed run, other weights than before or no teacher."""
    given = recipe.train.distill
    if given is None:
        if (run.path / TEACHER_WEIGHTS).is_file():
            cause = f"Run '{run.name}' has been distilled from a teacher so far, and train.distill is unset now."
            raise UserError(cause, "Restore train.distill, or start a new run.")
        return
    folder = pretrained.resolve(given)
    own = run.path / (pretrained.BASE if recipe.model.family else TOKENIZER)
    if _deciding(folder) != _deciding(own):
        fix = "Import a model with the same tokenizer." if recipe.model.family else "Set data as in the teacher's own recipe."
        raise UserError(f"The tokenizer of the teacher {given} differs from that of this run's data.", fix)
    reason = "its steps so far followed those"
    pretrained.require_unchanged(folder, run.path / TEACHER_WEIGHTS, run.name, reason)


def _deciding(folder: Path) -> dict[str, Any]:
    path = folder / TOKENIZER_FILE
    try:
        values = json.loads(path.read_bytes())
        return {key: values.get(key) for key in DECIDING}
    except FileNotFoundError:
        fix = "Save the tokenizer with transformers' save_pretrained, which writes it, or use another model."
        raise UserError(f"{path} is missing: without it, tokenizers cannot be compared.", fix) from None
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {error}.", "Restore it.") from None
