"""Token ids of the prompts of `train.samples`, as the endpoint of the exported model would see them."""

import json
from collections.abc import Sequence
from pathlib import Path

from strata.platform.errors import UserError, shown
from strata.platform.recipe import Recipe, SamplesSection
from strata.training.data import tokenizer as bpe
from strata.training.data.finetuning.rendering import load_tokenizer
from strata.training.evaluation.samples import Prompts

FILE = "tokenizer.json"
ENDS = ("config.json", "generation_config.json")  # files with the tokens at which generation stops


def require_supported(recipe: Recipe) -> None:
    parallel = recipe.parallel
    if recipe.train.samples is None or parallel.pipeline == 1:
        return
    if parallel.schedule == "dualpipev":
        cause = "train.samples is not supported with parallel.schedule=dualpipev, which evaluates whole steps only."
        raise UserError(cause, "Remove train.samples, or set parallel.schedule=1f1b.")
    if recipe.train.preference:
        cause = f"train.samples is not supported with train.preference and a pipeline (parallel.pipeline={parallel.pipeline})."
        raise UserError(cause, "Remove train.samples, or set parallel.pipeline=1.")


def of_corpus(section: SamplesSection, folder: Path, context: int) -> Prompts:
    """Prompts of a run from random weights, with the tokenizer in `folder`. A text begins after the end of another."""
    words = bpe.load(folder)
    ids = [words.encode(prompt, add_special_tokens=False).ids or [bpe.END_OF_TEXT_ID] for prompt in section.prompts]
    return _fitting(section, ids, (bpe.END_OF_TEXT_ID,), folder, context)


def of_imported(section: SamplesSection, base: Path, context: int, kinds: set[str]) -> Prompts:
    """Prompts of a fine-tuning run: messages of a user if the data are conversations, else beginnings of texts."""
    words = load_tokenizer(base)
    begin = [words.bos_token_id] if words("").input_ids[:1] == [words.bos_token_id] else []
    ids = []
    for prompt in section.prompts:
        if kinds & {"chat", "preference"} and words.chat_template:
            messages = [{"role": "user", "content": prompt}]
            text = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids.append(words(text, add_special_tokens=False).input_ids)
        else:
            ids.append([*begin, *words(prompt, add_special_tokens=False).input_ids])
    return _fitting(section, ids, _ends(base, words.eos_token_id), base, context)


def _ends(base: Path, end: int | None) -> tuple[int, ...]:
    found = set() if end is None else {end}
    for name in ENDS:
        if (base / name).is_file():
            given = json.loads((base / name).read_bytes()).get("eos_token_id")
            found |= set(given if isinstance(given, list) else [given]) - {None}
    return tuple(sorted(found))


def _fitting(section: SamplesSection, ids: Sequence[Sequence[int]], ends: tuple[int, ...], folder: Path, context: int) -> Prompts:
    for prompt, tokens in zip(section.prompts, ids, strict=True):
        if not tokens:
            raise UserError(f"train.samples.prompts: {shown(repr(prompt))} has no tokens.", "Write a prompt of at least a word.")
        if len(tokens) + section.tokens > context:
            cause = f"train.samples.prompts: {shown(repr(prompt))} has {len(tokens)} tokens and continues for {section.tokens}"
            raise UserError(f"{cause}, and model.context={context}.", "Shorten the prompt, or lower train.samples.tokens.")
    if not (folder / FILE).is_file():
        raise UserError(f"train.samples: {folder} has no {FILE}, with which workers write text.", "Remove train.samples.")
    return Prompts(section.prompts, tuple(map(tuple, ids)), section.tokens, ends, folder / FILE)
