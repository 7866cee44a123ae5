"""Greedy generation without a KV cache, and its records."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from strata.platform.errors import UserError
from strata.platform.recipe import Recipe, SamplesSection
from strata.platform.runs import Run
from strata.training.data import tokenizer
from strata.training.evaluation import sample_prompts, samples
from strata.training.metrics import records

from .conftest import CONTEXT


@pytest.fixture(scope="module")
def words(model_folder: Path) -> Tokenizer:
    return tokenizer.load(model_folder)


class Counting:
    """Model whose next token is the last one plus one, and that remembers the shapes it was called with."""

    def __init__(self, end_after: int | None = None) -> None:
        self.end_after, self.shapes = end_after, list[tuple[int, ...]]()

    def __call__(self, tokens_bt: Tensor, last_b: Tensor) -> Tensor:
        self.shapes.append(tuple(tokens_bt.shape))
        current_b = tokens_bt[torch.arange(len(last_b)), last_b]
        return current_b + 1 if self.end_after is None else torch.where(current_b >= self.end_after, 0, current_b + 1)


def test_continuations_of_prompts_of_different_lengths() -> None:
    model = Counting()
    assert samples.generate(model, [(7, 8, 9), (3,)], 4, (0,), CONTEXT) == [[10, 11, 12, 13], [4, 5, 6, 7]]
    assert model.shapes == [(2, CONTEXT)] * 4


def test_continuations_end_before_an_end_token() -> None:
    model = Counting(end_after=12)
    assert samples.generate(model, [(10,), (12,), (5,)], 9, (0, 8), CONTEXT) == [[11, 12], [], [6, 7]]
    assert len(model.shapes) == 3  # all rows have ended


@pytest.mark.parametrize(("context", "multiple", "width"), [(1000, 64, 64), (40, 64, 40), (1000, 96, 96), (1000, 1000, 1000)])
def test_width_is_the_least_multiple_or_the_context(context: int, multiple: int, width: int) -> None:
    model = Counting()
    samples.generate(model, [(1,)], 8, (), context, multiple=multiple)
    assert set(model.shapes) == {(1, width)}


def test_width_grows_by_its_multiple() -> None:
    model = Counting()
    for most in (63, 64):  # with a prompt of one token
        samples.generate(model, [(1,)], most, (), 1000)
    assert sorted(set(model.shapes)) == [(1, 64), (1, 128)]


def test_prompts_must_fit() -> None:
    with pytest.raises(AssertionError, match="context=64"):
        samples.generate(Counting(), [(1,)], CONTEXT, (), CONTEXT)


def test_padding_does_not_change_a_real_model(model_folder: Path, words: Tokenizer) -> None:
    """Against transformers' own greedy generation, prompt by prompt."""
    from transformers import AutoModelForCausalLM

    section = SamplesSection(prompts=("the cat sat", "a", "where rain fell on the big"), tokens=12)
    prompts = sample_prompts.of_corpus(section, model_folder, CONTEXT)
    model = AutoModelForCausalLM.from_pretrained(model_folder)

    def greedy(tokens_bt: Tensor, last_b: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(tokens_bt).logits[torch.arange(len(last_b)), last_b].argmax(-1)
        return found

    texts = prompts.decoder()(samples.generate(greedy, prompts.ids, prompts.tokens, prompts.ends, CONTEXT))
    assert tuple(texts) == section.prompts
    for prompt, text in texts.items():
        ids = words.encode(prompt).ids
        expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        assert text == words.decode(expected[: expected.index(0)] if 0 in expected else expected, skip_special_tokens=False)


def test_empty_prompt_begins_with_the_end_token(model_folder: Path) -> None:
    assert sample_prompts.of_corpus(SamplesSection(prompts=("",)), model_folder, CONTEXT).ids == ((0,),)


def test_prompts_of_conversations_are_rendered_by_the_chat_template(model_folder: Path, words: Tokenizer) -> None:
    section = SamplesSection(prompts=("the cat",), tokens=4)
    chat = sample_prompts.of_imported(section, model_folder, CONTEXT, {"chat"})
    assert words.decode(list(chat.ids[0])) == "user: the cat\nassistant:" and chat.ends == (0,)
    plain = sample_prompts.of_imported(section, model_folder, CONTEXT, {"completion"})
    assert words.decode(list(plain.ids[0])) == "the cat"


def test_long_prompt_is_refused(model_folder: Path) -> None:
    section = SamplesSection(prompts=("the cat sat on a mat " * 40,), tokens=4)
    with pytest.raises(UserError, match=r"continues for 4, and model\.context=64") as refusal:
        sample_prompts.of_corpus(section, model_folder, CONTEXT)
    assert "train.samples.tokens" in refusal.value.fix


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pipeline": 2}, None),
        ({"pipeline": 2, "schedule": "dualpipev"}, "parallel.schedule=dualpipev"),
    ],
)
def test_layouts_that_cannot_generate_are_refused(small_recipe: Recipe, changes: dict[str, object], named: str | None) -> None:
    train = small_recipe.train.model_copy(update={"samples": SamplesSection(prompts=("a",))})
    parallel = small_recipe.parallel.model_copy(update=changes)
    recipe = small_recipe.model_copy(update={"train": train, "parallel": parallel})
    if named is None:
        sample_prompts.require_supported(recipe)
        return
    with pytest.raises(UserError, match=named):
        sample_prompts.require_supported(recipe)
    sample_prompts.require_supported(recipe.model_copy(update={"train": small_recipe.train}))


def write(run: Run, step: int, texts: dict[str, str]) -> None:
    records.append(samples.path(run), *samples.lines(step, texts))


def test_samples_are_read_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert samples.read(run) == []
    write(run, 10, {"a": "1", "b": "é\n2"})
    write(run, 20, {"a": "3"})
    assert samples.read(run) == [
        {"step": 10, "prompt": "a", "text": "1"},
        {"step": 10, "prompt": "b", "text": "é\n2"},
        {"step": 20, "prompt": "a", "text": "3"},
    ]
    assert json.loads(samples.path(run).read_text().splitlines()[2]) == {"step": 20, "prompt": "a", "text": "3"}


def test_resumed_run_removes_the_steps_that_it_repeats(tmp_path: Path) -> None:
    run = Run(tmp_path)
    samples.cut(run, 10)  # no samples yet
    for step in (10, 20, 30):
        write(run, step, {"a": str(step)})
    with samples.path(run).open("ab") as file:
        file.write(b'{"step": 40, "prompt": "a", "te')  # truncated by a kill
    assert [sample["step"] for sample in samples.read(run)] == [10, 20, 30]
    samples.cut(run, 20)
    write(run, 30, {"a": "again"})
    assert [(sample["step"], sample["text"]) for sample in samples.read(run)] == [(10, "10"), (20, "20"), (30, "again")]
