"""Policy that stops drafting: measured rates decide, and the other way is tried again."""

from collections.abc import Callable

import pytest

from strata.serving.speculation.policy import FIRST_TRIAL, RAREST_TRIAL, SETTLE, WINDOW, BatchClass, Policy

Rates = Callable[[bool], float]


def run(batch: BatchClass, steps: int, rate: Rates) -> list[bool]:
    """Steps of one token each. Returns which of them had drafts."""
    used = []
    for _ in range(steps):
        drafts = batch.drafts
        used.append(drafts)
        batch.add(drafts, 1, 1 / rate(drafts))
    return used


def test_drafts_stay_where_they_are_faster() -> None:
    used = run(BatchClass(), 20 * FIRST_TRIAL, lambda drafts: 2.0 if drafts else 1.0)
    trial = used.index(False)
    assert FIRST_TRIAL <= trial <= FIRST_TRIAL + WINDOW + SETTLE
    assert used[trial : trial + SETTLE + WINDOW + 1] == [False] * (SETTLE + WINDOW) + [True]
    assert used.count(False) / len(used) < 0.03  # trials become rarer


def test_drafts_stop_where_they_are_slower() -> None:
    used = run(BatchClass(), 20 * FIRST_TRIAL, lambda drafts: 0.7 if drafts else 1.0)
    later = used[2 * FIRST_TRIAL :]
    assert later.count(True) / len(later) < 0.05


def test_drafts_return_when_the_text_changes() -> None:
    batch = BatchClass()
    run(batch, 4 * FIRST_TRIAL, lambda drafts: 0.7 if drafts else 1.0)
    assert not batch.drafts
    used = run(batch, 3 * RAREST_TRIAL, lambda drafts: 2.0 if drafts else 1.0)
    assert used[-FIRST_TRIAL:].count(True) == FIRST_TRIAL
    first = used.index(True)
    assert all(used[first : first + FIRST_TRIAL])  # the trial becomes the rule at once


def test_equal_rates_change_nothing() -> None:
    assert run(BatchClass(), 10 * FIRST_TRIAL, lambda drafts: 1.0)[-1]


def test_steps_of_the_other_way_are_not_counted() -> None:
    batch = BatchClass()
    for _ in range(10 * FIRST_TRIAL):  # scheduled before a change
        batch.add(False, 1, 1.0)
    assert batch.drafts


def test_steps_without_time_are_harmless() -> None:
    batch = BatchClass()
    for _ in range(2 * WINDOW):
        batch.add(True, 1, 0.0)
    assert batch.drafts


@pytest.mark.parametrize(("one", "other", "same"), [(1, 2, False), (3, 4, True), (4, 5, False), (5, 8, True), (33, 64, True)])
def test_batches_of_similar_size_share_their_rates(one: int, other: int, same: bool) -> None:
    policy = Policy()
    assert (policy.of(one) is policy.of(other)) is same
