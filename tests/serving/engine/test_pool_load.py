"""Load and measured rates that the prefill policy reads. Without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from strata.serving.engine import pool_load
from strata.serving.engine.pool_load import PoolLoad
from strata.serving.routing.policy import Load, Pool, Rates


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(pool_load, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def load_of(min_tokens: int = 0, transfer: float | None = None) -> tuple[PoolLoad, Any]:
    stats = SimpleNamespace(running=3, waiting=2, remote_prefills=0, transfer_s_per_token=transfer)
    return PoolLoad(stats, min_tokens), stats  # type: ignore[arg-type]


def peer(name: str, **reported: int) -> Any:
    return SimpleNamespace(name=name, link=SimpleNamespace(load=reported))


def peers(*members: Any) -> Any:
    return SimpleNamespace(all=lambda: list(members))


def first_output(tokens: int | None, cached: int | None, scheduled: float, first: float) -> Any:
    ids = None if tokens is None else [0] * tokens
    clock = SimpleNamespace(scheduled_ts=scheduled, first_token_ts=first)
    return SimpleNamespace(prompt_token_ids=ids, num_cached_tokens=cached, metrics=clock)


def test_local_queue_counts_prompts_in_prefill() -> None:
    load, _ = load_of()
    with load.prefilling_here(70):
        with load.prefilling_here(5):
            assert load.here() == Load(running=3, waiting=2, queued_tokens=75)
        assert load.here().queued_tokens == 70
    with pytest.raises(KeyError), load.prefilling_here(9):
        raise KeyError
    assert load.here().queued_tokens == 0


def test_remote_queue_is_the_larger_of_sent_and_reported() -> None:
    load, stats = load_of()
    small, large = peer("small", queued_tokens=40), peer("large", queued_tokens=90)
    with load.prefilling_at(small, 50), load.prefilling_at(small, 11), load.prefilling_at(large, 8):
        assert load.queued_tokens(small) == 61
        assert load.queued_tokens(large) == 90
        assert load.queued_tokens(peer("other")) == 0
        assert load.pool(peers(large, small)) == Pool(engines=2, queued_tokens=61)
        assert stats.remote_prefills == 3
    assert load.queued_tokens(small) == 40 and stats.remote_prefills == 0
    with pytest.raises(KeyError), load.prefilling_at(small, 50):
        raise KeyError
    assert load.queued_tokens(small) == 40 and stats.remote_prefills == 0


def test_a_prompt_that_ends_leaves_the_others_queued() -> None:
    load, _ = load_of()
    engine = peer("a")
    with load.prefilling_at(engine, 50):
        with load.prefilling_at(engine, 11):
            pass
        assert load.queued_tokens(engine) == 50
    assert load.queued_tokens(engine) == 0


@pytest.mark.parametrize("members", [None, peers()])
def test_without_prefill_engines_there_is_no_pool(members: Any) -> None:
    assert load_of()[0].pool(members) is None


@pytest.mark.parametrize(("min_tokens", "shortest"), [(0, 64), (64, 64), (200, 200)])
def test_short_prompts_are_no_samples(min_tokens: int, shortest: int) -> None:
    for tokens, known in ((shortest - 1, False), (shortest, True)):
        load, _ = load_of(min_tokens)
        remote, _ = load_of(min_tokens)
        for _ in range(3):
            load.prefilled_locally(first_output(tokens + 7, 7, 10.0, 10.5))
            remote.prefilled_remotely(tokens, 0.25)
        assert load.rates().local_tokens_per_s == (pytest.approx(2 * tokens) if known else None)
        assert remote.rates().remote_tokens_per_s == (pytest.approx(4 * tokens) if known else None)


@pytest.mark.parametrize(
    "output",
    [
        first_output(None, None, 10.0, 11.0),
        first_output(100, 60, 10.0, 11.0),
        first_output(100, 0, 0.0, 11.0),
        first_output(100, 0, 10.0, 0.0),
        SimpleNamespace(prompt_token_ids=[0] * 100, num_cached_tokens=0, metrics=None),
    ],
)
def test_outputs_without_a_sample_are_ignored(output: Any) -> None:
    load, _ = load_of()
    for _ in range(3):
        load.prefilled_locally(output)
    assert load.rates().local_tokens_per_s is None


def test_uncached_counts_of_zero_may_be_missing() -> None:
    load, _ = load_of()
    for _ in range(3):
        load.prefilled_locally(first_output(100, None, 10.0, 12.0))
    assert load.rates().local_tokens_per_s == pytest.approx(50)


def test_engines_are_assumed_equal_until_there_are_local_samples() -> None:
    load, _ = load_of(transfer=0.125)
    assert load.rates() == Rates(None, None, 0.125, None)
    for _ in range(3):
        load.prefilled_remotely(100, 0.5)
    assert load.rates() == Rates(pytest.approx(200), pytest.approx(200), 0.125, None)
    for _ in range(3):
        load.prefilled_locally(first_output(100, 0, 10.0, 10.25))
    assert load.rates() == Rates(pytest.approx(400), pytest.approx(200), 0.125, None)


@pytest.mark.parametrize(
    ("tokens", "seconds", "transfer", "handoff"),
    [
        (100, 3.0, 0.02, 1.0),  # 3 - 100 * 0.02
        (100, 3.0, None, 3.0),
        (100, 1.0, 0.02, 1e-4),  # less than the transfer: the shortest time that is measured
        (100, 2.0, 0.02, 1e-4),
    ],
)
def test_handoff_is_the_time_less_the_transfer(tokens: int, seconds: float, transfer: float | None, handoff: float) -> None:
    load, _ = load_of(transfer=transfer)
    for _ in range(3):
        load.record_handoff(tokens, seconds)
    assert load.rates().handoff_s == pytest.approx(handoff)


def test_rates_expire(clock: SimpleNamespace) -> None:
    load, _ = load_of()
    for _ in range(3):
        load.prefilled_remotely(100, 0.5)
        load.record_handoff(0, 0.5)
        load.prefilled_locally(first_output(100, 0, 10.0, 10.25))
    clock.s += 61
    assert load.rates() == Rates(None, None, None, None)
