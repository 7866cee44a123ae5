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


# Powers of two, so that costs are exact. 3072 tokens, 1024 of them cached; 2 + 1 other sequences at half weight.
# Local: 512 / 1024 queued + 2048 * (1 + 3 / 2) / 1024 = 5.5 s.
# Remote: (256 + 1024) / 2048 + 2048 * (1 / 2048 + 1 / 4096) + handoff = 2.125 s + handoff.
EXACT = Case(
    Prompt(3072, 1024),
    Load(running=2, waiting=1, queued_tokens=512),
    Pool(1, 256),
    Rates(1024.0, 2048.0, 2.0**-12, 3.375),
    Rule("cheaper", 16, 8.0, 0.5),
)


def with_handoff(case: Case, handoff_s: float) -> str:
    return case.where(rates=replace(case.rates, handoff_s=handoff_s))


@pytest.mark.parametrize(
    ("case", "break_even_s"),
    [
        (EXACT, 3.375),
        (replace(EXACT, here=Load(5, 1, 512)), 6.375),  # three more sequences: + 2048 * 1.5 / 1024
        (replace(EXACT, here=Load(2, 1, 1536)), 4.375),
        (replace(EXACT, pool=Pool(1, 2304)), 2.375),
        (replace(EXACT, pool=Pool(3, 256)), 3.375),  # the queue is that of one engine
        (replace(EXACT, prompt=Prompt(3072, 0)), 5.625),  # 0.5 + 7.5 - 0.125 - 1.5 - 0.75
        (replace(EXACT, prompt=Prompt(2048, 1024)), 1.625),  # 0.5 + 2.5 - 0.625 - 0.5 - 0.25
    ],
)
def test_break_even_is_the_sum_of_all_costs(case: Case, break_even_s: float) -> None:
    assert with_handoff(case, break_even_s) == "local", "a tie stays"
    assert with_handoff(case, break_even_s - 2**-10) == "remote"


def test_a_remote_token_that_costs_as_much_as_a_local_one_stays_whatever_the_queue() -> None:
    rates = Rates(1024.0, 2048.0, 2.0**-11, 1e-6)  # 1 / 1024 s on either side
    queued = Load(running=0, waiting=0, queued_tokens=10**6)
    assert EXACT.where(rates=rates, here=queued) == "local"
    assert EXACT.where(rates=replace(rates, transfer_s_per_token=2.0**-12), here=queued) == "remote"


@pytest.mark.parametrize(("queued", "reason"), [(2048 * 8, "cheaper-there"), (2048 * 8 + 1, "prefill-busy")])
def test_a_prefill_engine_is_busy_beyond_the_longest_queue(queued: int, reason: str) -> None:
    here = Load(running=2, waiting=1, queued_tokens=10**6)
    assert decide(EXACT.prompt, here, Pool(1, queued), EXACT.rates, EXACT.rule).reason == reason


@pytest.mark.parametrize(
    ("tokens", "cached", "reason"),
    [(15, 0, "short"), (15, 3, "short"), (16, 0, "long"), (16, 1, "cached"), (17, 1, "long"), (17, 2, "cached")],
)
def test_prompts_with_few_uncached_tokens_are_local(tokens: int, cached: int, reason: str) -> None:
    assert decide(Prompt(tokens, cached), IDLE, FREE, UNKNOWN, EXACT.rule).reason == reason


@pytest.mark.parametrize("unknown", ["local_tokens_per_s", "remote_tokens_per_s", "transfer_s_per_token", "handoff_s"])
def test_length_decides_while_any_rate_is_unknown(unknown: str) -> None:
    rates = replace(EXACT.rates, handoff_s=1e6)
    assert decide(EXACT.prompt, IDLE, FREE, rates, EXACT.rule) == Decision("local", "cheaper-here")
    assert decide(EXACT.prompt, IDLE, FREE, replace(rates, **{unknown: None}), EXACT.rule) == Decision("remote", "long")


@pytest.mark.parametrize("pool", [None, Pool(0, 0)])
def test_always_without_an_engine_follows_the_other_rules(pool: Pool | None) -> None:
    assert decide(Prompt(3, 0), IDLE, pool, UNKNOWN, replace(RULE, when="always")) == Decision("local", "short")
    assert decide(Prompt(3000, 0), IDLE, pool, UNKNOWN, replace(RULE, when="always")) == Decision("local", "no-prefill-engine")


def test_a_sample_loses_half_its_weight_every_thirty_seconds() -> None:
    meter = RateMeter()
    for seconds in (8, 8, 8):
        meter.add(4, seconds, now=100.0)
    assert meter.seconds_each(100.0) == 2.0
    meter.add(4, 32, now=130.0)  # median of 2, 2, 8: (2 / 2 + 2) / (1 / 2 + 1)
    assert meter.seconds_each(130.0) == 2.0
    meter.add(4, 32, now=130.0)  # median of 2, 8, 8: (3 + 8) / (1.5 + 1)
    assert meter.seconds_each(130.0) == pytest.approx(4.4)
    meter.add(4, 16, now=190.0)  # median of 8, 8, 4: (11 / 4 + 8) / (2.5 / 4 + 1)
    assert meter.seconds_each(190.0) == pytest.approx(10.75 / 1.625)
    assert meter.per_second(190.0) == pytest.approx(1.625 / 10.75)


def test_half_life_can_be_set() -> None:
    meter = RateMeter(half_life_s=5.0)
    for seconds, now in ((2, 0.0), (2, 0.0), (2, 0.0), (8, 10.0), (8, 10.0)):
        meter.add(1, seconds, now)
    assert meter.seconds_each(10.0) == pytest.approx((2.5 + 8) / (1.25 + 1))  # 2 / 4 + 2, then + 8


def test_samples_expire_after_sixty_seconds_without_another() -> None:
    meter = RateMeter()
    for now in (0.0, 60.0, 120.0):
        meter.add(1, 2, now)
    assert meter.seconds_each(180.0) == 2.0 and meter.seconds_each(180.5) is None
    meter.add(1, 4, 180.0)  # just in time
    assert meter.seconds_each(180.0) == 2.0
    meter.add(1, 4, 240.5)
    meter.add(1, 4, 240.5)
    assert meter.seconds_each(240.5) is None, "two samples since the expiry"
    meter.add(1, 4, 240.5)
    assert meter.seconds_each(240.5) == 4.0


@pytest.mark.parametrize(("amount", "seconds"), [(0, 5.0), (-1, 5.0), (5, 0.0), (5, -1.0), (0, 0.0)])
def test_a_sample_without_information_does_not_count(amount: float, seconds: float) -> None:
    meter = RateMeter()
    for _ in range(2):
        meter.add(0.5, 0.25, 0.0)
    meter.add(amount, seconds, 0.0)
    assert meter.seconds_each(0.0) is None
    meter.add(0.5, 0.25, 0.0)
    assert meter.seconds_each(0.0) == 0.5
