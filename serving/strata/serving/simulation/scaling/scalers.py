"""Scalers of a simulation: Strata's policy by SLO, and Ray Serve's default policy."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from strata.serving.scaling import policy, sizing
from strata.serving.scaling.demand import Seen
from strata.serving.scaling.policy import Bounds, PoolMemory
from strata.serving.scaling.sizing import Lengths, Limits, Overhead, Slo, StepTimes
from strata.serving.simulation.replica import Role
from strata.serving.simulation.scaling.fleet import Pool


@dataclass(frozen=True)
class EngineModel:
    times: StepTimes
    limits: Mapping[Role, Limits]
    overhead: Overhead


@dataclass
class SloScaler:
    engine: EngineModel
    slo: Slo
    bounds: Mapping[Role, Bounds]
    startup_s: float
    _memory: dict[Role, PoolMemory] = field(default_factory=dict)

    def decide(self, seen: Seen, pools: Mapping[Role, Pool]) -> dict[Role, int]:
        wanted = {}
        for role, pool in pools.items():

            def rate_of(lengths: Lengths, role: Role = role) -> float:
                engine, limits = self.engine, self.engine.limits[role]
                if role == "prefill":
                    return sizing.prefill_rate(engine.times, lengths, limits, engine.overhead, self.slo)
                prefills = "prefill" not in pools
                return sizing.decode_rate(engine.times, lengths, limits, engine.overhead, self.slo, prefills)

            memory = self._memory.get(role, PoolMemory())
            wanted[role], self._memory[role] = policy.decide(
                replace(seen, waiting=pool.waiting), memory, self.bounds[role], pool.running, self.startup_s, rate_of
            )
        return wanted


@dataclass
class RayDefaultScaler:
    """Ray Serve's default policy and settings, but for the bounds."""

    bounds: Mapping[Role, Bounds]
    _samples: dict[Role, deque[tuple[float, int]]] = field(default_factory=dict)
    _states: dict[Role, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from ray.serve.config import AutoscalingConfig

        self._configs = {
            role: AutoscalingConfig(min_replicas=each.least, max_replicas=each.most) for role, each in self.bounds.items()
        }

    def decide(self, seen: Seen, pools: Mapping[Role, Pool]) -> dict[Role, int]:
        from strata.serving.ray_patches import default_autoscaling

        wanted = {}
        for role, pool in pools.items():
            config, samples = self._configs[role], self._samples.setdefault(role, deque())
            samples.append((seen.at, pool.ongoing))
            while samples[0][0] <= seen.at - config.look_back_period_s:
                samples.popleft()
            requests = sum(ongoing for _, ongoing in samples) / len(samples)
            state = self._states.get(role, {})
            wanted[role], self._states[role] = default_autoscaling.decide(
                config, pool.running, pool.target, requests, seen.at, state
            )
        return wanted
