"""Runs tasks of lm-evaluation-harness on a model, and stores the scores."""

import logging
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from strata.platform import benchmark_record
from strata.platform.errors import UserError, shown
from strata.platform.files import cache_dir, write_atomic
from strata.training.checkpoint import model_card
from strata.training.evaluation.progress import RequestProgress
from strata.training.evaluation.subject import Subject
from strata.training.metrics import evaluations
from strata.training.metrics.evaluations import Evaluation, Score, Settings

if TYPE_CHECKING:
    from strata.training.evaluation.endpoint_model import EndpointModel
    from strata.training.evaluation.local_model import LocalModel

# Modules that the harness needs but does not install by itself.
LOCAL_MODULES = ("lm_eval", "accelerate")
ENDPOINT_MODULES = ("lm_eval", "tenacity")
NOISY = ("lm_eval", "datasets", "huggingface_hub", "transformers", "httpx", "accelerate")  # loggers
SEED, OTHER_SEED = 0, 1234  # the harness's own, so that its few-shot examples are the same
BOOTSTRAPS = 1000  # for standard errors that have no formula
DEFAULT_BATCH = 8


def evaluate(
    subject: Subject,
    settings: Settings,
    console: Console,
    *,
    include: Sequence[Path] = (),
    device: str | None = None,
    tokenizer: str | None = None,
    batch: int = DEFAULT_BATCH,
) -> Evaluation:
    """Scores of the subject. `batch` sequences are computed together, or are one request to an endpoint."""
    _require_installed(ENDPOINT_MODULES if subject.url else LOCAL_MODULES)
    began = time.monotonic()
    with _quiet():
        with console.status("loading the tasks"):
            from strata.training.evaluation import task_loading

            _seed()
            loaded = task_loading.load(settings.tasks, include)
        progress = RequestProgress(console)
        with console.status("loading the model"):
            model = _open(subject, device, tokenizer, batch, settings.truncate, progress)
        with progress:
            results = _score(model, loaded, settings, subject, progress)
    header = benchmark_record.header("eval")
    header["versions"]["lm-eval"] = version("lm_eval")
    return Evaluation(
        **header,
        subject=subject.name,
        step=subject.step,
        settings=settings,
        seconds=round(time.monotonic() - began, 1),
        truncated=model.truncated,
        scores=tuple(scores(results)),
    )


def store(subject: Subject, evaluation: Evaluation, also: Path | None = None) -> Path:
    """Writes the evaluation into the run's folder and its model card; that of a folder or an endpoint into Strata's cache."""
    path = evaluations.write(evaluations.folder(subject.run) if subject.run else cache_dir() / "evaluations", evaluation)
    if subject.run and (origin := model_card.origin_of(subject.run.export)):
        model_card.write(subject.run.export, subject.run, origin)
    if also:
        write_atomic(also, evaluations.dump(evaluation))
    return path


def scores(results: dict[str, Any]) -> Iterator[Score]:
    """Scores in the harness's results, groups first. Its keys are `metric,filter` and `metric_stderr,filter`."""
    for name, found in (results.get("groups", {}) | results["results"]).items():
        counts = results["n-samples"].get(name, {})
        shots = results["n-shot"].get(name)
        task_version = results["versions"].get(name)
        for key, value in found.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            stderr = found.get(f"{metric}_stderr,{filtered}")
            yield Score(
                task=name,
                metric=metric if filtered == "none" else f"{metric} ({filtered})",
                value=float(value),
                stderr=float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None,
                samples=int(counts.get("effective", found.get("sample_len", 0))),
                shots=shots,
                version=None if task_version is None else str(task_version),
                higher_is_better=results["higher_is_better"].get(name, {}).get(metric),
            )


def _require_installed(modules: Sequence[str]) -> None:
    for module in modules:
        if find_spec(module) is None:
            cause = f"strata eval needs lm-evaluation-harness; the module {module} is not installed."
            raise UserError(cause, "Install it with: uv pip install 'lm-eval[api,hf]'")


def _open(
    subject: Subject, device: str | None, tokenizer: str | None, batch: int, truncate: bool, progress: RequestProgress
) -> "LocalModel | EndpointModel":
    if subject.url:
        from strata.training.evaluation.endpoint_model import open_endpoint

        return open_endpoint(subject.url, tokenizer, batch, truncate, progress)
    from strata.training.evaluation.local_model import open_folder

    assert subject.folder is not None
    return open_folder(subject.folder, device, batch, truncate, progress)


def _score(model: Any, loaded: dict[str, Any], settings: Settings, subject: Subject, progress: RequestProgress) -> dict[str, Any]:
    """Calls the harness's `evaluate`. Its `simple_evaluate` would also list every installed package, which takes long."""
    from lm_eval.evaluator import evaluate as run_tasks

    for task in loaded["tasks"].values():
        if settings.shots is not None and task.get_config("num_fewshot") != 0:  # a task with none has no examples to show
            task.set_config(key="num_fewshot", value=settings.shots)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=OTHER_SEED)
    try:
        results: dict[str, Any] = run_tasks(
            lm=model,
            task_dict=loaded,
            limit=settings.limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
        )
    except OSError as error:  # those of `requests` are OSErrors
        if subject.url is None:
            raise
        answer = getattr(getattr(error, "response", None), "text", "")
        cause = f"The endpoint at {subject.url} failed after {progress.position}: {shown(f'{error} {answer}', 300)}"
        raise UserError(cause, "See its log, then run the evaluation again: nothing was written.") from error
    return results


def _seed() -> None:
    import numpy as np
    import torch

    random.seed(SEED)
    np.random.seed(OTHER_SEED)
    torch.manual_seed(OTHER_SEED)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the logs and progress bars of the harness and its libraries: failures are raised, progress has its own display.
    tqdm reads its environment when it is imported."""
    loggers = {name: logging.getLogger(name) for name in NOISY}
    levels = {name: logger.level for name, logger in loggers.items()}
    before = os.environ.get("TQDM_DISABLE")
    os.environ["TQDM_DISABLE"] = "1"
    for logger in loggers.values():
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, logger in loggers.items():
            logger.setLevel(levels[name])
        os.environ.pop("TQDM_DISABLE") if before is None else os.environ.update(TQDM_DISABLE=before)
