"""Rule for spikes of the loss and the gradient norm."""

import math

import pytest

from strata.platform.recipe import SpikeSection
from strata.training.metrics.records import Record
from strata.training.watchdog.spikes import LEAST, Spikes


def record(step: int, loss: float = 2.0, norm: float | None = 1.0) -> Record:
    return Record(step=step, loss=loss, lr=0.1, grad_norm=norm, tokens_per_s=1.0, time=0.0)


@pytest.fixture
def spikes() -> Spikes:
    rule = Spikes(SpikeSection(factor=3.0))
    assert [rule.seen(record(step, 2.0 + 0.1 * (step % 3))) for step in range(1, LEAST + 1)] == [None] * LEAST
    return rule


def test_spikes_are_named_with_their_step(spikes: Spikes) -> None:
    assert "loss is nan at step 11" in (spikes.seen(record(11, math.nan)) or "")
    assert "gradient norm is inf at step 11" in (spikes.seen(record(11, norm=math.inf)) or "")
    assert "loss is 6.4 at step 11, 3.0 times" in (spikes.seen(record(11, 6.4)) or "")
    assert "gradient norm is 3.1 at step 11" in (spikes.seen(record(11, norm=3.1)) or "")
    assert spikes.seen(record(11, 6.2, 2.9)) is None and spikes.seen(record(12, 2.0, None)) is None


def test_spikes_do_not_enter_the_measure(spikes: Spikes) -> None:
    for _ in range(100):
        assert spikes.seen(record(11, 50.0))


def test_first_losses_are_no_spikes() -> None:
    rule = Spikes(SpikeSection())
    assert [rule.seen(record(step, 11.0 if step == 2 else 1.0)) for step in range(1, LEAST + 1)] == [None] * LEAST
    assert rule.seen(record(LEAST + 1, math.nan))


def test_without_the_rule_nothing_is_a_spike() -> None:
    assert Spikes(None).seen(record(1, math.nan)) is None
