"""Early stop of a run by its validation losses."""

import pytest

from strata.training.schedule.early_stop import EarlyStop


@pytest.mark.parametrize(
    ("patience", "losses", "ends_at"),
    [
        (1, [3.0, 2.0, 2.0], 2),  # an equal loss is no progress
        (2, [3.0, 2.0, 2.5, 1.9, 2.0, 1.95], 5),  # a lower loss starts the count again
        (2, [3.0, 2.9, 2.8], None),
        (3, [1.0, 2.0, 2.0], None),
        (None, [1.0, 2.0, 3.0, 4.0], None),
    ],
)
def test_run_ends_after_evaluations_without_progress(patience: int | None, losses: list[float], ends_at: int | None) -> None:
    state = EarlyStop(patience)
    ends = [number for number, loss in enumerate(losses) if state.seen(loss)]
    assert ends[:1] == ([] if ends_at is None else [ends_at])


@pytest.mark.parametrize("resumed", range(5))
def test_resumed_run_ends_where_the_uninterrupted_one_does(resumed: int) -> None:
    losses = [3.0, 2.0, 2.5, 2.4]
    history = [{"step": step, "loss": 9.0, "val_loss": loss} for step, loss in enumerate(losses[:resumed])]
    state = EarlyStop.after(2, [*history, {"step": 9, "loss": 9.0}])  # type: ignore[list-item]
    ends = [state.seen(loss) for loss in losses[resumed:]]
    assert ends == [False] * max(0, 3 - resumed) + [True] * (resumed < 4)
