"""Retry-After of rejected requests."""

from contextlib import ExitStack

import pytest

from strata.serving.api.requests import ApiError
from strata.serving.gateway.admission import LONGEST_RETRY_S, WINDOW_S, Admission


class Served:
    """Endpoint with a capacity of `capacity` sequences and a clock that the test sets."""

    def __init__(self, capacity: int) -> None:
        self.now = 1000.0
        self.admission = Admission(lambda: capacity, clock=lambda: self.now)
        self._inside: list[ExitStack] = []

    def begin(self, sequences: int = 1) -> None:
        stack = ExitStack()
        stack.enter_context(self.admission.admitted(sequences))
        self._inside.append(stack)

    def end(self) -> None:
        self._inside.pop(0).close()

    def retry_after(self, sequences: int = 1) -> int:
        with pytest.raises(ApiError) as caught, self.admission.admitted(sequences):
            pass
        assert caught.value.status == 429 and caught.value.body["error"]["type"] == "rate_limit_error"
        return int(caught.value.headers["retry-after"])

    def steady(self, every_s: float, count: int, sequences: int = 1) -> None:
        """Repeatedly ends a request and begins another."""
        for _ in range(count):
            self.now += every_s
            self.end()
            self.begin(sequences)


def test_retry_after_follows_the_completion_rate() -> None:
    served = Served(40)
    for _ in range(40):
        served.begin()
    assert served.retry_after() == 1
    served.steady(2.0, 15)  # a quarter of 40 at one every two seconds
    assert 18 <= served.retry_after() <= 22
    served.steady(0.1, 300)
    assert served.retry_after() == 1
    assert served.retry_after(sequences=30) == 3


def test_rate_counts_sequences_not_requests() -> None:
    served = Served(40)
    for _ in range(4):
        served.begin(10)
    served.steady(2.0, 15, sequences=10)
    assert 2 <= served.retry_after() <= 3


def test_idle_time_does_not_lower_the_rate() -> None:
    served = Served(4)
    for _ in range(100):
        served.begin()
        served.now += 0.01
        served.end()
    served.now += 3600
    for _ in range(4):
        served.begin()
    assert served.retry_after() == 1
    served.steady(0.1, 10)
    assert served.retry_after() == 1


def test_old_completions_do_not_count() -> None:
    served = Served(4)
    for _ in range(4):
        served.begin()
    served.steady(0.1, 200)
    served.now += 2 * WINDOW_S
    assert served.retry_after() == WINDOW_S, "nobody has left for so long"
    served.steady(10.0, 4)
    assert 8 <= served.retry_after() <= 16


def test_retry_after_is_bounded() -> None:
    served = Served(1000)
    served.begin(1000)
    served.now += 29
    served.end()
    served.begin(999)
    served.begin()
    served.now += 25
    assert 1 <= served.retry_after() <= LONGEST_RETRY_S
    assert served.retry_after(sequences=1000) <= LONGEST_RETRY_S
