"""Engine statistics, with vLLM's own scheduler and stat loggers, so that changes of vLLM are noticed."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from vllm.config import CacheConfig, ModelConfig, ObservabilityConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerIterationDetails, SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from strata.serving.kv_offload.settings import FOUND_TOKENS
from strata.serving.metrics import exposition
from strata.serving.metrics.telemetry import Replica
from strata.serving.vllm_patches import engine_stats
from strata.serving.vllm_patches.engine_stats import EngineStats

BLOCK, BLOCKS = 16, 64
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", served_model_name="tiny"),
        scheduler_config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512, is_encoder_decoder=False),
        cache_config=CacheConfig(block_size=BLOCK),
    )


@pytest.fixture
def scheduler(config: VllmConfig) -> Scheduler:
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=BLOCKS + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    config.cache_config.num_gpu_blocks = BLOCKS + 1  # one of them is vLLM's own
    manager = StructuredOutputManager(config)
    return Scheduler(config, cache, structured_output_manager=manager, block_size=BLOCK, log_stats=True)


def request(name: str, length: int, answer: int) -> Request:
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, list(range(length)), sampling_params=params, pooling_params=None, block_hasher=hasher)


def steps(scheduler: Scheduler) -> Iterator[SchedulerStats]:
    """Runs the engine's loop while the scheduler has requests, with a model that always generates 7."""
    while scheduler.has_requests():
        planned = scheduler.schedule()
        names = list(planned.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
        )
        yield scheduler.update_from_output(planned, output)[0].scheduler_stats


def value(replica: Replica, name: str) -> float:
    return next(s.value for family in text_string_to_metric_families(replica.text()) for s in family.samples if s.name == name)


@pytest.fixture
def replica() -> Replica:
    return Replica("tiny", "decode", "decode-1")


def test_load_and_cache_usage_return_to_zero(scheduler: Scheduler, replica: Replica) -> None:
    stats = EngineStats(replica, shards=1)
    for name in ("a", "b"):
        scheduler.add_request(request(name, 40, answer=4))
    seen = []
    for report in steps(scheduler):
        stats.record(report, None)
        seen.append((stats.running, value(replica, "strata_serve_kv_cache_usage")))
    assert seen[0] == (2, 4 / BLOCKS)  # 3 blocks each, 2 of them shared
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert seen[-1] == (0, 0.0)
    assert value(replica, "strata_serve_sequences_running") == 0
    assert value(replica, "strata_serve_prefix_cache_queried_tokens_total") == 80
    assert value(replica, "strata_serve_prefix_cache_hit_tokens_total") == 32


def test_abort_of_the_last_request_is_reported(scheduler: Scheduler, replica: Replica) -> None:
    stats = EngineStats(replica, shards=1)
    scheduler.add_request(request("a", 100, answer=50))
    stats.record(next(steps(scheduler)), None)
    assert stats.running == 1 and stats.kv_usage > 0
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    for report in steps(scheduler):
        stats.record(report, None)
    assert (stats.running, stats.kv_usage) == (0, 0.0)


def transfers(*moved: tuple[int, float], failed: int = 0, expired: int = 0) -> dict[str, Any]:
    """Statistics of the NIXL connector for these (bytes, microseconds)."""
    stats = NixlKVConnectorStats()
    for size, micros in moved:
        stats.record_transfer(SimpleNamespace(xferDuration=micros, postDuration=1, totalBytes=size, descCount=1))
    for _ in range(failed):
        stats.record_failed_transfer()
    for _ in range(expired):
        stats.record_kv_expired_req()
    return dict(stats.data)


def arrived(tokens: int) -> IterationStats:
    iteration = IterationStats()
    iteration.prompt_token_stats.external_kv_transfer = tokens
    return iteration


def test_transfers_are_counted_and_timed(replica: Replica) -> None:
    stats = EngineStats(replica, shards=1)
    assert stats.transfer_s_per_token is None
    stats.record(SchedulerStats(kv_connector_stats=transfers(*[(4096, 1000)] * 3, failed=1, expired=2)), None)
    assert stats.transfer_s_per_token is None, "bytes alone say nothing about tokens"
    stats.record(SchedulerStats(), arrived(12))
    assert stats.transfer_s_per_token == pytest.approx(0.003 / 12)
    assert value(replica, "strata_serve_kv_transfer_bytes_total") == 12288
    assert value(replica, "strata_serve_kv_transfer_seconds_sum") == pytest.approx(0.003)
    assert value(replica, "strata_serve_kv_transfer_failures_total") == 1
    assert value(replica, "strata_serve_kv_expired_total") == 2


def tiers(**tokens: int) -> dict[str, Any]:
    """Statistics of the offloading connector for tokens found by tier."""
    stats = OffloadingConnectorStats()
    for tier, count in tokens.items():
        stats.increase_counter(FOUND_TOKENS, count, (tier,))
    return dict(stats.data)


def found(replica: Replica) -> dict[str, float]:
    samples = [each for family in text_string_to_metric_families(replica.text()) for each in family.samples]
    return {each.labels["tier"]: each.value for each in samples if each.name == "strata_serve_kv_tier_hit_tokens_total"}


def test_tokens_are_counted_by_tier(replica: Replica) -> None:
    stats = EngineStats(replica, shards=1)
    stats.record(SchedulerStats(kv_connector_stats=tiers(cpu=256)), None)
    stats.record(SchedulerStats(kv_connector_stats=tiers(cpu=128, disk=384)), None)
    assert found(replica) == {"cpu": 384, "disk": 384}


def test_both_connectors_of_an_engine_are_recorded(replica: Replica) -> None:
    """As the engine's process sends them: each connector's statistics by its class."""
    both = MultiKVConnectorStats(data={"OffloadingConnector": OffloadingConnectorStats(data=tiers(cpu=256))})
    both["NixlConnector"] = NixlKVConnectorStats(data=transfers(*[(4096, 1000)] * 3))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(both.data), strict=False)
    stats = EngineStats(replica, shards=1)
    stats.record(SchedulerStats(kv_connector_stats=sent), arrived(256 + 12))
    assert found(replica) == {"cpu": 256}
    assert value(replica, "strata_serve_kv_transfer_bytes_total") == 12288
    assert stats.transfer_s_per_token == pytest.approx(0.003 / 12), "tokens of a tier were not transferred"


def test_transfer_time_counts_shards_as_parallel(replica: Replica) -> None:
    stats = EngineStats(replica, shards=2)
    stats.record(SchedulerStats(kv_connector_stats=transfers(*[(4096, 1000)] * 4)), arrived(20))
    assert stats.transfer_s_per_token == pytest.approx(0.001 / 10)


def went_on(replica: Replica) -> dict[str, float]:
    families = text_string_to_metric_families(replica.text())
    counts = [s for family in families for s in family.samples if s.name == "strata_serve_engine_gap_seconds_count"]
    return {sample.labels["beside"]: sample.value for sample in counts if sample.value}


def test_inter_token_latencies_are_labelled_by_cause(replica: Replica) -> None:
    stats = EngineStats(replica, shards=1)

    def step(streams: int, prompts: int = 0, prompt_tokens: int = 0, **scheduler: Any) -> None:
        iteration = IterationStats()
        iteration.inter_token_latencies_iter = [0.003] * streams
        details = SchedulerIterationDetails(0, prompts, prompt_tokens, streams, streams, 1.0)
        stats.record(SchedulerStats(iteration_details=details, **scheduler), iteration)

    step(1)
    step(2, prompts=1, prompt_tokens=200)
    step(3, prompts=1, prompt_tokens=1)  # the last token of a prompt after a KV transfer
    step(4, num_skipped_waiting_reqs=1)  # its blocks in transfer
    step(5, kv_connector_stats=transfers((4096, 1000)))
    assert went_on(replica) == {"nothing": 1, "prefill": 2, "hand-over": 12}
    stats.remote_prefills = 1
    step(6)
    stats.remote_prefills = 0
    step(7)  # it began during a remote prefill
    step(8)
    assert went_on(replica) == {"nothing": 9, "prefill": 2, "hand-over": 12, "pool-prefill": 13}


def test_vllm_reports_the_tokens_of_each_step() -> None:
    """Enabled by the option with which Strata's engines start."""
    core = SimpleNamespace(
        vllm_config=VllmConfig(observability_config=ObservabilityConfig(enable_logging_iteration_details=True))
    )
    core.log_stats = True
    new = [SimpleNamespace(req_id="new")]
    planned = SimpleNamespace(
        total_num_scheduled_tokens=101,
        num_scheduled_tokens={"new": 100, "old": 1},
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(is_context_phase=lambda _: False),
        scheduled_encoder_input_stats=None,
    )
    with EngineCore.capture_iteration_details(core, planned) as details:
        pass
    assert (details.num_ctx_requests, details.num_ctx_tokens, details.num_generation_tokens) == (1, 100, 1)


def test_engine_stats_are_exported_beside_vllm_series(config: VllmConfig, replica: Replica) -> None:
    manager = StatLoggerManager(config)  # with vLLM's default loggers
    engine = SimpleNamespace(logger_manager=manager, vllm_config=config)
    stats = engine_stats.attach(engine, replica)
    iteration = arrived(0)
    iteration.num_generation_tokens = 3
    iteration.inter_token_latencies_iter = [0.001] * 3
    manager.record(SchedulerStats(num_running_reqs=3, num_waiting_reqs=1, num_skipped_waiting_reqs=1), iteration, None, 0)
    manager.log()
    assert (stats.running, stats.waiting) == (3, 2)

    text = exposition.merge([({}, replica.text()), ({"role": "decode", "replica": "decode-1"}, engine_stats.vllm_text())])
    samples = {s.name: s for family in text_string_to_metric_families(text) for s in family.samples}
    assert samples["vllm:generation_tokens_total"].value == 3
    assert samples["vllm:generation_tokens_total"].labels["replica"] == "decode-1"
    assert samples["vllm:inter_token_latency_seconds_count"].value == 0
    assert samples["strata_serve_sequences_running"].value == 3
    assert not [name for name in samples if name.startswith(("python_", "process_")) or name.endswith("_created")]


def test_vllm_still_needs_it() -> None:
    source = inspect.getsource(PrometheusStatLogger.record)
    assert "for itl in iteration_stats.inter_token_latencies_iter" in source, (
        "vLLM no longer observes inter-token latencies one by one: measure again and review VllmSeries in engine_stats.py."
    )
