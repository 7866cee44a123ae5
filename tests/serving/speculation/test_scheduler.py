"""vLLM's own scheduler with the policy's table, and requests without drafts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scripted_replica
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from strata.serving.speculation import scheduler as schedulers
from strata.serving.speculation.policy import FIRST_TRIAL, Policy
from strata.serving.speculation.scheduler import MeasuredScheduler, Table, only_decodes
from strata.serving.speculation.settings import OFF, Speculation

BLOCK, TOKENS = 16, 3


@pytest.fixture
def scheduler(tmp_path: Path) -> MeasuredScheduler:
    scripted_replica.write_model(tmp_path)
    speculation = Speculation("ngram", TOKENS, None)
    args = AsyncEngineArgs(
        model=str(tmp_path),
        max_num_batched_tokens=256,
        max_num_seqs=4,
        block_size=BLOCK,
        enable_prefix_caching=False,
        async_scheduling=False,
        **speculation.engine_arguments(4),
        scheduler_cls=speculation.scheduler(False),
    )
    config = args.create_engine_config()
    assert config.scheduler_config.get_scheduler_cls() is MeasuredScheduler
    config.cache_config.num_gpu_blocks = 1000
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    blocks = KVCacheConfig(1000, [], [KVCacheGroupSpec(["layer"], attention)])
    return MeasuredScheduler(config, blocks, StructuredOutputManager(config), BLOCK)


def add(scheduler: MeasuredScheduler, name: str, **extra: Any) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True, extra_args=extra or None)
    params.update_from_generation_config({}, 0)
    scheduler.add_request(Request(name, [1] * 9, params, None))


def step(scheduler: MeasuredScheduler, accepted: int = 0) -> SchedulerOutput:
    """A step of an engine that proposes token 6, accepts `accepted` of each draft, and generates 5."""
    planned = scheduler.schedule()
    names = list(planned.num_scheduled_tokens)
    right = {name: min(accepted, len(planned.scheduled_spec_decode_tokens.get(name, ()))) for name in names}
    sampled = [[6] * right[name] + [5] for name in names]
    scheduler.update_from_output(planned, ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled))
    drafts = [[6] * planned.num_spec_tokens_to_schedule for _ in names]
    scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
    return planned


def test_requests_without_drafts_are_scheduled_beside_others(scheduler: MeasuredScheduler) -> None:
    add(scheduler, "plain", **{OFF: True})
    add(scheduler, "drafted")
    first, second = step(scheduler), step(scheduler, accepted=2)
    assert not only_decodes(first) and only_decodes(second)
    assert second.num_scheduled_tokens == {"plain": 1, "drafted": 1 + TOKENS}
    assert scheduler.requests["drafted"].num_output_tokens == 4 and scheduler.requests["plain"].num_output_tokens == 2


def test_joining_sequence_gets_no_placeholders(scheduler: MeasuredScheduler) -> None:
    """vLLM would pad a sequence that has one token to compute with drafts of token -1."""
    add(scheduler, "running")
    step(scheduler)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    params.update_from_generation_config({}, 0)
    scheduler.add_request(Request("joining", [1], params, None))
    planned = step(scheduler)
    assert planned.num_scheduled_tokens == {"running": 1 + TOKENS, "joining": 1}
    assert "joining" not in planned.scheduled_spec_decode_tokens


def test_drafts_stop_when_steps_with_them_are_slower(scheduler: MeasuredScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(schedulers, "time", SimpleNamespace(monotonic=clock))
    add(scheduler, "drafted")
    drafted = []
    for _ in range(FIRST_TRIAL + 100):
        planned = step(scheduler)
        drafted.append(planned.num_spec_tokens_to_schedule > 0)
        clock.now += 2.0 if planned.scheduled_spec_decode_tokens else 1.0
    assert all(drafted[:FIRST_TRIAL]) and not any(drafted[-40:])


def test_table_follows_the_policy() -> None:
    policy = Policy()
    table = Table(TOKENS, policy)
    assert table[1] == table[64] == TOKENS
    policy.of(64)._better = False
    assert table[1] == TOKENS and table[64] == 0


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_own_drafter_knows_how_many_tokens_are_wanted(scheduler: MeasuredScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    own: Any = SimpleNamespace(wanted=None)
    monkeypatch.setattr(schedulers.CpuDrafter, "latest", own)
    add(scheduler, "a")
    step(scheduler)
    assert own.wanted == TOKENS
    monkeypatch.setattr(scheduler, "dynamic_sd_lookup", {1: 0})
    step(scheduler)
    assert own.wanted == 0
