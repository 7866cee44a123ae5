"""Python API of serving: `with strata.serving.serve(run_or_folder) as endpoint: ...`. The `serve` command calls it too."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from strata.platform.runs import Run
from strata.serving.models import choice
from strata.serving.models.choice import Choice
from strata.serving.runtime import endpoint, pictures
from strata.serving.runtime.endpoint import Endpoint
from strata.serving.runtime.start.progress import Report

__all__ = ["Endpoint", "serve"]


def serve(
    source: str | Path | Run | Choice | None = None,
    overrides: Sequence[str] = (),
    *,
    recipe: str | None = None,
    report: Report = lambda line: None,
    began: float | None = None,
) -> AbstractContextManager[Endpoint]:
    """Serves a model behind the OpenAI API for the length of a `with` block: a language model as prefill and decode engines, a
    diffusion model as groups of workers.

    The block begins when the endpoint is ready. Its end stops the endpoint, and the Ray cluster if this call started one.

        with strata.serving.serve("laptop-1", ["serve.port=8001"]) as endpoint:
            endpoint.client().completions.create(model=endpoint.model, prompt="import os", max_tokens=8)

    Args:
        source: A run or its name, or a Hugging Face model folder: a `Path`, or a string with a slash in it. Default: the newest
            run with an export.
        overrides: Changes to the recipe, such as `serve.port=8001`.
        recipe: Name or path of the recipe with the serve section. Default: the run's own, or `laptop` for a folder.
        report: Receives a progress line every ten seconds of the start. Default: nothing is printed.
        began: Unix time from which `endpoint.phases` are counted. Default: now.

    Raises:
        UserError: The model, the recipe or the machine does not allow it, or an engine ended during the start.
    """
    chosen = source if isinstance(source, Choice) else _choose(source, overrides, recipe)
    running = pictures.running if chosen.makes_pictures else endpoint.running
    return running(chosen.section, chosen.folder, chosen.model_id, report, began)


def _choose(source: str | Path | Run | None, overrides: Sequence[str], recipe: str | None) -> Choice:
    if isinstance(source, Run):
        source = source.name
    if isinstance(source, Path) or (source is not None and "/" in source):
        return choice.choose(overrides, None, source, recipe)
    return choice.choose(overrides, source, None, recipe)
