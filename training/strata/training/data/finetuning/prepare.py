"""Preparation of fine-tuning data: from sets to rendered inputs to packed rows, in a folder named after all that decides them."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strata.platform.errors import UserError, shown
from strata.platform.files import cache_dir
from strata.platform.recipe import DataSection
from strata.training.data.cached_folder import all_files, build_once
from strata.training.data.finetuning import store
from strata.training.data.finetuning.fitting import Fitted, Indices, fit
from strata.training.data.finetuning.packing import one_each, pack
from strata.training.data.finetuning.parallel import Progress, render_all
from strata.training.data.finetuning.rendered import UNLABELED, Job, RenderedInput
from strata.training.data.finetuning.rendering import load_tokenizer, tokenizer_digest
from strata.training.data.finetuning.sources import InputSet, open_sets
from strata.training.data.finetuning.splitting import held_out
from strata.training.data.finetuning.store import Meta, Objective, PlannedRows, SetMeta
from strata.training.data.left_out import LeftOut
from strata.training.data.shards import SPLITS, Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def prepare(
    data: DataSection,
    tokenizer_dir: Path,
    context: int,
    say: Callable[[str], None] = print,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Folder with the rows of a recipe's data, for the tokenizer in a folder of Hugging Face files. Builds it if it does not
    exist. `progress` receives the number of rendered inputs and of all."""
    sets, template = open_sets(data), _template(data.chat_template)
    digest = tokenizer_digest(tokenizer_dir)
    cache = cache_dir() / "rendered"
    jobs = [[Job(each, tokenizer_dir.absolute(), digest, template, data.mask, cache) for each in one.inputs] for one in sets]
    contents = [
        [one.title, one.kind, [[job.folder.name, job.source.name] for job in mine]] for one, mine in zip(sets, jobs, strict=True)
    ]
    key = [store.FORMAT, contents, digest, template, context, data.pack, data.mask, data.on_long, data.holdout]
    folder = cache_dir() / "rows" / hashlib.blake2b(json.dumps(key).encode(), digest_size=10).hexdigest()

    def build(building: Path) -> None:
        render_all(list({job.folder: job for mine in jobs for job in mine}.values()), progress)
        _assemble(building, data, context, sets, jobs, load_tokenizer(tokenizer_dir))

    build_once(folder, build, all_files, "rows", say)
    return folder


def _template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"data.chat_template={shown(path, 200)} cannot be read: {reason}.", "Correct the path.") from None


@dataclass(frozen=True)
class _FittedSet:
    """Rendered inputs of a set with their fitted documents."""

    source: InputSet
    inputs: list[RenderedInput]
    fitted: list[Fitted]

    def require_documents(self, context: int) -> None:
        """Refuses a set without examples, or with long ones only."""
        if not any(len(each.numbers) for each in self.inputs):
            raise UserError(f"The set '{self.source.title}' has no examples.", "Correct its path, or remove the set.")
        if not any(len(each.begins) for each in self.fitted):
            tokens, place = min(
                (int(tokens), str(rendered.place(int(example))))
                for rendered, each in zip(self.inputs, self.fitted, strict=True)
                for example, tokens in zip(each.long, each.lengths, strict=True)
            )
            raise UserError(
                f"All examples of the set '{self.source.title}' are longer than model.context={context} tokens: "
                f"the shortest has {tokens:,} ({place}).",
                "Raise model.context, set data.on_long=truncate, or shorten the examples.",
            )


def _assemble(
    folder: Path,
    data: DataSection,
    context: int,
    sets: Sequence[InputSet],
    jobs: Sequence[Sequence[Job]],
    tokenizer: "PreTrainedTokenizerFast",
) -> None:
    rendered = [[RenderedInput(job.source.name, job.folder) for job in mine] for mine in jobs]
    objective = _objective(sets, rendered)
    width = 2 if objective == "pairs" else 1
    plans: dict[Split, list[PlannedRows]] = {split: [] for split in SPLITS}
    notes, examples, before = list[str](), list[dict[str, int]](), 0
    for source, inputs in zip(sets, rendered, strict=True):
        one = _FittedSet(source, inputs, [fit(each, source.kind, width, context, data.on_long) for each in inputs])
        one.require_documents(context)
        examples.append(_plan(one, data, width, context, before, plans))
        notes += _notes(one, data, context)
        before += len(inputs)
    flat = [each for inputs in rendered for each in inputs]
    dtype = "uint16" if len(tokenizer) <= 2**16 else "uint32"
    counts = {split: store.write_rows(folder, split, plans[split], flat, dtype) for split in SPLITS}
    meta = Meta(
        context=context,
        dtype=dtype,
        pad=next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None),
        objective=objective,
        sets=[
            SetMeta(one.title, one.kind, examples[number], {split: counts[split][number] for split in SPLITS})
            for number, one in enumerate(sets)
        ],
        inputs=[[each.name, each.meta.unit] for each in flat],
        special=_special(flat, tokenizer),
        notes=notes,
    )
    store.write_meta(folder, meta)


def _objective(sets: Sequence[InputSet], rendered: Sequence[Sequence[RenderedInput]]) -> Objective:
    """Kind of loss that the documents are for. All preference data of a run has the same form."""
    if sets[0].kind != "preference":
        return "tokens"
    first: dict[bool, str] = {}
    for each in (each for inputs in rendered for each in inputs):
        labeled = each.labels != UNLABELED
        for form in (True, False):
            if form not in first and (labeled == form).any():
                first[form] = str(each.place(int(np.argmax(labeled == form))))
    if len(first) == 2:
        cause = f"The data has pairs ({first[False]}) and answers with a label ({first[True]}): their losses differ."
        raise UserError(cause, "Use one of the two forms.")
    return "labels" if True in first else "pairs"


def _plan(
    one: _FittedSet, data: DataSection, width: int, context: int, before: int, plans: dict[Split, list[PlannedRows]]
) -> dict[str, int]:
    """Adds the rows of a set to the plans, and returns the number of examples in each split. The set's inputs are numbered from
    `before` on."""

    def joined(arrays: Sequence[Indices]) -> Indices:
        return np.concatenate(arrays)

    numbers = joined([np.full(len(each.begins), before + number) for number, each in enumerate(one.fitted)])
    begins, ends = joined([each.begins for each in one.fitted]), joined([each.ends for each in one.fitted])
    examples = joined([each.examples for each in one.fitted])
    hashes = np.concatenate([source.hashes[each.examples] for source, each in zip(one.inputs, one.fitted, strict=True)])
    outside = held_out(hashes, data.holdout)
    if outside is None:
        place = one.inputs[int(numbers[0]) - before].place(int(examples[0]))
        raise UserError(
            f"The set '{one.source.title}' cannot be split into training and validation: it has one example only ({place}), or "
            "copies of it.",
            "Add a different example.",
        )
    found = {}
    for split in SPLITS:
        mine = outside == (split == "validation")
        lengths = (ends - begins)[mine].reshape(-1, width).sum(axis=1)
        order, offsets = pack(lengths, context) if data.pack else one_each(len(lengths))
        plans[split].append(PlannedRows(order, offsets, width, numbers[mine], begins[mine], ends[mine], examples[mine]))
        found[str(split)] = len(np.unique(np.stack([numbers[mine], examples[mine]]), axis=1).T)
    return found


def _notes(one: _FittedSet, data: DataSection, context: int) -> list[str]:
    """Lines about skipped files and examples, and about special tokens in texts."""
    left_out = LeftOut(files=dict(one.source.others))
    for each in one.inputs:
        meta = each.meta
        left_out.read += meta.read
        left_out.documents += meta.documents
        left_out.empty += meta.empty
        if meta.skipped is not None:
            left_out.files[Path(each.name)] = meta.skipped
        if meta.first_empty and not left_out.first_empty:
            left_out.first_empty = f"{meta.first_empty} of {each.name}"
    lines = left_out.lines()
    long = [(each, fitted.long) for each, fitted in zip(one.inputs, one.fitted, strict=True) if len(fitted.long)]
    if long:
        count, total = sum(len(examples) for _, examples in long), sum(len(each.numbers) for each in one.inputs)
        why = f"longer than model.context={context} tokens"
        if data.on_long == "truncate":
            why = f"without a counted token in the first {context} (model.context)"
        first = long[0][0].place(int(long[0][1][0]))
        lines.append(f"{count:,} of {total:,} examples left out: {why}, the first at {first}.")
    if named := [each for each in one.inputs if each.meta.named]:
        count = sum(each.meta.named for each in named)
        how = "encoded as text" if one.source.kind == "text" else "read as special tokens"
        first_named = f"{named[0].meta.unit} {named[0].meta.first_named:,} of {named[0].name}"
        lines.append(f"{count:,} examples contain names of special tokens, which are {how}, the first at {first_named}.")
    return lines


def _special(inputs: Sequence[RenderedInput], tokenizer: "PreTrainedTokenizerFast") -> list[tuple[int, str, str]]:
    """Added tokens in use, with their names and the first examples with them."""
    found: dict[int, str] = {}
    for each in inputs:
        for token, number in each.meta.special.items():
            found.setdefault(int(token), f"{each.meta.unit} {number:,} of {each.name}")
    return [(token, str(tokenizer.convert_ids_to_tokens(token)), place) for token, place in sorted(found.items())]
