"""Quantizes a model folder: loads, calibrates, rounds, writes, reads back and compares, and renames when all of it is done."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoTokenizer

from strata.platform import file_errors
from strata.platform.errors import UserError, shown
from strata.training.deployment.building import building
from strata.training.quantization import folder as folders
from strata.training.quantization import layers, model_folder, quality, report, rows
from strata.training.quantization.formats import Format
from strata.training.quantization.report import Report, Side
from strata.training.quantization.rounding import Rounding
from strata.training.quantization.rows import TokenRows
from strata.training.quantization.source import Source, require_supported


@dataclass(frozen=True)
class Request:
    """A source's format, target and calibration."""

    format: Format
    to: Path | None  # None: beside the source
    data: Path | None  # None: the data of the run
    samples: int  # calibration rows
    group_size: int | None  # None: the largest that fits every layer
    head: bool  # quantize the output layer, too
    seed: int
    device: str | None  # None: a GPU if there is one


def quantize(source: Source, request: Request, console: Console) -> Path:
    """Returns the new folder. Nothing has its name before it is complete and was read back."""
    target = (request.to or source.target(request.format)).absolute()
    if os.path.lexists(target):
        raise UserError(f"{target} exists already.", "Choose another folder with --to, or remove it.")
    require_supported(source.folder)
    device = model_folder.device_of(request.device)
    console.print(f"loading {source.folder}", markup=False)
    model = model_folder.load(source.folder, device)
    plan = layers.plan(model, request.format, request.group_size, request.head)
    folders.require_names(source.folder, plan)
    folders.require_space(source.folder, target, plan)
    tokens = _rows(source, request, model_folder.context_of(model.config), console)
    _require_vocabulary(tokens, model)
    _describe(plan, tokens, console)
    console.print(f"measuring on {len(tokens.held_out)} held-out rows", markup=False)
    with _bar("before", len(tokens.held_out), console) as advance:
        before = Side(quality.perplexity(model, tokens.held_out, advance), _weights_bytes(source.folder))
    reference = quality.greedy(model, tokens.held_out)

    with building(target) as built, _named(target):
        stored = model_folder.stored_dtype(model.config)
        rounding = Rounding(model, plan, stored)
        inputs = torch.from_numpy(tokens.calibration[:, :-1]).to(device) if plan.format.calibrated else None
        with _bar("layers", len(layers.decoder_layers(model)), console) as advance:
            rounding.run(inputs, advance)
        state = model.state_dict()
        changed = {name: state[name] for name in state if name.rpartition(".")[0] in rounding.changed}
        console.print("writing")
        folders.write(source.folder, built, plan, rounding.tensors, changed, stored)
        del model, rounding, state, changed
        gc.collect()
        after, agreement = _read_back(built, device, tokens, reference, console)
        written = Report(source.name, plan, tokens, request.seed, before, after, agreement, reference.tokens)
        report.write(written, built)
        built.chmod(0o755)
        if os.path.lexists(target):  # made by another process meanwhile
            raise UserError(f"{target} exists already.", "Choose another folder with --to, or remove it.")
        built.rename(target)
    report.show(written, console)
    return target


def _read_back(
    built: Path, device: torch.device, tokens: TokenRows, reference: quality.Greedy, console: Console
) -> tuple[Side, quality.Agreement]:
    """Loads the written folder as any user of transformers would and measures it, with its 8-bit activations if it has them."""
    model = model_folder.load(built, device, quantized=True)
    console.print("reading back")
    with _bar("after", len(tokens.held_out) + len(reference.ids), console) as advance:
        side = Side(quality.perplexity(model, tokens.held_out, advance), _weights_bytes(built))
        return side, quality.agreement(model, reference, advance)


def _rows(source: Source, request: Request, context: int, console: Console) -> TokenRows:
    if request.data is not None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
        except Exception as error:  # transformers and tokenizers raise many kinds
            cause = f"The tokenizer in {source.folder} cannot be loaded: {shown(error, 200)}"
            raise UserError(cause, "Restore the tokenizer's files in that folder.") from None
        return rows.of_file(request.data, tokenizer, context, request.samples, request.seed)
    if source.run is None:
        cause = f"{source.folder} is not a run, so it has no data for calibration and comparison."
        raise UserError(cause, "Name a text, JSONL or Parquet file with --data.")
    return rows.of_run(source.run, context, request.samples, request.seed, console)


def _require_vocabulary(tokens: TokenRows, model: Any) -> None:
    largest = max(int(tokens.calibration.max()), int(tokens.held_out.max()))
    if largest >= model.config.vocab_size:
        cause = f"The data has the token {largest}, and the model has embeddings for {model.config.vocab_size} tokens only."
        raise UserError(cause, "Restore the tokenizer of this model.")


def _describe(plan: layers.Plan, tokens: TokenRows, console: Console) -> None:
    groups = f", groups of {plan.group_size}" if plan.group_size else ""
    console.print(f"{len(plan.quantized)} linear layers as {plan.format.name}{groups}", markup=False)
    if plan.unfit:
        console.print(f"{len(plan.unfit)} layers stay unquantized: {plan.group_size} does not divide their inputs", markup=False)
    if plan.format.calibrated:
        count, width = tokens.calibration.shape
        console.print(f"calibrating with {count} rows of {width - 1} tokens, {tokens.origin}", markup=False)


def _weights_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@contextmanager
def _bar(title: str, total: int, console: Console) -> Iterator[Callable[[], None]]:
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        row = bar.add_task("", total=total)
        yield lambda: bar.advance(row)


@contextmanager
def _named(target: Path) -> Iterator[None]:
    """Errors of a full disk as file errors that name the target: libraries in Rust raise types of their own for them."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        number = file_errors.number_of(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(target)) from None
