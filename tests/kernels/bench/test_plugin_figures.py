"""Comparison of vLLM's answers and speeds, switches of the plugin, and sizes that a warm-up compiles."""

import math
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from strata.kernels.bench import vllm_plugin as bench
from strata.kernels.bench.vllm_engine import Answer
from strata.kernels.bench.vllm_plugin import Divergence, Workload, distances, divergences, paired_ratio
from strata.kernels.compiler.warm_up import sizes
from strata.kernels.vllm_plugin import switch
from strata.platform.errors import UserError

# Answers


def answer(tokens: list[int], *rated: dict[int, float]) -> Answer:
    return Answer(tokens, list(rated))


def test_an_answer_diverges_at_the_first_different_token() -> None:
    theirs = [
        answer([1, 2, 3], {1: -0.1}, {2: -0.5, 9: -0.75}, {3: -0.2}),
        answer([4], {4: -0.1}),
        answer([5, 6], {5: -0.1, 7: -0.3}, {6: -0.1}),
    ]
    others = [answer([1, 9, 8]), answer([4]), answer([8, 6])]
    assert divergences(theirs, others, [10, 20, 30]) == [Divergence(10, 1, 0.25), Divergence(30, 0, None)]


@pytest.mark.parametrize(("gap", "within"), [(0.0, True), (0.25, True), (0.26, False), (None, False)])
def test_a_divergence_is_tolerated_up_to_a_quarter(gap: float | None, within: bool) -> None:
    assert Divergence(1, 1, gap).within_tolerance is within


def test_distances_of_common_tokens_up_to_a_divergence() -> None:
    theirs = [answer([1, 2, 3], {1: -1.0, 7: -2.0}, {2: -1.0}, {3: -1.0})]
    others = [answer([1, 9, 3], {1: -1.5, 8: -9.0}, {2: -3.0, 9: -1.0}, {3: -9.0})]
    assert distances(theirs, others) == [0.5, 2.0], "nothing after the tokens differ"


# Speeds


def test_the_ratio_is_the_geometric_mean_of_the_rounds() -> None:
    ratio, error = paired_ratio([200.0, 50.0], [100.0, 100.0])
    # Logarithms of 2 and 1/2: mean 0, deviation sqrt(2) log 2, and the error of a mean of two.
    assert ratio == pytest.approx(1.0) and error == pytest.approx(math.log(2))
    assert paired_ratio([300.0, 1.0], [100.0]) == (pytest.approx(3.0), None), "a failed engine has fewer rounds"
    ratio, error = paired_ratio([110.0, 110.0, 110.0], [100.0, 100.0, 100.0])
    assert ratio == pytest.approx(1.1) and error == pytest.approx(0.0)


def test_workloads() -> None:
    prompts, lengths = Workload(50, 7, 20).drawn(vocabulary=5, seed=1)
    assert len(prompts) == 50 and {len(prompt) for prompt in prompts} == {7} and lengths == [20] * 50
    assert {token for prompt in prompts for token in prompt} == {0, 1, 2, 3, 4}
    _, lengths = Workload(500, 7, 20, concurrency=4).drawn(5, seed=1)
    assert (min(lengths), max(lengths)) == (10, 30), "by half"
    assert str(Workload(2, 3, 4)) == "2 x (3 in, 4 out)" and str(Workload(2, 3, 4, 5)) == "2 x (3 in, 4 out), 5 concurrent"
    assert Workload(3, 7, 20).drawn(9, seed=1) == Workload(3, 7, 20).drawn(9, seed=1) != Workload(3, 7, 20).drawn(9, seed=2)
    sizes = {name: (one.prompts, one.tokens_in, one.tokens_out, one.concurrency) for name, one in bench.WORKLOADS.items()}
    assert sizes == {
        "served": (512, 200, 128, 64),
        "chat": (256, 512, 128, None),
        "decode": (64, 64, 512, None),
        "long": (64, 8192, 256, None),
    }


class Engine:
    """Stand-in for an engine with a fixed speed, in tokens per second."""

    order: ClassVar[list[str]] = []

    def __init__(self, name: str, speed: float, fails_after: int = 99) -> None:
        self.name, self.speed, self.left, self.closed = name, speed, fails_after, False

    def seconds(self, prompts: Any, tokens: list[int], concurrency: int | None) -> float:
        Engine.order.append(self.name)
        self.left -= 1
        if self.left < 0:
            raise UserError("broken", "fix")
        return sum(tokens) / self.speed

    def close(self) -> None:
        self.closed = True


def compared(monkeypatch: pytest.MonkeyPatch, engines: dict[str, Any], rounds: int, deadline: float = math.inf) -> dict[str, Any]:
    Engine.order = []
    monkeypatch.setattr(bench, "Engine", Engine)
    monkeypatch.setattr(bench, "WORKLOADS", {"w": Workload(4, 3, 10)})
    result: dict[str, Any] = {"contenders": {name: {} for name in engines}}
    bench._compare_speed(engines, 9, rounds, deadline, result)
    return result


def test_rounds_alternate_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    result = compared(monkeypatch, {"vllm": Engine("vllm", 100), "strata": Engine("strata", 120)}, rounds=2)
    assert Engine.order == ["strata", "vllm", "vllm", "strata", "strata", "vllm"]
    assert result["output_tokens_per_s"]["w"]["strata"] == pytest.approx([120, 120])
    assert result["ratio_to_vllm"]["w"]["strata"]["ratio"] == pytest.approx(1.2)


def test_no_round_starts_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    result = compared(monkeypatch, {"vllm": Engine("vllm", 100)}, rounds=5, deadline=-math.inf)
    assert len(result["output_tokens_per_s"]["w"]["vllm"]) == 1, "at least one"


def test_a_failed_engine_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Engine("strata", 120, fails_after=2)
    engines = {"vllm": Engine("vllm", 100), "strata": broken}
    result = compared(monkeypatch, engines, rounds=3)
    assert broken.closed and list(engines) == ["vllm"] and result["contenders"]["strata"] == {"failed": True}
    assert len(result["output_tokens_per_s"]["w"]["strata"]) == 1 and len(result["output_tokens_per_s"]["w"]["vllm"]) == 3
    with pytest.raises(UserError, match="broken"):
        compared(monkeypatch, {"vllm": Engine("vllm", 100, fails_after=0)}, rounds=1)


def test_answers_are_right_within_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(token: int) -> Any:
        def answers(prompts: list[list[int]], tokens: int, concurrency: int | None = None) -> list[Answer]:
            return [answer([token], {1: -0.5, 2: -0.7, 3: -0.8}) for _ in prompts]

        return SimpleNamespace(answer=answers, close=lambda: None)

    monkeypatch.setattr(bench, "Engine", SimpleNamespace(answer=lambda one, **given: one.answer(**given)))
    for token, right, equal in ((1, True, 16), (2, True, 0), (3, False, 0)):
        result: dict[str, Any] = {"contenders": {"vllm": {}, "strata": {}}}
        assert bench._compare_answers({"vllm": engine(1), "strata": engine(token)}, 9, result) is right
        assert result["answers"]["strata"]["equal"] == equal and result["answers"]["strata"]["of"] == 16
        assert set(result["answers"]) == {"vllm, one by one", "strata", "vllm, 4 at once", "strata, 4 at once"}


# Switches


def test_engine_arguments_of_the_parts() -> None:
    assert switch.engine_arguments(()) == {}
    assert switch.engine_arguments() == {"attention_backend": "CUSTOM", "compilation_config": {"cudagraph_mode": "FULL"}}
    assert switch.engine_arguments((), largest_graph=64) == {"compilation_config": {"max_cudagraph_capture_size": 64}}
    assert switch.engine_arguments(("rms_norm", "silu_and_mul")) == {
        "ir_op_priority": {"rms_norm": ["strata"], "fused_add_rms_norm": ["strata"]},
        "compilation_config": {"custom_ops": ["+silu_and_mul"]},
    }


def test_the_switch_names_known_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert switch.environment() == {"STRATA_VLLM_KERNELS": "attention,flash_prefill"}
    for value, expected in (("", set()), ("attention", {"attention"}), ("attention,rms_norm", {"attention", "rms_norm"})):
        monkeypatch.setenv("STRATA_VLLM_KERNELS", value)
        assert switch.switched_on() == expected
    monkeypatch.delenv("STRATA_VLLM_KERNELS")
    assert switch.switched_on() == frozenset()
    monkeypatch.setenv("STRATA_VLLM_KERNELS", "attention,softmax")
    with pytest.raises(ValueError, match="unknown parts softmax"):
        switch.switched_on()


# Warm-up


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (4, [1, 2, 3, 4]),
        (5, [1, 2, 3, 4, 5]),
        (16, [1, 2, 3, 4, 7, 8, 15, 16]),
        (40, [1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 40]),
    ],
)
def test_two_sizes_for_each_power_of_two(largest: int, expected: list[int]) -> None:
    assert sizes(largest) == expected
