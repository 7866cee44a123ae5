"""Counts of gateways as rates, lengths and a forecast."""

import pytest

from strata.serving.scaling.demand import BIN_S, MOST_GROWTH, TREND_S, Memory, Seen, forecast, mean_rate, remember


def seen(at: float, arrivals: int, ended: int = 0, prompt: int = 0, output: int = 0, in_flight: int = 0) -> Seen:
    return Seen(at, arrivals, ended, prompt, output, in_flight, waiting=0)


def after(*looks: Seen) -> Memory:
    memory = Memory()
    for look in looks:
        memory = remember(memory, look)
    return memory


def ramp(slope: float, seconds: float, base: float = 2.0) -> Memory:
    """Arrivals at a rate of `base + slope * t`."""
    return after(*(seen(t, round(base * t + slope * t * t / 2)) for t in range(0, int(seconds) + 1, int(BIN_S))))


def test_steady_arrivals_are_forecast_as_they_are() -> None:
    assert forecast(after(*(seen(t, 3 * t) for t in range(0, 400, 2))), 60) == pytest.approx(3.0)
    assert forecast(Memory(), 60) == forecast(after(seen(0, 7)), 60) == 0.0


def test_rise_is_forecast_ahead_and_fall_is_not() -> None:
    rate_now = 2.0 + 0.02 * 300
    assert forecast(ramp(0.02, 300), 0) == pytest.approx(rate_now, rel=0.03)
    assert forecast(ramp(0.02, 300), 60) == pytest.approx(rate_now + 1.2, rel=0.03)
    falling = ramp(-0.02, 300, base=12.0)
    assert forecast(falling, 60) == pytest.approx(12 - 0.02 * (300 - BIN_S / 2), rel=0.03)


def test_forecast_is_bounded_by_the_rates_seen() -> None:
    burst = after(*(seen(5.0 * k, 0 if k < 3 else 100 * (k - 2)) for k in range(5)))
    assert forecast(burst, 10_000) == pytest.approx(MOST_GROWTH * 20)


def test_mean_rate_is_over_the_time_of_the_trend() -> None:
    assert mean_rate(Memory()) == mean_rate(after(seen(0, 7))) == 0.0
    assert mean_rate(after(seen(0, 0), seen(5, 50), seen(10, 60))) == 6.0


def test_only_the_trends_time_is_remembered() -> None:
    memory = after(*(seen(5.0 * k, 5 * k) for k in range(300)))
    assert memory.marks[-1][0] - memory.marks[0][0] <= TREND_S + BIN_S
    assert len(memory.marks) == TREND_S / BIN_S + 2


def test_lengths_follow_recent_requests() -> None:
    memory = after(seen(0, 0), seen(1, 10, ended=10, prompt=1000, output=500))
    assert (memory.prompt, memory.output) == (100.0, 50.0)
    later = remember(memory, seen(2, 20, ended=20, prompt=4000, output=600))
    assert (later.prompt, later.output) == pytest.approx((200.0, 30.0), rel=0.02)  # the first ones weigh as much as others
    assert remember(later, seen(3, 20, ended=20, prompt=4000, output=600)).prompt == later.prompt
    steady = after(*(seen(k, k, ended=k, prompt=100 * k, output=10 * k) for k in range(3000)))
    changed = after_steps(steady, 200, prompt=300)
    assert steady.prompt == pytest.approx(100.0) and changed.prompt == pytest.approx(200.0, rel=0.01)  # half after 200 requests


def after_steps(memory: Memory, requests: int, prompt: int) -> Memory:
    """`requests` further requests with `prompt` tokens, one after the other."""
    arrivals, ended, tokens = memory.marks[-1][1], memory.ended, memory.prompt_tokens
    for number in range(1, requests + 1):
        at, output = memory.marks[-1][0] + 1, memory.output_tokens + 10
        memory = remember(memory, seen(at, arrivals + number, ended + number, tokens + prompt * number, output))
    return memory


def test_counts_that_begin_anew_are_no_negative_rate() -> None:
    memory = after(seen(0, 100, 50, 5000, 500), seen(5, 150, 60, 6000, 600), seen(10, 3, 1, 40, 4))
    assert forecast(memory, 60) == 0.0 and memory.marks == ((10, 3),)
    memory = remember(memory, seen(15, 13, 2, 90, 9))
    assert forecast(memory, 0) == 2.0 and 90 < memory.prompt < 100


def test_requests_in_flight_or_new_ones_are_activity() -> None:
    memory = after(seen(0, 5), seen(1, 5))
    assert memory.active_at == 0
    assert remember(memory, seen(2, 6)).active_at == 2
    assert remember(memory, seen(2, 5, in_flight=1)).active_at == 2
    # Engines report means of half a minute: their queue may be long gone.
    assert remember(memory, Seen(2, 5, 0, 0, 0, in_flight=0, waiting=1)).active_at == 0
