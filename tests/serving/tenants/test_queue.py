"""Weighted fair queue: shares of running sequences, order, bounds, and what a flood cannot change."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest

from strata.serving.api.requests import ApiError
from strata.serving.tenants.queue import ACTIVE_S, Elsewhere, FairQueue, Ticket
from strata.serving.tenants.refusal import LimitReached
from strata.serving.tenants.tenant import Limits, Tenant


class Endpoint:
    """A queue over `slots` sequences, with a clock that the test sets."""

    def __init__(self, slots: int, max_queue: int = 1000, lend_idle: bool = False, **limits: Limits) -> None:
        self.now, self.slots = 1000.0, slots
        self.elsewhere: dict[str, Elsewhere] = {}
        self.queue = FairQueue(lambda: self.slots, max_queue, lambda: self.now, lambda: lend_idle, lambda: self.elsewhere)
        self.tenants = {name: Tenant(name, limits.get(name, Limits())) for name in ("a", "b", "c", *limits)}
        self.running: list[Ticket] = []
        self.dropped: list[tuple[str, ApiError]] = []
        self.started: list[str] = []

    def send(self, name: str, sequences: int = 1) -> Ticket:
        def start() -> None:
            self.running.append(ticket)
            self.started.append(name)

        ticket = Ticket(self.tenants[name], sequences, start, lambda error: self.dropped.append((name, error)))
        self.queue.submit(ticket)
        return ticket

    def end(self, name: str) -> None:
        ticket = next(each for each in self.running if each.tenant.name == name)
        self.running.remove(ticket)
        self.queue.leave(ticket)

    def count(self, name: str) -> int:
        return sum(each.sequences for each in self.running if each.tenant.name == name)


def test_a_single_tenant_has_all_slots() -> None:
    here = Endpoint(4)
    for _ in range(6):
        here.send("a")
    assert here.count("a") == 4 and here.queue.in_flight("a") == 6 and here.queue.share("a") == 4
    here.end("a")
    assert here.count("a") == 4 and here.queue.in_flight("a") == 5


@pytest.mark.parametrize(
    ("slots", "weights", "shares"),
    [
        (8, {"a": 1.0, "b": 1.0}, {"a": 4, "b": 4}),
        (8, {"a": 3.0, "b": 1.0}, {"a": 6, "b": 2}),
        (9, {"a": 1.0, "b": 1.0}, {"a": 4, "b": 4}),  # rounded down: the sum never exceeds the slots
        (10, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 3, "b": 3, "c": 3}),
        (4, {"a": 1000.0, "b": 0.001}, {"a": 3, "b": 1}),  # at least one each
        (8, {"a": 0.5, "b": 0.25, "c": 0.25}, {"a": 4, "b": 2, "c": 2}),
    ],
)
def test_active_tenants_run_their_share(slots: int, weights: dict[str, float], shares: dict[str, int]) -> None:
    here = Endpoint(slots, **{name: Limits(weight=weight) for name, weight in weights.items()})
    for _ in range(20):
        for name in weights:
            here.send(name)
    for _ in range(200):  # however the first ones were spread
        here.end(random.choice(here.running).tenant.name)
        for name in weights:
            here.send(name)
    assert {name: here.count(name) for name in weights} == shares


def test_what_a_tenant_does_not_use_stays_free_while_it_is_active() -> None:
    here = Endpoint(8)
    here.send("b")
    for _ in range(20):
        here.send("a")
    assert here.count("a") == 4 and here.count("b") == 1
    here.end("b")
    here.now += ACTIVE_S
    here.end("a")
    assert here.count("a") == 4, "b is active for a minute after its last request"
    here.now += 0.001
    here.end("a")
    assert here.count("a") == 8


def test_idle_shares_can_be_lent() -> None:
    here = Endpoint(8, lend_idle=True)
    here.send("b")
    for _ in range(20):
        here.send("a")
    assert here.count("a") == 7 and here.count("b") == 1
    for _ in range(3):
        here.send("b")
        here.end("a")
    assert here.count("b") == 4 and here.count("a") == 4, "freed slots go to the tenant that runs fewer"


def test_a_flood_delays_nobody_else() -> None:
    """The waits of one tenant are the same whether the other sends its share or a hundred times that."""

    def waits(load: int) -> list[int]:
        here, choose = Endpoint(8), {name: random.Random(name) for name in "ab"}
        found: dict[Ticket, int] = {}
        sent: dict[Ticket, int] = {}
        ends: dict[Ticket, int] = {}
        for step in range(400):
            here.now += 0.1
            for ticket in [each for each in here.running if ends.get(each) == step]:
                here.running.remove(ticket)
                here.queue.leave(ticket)
            if not step or choose["b"].random() < 0.6:
                sent[here.send("b")] = step
            with suppress(LimitReached):
                for _ in range(load):
                    here.send("a")
            for ticket in here.running:
                if ticket not in ends:
                    ends[ticket] = step + choose[ticket.tenant.name].randint(1, 9)
            found |= {ticket: step - at for ticket, at in sent.items() if ticket.running and ticket not in found}
        return list(found.values())

    assert waits(100) == waits(4) and max(waits(4)) > 0


def test_higher_priority_goes_first() -> None:
    here = Endpoint(2, lend_idle=True, urgent=Limits(priority=1), batch=Limits(priority=-1))
    for name in ("a", "a", "batch", "a", "urgent", "batch", "urgent"):
        here.send(name)
    assert here.started == ["a", "a"]
    for _ in range(5):
        here.end(here.running[0].tenant.name)
    assert here.started[2:] == ["urgent", "urgent", "a", "batch", "batch"]


def test_a_tenants_requests_start_in_their_order() -> None:
    here = Endpoint(1)
    tickets = [here.send("a") for _ in range(5)]
    for ticket in tickets:
        assert here.running == [ticket]
        here.end("a")


def test_equally_loaded_tenants_alternate() -> None:
    here = Endpoint(1, a=Limits(weight=2.0))
    for _ in range(9):
        here.send("a")
        here.send("b")
    for _ in range(12):
        here.end(here.running[0].tenant.name)
    found = Counter(here.started[1:])
    assert found["a"] == 2 * found["b"], here.started


@pytest.mark.parametrize("sequences", [5, 8, 20])
def test_a_request_larger_than_its_share_waits_for_idle_engines_and_delays_nobody(sequences: int) -> None:
    here = Endpoint(8)
    here.send("b")
    big = here.send("a", sequences)
    fits = sequences <= 7
    assert big.running is fits
    if not fits:
        assert here.send("b").running, "it blocks nobody"
        here.end("b")
        here.end("b")
        assert big.running


def test_a_request_of_several_sequences_is_not_overtaken_for_ever() -> None:
    here = Endpoint(8, lend_idle=True)
    for _ in range(8):
        here.send("b")
    four = here.send("a", 4)
    for _ in range(50):
        here.send("b")
    for _ in range(3):
        here.end("b")
        assert four.waiting and here.count("b") < 8
    here.end("b")
    assert four.running and here.count("b") == 4


def test_full_queue_drops_the_newest_of_the_longest() -> None:
    here = Endpoint(1, max_queue=4)
    first = [here.send("a") for _ in range(5)]
    with pytest.raises(LimitReached) as refused:
        here.send("a")
    assert refused.value.status == 429 and refused.value.limit == "max_queue" and int(refused.value.headers["retry-after"]) >= 1
    quiet = here.send("b")
    assert quiet.waiting and not first[-1].waiting and [name for name, _ in here.dropped] == ["a"]
    assert all(ticket.waiting for ticket in first[1:4])
    assert here.queue.in_flight("a") == 4 and here.queue.in_flight("b") == 1


def test_the_longest_queue_is_relative_to_the_weight() -> None:
    here = Endpoint(1, max_queue=4, a=Limits(weight=5.0))
    for name in ("c", "a", "a", "a", "b"):
        here.send(name)
    with pytest.raises(LimitReached):
        here.send("b")
    here.send("a")
    assert [name for name, _ in here.dropped] == ["b"]


def test_without_a_queue_requests_start_or_are_refused() -> None:
    here = Endpoint(2, max_queue=0)
    assert here.send("a").running and here.send("a").running
    with pytest.raises(LimitReached):
        here.send("a")
    here.end("a")
    assert here.send("a").running


def test_a_withdrawn_request_leaves_its_place() -> None:
    here = Endpoint(1, max_queue=2)
    here.send("a")
    second, third = here.send("a"), here.send("a")
    here.queue.leave(second)
    here.queue.leave(second)
    assert here.send("a").waiting and not here.dropped
    here.end("a")
    assert third.running and here.queue.in_flight("a") == 2


def test_use_of_other_gateways_counts() -> None:
    here = Endpoint(8)
    here.elsewhere = {"a": Elsewhere(running=3, in_flight=9, weight=1.0), "b": Elsewhere(running=2, in_flight=2, weight=1.0)}
    for _ in range(9):
        here.send("a")
    assert here.count("a") == 1, "four of eight, three of them elsewhere"
    here.elsewhere = {}
    here.queue.dispatch()
    assert here.count("a") == 8


def test_slots_of_other_gateways_are_taken() -> None:
    here = Endpoint(8, lend_idle=True)
    here.elsewhere = {"b": Elsewhere(running=6, in_flight=6, weight=1.0)}
    for _ in range(9):
        here.send("a")
    assert here.count("a") == 2


def test_new_slots_are_used() -> None:
    here = Endpoint(2)
    for _ in range(9):
        here.send("a")
    here.slots = 6
    here.queue.dispatch()
    assert here.count("a") == 6
    here.slots = 2
    for _ in range(4):
        here.end("a")
    assert here.count("a") == 2


def test_a_changed_weight_applies_at_once() -> None:
    here = Endpoint(8)
    for _ in range(9):
        here.send("a")
        here.send("b")
    here.tenants["a"] = Tenant("a", Limits(weight=3.0))
    here.send("a")
    assert here.queue.share("a") == 6 and here.queue.share("b") == 2


def test_retry_after_is_that_of_the_tenants_own_rate() -> None:
    here = Endpoint(4, lend_idle=True)
    for _ in range(6):
        here.send("a")
        here.send("b")
    for _ in range(10):
        here.now += 0.1
        here.end("a")
        here.send("a")
    assert here.queue.retry_after("a", 1) < 5 and here.queue.retry_after("unknown", 1) == 1
    here.now += 19.5
    assert here.queue.retry_after("b", 1) == 21, "nothing of b has ended since it began"


@pytest.mark.parametrize("seed", range(5))
def test_counts_agree_with_what_runs(seed: int) -> None:
    """Random sends, ends, withdrawals and time: nothing is lost, no bound is broken."""
    choose = random.Random(seed)
    here = Endpoint(7, max_queue=9, a=Limits(weight=2.0, priority=1), lend_idle=bool(seed % 2))
    sent: list[Ticket] = []

    def withdraw() -> None:
        if waiting := [each for each in sent if each.waiting]:
            here.queue.leave(choose.choice(waiting))

    actions: list[Callable[[], object]] = [
        lambda: sent.append(here.send(choose.choice("abc"), choose.choice((1, 1, 1, 2, 5)))),
        lambda: here.running and here.end(choose.choice(here.running).tenant.name),
        withdraw,
        lambda: setattr(here, "now", here.now + choose.random() * 40),
    ]
    for _ in range(2000):
        with suppress(LimitReached):
            choose.choices(actions, (5, 3, 1, 1))[0]()
        for name in "abc":
            waiting = sum(each.sequences for each in sent if each.waiting and each.tenant.name == name)
            assert here.queue.in_flight(name) == waiting + here.count(name)
            assert here.queue.running(name) == here.count(name)
        assert sum(here.count(name) for name in "abc") <= 7
        assert sum(each.sequences for each in sent if each.waiting) <= 9
    while here.running:
        here.end(here.running[0].tenant.name)
    assert not any(each.waiting for each in sent)
