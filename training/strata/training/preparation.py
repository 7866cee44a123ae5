"""Checks and preparation of a run: every error that can be found before workers start is raised here."""

import math
import os
import shutil
from pathlib import Path

import numpy as np
from pydantic import ValidationError
from rich.console import Console

from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.platform.recipe import ModelSection, PreferenceSection, Recipe, TrainSection
from strata.platform.runs import Run
from strata.training.checkpoint import adapter, pretrained
from strata.training.checkpoint.export import TOKENIZER
from strata.training.data import shards
from strata.training.data.bigram import cached_bigram_loss
from strata.training.data.corpus import open_corpus
from strata.training.data.finetuning import prepare as finetuning
from strata.training.data.finetuning import special_tokens, store
from strata.training.data.finetuning.rows import Rows
from strata.training.data.pictures import captions, draws
from strata.training.data.pictures import prepare as pictures
from strata.training.data.windows import Windows
from strata.training.diffusion.progress import PicturePrompts
from strata.training.distillation import requirements as teaching
from strata.training.engine import is_frozen
from strata.training.evaluation import sample_prompts
from strata.training.evaluation.samples import Prompts
from strata.training.layout import require_workable
from strata.training.loop import Job
from strata.training.memory import require_memory
from strata.training.metrics.startup import Startup
from strata.training.metrics.trackers import require_installed
from strata.training.model import quantized
from strata.training.model.huggingface import require_exportable
from strata.training.parallel.shard_map import Shard
from strata.training.preferences.mismatched import MismatchedRows

CHAT_TEMPLATE = "chat_template.jinja"
SHOWN_PICTURES = 16  # held-out captions that a run draws if the recipe has none
BASE_WEIGHTS = "base_weights"  # file in a run with the identity of the weights that it does not train


def prepare(run: Run, recipe: Recipe, console: Console) -> tuple[Job, float | None]:
    """The job of a run, and the validation loss of a bigram model on its corpus, None for fine-tuning."""
    startup = Startup()
    startup.done("this command")
    require_exportable(recipe.model)
    require_workable(recipe.model, recipe.train, recipe.parallel)
    require_installed(recipe.train.trackers)
    _require_consistent(recipe)
    sample_prompts.require_supported(recipe)
    if recipe.model.picture:
        return _pictures(run, recipe, startup, console), None
    if recipe.train.distill:
        teaching.require_weights(recipe.model, recipe.train)
    if recipe.parallel.device == "cpu" and "RAY_ADDRESS" not in os.environ:
        require_memory(recipe.model, recipe.train, recipe.parallel)
    if recipe.model.family:
        with console.status("checking the model to import"):
            _import(run, recipe)
        startup.done("model")
        tokens, bigram = _finetuning_rows(run, recipe, console), None
        mix = tuple(one.weight for one in recipe.data.all_sets) or (1.0,)
        rows = len(Rows(tokens, "train"))
    else:
        tokens, bigram = _corpus(run, recipe, console)
        mix, rows = (), len(Windows(tokens, "train", recipe.model.context))
    startup.done("corpus")
    teaching.require_same_tokens(run, recipe)
    train, phases = with_epochs(recipe.train, rows), tuple(startup.phases.items())
    prompts = _sample_prompts(run, recipe)
    return Job(run.path, tokens, recipe.model, train, recipe.parallel, mix=mix, phases=phases, prompts=prompts), bigram


def _pictures(run: Run, recipe: Recipe, startup: Startup, console: Console) -> Job:
    """The job of a run that trains a picture model."""
    model, flow = recipe.model, recipe.train.flow
    assert model.picture and flow
    if recipe.train.steps == 0:
        raise UserError("train.steps=0 exports an imported model as it is, and this run has none.", "Set train.steps.")
    with console.status("preparing the pictures"):
        prepared = pictures.prepare(recipe.data, model, console.print)
    meta = pictures.read_meta(prepared)
    if meta.count is None:
        if recipe.train.epochs is not None:
            raise UserError("train.epochs counts passes over the data, and generated pictures never end.", "Set train.steps.")
        console.print("Generated pictures of shapes; a share of the captions is held out.")
    else:
        console.print(f"{meta.count['train']:,} pictures to train on, {meta.count['validation']:,} held out")
    (run.path / TOKENIZER).mkdir(exist_ok=True)
    shutil.copy(prepared / captions.TOKENIZER, run.path / TOKENIZER)
    data = draws.training_data(prepared, model, recipe.train)
    startup.done("pictures")
    train = with_epochs(recipe.train, len(data.train))
    validation = data.validation
    assert isinstance(validation, draws.Draws)
    texts = flow.prompts or tuple(validation.example(draw).caption for draw in range(min(SHOWN_PICTURES, len(validation))))
    words = captions.load(prepared, model.picture.caption_tokens)
    prompts = PicturePrompts(texts, captions.encode(words, list(texts)), captions.encode(words, [""]))
    phases = tuple(startup.phases.items())
    return Job(run.path, prepared, model, train, recipe.parallel, phases=phases, pictures=prompts)


def _sample_prompts(run: Run, recipe: Recipe) -> Prompts | None:
    section, context = recipe.train.samples, recipe.model.context
    if section is None:
        return None
    if recipe.model.family is None:
        return sample_prompts.of_corpus(section, run.path / TOKENIZER, context)
    kinds = {str(one.kind) for one in recipe.data.all_sets}
    return sample_prompts.of_imported(section, run.path / pretrained.BASE, context, kinds)


def _require_consistent(recipe: Recipe) -> None:
    kinds = {one.kind for one in recipe.data.all_sets}
    if recipe.model.family is None:
        fix = "Set model.from to a folder, a run or a Hugging Face id."
        if kinds - {"text"}:
            raise UserError(f"data.kind={min(kinds - {'text'})} needs a model that has been trained on text.", fix)
        if recipe.train.lora:
            raise UserError("train.lora adapts a trained model, and this run starts from random weights.", fix)
        if recipe.train.steps == 0:
            raise UserError("train.steps=0 exports an imported model as it is, and this run has none.", fix)
    if recipe.train.lora:
        if recipe.train.lora.base == "nf4":
            quantized.require_installed()
        adapter.adapted(recipe.model, recipe.train.lora)
        if recipe.train.lora.source:
            adapter.Adapter(Path(recipe.train.lora.source), recipe.model, recipe.train.lora)


def _import(run: Run, recipe: Recipe) -> None:
    """Checks the weights and copies the small files. A resumed run has them already, and needs the weights only if it trains
    a part of them."""
    base = run.path / pretrained.BASE
    partial = bool(recipe.train.lora or recipe.train.freeze)
    if partial or not (base / pretrained.TENSORS).is_file():
        folder = pretrained.prepare(recipe.model, base)
        if partial:
            reason = "its checkpoints are only a part of a model"
            pretrained.require_unchanged(folder, run.path / BASE_WEIGHTS, run.name, reason)
    if recipe.data.chat_template:
        try:
            write_atomic(base / CHAT_TEMPLATE, recipe.data.chat_template.read_bytes())
        except OSError as error:
            cause = f"data.chat_template={recipe.data.chat_template} cannot be read: {error.strerror}."
            raise UserError(cause, "Correct the path.") from None


def _finetuning_rows(run: Run, recipe: Recipe, console: Console) -> Path:
    model = recipe.model
    with console.status("preparing the data") as status:

        def progress(done: int, total: int) -> None:
            status.update(f"preparing the data: {done:,} of {total:,} inputs")

        tokens = finetuning.prepare(recipe.data, run.path / pretrained.BASE, model.context, console.print, progress)
    meta = store.read_meta(tokens)
    for note in meta.notes:
        console.print(note, markup=False)
    require_fitting_loss(meta.objective, recipe.train.preference)
    if recipe.train.preference and recipe.train.preference.loss == "kto":
        for split in shards.SPLITS:
            MismatchedRows(tokens, split).require_two_prompts(split)
        desirable, undesirable = Rows(tokens, "train").desirable()
        console.print(f"{desirable:,} desirable and {undesirable:,} undesirable answers to train on")
    largest = max(Rows(tokens, split).largest_token() for split in shards.SPLITS)
    if largest >= model.vocab:
        cause = f"The tokenizer has the token {largest}, and the model has embeddings for {model.vocab} tokens only."
        raise UserError(cause, "Restore the tokenizer of this model, or start from a model that fits it.")
    if meta.special:
        _require_trained_tokens(meta, model, recipe.train)
    counted, used = (sum(getattr(one.counts["train"], key) for one in meta.sets) for key in ("counted", "tokens"))
    held_out = sum(one.counts["validation"].rows for one in meta.sets)
    rows = sum(one.counts["train"].rows for one in meta.sets)
    fill = used / (rows * model.context)
    console.print(f"{rows:,} rows to train on, {fill:.0%} full; {counted:,} of {used:,} tokens count; {held_out:,} rows held out")
    return tokens


def require_fitting_loss(objective: store.Objective, preference: PreferenceSection | None) -> None:
    """Refuses data whose form the recipe's loss is not for."""
    if objective != "tokens" and preference is None:
        fix = f"Set train.preference.loss, such as {'dpo' if objective == 'pairs' else 'kto'}."
        raise UserError("The data are preferences, and the recipe has no loss for them (train.preference).", fix)
    if objective == "tokens" and preference is not None:
        raise UserError("train.preference needs preferences, and the data have none.", "Set data.kind=preference.")
    if objective == "labels" and preference is not None and preference.loss != "kto":
        cause = f"train.preference.loss={preference.loss} needs pairs, and the data are answers with a label."
        raise UserError(cause, "Set train.preference.loss=kto, or use rows with 'chosen' and 'rejected'.")


def _require_trained_tokens(meta: store.Meta, model: ModelSection, train: TrainSection) -> None:
    """Refuses data with special tokens that the model does not know and, with frozen embeddings, would not learn."""
    if not is_frozen(pretrained.EMBEDDING, train):
        return
    assert model.source
    source = pretrained.Pretrained(pretrained.resolve(model.source), model)
    table = Shard(pretrained.EMBEDDING, (model.vocab, model.hidden), None, 0)

    def row(token: int) -> np.ndarray:
        return source.read_range(table, "weight", token * model.hidden, (token + 1) * model.hidden).numpy()

    special_tokens.require_trained({token: (name, place) for token, name, place in meta.special}, row)


def _corpus(run: Run, recipe: Recipe, console: Console) -> tuple[Path, float]:
    model = recipe.model
    with console.status("reading the corpus"):
        tokens = shards.prepare(open_corpus(recipe.data), model.vocab, recipe.data.holdout, console.print)
        meta = shards.read_meta(tokens)
        for note in meta.notes:
            console.print(note, markup=False)
        for split in shards.SPLITS:
            if len(Windows(tokens, split, model.context)) == 0:
                cause = f"The corpus is too small: {meta.tokens[split]} tokens for {split}, model.context={model.context}."
                raise UserError(cause, "Use more text (data.path), or lower model.context.")
        bigram = cached_bigram_loss(tokens, model.context, recipe.train.eval_sequences, model.vocab)
    train, held_out = (meta.tokens[split] for split in shards.SPLITS)
    console.print(f"{train:,} tokens to train on, {held_out:,} held out; bigram loss {bigram:.3f}")
    (run.path / TOKENIZER).mkdir(exist_ok=True)
    shutil.copy(tokens / "tokenizer.json", run.path / TOKENIZER)
    return tokens, bigram


def with_epochs(train: TrainSection, rows: int) -> TrainSection:
    """The section with the steps of its epochs."""
    if train.epochs is None:
        return train
    steps = max(1, math.ceil(train.epochs * rows / train.batch))
    try:
        return TrainSection(**(train.model_dump(by_alias=True) | {"steps": steps}))
    except ValidationError as error:
        cause = f"train.epochs={train.epochs:g} are {steps} steps of {rows:,} rows: {error.errors()[0]['msg']}."
        raise UserError(cause, "Lower train.warmup, or train for more epochs.") from None
