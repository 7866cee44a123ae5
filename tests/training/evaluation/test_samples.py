"""Greedy generation without a KV cache, and its records."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from strata.platform.runs import Run
from strata.training.data import tokenizer
from strata.training.evaluation import samples

from .conftest import CONTEXT


@pytest.fixture(scope="module")
def words(model_folder: Path) -> Tokenizer:
    return tokenizer.load(model_folder)


class Counting:
    """Model whose next token is the last one plus one, and that remembers the shapes it was called with."""

    def __init__(self, vocab: int = 512, end_after: int | None = None) -> None:
        self.vocab, self.end_after, self.shapes = vocab, end_after, list[tuple[int, ...]]()

    def __call__(self, tokens_bt: Tensor) -> Tensor:
        self.shapes.append(tuple(tokens_bt.shape))
        following = tokens_bt + 1
        if self.end_after is not None:
            following = torch.where(tokens_bt >= self.end_after, 0, following)
        return torch.nn.functional.one_hot(following % self.vocab, self.vocab).float()


def ids(words: Tokenizer, text: str) -> list[int]:
    found: list[int] = words.encode(text).ids
    return found


def test_continuations_of_prompts_of_different_lengths(words: Tokenizer) -> None:
    model = Counting()
    prompts = ["the cat", "a", "the dog ran to its big red house"]
    texts = samples.generate(model, words, prompts, 5, CONTEXT)
    for prompt, text in zip(prompts, texts, strict=True):
        last = ids(words, prompt)[-1]
        assert text == words.decode([last + step for step in range(1, 6)])
    assert model.shapes == [(3, CONTEXT)] * 5


def test_text_ends_at_the_end_token_but_every_pass_runs(words: Tokenizer) -> None:
    [first] = ids(words, "a")
    model = Counting(end_after=first + 2)
    assert samples.generate(model, words, ["a"], 6, CONTEXT) == [words.decode([first + 1, first + 2])]
    assert len(model.shapes) == 6  # ranks that share a model stay in step


def test_first_token_may_be_the_end(words: Tokenizer) -> None:
    assert samples.generate(Counting(end_after=0), words, ["a"], 3, CONTEXT) == [""]


def test_empty_prompt_begins_with_the_end_token(words: Tokenizer) -> None:
    assert samples.generate(Counting(), words, [""], 3, CONTEXT) == [words.decode([1, 2, 3])]
    assert samples.generate(Counting(), words, [""], 2, CONTEXT, end=7) == [words.decode([8, 9])]


def test_long_prompt_loses_its_beginning(words: Tokenizer) -> None:
    model, seen = Counting(), []

    def watched(tokens_bt: Tensor) -> Tensor:
        seen.append(tokens_bt.clone())
        return model(tokens_bt)

    prompt = "the cat sat on a mat " * 40
    samples.generate(watched, words, [prompt], 4, CONTEXT)
    assert seen[0].shape == (1, CONTEXT) and seen[0][0, : CONTEXT - 4].tolist() == ids(words, prompt)[-(CONTEXT - 4) :]


@pytest.mark.parametrize(("context", "width"), [(1000, 64), (64, 64), (40, 40)])
def test_width_is_the_least_multiple_or_the_context(words: Tokenizer, context: int, width: int) -> None:
    model = Counting()
    samples.generate(model, words, ["a"], 8, context)
    assert set(model.shapes) == {(1, width)}


def test_width_grows_by_its_multiple(words: Tokenizer) -> None:
    model = Counting()
    for max_tokens in (63, 64):  # with a prompt of one token
        samples.generate(model, words, ["a"], max_tokens, 1000)
    assert sorted(set(model.shapes)) == [(1, 64), (1, 128)]


@pytest.mark.parametrize("max_tokens", [0, CONTEXT])
def test_impossible_lengths(words: Tokenizer, max_tokens: int) -> None:
    with pytest.raises(AssertionError, match="max_tokens"):
        samples.generate(Counting(), words, ["a"], max_tokens, CONTEXT)


def test_no_prompts_need_no_pass(words: Tokenizer) -> None:
    model = Counting()
    assert samples.generate(model, words, [], 3, CONTEXT) == [] and not model.shapes


def test_padding_does_not_change_a_real_model(model_folder: Path, words: Tokenizer) -> None:
    """Against transformers' own greedy generation, prompt by prompt."""
    from transformers import AutoModelForCausalLM

    prompts = ["the cat sat", "a", "where rain fell on the big"]
    texts = samples.of_folder(model_folder, prompts, 12)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    for prompt, text in zip(prompts, texts, strict=True):
        found = ids(words, prompt)
        greedy = model.generate(torch.tensor([found]), max_new_tokens=12, do_sample=False)[0, len(found) :].tolist()
        assert text == words.decode(greedy[: greedy.index(0)] if 0 in greedy else greedy, skip_special_tokens=False)


def test_records_are_read_back_and_repeated_steps_replaced(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert samples.read(run) == []
    samples.record(run, 10, ["a", "b"], ["1", "é\n2"])
    samples.record(run, 20, ["a"], ["3"])
    samples.record(run, 10, ["a"], ["4"])
    assert samples.read(run) == [
        {"step": 10, "prompt": "a", "text": "4"},
        {"step": 10, "prompt": "b", "text": "é\n2"},
        {"step": 20, "prompt": "a", "text": "3"},
    ]
    assert len(samples.path(run).read_text().splitlines()) == 4
    assert json.loads(samples.path(run).read_text().splitlines()[2]) == {"step": 20, "prompt": "a", "text": "3"}


def test_line_that_a_kill_truncated_costs_only_itself(tmp_path: Path) -> None:
    run = Run(tmp_path)
    samples.record(run, 1, ["a"], ["x"])
    with samples.path(run).open("ab") as file:
        file.write(b'{"step": 2, "prompt": "a", "te')
    assert [sample["step"] for sample in samples.read(run)] == [1]
    samples.record(run, 3, ["a"], ["y"])
    assert [sample["step"] for sample in samples.read(run)] == [1, 3]


def test_prompts_and_texts_must_match(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="zip"):
        samples.record(Run(tmp_path), 1, ["a", "b"], ["x"])
    assert samples.read(Run(tmp_path)) == []
