"""Python API of training: `strata.training.train(recipe)` and `evaluate(run, tasks)`. The `train` command calls it too.

`strata.training.driver` and with it torch's stack are imported on the first call, so that the command line starts fast.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from strata.platform import recipe_file, runs
from strata.platform.recipe import Recipe
from strata.platform.runs import Run

if TYPE_CHECKING:
    from strata.training.driver import Summary
    from strata.training.metrics.evaluations import Evaluation

UNNAMED = "run"  # prefix of the run's name for a recipe that comes from no file


def train(
    recipe: Recipe | str | Path = recipe_file.DEFAULT,
    overrides: Sequence[str] = (),
    *,
    run: str | None = None,
    console: Console | None = None,
) -> "Summary":
    """Trains a new run by a recipe, and exports it in Hugging Face's format.

        summary = strata.training.train("laptop", ["train.steps=50"])
        print(summary.val_loss, summary.export)

    Starts a Ray cluster, unless RAY_ADDRESS or `strata cluster start` provides one. Must be called from the main thread, since
    SIGINT and SIGTERM are handled meanwhile: the first saves a checkpoint and returns a summary without an export.

    Args:
        recipe: A `Recipe`, the name of a recipe that comes with Strata, or the path of a YAML file.
        overrides: Changes to the recipe, such as `train.steps=50`.
        run: Name of the new run. Default: the recipe's name and the next free number.
        console: Where progress is printed. Default: nothing is printed.

    Raises:
        UserError: The recipe or the machine does not allow the run, or the run failed for a reason that is known.
        ClusterDied: Ray died. `resume` continues the run, in a new process.
    """
    from strata.training import driver

    return driver.start(_load(recipe, overrides), run, _stem(recipe), console or _silent())


def resume(run: Run | str, overrides: Sequence[str] = (), *, console: Console | None = None) -> "Summary":
    """Continues a run from its newest good checkpoint, by its own recipe.

    Overrides may change the parallel layout and the number of steps; a changed model, corpus, batch or seed is refused. The other
    arguments, the result and the errors are those of `train`.
    """
    from strata.training import driver

    found = run if isinstance(run, Run) else runs.find(run)
    found.recipe()  # raises DamagedRun, which names the run, for a recipe that cannot be read
    return driver.resume(found, _load(found.path / "recipe.yaml", overrides), console or _silent())


def train_or_resume(
    recipe: Recipe | str | Path, overrides: Sequence[str] = (), *, run: str, console: Console | None = None
) -> "Summary | None":
    """Trains the run, or continues it if it exists, by the recipe given. Returns None for a run that is finished already.

    For jobs that a controller retries until they succeed, and never runs twice concurrently.
    """
    from strata.training import driver

    return driver.start_or_resume(_load(recipe, overrides), run, _stem(recipe), console or _silent())


def evaluate(
    subject: Run | str | Path,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    shots: int | None = None,
    chat: bool = False,
    truncate: bool = False,
    include: Sequence[Path] = (),
    console: Console | None = None,
) -> "Evaluation":
    """Scores a model with lm-evaluation-harness, and stores the result in the run's folder.

        evaluation = strata.training.evaluate("laptop-1", ["python_lines"])
        print(evaluation.scores)

    Args:
        subject: A run or its name, a model folder, or the address of an endpoint.
        tasks: Tasks or groups of the harness by name, or paths of YAML files.
        limit: Samples of each task. Default: all.
        shots: Examples in each prompt. Default: as many as each task defines.
        chat: Whether to write prompts with the model's chat template.
        truncate: Whether to cut the beginning of prompts that are longer than the context. Default: they are refused.
        include: Folders with YAML files of tasks.
        console: Where progress is printed. Default: nothing is printed.

    Raises:
        UserError: The model, a task or the harness is missing, or a request does not fit the model.
    """
    from strata.training.evaluation import evaluate as running
    from strata.training.evaluation.subject import resolve
    from strata.training.metrics.evaluations import Settings

    name = subject.name if isinstance(subject, Run) else str(subject.absolute()) if isinstance(subject, Path) else subject
    found = resolve(name)
    settings = Settings(tuple(tasks), limit, shots, chat, truncate)
    evaluation = running.evaluate(found, settings, console or _silent(), include=include)
    running.store(found, evaluation)
    return evaluation


def _load(recipe: Recipe | str | Path, overrides: Sequence[str]) -> Recipe:
    """The recipe with absolute paths of its data, adapter and checkpoints, so that the run can be resumed from another folder."""
    loaded = recipe_file.change(recipe, overrides) if isinstance(recipe, Recipe) else recipe_file.load(_source(recipe), overrides)
    data, section = loaded.data, loaded.train
    paths = {key: value.absolute() for key in ("path", "chat_template") if (value := getattr(data, key)) is not None}
    sets = tuple(one.model_copy(update={"path": one.path.absolute()}) if one.path else one for one in data.sets)
    data = data.model_copy(update={**paths, "sets": sets})
    if section.lora and section.lora.source:
        adapters = section.lora.model_copy(update={"source": str(Path(section.lora.source).absolute())})
        section = section.model_copy(update={"lora": adapters})
    if section.checkpoints is not None and "://" not in section.checkpoints:
        section = section.model_copy(update={"checkpoints": str(Path(section.checkpoints).absolute())})
    return loaded.model_copy(update={"data": data, "train": section})


def _source(recipe: str | Path) -> str:
    """A `Path` always names a file, also without a slash or a suffix in it."""
    return str(recipe.absolute()) if isinstance(recipe, Path) else recipe


def _stem(recipe: Recipe | str | Path) -> str:
    return UNNAMED if isinstance(recipe, Recipe) else Path(recipe).stem


def _silent() -> Console:
    return Console(quiet=True)
