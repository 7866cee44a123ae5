"""Scaling by SLO on Ray Serve's interface for autoscaling policies: a class that its controller calls several times a second.

The demand is in the gateways' reports. Engines report their step times and use through `record_autoscaling_stats`, of which Serve
passes means of the last half minute. Serve's own delays are off: the cool-downs are the policy's, as in a simulation.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from strata.serving.scaling import policy, reports, sizing
from strata.serving.scaling.policy import Bounds, PoolMemory
from strata.serving.scaling.sizing import Lengths, Limits, Overhead, Slo
from strata.serving.scaling.step_fit import LinearSteps
from strata.serving.transport.directory import Directory

logger = logging.getLogger("ray.serve")

DECIDE_S = 1.0
STARTUP_S = 60.0  # until a replica has reported its own
REQUEST_S = 0.01  # of a first token: HTTP, tokenizer and the way through the gateway
HANDOFF_S = 0.01


@dataclass(frozen=True)
class EngineReport:
    """Figures of an engine, as floats for Serve."""

    startup_s: float
    kv_tokens: float
    waiting: float
    kv_use: float
    cached_share: float
    fixed_s: float = 0.0  # 0: not enough steps yet
    stream_s: float = 0.0
    prompt_token_s: float = 0.0


class SloPolicy:
    """Keyword arguments are JSON, as Serve requires."""

    def __init__(
        self,
        endpoint: str,
        role: str,
        slo: Mapping[str, float],
        bounds: Mapping[str, float],
        max_sequences: int,
        step_tokens: int,
        disaggregated: bool,
    ) -> None:
        self._directory, self._role, self._disaggregated = Directory(endpoint), role, disaggregated
        self._slo = Slo(**slo)
        self._bounds = Bounds(int(bounds["least"]), int(bounds["most"]), bounds["cooldown_s"], bounds["idle_s"])
        self._max_sequences, self._step_tokens = max_sequences, step_tokens
        self._memory = PoolMemory()
        self._decided_at = float("-inf")
        self._number: int | None = None
        # Of the last replicas that were up: a pool without replicas is sized by them.
        self._engine: EngineReport | None = None

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context` is Serve's AutoscalingContext."""
        now = context.current_time
        if self._number is None or now >= self._decided_at + DECIDE_S:
            self._decided_at = now
            self._number = self._decide(context, now)
        return min(max(self._number, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas), {}

    def _decide(self, context: Any, now: float) -> int:
        try:
            seen = reports.total(self._directory.entries(reports.ROLE), now)
        except Exception:  # the GCS is down
            logger.warning("The gateways' reports cannot be read; the number of replicas stays.", exc_info=True)
            seen = None
        if seen is None:
            return int(context.target_num_replicas)
        engine = self._update(context.aggregated_metrics or {})
        running = context.current_num_replicas
        if running and engine is not None:
            seen = replace(
                seen,
                waiting=seen.waiting + round(running * engine.waiting),
                cached_share=engine.cached_share,
                kv_use=engine.kv_use if self._role == "decode" else 0.0,
            )
        known = engine if engine is not None and engine.fixed_s else None
        startup_s = engine.startup_s if engine is not None else STARTUP_S
        rate_of = None if known is None else lambda lengths: self._rate(lengths, known)
        number, self._memory = policy.decide(seen, self._memory, self._bounds, running, startup_s, rate_of)
        return number

    def _update(self, metrics: Mapping[str, Mapping[Any, float]]) -> EngineReport | None:
        """Means over the replicas. Step times are those of replicas that know theirs."""
        means = {}
        for name in EngineReport.__dataclass_fields__:
            values = [value for value in metrics.get(name, {}).values() if value or name not in STEP_TERMS]
            if values:
                means[name] = sum(values) / len(values)
            elif name in STEP_TERMS:
                means[name] = getattr(self._engine, name) if self._engine is not None else 0.0
            else:
                return self._engine
        self._engine = EngineReport(**means)
        return self._engine

    def _rate(self, lengths: Lengths, engine: EngineReport) -> float:
        times = LinearSteps(engine.fixed_s, engine.stream_s, engine.prompt_token_s)
        limits = Limits(engine.kv_tokens, self._max_sequences, self._step_tokens)
        if self._role == "prefill":
            return sizing.prefill_rate(times, lengths, limits, Overhead(REQUEST_S, HANDOFF_S), self._slo)
        return sizing.decode_rate(times, lengths, limits, Overhead(REQUEST_S), self._slo, not self._disaggregated)


STEP_TERMS = ("fixed_s", "stream_s", "prompt_token_s")
