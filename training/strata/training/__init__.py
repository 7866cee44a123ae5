"""Training of a model that can be served: corpus, tokens, model, DeepSpeed under Ray Train, checkpoints and export.

Public API: `train`, `resume`, `train_or_resume` and the `Summary` that they return, and `evaluate`. They load on first use, so
that the command line starts fast.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.training.driver import Summary
    from strata.training.python_api import evaluate, resume, train, train_or_resume

__all__ = ["Summary", "evaluate", "resume", "train", "train_or_resume"]


def __getattr__(name: str) -> Any:
    if name == "Summary":
        from strata.training import driver

        return driver.Summary
    if name in __all__:
        from strata.training import python_api

        return getattr(python_api, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
