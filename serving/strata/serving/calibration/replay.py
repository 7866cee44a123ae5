"""A benchmark's load in the simulation: the same prompts, block by block, at the same times."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from strata.serving.bench.clients.load import Level
from strata.serving.bench.clients.workloads import Workload
from strata.serving.calibration.figures import Figures
from strata.serving.simulation import planned
from strata.serving.simulation.calibration import Calibration
from strata.serving.simulation.endpoint import Setup, Simulation
from strata.serving.simulation.engine import EngineSettings
from strata.serving.simulation.requests import HashedText, OwnText, Request, Text

LARGEST_GRAPH = 512  # tokens
Timed = Iterator[tuple[float, Request]]


@dataclass(frozen=True)
class Engines:
    """Settings of the measured endpoint that are not fitted."""

    block_size: int
    max_sequences: int
    step_tokens: int
    decode: int = 1  # replicas
    prefill: int = 0
    prefix_caching: bool = True
    gpu: bool = False
    full_graphs: bool = False  # CUDA graphs of whole steps with prompts, which Strata's kernels allow

    @property
    def async_scheduling(self) -> bool:
        """vLLM's default on GPUs; it has none on CPUs."""
        return self.gpu

    @property
    def graph_tokens(self) -> int:
        """Largest step with prompts that is one CUDA graph, by vLLM's default sizes."""
        return min(2 * self.max_sequences, LARGEST_GRAPH) if self.full_graphs else 0


def simulate(
    calibration: Calibration, engines: Engines, workload: Workload, level: Level, seed: int, clients: int = 1
) -> Figures:
    load = requests(workload, level, seed, engines.block_size, clients)
    found = Simulation(setup(calibration, engines), seed).run(load).summary()
    ttft, itl = found["ttft_s"], found["itl_s"]
    rates = found["requests_per_s"], found["output_tokens_per_s"]
    return Figures(*rates, ttft["p50"], ttft["p90"], itl["p50"] or math.nan, itl["mean"] or math.nan)


def setup(calibration: Calibration, engines: Engines) -> Setup:
    model = planned.calibrated(calibration)
    settings = EngineSettings(
        blocks=model.kv_tokens // engines.block_size,
        block_size=engines.block_size,
        max_sequences=engines.max_sequences,
        step_tokens=max(engines.step_tokens, engines.max_sequences),
        prefix_caching=engines.prefix_caching,
        async_scheduling=engines.async_scheduling,
    )
    return Setup(
        times=model.times,
        decode_replicas=engines.decode,
        decode_engine=settings,
        max_queue=10**6,  # the measured loads are not rejected
        context=model.context,
        request_s=model.request_s,
        request_spread=model.request_spread,
        front_request_s=model.front_request_s,
        front_token_s=model.front_token_s,
        prefill_replicas=engines.prefill,
        prefill_engine=settings,
        handoff_s=model.handoff_s,
        transfer_token_s=model.transfer_token_s,
        routing="kv" if engines.decode > 1 else "least-busy",
    )


def requests(workload: Workload, level: Level, seed: int, block_size: int, clients: int = 1) -> Timed:
    """Requests of all clients. A conversation's next turn follows its last at once, as in the benchmark."""
    made = [[Request(*each) for each in turns] for turns in _conversations(workload, level.conversations, seed, block_size)]
    if level.concurrency:
        return _closed_loop(made, level, min(clients, level.concurrency))
    assert level.rate
    mean = workload.requests_per_conversation / level.rate
    times = np.cumsum(np.random.default_rng(seed).exponential(mean, level.conversations)).tolist()
    return ((at, _chain(deque(turns), None)) for at, turns in zip(times, made, strict=True))


def _closed_loop(made: list[list[Request]], level: Level, clients: int) -> Timed:
    for client in range(clients):
        work = deque(made[number] for number in level.numbers(client, clients))
        for _ in range(min(level.slots(client, clients), len(work))):
            yield 0.0, _chain(deque(work.popleft()), work)


def _chain(turns: deque[Request], work: deque[list[Request]] | None) -> Request:
    """First of a conversation's requests; the others follow, and then the next conversation of `work`."""
    request = turns.popleft()

    def following() -> tuple[float, Request] | None:
        if turns:
            return 0.0, _chain(turns, work)
        return (0.0, _chain(deque(work.popleft()), work)) if work else None

    request.then = following
    return request


@lru_cache(maxsize=64)
def _conversations(workload: Workload, count: int, seed: int, block_size: int) -> list[list[tuple[int, int, int, Text]]]:
    """Arguments of the requests of each conversation. A fit simulates each load hundreds of times."""
    names: dict[tuple[int, tuple[int, ...]], int] = {}
    found, number = [], 0
    for place in range(count):
        turns: list[tuple[int, int, int, Text]] = []
        for turn in workload.conversation(seed, place):
            number += 1
            text: Text = OwnText(number)  # prompts that share no block
            if workload.prefix_caching:
                hashes = _hashes(turn.prompt, block_size, names)
                text = HashedText(number, hashes, 1, len(hashes))
            turns.append((number, len(turn.prompt), turn.output, text))
        found.append(turns)
    return found


def _hashes(prompt: tuple[int, ...], size: int, names: dict[tuple[int, tuple[int, ...]], int]) -> tuple[int, ...]:
    """A number for each block, equal where the prompts are equal up to the block's end."""
    before, found = 0, []
    for start in range(0, len(prompt) - size + 1, size):
        before = names.setdefault((before, prompt[start : start + size]), len(names) + 1)
        found.append(before)
    return tuple(found)
