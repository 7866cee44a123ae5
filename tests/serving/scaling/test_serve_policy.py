"""The policy as Ray Serve's controller calls it, with reports of gateways and figures of engines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from strata.platform import recipe_file
from strata.serving.runtime import autoscaling
from strata.serving.scaling import reports
from strata.serving.scaling.serve_policy import EngineReport, SloPolicy
from strata.serving.spec import EngineSpec, Network

ENGINE = EngineReport(20.0, 10**6, waiting=0.0, kv_use=0.1, cached_share=0.0, fixed_s=0.01, stream_s=1e-4, prompt_token_s=2e-5)


class Cluster:
    """Reports in a directory, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, least: int = 0) -> None:
        self.reports: list[dict[str, Any]] = []
        self.policy = SloPolicy(
            endpoint="m",
            role="decode",
            slo={"ttft_s": 2.0, "itl_s": 0.02},
            bounds={"least": least, "most": 8, "cooldown_s": 60.0, "idle_s": 30.0},
            max_sequences=64,
            step_tokens=8192,
            disaggregated=False,
        )
        monkeypatch.setattr(self.policy._directory, "entries", lambda role: self.reports if role == reports.ROLE else [])
        self.now, self.arrivals, self.number = 1000.0, 0, 1
        self.engine: EngineReport | None = ENGINE

    def run(self, seconds: int, rate: float, in_flight: int = 0) -> int:
        """Engines are up as soon as they are wanted."""
        for _ in range(seconds):
            self.now += 1.0
            self.arrivals += round(rate)
            tokens = {"prompt_tokens": 1000 * self.arrivals, "output_tokens": 100 * self.arrivals}
            count = {"arrivals": self.arrivals, "ended": self.arrivals, "in_flight": in_flight, "waiting": 0}
            self.reports = [{**count, **tokens, "at": self.now}]
            self.number = self.decide()
        return self.number

    def decide(self) -> int:
        figures = vars(self.engine) if self.engine is not None and self.number else {}
        context = SimpleNamespace(
            current_time=self.now,
            current_num_replicas=self.number,
            target_num_replicas=self.number,
            capacity_adjusted_min_replicas=0,
            capacity_adjusted_max_replicas=8,
            aggregated_metrics={name: {f"r{k}": value for k in range(self.number)} for name, value in figures.items()},
        )
        return self.policy(context)[0]


def test_pool_grows_empties_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    # One replica sustains (1 - 0.01 / 0.02) / 0.03 = 16.7 requests per second.
    # A new load has a headroom of 8.
    assert cluster.run(30, rate=10, in_flight=5) == 5
    assert cluster.run(10, rate=20, in_flight=9) >= 5
    assert cluster.run(25, rate=0) > 0
    assert cluster.run(60, rate=0) == 0
    cluster.run(50, rate=0)
    assert cluster.run(1, rate=1, in_flight=1) == 1


def test_from_zero_a_pool_is_sized_by_the_engines_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.run(30, rate=10, in_flight=5)
    assert cluster.run(100, rate=0) == 0
    assert cluster.run(20, rate=40, in_flight=9) == 8


def test_without_reports_the_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.run(30, rate=10, in_flight=5)
    before = cluster.number
    cluster.now += reports.STALE_S + 1
    assert cluster.decide() == before
    cluster.now += 2

    def broken(role: str) -> list[dict[str, Any]]:
        raise RuntimeError("GCS")

    monkeypatch.setattr(cluster.policy._directory, "entries", broken)
    assert cluster.decide() == before


def test_engines_that_do_not_know_their_times_yet_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    figures = {name: {"a": value, "b": value} for name, value in vars(ENGINE).items()}
    figures |= {name: {"a": 0.0, "b": getattr(ENGINE, name)} for name in ("fixed_s", "stream_s", "prompt_token_s")}
    figures["waiting"] = {"a": 2.0, "b": 4.0}
    found = cluster.policy._update(figures)
    assert found is not None and found.waiting == 3.0
    assert (found.fixed_s, found.stream_s, found.prompt_token_s) == (0.01, 1e-4, 2e-5)
    assert cluster.policy._update({}) is found


def test_reports_of_several_gateways_are_added_and_old_ones_left_out() -> None:
    one = {"arrivals": 3, "ended": 2, "prompt_tokens": 20, "output_tokens": 10, "in_flight": 1, "waiting": 1, "at": 100.0}
    seen = reports.total([one, one | {"at": 99.0}, one | {"at": 100.0 - reports.STALE_S}], 100.0)
    assert seen is not None and (seen.arrivals, seen.ended, seen.in_flight, seen.waiting) == (6, 4, 2, 2)
    assert reports.total([one], 100.0 + reports.STALE_S) is None and reports.total([], 0.0) is None


def test_serve_accepts_the_settings_of_a_recipe() -> None:
    words = ["serve.decode.replicas=0", "serve.decode.max_replicas=4", "serve.slo.ttft_s=1", "serve.slo.itl_s=0.03"]
    section = recipe_file.load("laptop", words).serve
    spec = EngineSpec.of("decode", section, Path("/model"), "m", Network.within(one_machine=True))
    found = spec.scaling()
    assert found is not None
    config = AutoscalingConfig(**found)
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, 1, 4)
    assert config.upscale_delay_s == config.downscale_delay_s == config.downscale_to_zero_delay_s == 0
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    assert policy._slo.itl_s == 0.03 and policy._bounds.least == 0
    plain = recipe_file.load("laptop", ["serve.decode.max_replicas=4"]).serve
    other = EngineSpec.of("decode", plain, Path("/model"), "m", Network.within(one_machine=True))
    assert other.scaling() == autoscaling.config(plain.decode.replicas, 4)
    fixed = recipe_file.load("laptop", []).serve
    assert EngineSpec.of("decode", fixed, Path("/model"), "m", Network.within(True)).scaling() is None
