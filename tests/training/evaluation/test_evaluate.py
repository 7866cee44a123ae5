"""Evaluation of a model folder with lm-evaluation-harness, against scores that are computed here."""

import io
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from strata.platform.errors import UserError
from strata.platform.runs import Run
from strata.training import python_api
from strata.training.checkpoint import model_card
from strata.training.data import tokenizer
from strata.training.evaluation import evaluate as running
from strata.training.evaluation.subject import resolve
from strata.training.metrics import evaluations
from strata.training.metrics.evaluations import Evaluation, Score, Settings

from .conftest import CONTEXT

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")


def evaluated(name: str | Path, *tasks: str, include: Path, output: io.StringIO | None = None, **settings: Any) -> Evaluation:
    console = Console(file=output or io.StringIO(), width=200)
    return running.evaluate(resolve(str(name)), Settings(tasks, **settings), console, include=[include], device="cpu")


def logprobs(folder: Path, text: str, continuation: str) -> tuple[float, int]:
    """Log probability of the continuation, and its number of characters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt, whole = words(text).input_ids, words(text + continuation).input_ids
    with torch.no_grad():
        rows = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    return sum(float(rows[at - 1, whole[at]]) for at in range(len(prompt), len(whole))), len(continuation)


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **config: Any) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
        "test_split": "test",
        "metadata": {"version": 1},
        **config,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "target_delimiter": "",
}


def test_scores_equal_those_of_the_model(run: Run, own_task: Path) -> None:
    found = evaluated("r", "words", include=own_task)
    rows = [json.loads(line) for line in (own_task / "rows.jsonl").read_text().splitlines()]
    right, normalized = 0, 0
    for row in rows:
        scored = [logprobs(run.export, row["text"], choice) for choice in row["choices"]]
        right += max(range(3), key=lambda at: scored[at][0]) == row["answer"]
        normalized += max(range(3), key=lambda at: scored[at][0] / scored[at][1]) == row["answer"]
    scores = {score.metric: score for score in found.scores}
    assert scores["acc"].value == right / 4 and scores["acc_norm"].value == normalized / 4
    assert scores["acc"].stderr == pytest.approx(math.sqrt(right / 4 * (1 - right / 4) / 3))
    assert (scores["acc"].samples, scores["acc"].shots, scores["acc"].version) == (4, 0, "3.5")
    assert scores["acc"].higher_is_better is True and scores.keys() == {"acc", "acc_norm"}
    assert (found.subject, found.step, found.truncated, found.benchmark) == ("r", 5, 0, "eval")
    assert found.versions["lm-eval"] and found.seconds > 0


def test_limit_and_batch_do_not_change_the_samples(model_folder: Path, own_task: Path) -> None:
    full = evaluated(model_folder, "words", include=own_task)
    for batch in (1, 3):
        console = Console(file=io.StringIO())
        settings = Settings(("words",), limit=4)
        again = running.evaluate(resolve(str(model_folder)), settings, console, include=[own_task], batch=batch, device="cpu")
        assert again.scores == full.scores
    limited = evaluated(model_folder, "words", include=own_task, limit=3)
    assert {score.samples for score in limited.scores} == {3}


def test_result_is_stored_in_the_run_and_its_card(run: Run, own_task: Path, tmp_path: Path) -> None:
    found = evaluated("r", "words", include=own_task)
    path = running.store(resolve("r"), found, tmp_path / "also" / "result.json")
    assert path.parent == run.path / "evaluations" and evaluations.read_all(run) == [found]
    assert evaluations.read(tmp_path / "also" / "result.json") == found
    card = (run.export / "README.md").read_text()
    assert "| words | acc |" in card and model_card.origin_of(run.export) == model_card.Origin(5, "none")


def test_result_of_a_folder_is_stored_in_the_cache(home: Path, model_folder: Path, own_task: Path) -> None:
    before = sorted(path.name for path in model_folder.iterdir())
    found = python_api.evaluate(model_folder, ["words"], include=[own_task])
    [path] = (home / ".strata" / "evaluations").iterdir()
    assert evaluations.read(path) == found and found.subject == model_folder.name and found.step is None
    assert sorted(path.name for path in model_folder.iterdir()) == before


def test_task_that_comes_with_strata_needs_no_network(
    model_folder: Path, own_task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = evaluated(model_folder, "python_lines", include=own_task, truncate=True)
    assert {score.samples for score in found.scores} == {48} and {score.metric for score in found.scores} == {"acc", "acc_norm"}


def test_rows_of_the_task_that_comes_with_strata() -> None:
    from strata.training.evaluation.tasks import python_lines

    rows = python_lines.load(version=1.0)["test"]
    assert len(rows) == 48 and len(set(rows["text"])) == 48
    assert all(len(set(choices)) == 4 for choices in rows["choices"])
    assert {rows["answer"].count(place) for place in range(4)} == {12}  # chance is a quarter, also for a constant answer


def long_text(model_folder: Path, tokens: int) -> str:
    """Text of exactly so many tokens."""
    words = tokenizer.load(model_folder)
    text = "a" * tokens * 4
    while len(words.encode(text).ids) > tokens:
        text = text[:-1]
    assert len(words.encode(text).ids) == tokens
    return text


def test_prompt_that_does_not_fit_is_refused_with_the_task(model_folder: Path, own_task: Path) -> None:
    """The last token is not an input, so one more than the context can be scored."""
    fits, long = (long_text(model_folder, CONTEXT + more) for more in (0, 1))
    for name, text in (("fits", fits), ("long", long)):
        write_task(own_task, name, [{"text": text, "choices": [" ", "\n"], "answer": 0}], **CHOICE)
    assert evaluated(model_folder, "fits", include=own_task).truncated == 0
    with pytest.raises(UserError) as caught:
        evaluated(model_folder, "words", "long", include=own_task)
    assert caught.value.cause == f"Task 'long' has a request of {CONTEXT + 2} tokens, and the model's context is {CONTEXT}."
    assert "--truncate" in caught.value.fix
    assert evaluated(model_folder, "fits", "long", include=own_task, truncate=True).truncated == 2  # both choices


def test_answer_that_does_not_fit_is_refused_with_truncate_too(model_folder: Path, own_task: Path) -> None:
    write_task(own_task, "huge", [{"text": "a", "choices": ["b" * 900, "c"], "answer": 0}], **CHOICE)
    with pytest.raises(UserError, match="Task 'huge'") as caught:
        evaluated(model_folder, "huge", include=own_task, truncate=True)
    assert "--truncate" not in caught.value.fix


GENERATE = {
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def test_generation_is_greedy(model_folder: Path, own_task: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompts = ["the cat sat", "where rain"]
    model, words = AutoModelForCausalLM.from_pretrained(model_folder), tokenizer.load(model_folder)
    ids = words.encode(prompts[0]).ids
    first = words.decode(model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :].tolist())
    rows = [{"text": prompts[0], "answer": first}, {"text": prompts[1], "answer": "something else"}]
    write_task(own_task, "answers", rows, **GENERATE, generation_kwargs={"max_gen_toks": 6, "until": ["<never>"]})
    [score] = evaluated(model_folder, "answers", include=own_task).scores
    assert (score.metric, score.value, score.samples) == ("exact_match", 0.5, 2)


@pytest.mark.parametrize(
    ("tokens", "prompt", "truncate", "fits"),
    [(8, 56, False, True), (8, 57, False, False), (8, 57, True, True), (64, 1, True, False)],
)
def test_generation_must_fit(model_folder: Path, own_task: Path, tokens: int, prompt: int, truncate: bool, fits: bool) -> None:
    rows = [{"text": long_text(model_folder, prompt), "answer": "x"}]
    write_task(own_task, "answers", rows, **GENERATE, generation_kwargs={"max_gen_toks": tokens, "until": ["<never>"]})
    if fits:
        assert evaluated(model_folder, "answers", include=own_task, truncate=truncate).truncated == truncate
        return
    with pytest.raises(UserError, match=f"Task 'answers' has a request of {prompt + tokens} tokens"):
        evaluated(model_folder, "answers", include=own_task, truncate=truncate)


def test_long_texts_are_scored_in_windows(model_folder: Path, own_task: Path) -> None:
    config = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    metrics = [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}]
    write_task(own_task, "texts", [{"text": "the cat sat on a mat " * 20}], **config, metric_list=metrics)
    scores = {score.metric: score.value for score in evaluated(model_folder, "texts", include=own_task).scores}
    assert scores.keys() == {"bits_per_byte", "word_perplexity"} and 0 < scores["bits_per_byte"] < 100


def test_groups_are_scored_with_their_tasks(model_folder: Path, own_task: Path) -> None:
    write_task(own_task, "one", [{"text": "a", "choices": ["b", "c"], "answer": 0}] * 2, **CHOICE)
    group = {"group": "both", "task": ["one", "words"], "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}
    (own_task / "both.yaml").write_text(yaml.safe_dump(group))
    scores = {(score.task, score.metric): score for score in evaluated(model_folder, "both", include=own_task).scores}
    one, words = scores["one", "acc"], scores["words", "acc"]
    assert scores["both", "acc"].value == pytest.approx((one.value * 2 + words.value * 4) / 6)


def test_progress_in_a_log_and_in_a_terminal(model_folder: Path, own_task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.training.evaluation.progress.LINE_EVERY_S", 0.0)
    output = io.StringIO()
    evaluated(model_folder, "words", include=own_task, output=output)
    assert "words: 12 of 12 requests" in output.getvalue()
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    running.evaluate(resolve(str(model_folder)), Settings(("words",)), terminal, include=[own_task], device="cpu")
    assert "words" in terminal.file.getvalue()  # type: ignore[attr-defined]


def test_chat_prompts_have_the_template(model_folder: Path, own_task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    from strata.training.evaluation.local_model import LocalModel

    words, seen = AutoTokenizer.from_pretrained(model_folder), list[str]()
    chat = [{"role": "user", "content": "the cat sat on a"}]
    prompt = words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    encode = LocalModel.tok_encode
    monkeypatch.setattr(
        LocalModel, "tok_encode", lambda self, text, *rest, **more: seen.append(text) or encode(self, text, *rest, **more)
    )
    evaluated(model_folder, "words", include=own_task, chat=True)
    assert prompt.startswith("user: ") and f"{prompt} mat" in seen
    seen.clear()
    evaluated(model_folder, "words", include=own_task)
    assert "the cat sat on a mat" in seen and not any("user:" in text for text in seen)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_damaged_model_folder(run: Run, own_task: Path, file: str) -> None:
    (run.export / file).write_bytes(b"{")
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        evaluated("r", "words", include=own_task)
    assert "\n" not in caught.value.cause and len(caught.value.cause) < 500
    assert evaluations.read_all(run) == []


@pytest.mark.parametrize("device", ["nonsense", "cuda"])
def test_devices_that_do_not_exist(model_folder: Path, own_task: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match=device):
        running.evaluate(
            resolve(str(model_folder)), Settings(("words",)), Console(file=io.StringIO()), include=[own_task], device=device
        )


def test_logs_and_environment_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    logger = logging.getLogger("lm_eval")
    logger.setLevel(logging.INFO)
    with pytest.raises(KeyboardInterrupt), running._quiet():
        assert logger.level == logging.CRITICAL and os.environ["TQDM_DISABLE"] == "1"
        raise KeyboardInterrupt
    assert logger.level == logging.INFO and "TQDM_DISABLE" not in os.environ
    monkeypatch.setenv("TQDM_DISABLE", "0")
    with running._quiet():
        pass
    assert os.environ["TQDM_DISABLE"] == "0"


def test_scores_of_the_harness_with_odd_values() -> None:
    results = {
        "results": {
            "t": {
                "alias": "t",
                "name": "t",
                "sample_len": 7,
                "acc,none": 1,
                "acc_stderr,none": "N/A",
                "em,strict": 0.5,
                "em_stderr,strict": math.nan,
                "note,none": "text",
                "flag,none": True,
            }
        },
        "versions": {},
        "n-shot": {"t": 2},
        "n-samples": {},
        "higher_is_better": {"t": {"em": False}},
    }
    assert list(running.scores(results)) == [
        Score("t", "acc", 1.0, None, 7, 2, None, None),
        Score("t", "em (strict)", 0.5, None, 7, 2, None, False),
    ]
