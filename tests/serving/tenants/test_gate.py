"""Limits of a tenant: rates, budgets, concurrency, their refusals and headers, several gateways, hostile numbers."""

import asyncio
import json
from typing import Any

import pytest
import virtual_time

from strata.serving.tenants import cache_salt
from strata.serving.tenants.bucket import Bucket, duration
from strata.serving.tenants.estimate import DEFAULT_OUTPUT, Estimate, estimate, sequences_of
from strata.serving.tenants.gate import WAIT_S, Gate
from strata.serving.tenants.refusal import LimitReached
from strata.serving.tenants.spending import DAYS, ROLE, Spending
from strata.serving.tenants.tenant import Caller, Limits, Tenant

NOON = 20_000 * 86_400 + 43_200.0
SECRET = b"s" * 32


class Here:
    """A gate with clocks that the test sets."""

    def __init__(self, name: str = "a", **limits: Any) -> None:
        self.now, self.at = 1000.0, NOON
        self.others: dict[str, Any] = {}
        self.gate = Gate(
            lambda: 100, 100, SECRET, others=lambda: self.others, spending=Spending(lambda: self.at), clock=lambda: self.now
        )
        self.caller = Caller(Tenant(name, Limits(**limits)), "key")

    def send(self, tokens: int = 10, sequences: int = 1, used: int | None = None) -> None:
        with self.gate.entered(self.caller, Estimate(sequences, tokens, 0)) as entry:
            entry.settle(input=tokens if used is None else used, output=0)

    def refused(self, tokens: int = 10, sequences: int = 1) -> LimitReached:
        with pytest.raises(LimitReached) as caught:
            self.send(tokens, sequences)
        assert caught.value.status == 429
        return caught.value

    def headers(self) -> dict[str, str]:
        return {name.removeprefix("x-ratelimit-"): value for name, value in self.gate.headers(self.caller.tenant).items()}


def test_requests_per_minute() -> None:
    here = Here(requests_per_minute=3)
    for _ in range(3):
        here.send()
    error = here.refused()
    assert error.body["error"]["param"] == "requests_per_minute" and error.body["error"]["type"] == "requests"
    assert error.body["error"]["code"] == "rate_limit_exceeded" and error.headers == {"retry-after": "20"}
    assert here.headers() == {"limit-requests": "3", "remaining-requests": "0", "reset-requests": "1m0s"}
    here.now += 19.9
    assert here.refused().headers["retry-after"] == "1"
    here.now += 0.2
    here.send()
    here.refused()
    here.now += 3600
    assert here.headers()["remaining-requests"] == "3", "a minute's worth at most"


def test_tokens_per_minute_are_estimated_and_corrected() -> None:
    here = Here(tokens_per_minute=600)
    here.send(500, used=100)
    assert here.headers() == {"limit-tokens": "600", "remaining-tokens": "500", "reset-tokens": "10s"}
    here.send(500, used=1100)
    assert here.headers()["remaining-tokens"] == "0"
    error = here.refused(1)
    assert error.body["error"]["type"] == "tokens" and error.body["error"]["param"] == "tokens_per_minute"
    assert error.headers["retry-after"] == "61", "600 too many, at ten a second, and one more"
    here.now += 60.2
    here.send(1)


def test_a_request_beyond_a_limit_is_refused_for_good() -> None:
    for limit in ("tokens_per_minute", "tokens_per_day"):
        here = Here(**{limit: 600})
        here.send(600)
        error = Here(**{limit: 600}).refused(601)
        assert not error.headers and error.body["error"]["param"] == limit and "larger than the limit" in str(error)
    assert not Here(concurrency=4).refused(sequences=5).headers


@pytest.mark.parametrize("tokens", [2**63 - 1, 10**300])
def test_huge_requests_are_refused_without_harm(tokens: int) -> None:
    here = Here(tokens_per_minute=10**15, tokens_per_day=10**15)
    here.refused(tokens)
    assert here.headers()["remaining-tokens"] == str(10**15)
    here.send(10**15)


def test_tokens_per_day() -> None:
    here = Here(tokens_per_day=1000)
    here.send(1000, used=400)
    here.send(600)
    error = here.refused(1)
    assert error.body["error"] | {"message": ""} == {
        "message": "",
        "type": "insufficient_quota",
        "param": "tokens_per_day",
        "code": "insufficient_quota",
    }
    assert error.headers["retry-after"] == "43200"
    assert here.headers() == {"limit-tokens-day": "1000", "remaining-tokens-day": "0", "reset-tokens-day": "12h0m0s"}
    here.at += 43_199.5
    assert here.refused(1).headers["retry-after"] == "1"
    here.at += 0.5
    here.send(1000)


def test_clock_jumps_do_not_reset_a_budget() -> None:
    here = Here(tokens_per_day=1000)
    here.send(900)
    for jump in (86_400, -86_400, -3600, 3600, 400 * 86_400, -400 * 86_400):
        here.at += jump
    here.refused(101)
    here.send(100)
    here.at -= 30 * 86_400
    here.send(1000)
    here.at += 30 * 86_400
    here.refused(1)


def test_a_monotonic_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    now = [10.0]
    bucket = Bucket(lambda: now[0])
    bucket.add(60, 60)
    now[0] = 5.0
    assert bucket.left(60) == 0
    now[0] = 6.0
    assert bucket.left(60) == 1


def test_a_correction_belongs_to_the_day_of_its_request() -> None:
    here = Here(tokens_per_day=1000)
    with here.gate.entered(here.caller, Estimate(1, 600, 0)) as entry:
        here.at += 86_400
        entry.settle(input=100, output=0)
    assert here.gate.spending.spent("a") == 0
    here.at -= 86_400
    assert here.gate.spending.spent("a") == 100


def test_a_request_that_never_ran_costs_no_tokens() -> None:
    here = Here(tokens_per_minute=100, tokens_per_day=100, requests_per_minute=5)
    with pytest.raises(KeyError), here.gate.entered(here.caller, Estimate(1, 90, 10)):
        raise KeyError
    found = here.headers()
    assert (found["remaining-tokens"], found["remaining-tokens-day"], found["remaining-requests"]) == ("100", "100", "4")


def test_concurrency_counts_sequences_in_flight() -> None:
    here = Here(concurrency=4)

    async def test() -> None:
        with here.gate.entered(here.caller, Estimate(3, 1, 1)) as entry:
            await entry.turn()
            error = here.refused(sequences=2)
            assert error.body["error"]["param"] == "concurrency" and int(error.headers["retry-after"]) >= 1
            assert here.headers()["remaining-concurrency"] == "1"
            with here.gate.entered(here.caller, Estimate(1, 1, 1)) as second:
                await second.turn()
                here.refused()
        here.send(sequences=4)

    asyncio.run(test())


def test_requests_count_from_the_check_on() -> None:
    """A burst passes the check before any of it has reached the queue."""
    here = Here(concurrency=2)
    with here.gate.entered(here.caller, Estimate(1, 1, 1)), here.gate.entered(here.caller, Estimate(1, 1, 1)):
        here.refused()
        assert here.gate.load()["a"][:2] == (0, 2)
    here.send(sequences=2)


def test_changed_limits_apply_to_the_next_request() -> None:
    here = Here(requests_per_minute=1)
    here.send()
    here.refused()
    here.caller = Caller(Tenant("a", Limits(requests_per_minute=2)), "key")
    here.send()
    here.refused()
    here.caller = Caller(Tenant("a"), "key")
    here.send()


def test_a_wait_ends_with_its_turn() -> None:
    gate = Gate(lambda: 1, 10, SECRET)
    caller = Caller(Tenant("a"), "key")

    async def test() -> None:
        with gate.entered(caller, Estimate(1, 1, 1)) as first:
            await first.turn()
            with gate.entered(caller, Estimate(1, 1, 1)) as second:
                turn = asyncio.ensure_future(second.turn())
                await asyncio.sleep(2.0)
                assert not turn.done() and gate.queue.in_flight("a") == 2
                first.leave()
                await turn
                assert second.waited_s == pytest.approx(2.0) and second.started
        assert gate.queue.in_flight("a") == 0

    virtual_time.run(test)


def test_a_cancelled_wait_leaves_the_queue() -> None:
    gate = Gate(lambda: 1, 10, SECRET)
    caller = Caller(Tenant("a"), "key")

    async def wait() -> None:
        with gate.entered(caller, Estimate(1, 1, 1)) as entry:
            await entry.turn()

    async def test() -> None:
        with gate.entered(caller, Estimate(1, 1, 1)) as first:
            await first.turn()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(wait(), 3.0)
            assert gate.queue.in_flight("a") == 1
            with pytest.raises(LimitReached) as late:
                await wait()
            assert late.value.limit == "max_queue" and f"{WAIT_S:.0f} s" in str(late.value)
            assert asyncio.get_running_loop().time() == pytest.approx(virtual_time.START + 3 + WAIT_S)

    virtual_time.run(test)


def test_gateways_share_limits() -> None:
    first, second = Here(requests_per_minute=10, tokens_per_minute=100), Here(requests_per_minute=10, tokens_per_minute=100)

    def pong() -> None:
        """A report of the first gateway, as JSON carries it."""
        second.others = {"first": json.loads(json.dumps(first.gate.load()))}

    pong()
    second.send(1)
    for _ in range(6):
        first.send(5)
    pong()
    second.send(1)
    found = second.headers()
    assert (found["remaining-requests"], found["remaining-tokens"]) == ("2", "68")
    pong()
    second.send(1)
    assert second.headers()["remaining-requests"] == "1", "a report counts once"
    with first.gate.entered(first.caller, Estimate(1, 60, 0)) as entry:
        pong()
        with pytest.raises(LimitReached):
            second.send(20)
        entry.settle(input=1, output=0)
    pong()
    second.gate.count(Caller(Tenant("b"), "key"))
    assert int(second.headers()["remaining-tokens"]) > 60, "a correction elsewhere counts too"


def test_a_gateway_that_starts_late_does_not_count_the_past() -> None:
    first, second = Here(requests_per_minute=10), Here(requests_per_minute=10)
    for _ in range(10):
        first.send()
    second.others = {"first": first.gate.load()}
    second.send()
    assert second.headers()["remaining-requests"] == "9"


def test_concurrency_and_shares_are_those_of_all_gateways() -> None:
    here = Here(concurrency=4)
    here.others = {"g": {"a": [2, 3, 0, 0, 1.0], "b": [1, 1, 0, 0, 1.0]}}
    here.refused(sequences=2)
    here.send(sequences=1)


class Store:
    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self.down = False

    async def publish(self, role: str, name: str, entry: dict[str, Any]) -> None:
        assert role == ROLE
        if self.down:
            raise OSError
        self.entries[name] = json.loads(json.dumps(entry))

    async def withdraw(self, role: str, name: str) -> None:
        del self.entries[name]

    async def names(self, role: str) -> set[str]:
        return set(self.entries)

    async def entry(self, role: str, name: str) -> dict[str, Any] | None:
        return self.entries.get(name)


def test_spending_survives_a_gateway_and_is_shared() -> None:
    async def test() -> None:
        store, at = Store(), [NOON]
        first = Spending(lambda: at[0])
        first.add("a", 70, first.today())
        first.add("a", -20, first.today())
        await first.sync(store, "first")
        again = Spending(lambda: at[0])
        await again.sync(store, "again")
        again.add("a", 5, again.today())
        assert again.spent("a") == 55 and again.spent("b") == 0
        await again.sync(store, "again")
        await first.sync(store, "first")
        assert first.spent("a") == 55
        at[0] += 86_400
        assert first.spent("a") == 0
        at[0] += (DAYS + 1) * 86_400
        await again.sync(store, "again")
        assert store.entries.keys() == {"again"}, "old entries are deleted"

    asyncio.run(test())


def test_spending_is_written_again_after_an_outage() -> None:
    async def test() -> None:
        store, spending = Store(), Spending(lambda: NOON)
        spending.add("a", 7, spending.today())
        store.down = True
        with pytest.raises(OSError):
            await spending.sync(store, "g")
        store.down = False
        await spending.sync(store, "g")
        assert store.entries == {"g": {"20000": {"a": 7}}}

    asyncio.run(test())


@pytest.mark.parametrize(
    ("tree", "sequences", "tokens"),
    [
        ({"prompt": "x", "max_tokens": 5}, 1, (25, 5)),
        ({"prompt": [1, 2, 3], "max_tokens": 5, "n": 4}, 4, (3, 20)),
        ({"prompt": [[1, 2], [3]], "max_tokens": 5, "n": 2}, 4, (3, 20)),
        ({"prompt": ["x", "y", "z"], "max_tokens": 5}, 3, (25, 15)),
        ({"messages": []}, 1, (25, DEFAULT_OUTPUT)),
        ({"messages": [], "max_completion_tokens": 7, "max_tokens": 9}, 1, (25, 7)),
        ({"prompt": "x", "max_tokens": 2**63 - 1}, 1, (25, 1000)),
        ({"prompt": "x", "max_tokens": -5}, 1, (25, DEFAULT_OUTPUT)),
        ({"prompt": "x", "max_tokens": True, "n": True}, 1, (25, DEFAULT_OUTPUT)),
        ({"prompt": "x", "max_tokens": "9", "n": "3"}, 1, (25, DEFAULT_OUTPUT)),
        ({"prompt": "x", "max_tokens": 1, "n": 10**9}, 1, (25, 1)),
        ({"prompt": ["x"] * 4000, "max_tokens": 1}, 128, (25, 128)),
        ({"prompt": [], "max_tokens": 1}, 1, (25, 1)),
        ({"prompt": [[1], "x"], "max_tokens": 1}, 2, (25, 2)),
        ({"prompt": {"a": 1}, "max_tokens": 1}, 1, (25, 1)),
    ],
)
def test_estimates(tree: dict[str, Any], sequences: int, tokens: tuple[int, int]) -> None:
    found = estimate(tree, 99, context=1000)
    assert (found.sequences, (found.input, found.output)) == (sequences, tokens) and found.tokens == sum(tokens)
    assert sequences_of(tree) == sequences


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0001, "1ms"), (0.294, "294ms"), (1, "1s"), (8.64, "8.7s"), (60, "1m0s"), (360, "6m0s"), (86_400, "24h0m0s")],
)
def test_durations_are_those_of_openai(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_salts_differ_between_tenants_and_endpoints() -> None:
    made = [cache_salt.salt(secret, Tenant(name)) for secret in (SECRET, b"t" * 32) for name in ("a", "b")]
    assert len(set(made)) == 4 and all(salt is not None and len(salt) == 32 for salt in made)
    assert cache_salt.salt(SECRET, Tenant("a")) == made[0]
    assert cache_salt.salt(SECRET, Tenant("a", Limits(share_cache=True))) is None


def test_a_clients_own_salt_stays_within_its_tenants() -> None:
    assert cache_salt.combined("t", "c") == "t:c" and cache_salt.combined("t", None) == "t"
    assert (
        cache_salt.combined("t", "") == "t" and cache_salt.combined(None, "c") == "c" and cache_salt.combined(None, None) is None
    )
