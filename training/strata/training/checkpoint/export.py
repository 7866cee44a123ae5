"""Exports a checkpoint as a Hugging Face model folder: for `transformers` and vLLM, or a picture model in diffusers' layout."""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from strata.platform import file_errors
from strata.platform.errors import UserError
from strata.platform.recipe import ModelSection, Recipe
from strata.platform.runs import Run
from strata.training.checkpoint import adapter, format, model_card, ownership, resharding
from strata.training.checkpoint.original_form import write_original_form
from strata.training.checkpoint.pretrained import BASE, Pretrained, resolve
from strata.training.data import tokenizer
from strata.training.diffusion import export as pictures
from strata.training.model import huggingface
from strata.training.parallel.optimizer_state import AVERAGE

TOKENIZER = "tokenizer"  # a run has its own copy, because the cache may be emptied
ADAPTER = "adapter"  # folder in an export with the adapters in peft's format, beside the merged model
REPLACED = "replaced"  # the previous export, moved into the new one until that has its final name


def export_run(run: Run, to: Path | None, say: Callable[[str], None]) -> Path:
    """Exports the newest valid checkpoint of a run: an imported model in its original form, others as a Llama or a Mixtral.
    Builds the folder next to its target and renames it, so that readers never see a partial export."""
    recipe = run.recipe()
    checkpoints = format.location(run, recipe.train)
    ownership.require_own(run, checkpoints)
    found = format.newest(checkpoints, say)
    if found is None:
        cause = f"Run '{run.name}' has no checkpoint to export."
        raise UserError(cause, f"Continue the run: strata train --resume {run.name}.")
    if to is not None and to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to} exists and is not an empty folder.", "Choose another folder with --to.")
    words = None if recipe.model.family else _tokenizer_of(run)
    target = (to or run.export).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    finish_or_remove_leftovers(target)
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=building_prefix(target, os.getpid())))
    try:
        reader = resharding.Reader(found)
        dtype = torch.float32 if recipe.train.precision == "fp32" else torch.bfloat16
        if recipe.model.picture:
            assert words
            average = {name: reader.whole(name, AVERAGE) for name in reader.names()}
            pictures.write_folder(building, average, recipe.model, dtype, words)
            sections = recipe.model_dump(
                mode="json", include={"model": {"layers", "hidden", "heads", "picture"}, "train": {"flow"}}
            )
            pictures.write_card(building, run.name, sections, found.step, found.origin.tokens)
        elif words is None:
            write_original_form(building, run.path / BASE, _whole_weights(reader, recipe), recipe.model)
            if recipe.train.lora:
                adapter.write(building / ADAPTER, reader.whole, recipe.model, recipe.train.lora)
        else:
            write_folder(building, {name: reader.whole(name) for name in reader.names()}, recipe.model, dtype)
            tokenizer.save(words, building, recipe.model.context)
        if recipe.model.picture is None:
            model_card.write(building, run, model_card.Origin(found.step, found.origin.tokens))
        building.chmod(0o755)
        if target.exists():
            target.rename(building / REPLACED)
        building.rename(target)
        shutil.rmtree(target / REPLACED, ignore_errors=True)
    except OSError:
        raise
    except Exception as error:  # Rust libraries raise their own exception types for a full disk
        number = file_errors.number_of(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(target)) from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _whole_weights(reader: resharding.Reader, recipe: Recipe) -> Callable[[str], Tensor]:
    """Weights by name: the checkpoint's, those of the imported model that were not trained, and both merged for adapters."""
    if not (recipe.train.lora or recipe.train.freeze):
        return reader.whole
    assert recipe.model.source
    base = Pretrained(resolve(recipe.model.source), recipe.model)
    trained = set(reader.names())

    def whole(name: str) -> Tensor:
        return reader.whole(name) if name in trained else base.whole(name)

    if recipe.train.lora is None:
        return whole
    return adapter.merging(whole, adapter.adapted(recipe.model, recipe.train.lora), recipe.train.lora)


def _tokenizer_of(run: Run) -> Tokenizer:
    path = run.path / TOKENIZER / "tokenizer.json"
    try:
        return tokenizer.load(path.parent)
    except Exception as error:  # tokenizers raises plain Exception
        fix = f"Resume the run, which writes it again: strata train --resume {run.name}"
        raise UserError(f"{path} cannot be read: {error}.", fix) from None


def finish_or_remove_leftovers(target: Path) -> None:
    """Cleans up after exports to `target` that were killed on this machine. An export that was killed between its two renames is
    complete and gets its final name; others are deleted."""
    for leftover in target.parent.glob(building_prefix(target, "*") + "*"):
        pid = leftover.name.removeprefix(building_prefix(target, "")).partition("-")[0]
        if not pid.isdigit() or (psutil.pid_exists(int(pid)) and int(pid) != os.getpid()):
            continue
        if (leftover / REPLACED).is_dir() and not target.exists():
            leftover.rename(target)
            shutil.rmtree(target / REPLACED, ignore_errors=True)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def building_prefix(target: Path, pid: int | str) -> str:
    """Name prefix of the folder in which an export is built. Contains the host and process that build it."""
    return f".{target.name}-{socket.gethostname()}-{pid}" + ("-" if pid else "")


def write_folder(folder: Path, weights: dict[str, Tensor], model: ModelSection, dtype: torch.dtype) -> None:
    shared = {"lm_head.weight"} if model.tie_embeddings else set()
    named = {huggingface.export_name(model, name): weight for name, weight in weights.items() if name not in shared}
    tensors = {name: weight.to(dtype).contiguous() for name, weight in (named | huggingface.biases(model)).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    end = tokenizer.END_OF_TEXT_ID
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = huggingface.config(model) | special | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2))
