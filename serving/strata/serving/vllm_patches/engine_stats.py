"""Stat loggers for vLLM: record each engine step in the replica's metrics and as plain numbers for the prefill policy.

The numbers do not go stale when the engine becomes idle. vLLM runs one more step after a request has ended or was aborted, to
remove it from the batch, and keeps stepping while a connector holds blocks for a peer, so the last report is of an empty engine.

vLLM's default loggers observe a histogram for each token of each step, on the event loop that sends these tokens.

Written for vLLM 0.29. `VllmSeries` is no longer needed when vLLM's `PrometheusStatLogger` does not observe inter-token latencies
one by one; the test of this file fails then.

Imports vLLM: only replicas import this file.
"""

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase

from strata.serving.kv_offload.settings import FOUND_TOKENS
from strata.serving.metrics.telemetry import Replica
from strata.serving.routing.policy import RateMeter
from strata.serving.scaling.step_fit import RecentShare, StepFit

# Names of vLLM's connectors, and a key that only the statistics of each have.
NIXL = ("NixlConnector", "bytes_transferred")
TIERS = ("OffloadingConnector", "types")


def attach(engine: Any, replica: Replica) -> "EngineStats":
    """Replaces the loggers of a running AsyncLLM, whose constructor accepts only factories of loggers."""
    manager = engine.logger_manager
    assert manager is not None, "this engine was started with disable_log_stats"
    config = engine.vllm_config
    stats = EngineStats(replica, config.parallel_config.tensor_parallel_size)
    manager.stat_loggers = [stats, VllmSeries(config)]
    manager.log_engine_initialized()
    return stats


class EngineStats(StatLoggerBase):  # type: ignore[misc]
    def __init__(self, replica: Replica, shards: int) -> None:
        self._replica = replica
        self._shards = shards
        self.running = 0
        self.waiting = 0  # including requests that wait for a KV transfer
        self.kv_usage = 0.0
        self.remote_prefills = 0  # of this replica, in progress on prefill engines
        self._had_remote_prefills = False  # at the end of the last step
        self._transfer = RateMeter()  # per byte, of one shard
        self.bytes_moved = 0.0  # KV blocks of other engines
        self._tokens_moved = 0
        self.fit = StepFit()
        self._busy_at: float | None = None  # end of the last step, if it left requests
        self._queried = RecentShare()

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that the prefix cache had, of recent prompts."""
        return self._queried.share

    @property
    def transfer_s_per_token(self) -> float | None:
        seconds_per_byte = self._transfer.seconds_each(time.monotonic())
        if seconds_per_byte is None or self._tokens_moved <= 0:
            return None
        # The shards of a tensor-parallel engine read their parts of a token concurrently.
        return seconds_per_byte * self.bytes_moved / self._tokens_moved / self._shards

    def load(self) -> dict[str, float]:
        return {"running": self.running, "waiting": self.waiting, "kv_usage": round(self.kv_usage, 4)}

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats)
        if iteration_stats is not None:
            self._tokens_moved += iteration_stats.prompt_token_stats.external_kv_transfer
            if latencies := iteration_stats.inter_token_latencies_iter:
                self._replica.inter_token_latencies(latencies, self._beside(scheduler_stats))
        self._fit_step(scheduler_stats, iteration_stats)
        self._had_remote_prefills = self.remote_prefills > 0

    def _fit_step(self, stats: Any, iteration: Any) -> None:
        """Adds a step to the fit. Its duration is the shortest inter-token latency, that of streams which were in the step
        before, too; without streams, the time since the last step of a busy engine. vLLM's own `elapsed_ms` is little more
        than the scheduler's time where steps run asynchronously."""
        now, step = time.monotonic(), stats.iteration_details if stats is not None else None
        latencies = iteration.inter_token_latencies_iter if iteration is not None else []
        if step is not None and not step.is_dummy and (step.num_generation_requests or step.num_ctx_tokens):
            if latencies:
                self.fit.add(len(latencies), step.num_ctx_tokens, min(latencies))
            elif self._busy_at is not None and not step.num_generation_requests:
                self.fit.add(0, step.num_ctx_tokens, now - self._busy_at)
        self._busy_at = now if self.running or self.waiting else None

    def _beside(self, stats: Any) -> str:
        """Work that makes this step longer than one that only decodes. After a KV transfer, the last token of a prompt is still
        computed here."""
        step = stats.iteration_details if stats is not None else None
        if step is not None and step.num_ctx_tokens > step.num_ctx_requests:
            return "prefill"
        if step is not None and (step.num_ctx_requests or stats.num_skipped_waiting_reqs or _connector(stats, NIXL)):
            return "hand-over"
        return "pool-prefill" if self._had_remote_prefills or self.remote_prefills else "nothing"

    def _record_scheduler(self, stats: Any) -> None:
        self.running = stats.num_running_reqs
        self.waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.kv_usage = stats.kv_cache_usage
        self._replica.load(self.running, self.waiting, self.kv_usage)
        self._queried.add(stats.prefix_cache_stats.queries, stats.prefix_cache_stats.hits)
        self._replica.prefix_looked_up(stats.prefix_cache_stats.queries, stats.prefix_cache_stats.hits)
        if (drafts := stats.spec_decoding_stats) is not None:
            self._replica.drafted(drafts.num_draft_tokens_per_pos, drafts.num_accepted_tokens_per_pos)
        if moved := _connector(stats, NIXL):
            self._record_transfers(moved)
        if tiers := _connector(stats, TIERS):
            for (tier,), tokens in tiers["data"].get(FOUND_TOKENS, {}).items():
                self._replica.found_in_tier(tier, tokens)
                self._tokens_moved -= tokens  # vLLM counts them with those from other engines

    def _record_transfers(self, data: dict[str, list[float]]) -> None:
        """Records `NixlKVConnectorStats.data`: lists with an entry for each event since the last step."""
        sizes, seconds = data["bytes_transferred"], data["transfer_duration"]
        self._replica.kv_moved(sizes, seconds)
        self._replica.kv_lost(len(data["num_failed_transfers"]), len(data["num_kv_expired_reqs"]))
        self.bytes_moved += sum(sizes)
        for size, took in zip(sizes, seconds, strict=True):
            self._transfer.add(size, took, time.monotonic())

    def log_engine_initialized(self) -> None:
        pass


def _connector(stats: Any, which: tuple[str, str]) -> dict[str, Any] | None:
    """Statistics of a connector since the last step, of an engine that has it alone or among several."""
    data = stats.kv_connector_stats
    if not data:
        return None
    name, key = which
    if key in data:
        return dict(data)
    return dict(data[name]["data"]) if name in data else None


class VllmSeries(PrometheusStatLogger):  # type: ignore[misc]
    """vLLM's own metrics (vllm:*), in the default registry. Without inter-token latencies: the gateway measures them at the
    client side, and here they would cost more than all other metrics together."""

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        if iteration_stats is not None:
            iteration_stats.inter_token_latencies_iter = []
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)


class _VllmCollector(Collector):
    def collect(self) -> Iterator[Metric]:
        for family in REGISTRY.collect():
            if family.name.startswith("vllm:"):
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                yield family


def vllm_text() -> str:
    """Text of vLLM's metrics. Merge it with a `replica` label: vLLM labels only by model and engine index."""
    return generate_latest(_VllmCollector()).decode()
