"""Retry-After of rejected requests."""

from contextlib import ExitStack

import pytest

from strata.serving.api.requests import ApiError
from strata.serving.gateway.admission import Admission
from strata.serving.tenants.completions import LONGEST_RETRY_S, WINDOW_S


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


@pytest.mark.parametrize(
    ("first", "second", "admitted"), [(3, 1, True), (3, 2, False), (4, 1, False), (0, 5, False), (0, 4, True)]
)
def test_sequences_up_to_the_capacity_are_admitted(first: int, second: int, admitted: bool) -> None:
    served = Served(4)
    if first:
        served.begin(first)
    if admitted:
        served.begin(second)
        assert served.admission.admitted_sequences == first + second
    else:
        assert served.retry_after(second) == 1
        assert served.admission.admitted_sequences == first, "a rejected request holds nothing"


def test_a_request_that_fails_gives_its_sequences_back() -> None:
    served = Served(4)
    with pytest.raises(KeyError), served.admission.admitted(3):
        raise KeyError
    assert served.admission.admitted_sequences == 0


def test_the_capacity_is_read_for_every_request() -> None:
    capacity = 1
    admission = Admission(lambda: capacity)
    with admission.admitted(1):
        with pytest.raises(ApiError), admission.admitted(1):
            pass
        capacity = 2
        with admission.admitted(1):
            assert admission.admitted_sequences == 2


def filled(capacity: int, completions: list[tuple[float, int]]) -> Served:
    """Endpoint that is full at second 1000 and after each completion: `completions` are seconds since then, and sequences."""
    served = Served(capacity)
    for _, sequences in completions:
        served.begin(sequences)
    served.begin(capacity - sum(sequences for _, sequences in completions))
    for at, sequences in completions:
        served.now = 1000.0 + at
        served.end()
        served.begin(sequences)
    return served


@pytest.mark.parametrize(
    ("at", "excess", "wait"),
    [
        # 24 in flight, 3 completed in 9 s: 3 s each. A quarter of those in flight is 6.
        (9.0, 1, 18),
        (9.0, 6, 18),
        (9.0, 7, 21),
        (9.0, 19, 57),
        (9.0, 20, 60),
        (9.0, 21, 60),  # at most a minute
        (10.0, 7, 24),  # 7 * 10 / 3 = 23.3, rounded up
        (0.3, 1, 1),  # 6 * 0.3 / 3 = 0.6
    ],
)
def test_wait_is_the_excess_or_a_quarter_at_the_measured_rate(at: float, excess: int, wait: int) -> None:
    served = filled(24, [(0.1, 1), (0.2, 2)])
    served.now = 1000.0 + at
    assert served.retry_after(excess) == wait


def test_excess_is_the_part_beyond_the_capacity() -> None:
    served = Served(24)
    for sequences in (3, 17):
        served.begin(sequences)
    served.now += 9
    served.end()
    assert served.admission.admitted_sequences == 17
    assert served.retry_after(20) == 39, "17 + 20 - 24 = 13 of 3 in 9 s"
    assert served.retry_after(8) == 13, "17 / 4 = 4.25 at 3 s each, rounded up"


@pytest.mark.parametrize(
    ("now", "wait"),
    [
        (29.0, 29),  # 8 / 4 in flight at 2 in 29 s
        (31.0, 30),  # the window is 30 s: 2 in 30 s
        (31.5, 30),
        (32.0, 30),  # a completion at 2 s is still within the window
        (32.5, 60),  # the first has left it: 1 in 30 s
        (35.5, 30),  # both have: as long again as the window
    ],
)
def test_rate_is_measured_over_thirty_seconds(now: float, wait: int) -> None:
    served = filled(8, [(2.0, 1), (5.0, 1)])
    served.now = 1000.0 + now
    assert served.retry_after() == wait


def test_without_a_completion_the_wait_is_the_time_so_far() -> None:
    served = Served(8)
    served.begin(8)
    served.now += 6.4
    assert served.retry_after(5) == 7
    served.now += 100
    assert served.retry_after() == 30


def test_an_idle_endpoint_too_small_for_a_request_asks_for_a_second() -> None:
    served = Served(8)
    served.now += 50
    assert served.retry_after(9) == 1
    served.begin(3)
    served.now += 20
    served.end()
    assert served.retry_after(9) == 1, "the busy period ended"


def test_a_new_busy_period_forgets_completions_of_the_last() -> None:
    served = Served(8)
    served.begin(5)
    served.now += 1
    served.end()
    served.begin(8)
    served.now += 7
    assert served.retry_after() == 7


def test_busy_period_begins_with_its_first_request() -> None:
    served = Served(8)
    served.begin(4)
    served.now += 10
    served.begin(4)
    served.now += 2
    assert served.retry_after() == 12
