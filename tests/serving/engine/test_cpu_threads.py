"""Threads of a CPU engine's steps."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from strata.serving.engine import cpu_threads

LAPTOP = [(512, 128), (128,), *[(256, 128), (128, 128), (768, 128), (128, 384)] * 2]
WIDE = [(4096, 512), (512,), *[(1024, 512), (512, 512), (3072, 512), (512, 1536)] * 2]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers that torch is given."""
    given: list[int] = []
    monkeypatch.setattr(cpu_threads, "_set_threads", given.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(CPUWorker, "load_model", lambda self: None)
    monkeypatch.setattr(CPUWorker, "execute_model", lambda self, step: step)
    return given


def worker(shapes: list[tuple[int, ...]], heads: int = 4, head: int = 32) -> Any:
    made: Any = cpu_threads.Worker.__new__(cpu_threads.Worker)
    made.parallel_config = None
    made.model_config = SimpleNamespace(get_num_attention_heads=lambda parallel: heads, get_head_size=lambda: head)
    made.model_runner = SimpleNamespace(
        get_model=lambda: SimpleNamespace(parameters=lambda: [torch.empty(*shape, device="meta") for shape in shapes])
    )
    made.load_model()
    return made


def step(prompts: dict[str, int], streams: dict[str, int], cached: int = 0) -> SchedulerOutput:
    """A step of prompts, each with `cached` tokens in the KV cache, and of streams with the given number of tokens so far."""
    made = SchedulerOutput.make_empty()
    made.scheduled_new_reqs = [SimpleNamespace(req_id=name, num_computed_tokens=cached) for name in prompts]  # type: ignore[misc]
    made.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(streams),
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[],
        num_computed_tokens=list(streams.values()),
        num_output_tokens=[],
    )
    made.num_scheduled_tokens = prompts | dict.fromkeys(streams, 1)
    made.total_num_scheduled_tokens = sum(made.num_scheduled_tokens.values())
    return made


def streams(number: int, context: int) -> dict[str, int]:
    return {f"stream {each}": context for each in range(number)}


@pytest.mark.parametrize(
    ("shapes", "prompts", "others", "wanted"),
    [
        (LAPTOP, {}, streams(1, 100), 1),
        (LAPTOP, {}, streams(16, 200), 1),
        (LAPTOP, {"short": 24}, streams(15, 200), 1),
        (LAPTOP, {"long": 128}, {}, 8),
        (LAPTOP, {"long": 128}, streams(16, 200), 8),
        (LAPTOP, {}, {}, 1),
        (LAPTOP, {}, streams(1, 30_000), 8),  # attention reads 30,000 tokens
        (WIDE, {}, streams(1, 100), 8),
    ],
)
def test_small_steps_have_one_thread(
    threads: list[int], shapes: list[tuple[int, ...]], prompts: dict[str, int], others: dict[str, int], wanted: int
) -> None:
    worker(shapes).execute_model(step(prompts, others))
    assert (threads or [8])[-1] == wanted


def test_cached_tokens_of_a_prompt_count_in_its_attention(threads: list[int]) -> None:
    small = worker(LAPTOP)
    small.execute_model(step({"prompt": 8}, {}))
    assert threads == [1]
    small.execute_model(step({"prompt": 8}, {}, cached=4000))
    assert threads == [1, 8]


def test_threads_change_only_when_they_must(threads: list[int]) -> None:
    small = worker(LAPTOP)
    for _ in range(3):
        small.execute_model(step({}, streams(2, 100)))
    small.execute_model(step({"long": 200}, {}))
    given = step({"long": 200}, {})
    assert small.execute_model(given) is given
    assert threads == [1, 8]


def test_a_model_without_matrices_is_served(threads: list[int]) -> None:
    worker([(128,)]).execute_model(step({}, streams(1, 0)))
    assert threads == [1]


def test_threads_are_set_where_vllm_has_replaced_torchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    before = torch.get_num_threads()
    try:
        cpu_threads._set_threads(before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        cpu_threads._set_threads(before)
