import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from strata.serving.routing import policy
from strata.serving.routing.policy import FORGET_S, Decision, Load, Pool, Prompt, RateMeter, Rates, Rule, decide

RULE = Rule(when="cheaper", min_tokens=256, max_queue_s=1.0, stall_weight=1.0)
UNKNOWN = Rates(None, None, None, None)
# Twins: 100,000 tokens a second on either side; blocks travel ten times as fast; 5 ms to hand over.
TWINS = Rates(local_tokens_per_s=1e5, remote_tokens_per_s=1e5, transfer_s_per_token=1e-6, handoff_s=0.005)
IDLE = Load(running=0, waiting=0, queued_tokens=0)
BUSY = Load(running=32, waiting=0, queued_tokens=0)
FREE = Pool(engines=1, queued_tokens=0)


@pytest.mark.parametrize(
    ("prompt", "here", "pool", "rates", "expected"),
    [
        # Few new tokens stay, whatever the load.
        (Prompt(255, 0), BUSY, FREE, TWINS, Decision("local", "short")),
        (Prompt(8000, 7984), BUSY, FREE, TWINS, Decision("local", "cached")),
        # Nobody there, or nobody with time.
        (Prompt(8000, 0), BUSY, None, TWINS, Decision("local", "no-prefill-engine")),
        (Prompt(8000, 0), BUSY, Pool(engines=0, queued_tokens=0), TWINS, Decision("local", "no-prefill-engine")),
        (Prompt(8000, 0), BUSY, Pool(engines=2, queued_tokens=100_001), TWINS, Decision("local", "prefill-busy")),
        # Nothing measured: length decides.
        (Prompt(256, 0), IDLE, FREE, UNKNOWN, Decision("remote", "long")),
        (Prompt(8000, 0), IDLE, Pool(1, 10**9), UNKNOWN, Decision("remote", "long")),
        (Prompt(8000, 0), IDLE, FREE, replace(TWINS, handoff_s=None), Decision("remote", "long")),
        # An idle engine delays nobody, and is nearer.
        (Prompt(8000, 0), IDLE, FREE, TWINS, Decision("local", "cheaper-here")),
        # 512 tokens would delay one stream by 5.1 ms; to hand them over takes 5.5. With 1024 it is 10.2 against 6.0.
        (Prompt(512, 0), replace(IDLE, running=1), FREE, TWINS, Decision("local", "cheaper-here")),
        (Prompt(1024, 0), replace(IDLE, running=1), FREE, TWINS, Decision("remote", "cheaper-there")),
        (Prompt(8000, 0), BUSY, FREE, TWINS, Decision("remote", "cheaper-there")),
        # A cached beginning is computed again over there, so it speaks for staying: 32 ms of delay against 66 ms.
        (Prompt(8000, 6400), replace(IDLE, running=1), FREE, TWINS, Decision("local", "cheaper-here")),
        # Waiting requests will be running by then.
        (Prompt(1024, 0), replace(IDLE, waiting=1), FREE, TWINS, Decision("remote", "cheaper-there")),
        # A queue here is a reason to leave, a queue there to stay.
        (Prompt(512, 0), Load(1, 0, queued_tokens=8000), FREE, TWINS, Decision("remote", "cheaper-there")),
        (Prompt(1024, 0), replace(IDLE, running=1), Pool(1, 8000), TWINS, Decision("local", "cheaper-here")),
    ],
)
def test_decisions_and_reasons(prompt: Prompt, here: Load, pool: Pool | None, rates: Rates, expected: Decision) -> None:
    assert decide(prompt, here, pool, rates, RULE) == expected


def test_stall_weight_of_the_recipe_is_applied() -> None:
    prompt, here = Prompt(1024, 0), Load(running=1, waiting=0, queued_tokens=0)
    assert decide(prompt, here, FREE, TWINS, RULE).where == "remote"
    assert decide(prompt, here, FREE, TWINS, replace(RULE, stall_weight=0.0)).where == "local"


def test_always_is_remote_unless_there_is_no_prefill_engine() -> None:
    always = replace(RULE, when="always")
    for case in cases(500):
        assert decide(case.prompt, case.here, case.pool, case.rates, always) == Decision("remote", "always")
        assert decide(case.prompt, case.here, None, case.rates, always).where == "local"


@dataclass(frozen=True)
class Case:
    prompt: Prompt
    here: Load
    pool: Pool
    rates: Rates
    rule: Rule

    def where(self, **changes: object) -> str:
        case = replace(self, **changes)  # type: ignore[arg-type]
        return decide(case.prompt, case.here, case.pool, case.rates, case.rule).where


def cases(count: int = 5000) -> Iterator[Case]:
    rng = random.Random(7)

    def scaled(low: float, high: float) -> float:
        return float(low * (high / low) ** rng.random())

    for _ in range(count):
        tokens = int(scaled(1, 100_000))
        yield Case(
            Prompt(tokens, rng.choice((0, rng.randrange(tokens)))),
            Load(
                rng.choice((0, 1, rng.randrange(300))), rng.choice((0, rng.randrange(50))), rng.choice((0, rng.randrange(10**5)))
            ),
            Pool(rng.randrange(1, 5), rng.choice((0, rng.randrange(10**5)))),
            rng.choice((UNKNOWN, Rates(scaled(1e2, 1e6), scaled(1e2, 1e6), scaled(1e-8, 1e-2), scaled(1e-4, 1)))),
            Rule("cheaper", rng.randrange(2000), scaled(0.01, 10), rng.choice((0.0, scaled(0.01, 10)))),
        )


def test_cases_reach_every_reason() -> None:
    reasons = {decide(case.prompt, case.here, case.pool, case.rates, case.rule).reason for case in cases()}
    assert reasons | {"no-prefill-engine", "always"} == {*policy.LOCAL, *policy.REMOTE}


def test_more_new_tokens_never_change_remote_to_local() -> None:
    for case in cases():
        longer = [replace(case.prompt, tokens=case.prompt.tokens + more) for more in (1, 100, 10_000, 10**6)]
        colder = [replace(case.prompt, cached=case.prompt.cached // part) for part in (2, 10, 10**6)]
        if case.where() == "remote":
            assert {case.where(prompt=prompt) for prompt in longer + colder} == {"remote"}, case


def test_a_longer_remote_queue_never_changes_local_to_remote() -> None:
    for case in cases():
        fuller = [replace(case.pool, queued_tokens=case.pool.queued_tokens + more) for more in (1, 1000, 10**6)]
        if case.where() == "local":
            assert {case.where(pool=pool) for pool in fuller} == {"local"}, case


def test_a_busier_local_engine_never_changes_remote_to_local() -> None:
    for case in cases():
        busier = [
            replace(case.here, running=case.here.running + 10),
            replace(case.here, waiting=case.here.waiting + 10),
            replace(case.here, queued_tokens=case.here.queued_tokens + 1000),
        ]
        if case.where() == "remote":
            assert {case.where(here=here) for here in busier} == {"remote"}, case


def test_without_a_pool_every_prefill_is_local() -> None:
    assert {case.where(pool=None) for case in cases()} == {"local"}


def test_rate_is_unknown_until_measured() -> None:
    meter = RateMeter()
    for at in (5.0, 6.0, 7.0):
        assert meter.per_second(at) is None and meter.seconds_each(at) is None
        meter.add(1000, 0.01, now=at)
    assert meter.per_second(7.0) == pytest.approx(1e5)
    assert meter.seconds_each(7.0) == pytest.approx(1e-5)


def test_measurements_without_positive_duration_are_ignored() -> None:
    meter = RateMeter()
    for amount, seconds in ((100, 0.0), (100, -1.0), (0, 1.0)):
        meter.add(amount, seconds, now=1.0)
    assert meter.per_second(1.0) is None


@pytest.mark.parametrize("when", [0, 1, 2, 10, 19])
def test_a_single_outlier_does_not_change_the_rate(when: int) -> None:
    meter = RateMeter()
    for at in range(20):
        meter.add(1000, 60.0 if at == when else 0.01, now=at * 0.1)
    assert meter.per_second(2.0) == pytest.approx(1e5)


def test_a_lasting_change_is_adopted_within_a_few_half_lives() -> None:
    meter = RateMeter(half_life_s=10.0)
    for at in range(100):
        meter.add(1000, 0.01, now=float(at))
    for at in range(100, 140):
        meter.add(1000, 0.02, now=float(at))
    assert meter.seconds_each(139.0) == pytest.approx(2e-5, rel=0.05)


def test_old_measurements_expire() -> None:
    """Otherwise a pool that was slow once would never be chosen again."""
    meter = RateMeter()
    for at in range(3):
        meter.add(1000, 10.0, now=float(at))
    assert meter.per_second(2.0 + FORGET_S) == pytest.approx(100)
    assert meter.per_second(2.1 + FORGET_S) is None
    for at in range(3):
        assert meter.per_second(1e6) is None
        meter.add(1000, 0.01, now=1e6 + at)
    assert meter.per_second(1e6 + 2) == pytest.approx(1e5)
