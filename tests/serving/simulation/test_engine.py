"""The simulated engine beside a naive one that takes every step and lists every block, and beside closed formulas."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.serving.simulation.calibration import Calibration
from strata.serving.simulation.endpoint import Setup, Simulation
from strata.serving.simulation.engine import EngineSettings
from strata.serving.simulation.requests import OwnText, Request
from strata.serving.simulation.results import Results

TIMES = Calibration(
    fixed_s=0.01,
    sequence_s=0.0011,
    context_token_s=0.000013,
    prompt_token_s=0.00017,
    prompt_pair_s=0.0000019,
    request_s=0.0,
    kv_tokens=10**6,
    context=10**6,
)


def setup(engine: EngineSettings, times: Calibration = TIMES, **more: int) -> Setup:
    return Setup(times=times, decode_replicas=1, decode_engine=engine, max_queue=10**9, context=10**9, request_s=0.0, **more)  # type: ignore[arg-type]


def run(
    engine: EngineSettings, load: list[tuple[float, Request]], times: Calibration = TIMES
) -> tuple[Results, dict[int, float]]:
    """Results, and the time at which each request ended."""
    simulation = Simulation(setup(engine, times))
    ends: dict[int, float] = {}
    close = simulation._close

    def closing(flight, failed=False):  # type: ignore[no-untyped-def]
        assert flight.request.number not in ends and not failed
        ends[flight.request.number] = simulation.now
        close(flight, failed)

    simulation._close = closing  # type: ignore[method-assign]
    results = simulation.run(iter(load))
    for replica in simulation.pools["decode"]:
        assert replica.engine.cache.used == replica.engine.cache.references == 0
        assert replica.engine.running == replica.engine.waiting == replica.busy == 0
    return results, ends


@dataclass
class Block:
    name: int | None = None
    references: int = 0


@dataclass
class Job:
    request: Request
    tokens: int = 0
    computed: int = 0
    emitted: int = 0
    decodes: bool = False
    blocks: list[Block] = field(default_factory=list)
    looked_up: int = 0  # blocks whose names were found or given


class Naive:
    """vLLM's scheduler in its plainest form: one step at a time, blocks as objects in one free queue."""

    def __init__(self, engine: EngineSettings) -> None:
        self.engine = engine
        self.free = deque(Block() for _ in range(engine.blocks))
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.preemptions = self.hits = 0
        self.ends: dict[int, float] = {}
        self.counted: set[int] = set()

    def named(self, name: int) -> Block | None:
        jobs = [*self.running, *self.admitting]
        held = [block for job in jobs for block in job.blocks if block.name == name]
        return next(iter(held), None) or next((block for block in self.free if block.name == name), None)

    def allocate(self, job: Job, tokens: int) -> bool:
        size = self.engine.block_size
        need = -(-tokens // size) - len(job.blocks)
        if need > len(self.free):
            return False
        for _ in range(need):
            block = self.free.popleft()
            block.name, block.references = None, 1
            job.blocks.append(block)
        self.admitting.append(job)
        if self.engine.prefix_caching:
            for index, name in enumerate(job.request.text.names(job.looked_up, tokens // size), job.looked_up):
                if self.named(name) is None:
                    job.blocks[index].name = name
                job.looked_up = index + 1
        self.admitting.pop()
        return True

    def release(self, job: Job) -> None:
        for block in reversed(job.blocks):
            block.references -= 1
            if not block.references:
                (self.free.appendleft if block.name is None else self.free.append)(block)
        job.blocks, job.looked_up = [], 0

    def preempt(self) -> Job:
        job = self.running.pop()
        self.release(job)
        job.computed, job.decodes = 0, False
        self.preemptions += 1
        self.waiting.appendleft(job)
        return job

    def schedule(self) -> list[tuple[Job, int]]:
        self.admitting: list[Job] = []
        budget, plan, preempted = self.engine.step_tokens, [], False
        for job in list(self.running):
            if job not in self.running or not budget:
                continue
            chunk = min(job.tokens - job.computed, budget)
            while not self.allocate(job, job.computed + chunk):
                preempted = True
                if self.preempt() is job:
                    break
            if job in self.running:
                plan.append((job, chunk))
                budget -= chunk
        while not preempted and self.waiting and budget and len(self.running) < self.engine.max_sequences:
            job = self.waiting[0]
            size = self.engine.block_size
            found: list[Block] = []
            for name in job.request.text.names(0, (job.tokens - 1) // size) if self.engine.prefix_caching else ():
                block = self.named(name)
                if block is None:
                    break
                found.append(block)
            if -(-job.tokens // size) - len(found) + sum(not block.references for block in found) > len(self.free):
                break
            self.waiting.popleft()
            for block in found:
                if not block.references:
                    self.free.remove(block)
                block.references += 1
            job.blocks, job.computed, job.looked_up = found, len(found) * size, len(found)
            if job.request.number not in self.counted:
                self.counted.add(job.request.number)
                self.hits += job.computed
            chunk = min(job.tokens - job.computed, budget)
            assert self.allocate(job, job.computed + chunk)
            self.running.append(job)
            plan.append((job, chunk))
            budget -= chunk
        return plan

    def run(self, load: list[tuple[float, Request]]) -> None:
        arrivals, now = deque(load), 0.0
        while arrivals or self.waiting or self.running:
            while arrivals and arrivals[0][0] <= now:
                request = arrivals.popleft()[1]
                self.waiting.append(Job(request, request.prompt))
            plan = self.schedule()
            if not plan:
                if not self.waiting:
                    now = arrivals[0][0]
                continue
            decodes = [job for job, _ in plan if job.decodes]
            prompts = [(job, chunk) for job, chunk in plan if job not in decodes]
            pairs = sum(chunk * (job.computed + chunk / 2) for job, chunk in prompts)
            context = sum(job.tokens for job in decodes)
            now += TIMES.step(len(decodes), context, sum(chunk for _, chunk in prompts), pairs)
            for job, chunk in plan:
                job.computed += chunk
                if job.computed == job.tokens:
                    job.tokens += 1
                    job.emitted += 1
                    job.decodes = True
                    if job.emitted == job.request.output:
                        self.running.remove(job)
                        self.release(job)
                        self.ends[job.request.number] = now


def random_load(
    seed: int, requests: int, prompts: int, outputs: int, gap_s: float, block_size: int = 4
) -> list[tuple[float, Request]]:
    draw = random.Random(seed)
    now, load = 0.0, []
    for number in range(requests):
        now += draw.expovariate(1 / gap_s)
        prompt = draw.randint(1, prompts)
        text = OwnText(number, draw.randrange(3), min(draw.choice([0, 1, 2, 3, 6]), prompt // block_size))
        load.append((now, Request(number, prompt, draw.randint(1, outputs), text)))
    return load


def assert_like_naive(engine: EngineSettings, load: list[tuple[float, Request]]) -> Results:
    naive = Naive(engine)
    naive.run(load)
    results, ends = run(engine, load)
    assert ends == {number: pytest.approx(at, rel=1e-9) for number, at in naive.ends.items()}
    assert results.preemptions == naive.preemptions
    assert results.hit_tokens == naive.hits
    return results


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    blocks=st.integers(16, 60),
    block_size=st.sampled_from([1, 3, 4, 8]),
    sequences=st.integers(1, 9),
    budget=st.integers(9, 60),
    caching=st.booleans(),
    gap_s=st.sampled_from([0.01, 0.1, 1.0]),
)
def test_any_load_runs_as_on_the_naive_engine(
    seed: int, blocks: int, block_size: int, sequences: int, budget: int, caching: bool, gap_s: float
) -> None:
    engine = EngineSettings(blocks, block_size, sequences, budget, caching)
    tokens = blocks * block_size
    load = random_load(seed, 15, max(1, tokens // 2), max(1, tokens // 2), gap_s, block_size)
    assert_like_naive(engine, load)


def test_preempted_requests_are_answered_in_full() -> None:
    engine = EngineSettings(40, 4, 8, 64)
    load = random_load(5, 30, 60, 90, 0.05)
    results = assert_like_naive(engine, load)
    assert results.preemptions > 5
    assert results.output_tokens == sum(request.output for _, request in load)
    assert results.itl.weight == sum(request.output - 1 for _, request in load)


def test_shared_prefixes_are_found() -> None:
    engine = EngineSettings(60, 4, 4, 64)
    assert assert_like_naive(engine, random_load(6, 40, 60, 20, 0.2)).hit_tokens > 100


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), blocks=st.integers(30, 90), block_size=st.sampled_from([1, 3, 4]))
def test_turns_find_of_their_history_what_the_naive_engine_finds(seed: int, blocks: int, block_size: int) -> None:
    """Conversations that evict each other, on an engine that runs one request at a time."""
    draw, now, load = random.Random(seed), 0.0, []
    history = {number: (OwnText(number, 0, draw.choice([0, 2])), 2 * block_size) for number in range(4)}
    for number in range(25):
        text, tokens = history[chosen := draw.randrange(4)]
        prompt, output = tokens + draw.randint(1, 3 * block_size), draw.randint(1, 3 * block_size)
        if prompt + output > blocks * block_size:
            text, prompt = OwnText(100 + number, 0, 2), 2 * block_size + 1  # a new conversation
        history[chosen] = text, prompt + output
        now += draw.expovariate(2)
        load.append((now, Request(number, prompt, output, text)))
    assert_like_naive(EngineSettings(blocks, block_size, 1, 64), load)


@pytest.mark.parametrize(("prompt", "output", "budget"), [(100, 1, 4096), (100, 50, 4096), (100, 50, 33), (1, 2, 8)])
def test_one_request_takes_the_time_of_its_steps(prompt: int, output: int, budget: int) -> None:
    engine = EngineSettings(1000, 16, 8, budget)
    results, _ = run(engine, [(3.0, Request(0, prompt, output, OwnText(0)))])
    chunks = [min(budget, prompt - done) for done in range(0, prompt, budget)]
    ttft = sum(TIMES.step(0, 0, new, new * (index * budget + new / 2)) for index, new in enumerate(chunks))
    decodes = sum(TIMES.step(1, prompt + done, 0, 0) for done in range(1, output))
    assert results.ttft_s[0] == pytest.approx(ttft)
    assert results.latency_s[0] == pytest.approx(ttft + decodes)
    assert results.queue_s[0] == 0
    assert results.itl.total == pytest.approx(decodes, rel=1e-9) and results.itl.weight == output - 1


def test_requests_are_admitted_in_order() -> None:
    engine = EngineSettings(100, 4, 2, 16)
    load = random_load(8, 50, 60, 5, 0.01)
    simulation = Simulation(setup(engine))
    order: list[int] = []
    began = simulation.began
    simulation.began = lambda sequence, now: (order.append(sequence.request.number), began(sequence, now))[0]  # type: ignore[method-assign]
    simulation.run(iter(load))
    assert order == sorted(order) and len(order) == 50


def test_waits_are_those_of_a_queue_with_constant_service() -> None:
    """M/D/1: one sequence at a time, and one step for each."""
    times = TIMES.model_copy(update={"sequence_s": 0.0, "context_token_s": 0.0, "prompt_token_s": 0.0, "prompt_pair_s": 0.0})
    draw, load, now = random.Random(4), [], 0.0
    busy = 0.6
    for number in range(20_000):
        now += draw.expovariate(busy / 0.01)
        load.append((now, Request(number, 1, 1, OwnText(number))))
    results, _ = run(EngineSettings(4, 16, 1, 16), load, times)
    assert results.summary()["queue_s"]["mean"] == pytest.approx(busy * 0.01 / 2 / (1 - busy), rel=0.08)
    assert results.summary()["pools"]["decode"]["utilisation"] == pytest.approx(busy, rel=0.03)


@pytest.mark.parametrize("output", [10, 100, 3000])
def test_events_do_not_grow_with_the_output(output: int) -> None:
    load = [(0.5 * number, Request(number, 50, output, OwnText(number))) for number in range(100)]
    results, _ = run(EngineSettings(40_000, 16, 64, 4096), load)
    assert results.events <= 6 * len(load)
    assert results.steps >= output


def test_decode_runs_end_where_blocks_run_out() -> None:
    """Two sequences that fit one by one: the second is preempted once, and computed again."""
    engine = EngineSettings(20, 4, 2, 64, prefix_caching=False)
    load = [(0.0, Request(0, 8, 60, OwnText(0))), (0.001, Request(1, 8, 60, OwnText(1)))]
    results, ends = run(engine, load)
    assert results.preemptions == 1 and ends[0] < ends[1]
    assert results.pools["decode"].peak == 1.0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_scheduled_ahead_does_not_admit_what_arrives_during_the_step_before(ahead: bool) -> None:
    engine = EngineSettings(blocks=100, block_size=16, max_sequences=4, step_tokens=512, async_scheduling=ahead)
    first = TIMES.step(0, 0, 100, 100 * 50)
    load = [(0.0, Request(1, 100, 5, OwnText(1))), (first / 2, Request(2, 100, 1, OwnText(2)))]
    _, ends = run(engine, load)
    between = TIMES.step(1, 101, 0, 0) if ahead else 0.0
    assert ends[2] == pytest.approx(first + between + TIMES.step(1, 101 + ahead, 100, 100 * 50))
    # Within a run of decode steps, an arrival waits for the end of the present step and, if scheduled ahead, of the next.
    alone = [(0.0, Request(1, 100, 50, OwnText(1))), (first + 0.5 * TIMES.step(1, 101, 0, 0), Request(2, 100, 1, OwnText(2)))]
    _, ends = run(engine, alone)
    steps = sum(TIMES.step(1, 101 + step, 0, 0) for step in range(1 + ahead))
    assert ends[2] == pytest.approx(first + steps + TIMES.step(1, 102 + ahead, 100, 100 * 50))


def test_the_host_bounds_a_step_from_below() -> None:
    engine = EngineSettings(blocks=100, block_size=16, max_sequences=4, step_tokens=512)
    times = TIMES.model_copy(update={"host_s": 0.02, "host_sequence_s": 0.005})
    _, ends = run(engine, [(0.0, Request(1, 100, 5, OwnText(1)))], times)
    assert ends[1] == pytest.approx(TIMES.step(0, 0, 100, 100 * 50) + 4 * 0.025)
    assert times.step(1, 101, 0, 0) == 0.025


def test_steps_within_a_graph_are_launched_at_once() -> None:
    times = TIMES.model_copy(update={"prompt_step_s": 0.003, "graph_tokens": 64})
    assert times.step(4, 0, 60, 0) == TIMES.step(4, 0, 60, 0)
    assert times.step(5, 0, 60, 0) == pytest.approx(TIMES.step(5, 0, 60, 0) + 0.003)
