"""Steps that a short prompt waits behind long ones, in vLLM's own scheduler."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import scripted_replica
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from strata.serving.engine.engine import SHARED_STEP_TOKENS, longest_chunk

STEP, LONG, SHORT, BLOCK = 256, 1000, 16, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    scripted_replica.write_model(folder)
    return folder


def waited(model: Path, long_prompts: int, chunk: int) -> int:
    """Steps before the one that computes the short prompt, which arrives last."""
    args = AsyncEngineArgs(
        model=str(model),
        max_num_batched_tokens=STEP,
        long_prefill_token_threshold=chunk,
        max_num_seqs=16,
        block_size=BLOCK,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = 1000
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    blocks = KVCacheConfig(1000, [], [KVCacheGroupSpec(["layer"], attention)])
    scheduler = Scheduler(config, blocks, StructuredOutputManager(config), BLOCK)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    params.update_from_generation_config({}, 0)
    for number in range(long_prompts):
        scheduler.add_request(Request(f"long-{number}", [1] * LONG, params, None))
    scheduler.add_request(Request("short", [1] * SHORT, params, None))
    for step in range(100):
        planned = scheduler.schedule()
        if "short" in planned.num_scheduled_tokens:
            return step
        names = list(planned.num_scheduled_tokens)
        computed = {name: scheduler.requests[name].num_computed_tokens for name in names}
        sampled = [[5] if computed[name] >= LONG else [] for name in names]
        scheduler.update_from_output(planned, ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled))
    raise AssertionError("the short prompt was never computed")


@pytest.mark.parametrize(
    ("long_prompts", "chunk", "steps"),
    [
        (0, 0, 0),
        (1, 0, LONG // STEP),  # the last step of the long prompt has tokens left for the short one
        (2, 0, 2 * LONG // STEP),
        (1, STEP // 2, 0),  # half of each step is free
        (2, STEP // 2, LONG // (STEP // 2)),  # two fill a step; both end after as many steps as one alone with this chunk
        (3, STEP // 4, 0),
    ],
)
def test_short_prompt_waits(model: Path, long_prompts: int, chunk: int, steps: int) -> None:
    assert waited(model, long_prompts, chunk) == steps


@pytest.mark.parametrize(
    ("step", "context", "chunked", "chunk"),
    [
        (SHARED_STEP_TOKENS, 32768, True, SHARED_STEP_TOKENS // 2),
        (16384, 32768, True, 8192),
        (16384, 8193, True, 8192),
        (16384, 8192, True, 0),  # no prompt is longer
        (SHARED_STEP_TOKENS - 1, 32768, True, 0),
        (16384, 32768, False, 0),
    ],
)
def test_default(step: int, context: int, chunked: bool, chunk: int) -> None:
    scheduler = SimpleNamespace(max_num_batched_tokens=step, enable_chunked_prefill=chunked)
    config = SimpleNamespace(scheduler_config=scheduler, model_config=SimpleNamespace(max_model_len=context))
    assert longest_chunk(config) == chunk
