"""Routing of simulated requests: what announcements tell is what the caches have, and it is nearly as good as full knowledge."""

import random
from dataclasses import replace

import pytest

from strata.serving.routing.kv.prefix_map import PrefixMap
from strata.serving.simulation.calibration import Calibration
from strata.serving.simulation.endpoint import Kill, Setup, Simulation
from strata.serving.simulation.engine import Engine, EngineSettings
from strata.serving.simulation.generated import Shape, open_loop
from strata.serving.simulation.histogram import Histogram
from strata.serving.simulation.requests import HashedText, OwnText, Request, Text
from strata.serving.simulation.results import Results
from strata.serving.simulation.routing import announcements
from strata.serving.simulation.routing.announcements import Announcements
from strata.serving.simulation.sequence import Sequence

TIMES = Calibration(
    fixed_s=0.002,
    sequence_s=2e-5,
    context_token_s=2e-8,
    prompt_token_s=5e-5,
    prompt_pair_s=1e-10,
    request_s=0.005,
    kv_tokens=10**6,
    context=10**6,
)
SETUP = Setup(
    times=TIMES,
    decode_replicas=4,
    decode_engine=EngineSettings(blocks=4000, block_size=16, max_sequences=64, step_tokens=2048),
    max_queue=10**6,
    context=10**6,
    request_s=0.005,
    recovery_s=5.0,
)
CHAT = Shape(prompt=200, output=50, shared=1000, openings=12, turns=5, think_s=2.0)


def run(setup: Setup, requests: int = 600, rate: float = 30.0) -> Results:
    return Simulation(setup, 0).run(open_loop("poisson", rate, requests, CHAT, 16, 0))


class Ignored:
    """Listener that drives one engine by itself."""

    def __init__(self) -> None:
        self.wake: tuple[float, int] | None = None

    def wake_at(self, engine: Engine, at: float) -> None:
        self.wake = (at, engine.version)

    def began(self, sequence: Sequence, now: float) -> None: ...
    def ended(self, sequence: Sequence, now: float) -> None: ...
    def reads(self, sequence: Sequence, tokens: int) -> None: ...


@pytest.mark.parametrize("seed", range(6))
def test_map_has_the_points_of_the_cache(seed: int) -> None:
    """Random requests of texts with and without public blocks on a small cache, one after another."""
    draw, listener, known = random.Random(seed), Ignored(), PrefixMap()
    engine = Engine(TIMES, EngineSettings(60, 16, 4, 512), listener, Histogram())
    announced = Announcements(known, 16)
    engine.announce(announced)
    texts: list[Text] = [OwnText(number, number % 2, 6) for number in range(1, 5)]
    texts += [HashedText(number, (7, number % 2, number), 4, 12) for number in range(5, 8)]
    now = 0.0
    for number in range(150):
        text = draw.choice(texts)
        engine.submit(Sequence(Request(number, draw.randint(16 * text.public + 1, 500), draw.randint(1, 60), text)), now)
        while listener.wake is not None:
            (now, version), listener.wake = listener.wake, None
            if version == engine.version:
                engine.wake(now)
        assert not engine.running and not engine.waiting
        for each in texts:
            tokens = 40 * 16 + 1
            cached = engine.cached_tokens(each, tokens)
            found = known.cached_tokens(announcements.points(each, 40, announcements.stride(16)))
            assert found.get(announced.slot, 0) == cached // 64 * 64
    announced.close()
    assert known.size == 0


def test_announcements_are_as_good_as_full_knowledge_and_better_than_load_alone() -> None:
    found = {name: run(replace(SETUP, routing=name)) for name in ("kv", "oracle", "least-busy")}  # type: ignore[arg-type]
    rates = {name: results.hit_tokens / results.queried_tokens for name, results in found.items()}
    assert rates["kv"] >= 0.95 * rates["oracle"]
    assert rates["kv"] > 1.2 * rates["least-busy"]
    medians = {name: sorted(results.ttft_s)[len(results.ttft_s) // 2] for name, results in found.items()}
    assert medians["kv"] < 0.8 * medians["least-busy"]
    assert found["kv"].routed["prefix"] > 500 and found["kv"].routed["new"] == CHAT.openings
    assert found["least-busy"].routed == {"least-busy": 600}


def test_every_replica_works_although_one_has_the_prefix_first() -> None:
    """All conversations have one system prompt."""
    simulation = Simulation(replace(SETUP, routing="kv"), 0)
    one = replace(CHAT, openings=1)
    simulation.run(open_loop("poisson", 120.0, 1500, one, 16, 0))
    work = sorted(replica.engine.busy_s for replica in simulation.pools["decode"])
    assert work[0] > 0.5 * work[-1]


@pytest.mark.parametrize("routing", ["kv", "oracle"])
def test_lost_replicas_lose_their_prefixes_and_no_request(routing: str) -> None:
    kills = (Kill(2.0, "decode", 0), Kill(3.0, "decode", 1), Kill(11.0, "decode", 0))
    for prefill in (0, 1):
        setup = replace(SETUP, routing=routing, kills=kills, prefill_replicas=prefill, prefill_engine=SETUP.decode_engine)  # type: ignore[arg-type]
        simulation = Simulation(setup, 0)
        results = simulation.run(open_loop("poisson", 30.0, 600, CHAT, 16, 0))
        assert results.completed == results.sent == 600
        assert simulation._chooser is not None and not simulation._chooser._queued
        assert sum(results.routed.values()) == 600 + results.retried + results.migrated


def test_without_prefix_caching_nothing_is_announced() -> None:
    off = replace(SETUP, decode_engine=replace(SETUP.decode_engine, prefix_caching=False), routing="kv")
    results = run(off, 100)
    assert results.hit_tokens == 0 and results.routed.keys() == {"new"}
