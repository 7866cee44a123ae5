"""Analysis of engines' traces: time by cause, phases, requests, findings, and the reports."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from strata.platform.errors import UserError
from strata.serving.bench.clients import measure
from strata.serving.bench.clients.load import Record
from strata.serving.engine.profiled import START
from strata.serving.profile import session
from strata.serving.profile.analysis import scheduler_log
from strata.serving.profile.analysis.findings import findings
from strata.serving.profile.analysis.summary import Engine, Summary, summarize
from strata.serving.profile.machine import Machine
from strata.serving.profile.report import html, present, record, tables
from strata.serving.profile.request_lanes import lanes, spans

from .synthetic import Writer


def busy_engine(name: str = "decode-0") -> Engine:
    """One request: a prefill of 20 ms, then eight decode steps of 8 ms, without a pause."""
    writer = Writer()
    writer.arrival("a", 0)
    writer.step(1, 20, {"a": 8})
    for number in range(8):
        writer.step(21.2 + number * 10, 9.8, {"a": 1}, ("a",) if number == 7 else ())
    return writer.engine(102, [(0, 102)], name)


def summary_of(writer: Writer, end: float, client: list[tuple[float, float]]) -> Summary:
    return summarize([writer.engine(end, client)])


def causes(summary: Summary, number: int = 0) -> dict[str, float]:
    """Milliseconds by cause, without those of no length."""
    return {cause: round(s * 1e3, 1) for cause, s in summary.engines[number].seconds.items() if s > 5e-5}


def test_every_moment_of_an_engine_has_one_cause() -> None:
    writer = Writer()
    writer.arrival("a", 20)
    writer.step(22, 10, {"a": 8}, work=0.8)
    writer.schedule(40, {}, waiting=1, remote=1)
    writer.range("strata:kv transfer", 41, 2)
    writer.step(52, 10, {"a": 1}, ("a",))
    writer.range("gpu_model_runner: sample", 63, 4)
    writer.op("aten::argmax", 63, 3)
    summary = summary_of(writer, 100, [(10, 90)])
    found = causes(summary)
    assert sum(summary.engines[0].seconds.values()) == pytest.approx(0.1)
    assert found["waiting for requests"] == 20.0, "before the client's request, and after its answer"
    assert found["KV transfer"] == 11.9, "from the step without blocks to the next one"
    assert found["front end"] == 10 + 24.9, "until the request arrives, and while its answer travels"
    assert found["scheduler"] == 0.4 and found["engine loop"] == 9.8
    assert found["dispatch"] == 2.0 and found["products"] == 18.0 and found["sampling"] == 3.0


def test_an_engine_without_requests_waits_for_the_one_that_has_them() -> None:
    prefill = Writer("prefill")
    prefill.arrival("p", 0)
    prefill.step(1, 48, {"p": 8}, ("p",))
    decode = Writer()
    decode.arrival("d", 60)
    decode.step(61, 38, {"d": 1}, ("d",))
    summary = summarize([decode.engine(100, [(0, 100)]), prefill.engine(100, [(0, 100)])])
    assert causes(summary)["waiting for other engines"] == 49.1 and causes(summary)["front end"] == 11.8
    assert causes(summary, 1)["waiting for other engines"] == 39.1


def test_kernels_of_a_gpu_are_work_and_hidden_collectives_cost_nothing() -> None:
    writer = Writer()
    writer.arrival("a", 0)
    writer.schedule(0, {"a": 1}, length=1)
    writer.range("execute_context_0(0)_generation_1(1)", 1, 9)
    writer.kernel("nvjet_tst", 2, 5, 45)
    writer.kernel("ncclDevKernel_AllReduce", 3, 40, 20)
    writer.kernel("topk_kernel", 12, 60, 30)  # launched after the step: sampling
    writer.update(99, "a")
    [engine] = summary_of(writer, 100, [(0, 100)]).engines
    assert engine.seconds["products"] == pytest.approx(0.045) and engine.seconds["sampling"] == pytest.approx(0.030)
    assert engine.seconds["collectives"] == pytest.approx(0.010)
    assert engine.seconds["scheduler"] == pytest.approx(0.002) and engine.seconds["dispatch"] == pytest.approx(0.004)
    assert engine.phases["decode step"].seconds == pytest.approx(0.045)


def test_prompts_of_one_token_are_decoded() -> None:
    """After a prefill on another engine, vLLM counts a request as context once more."""
    writer = Writer()
    for at, name in enumerate(("context_2(2)_generation_1(1)", "context_1(8)_generation_2(2)", "context_1(8)_generation_0(0)")):
        writer.range(f"execute_{name}", 10 * at, 5)
    [engine] = summary_of(writer, 30, [(0, 30)]).engines
    assert {name: phase.count for name, phase in engine.phases.items()} == {"decode step": 1, "mixed step": 1, "prefill step": 1}


def test_a_busy_engine_has_no_finding() -> None:
    summary = summarize([busy_engine()])
    assert findings(summary) == [] and summary.engines[0].busy > 0.8 * summary.window


def test_requests_have_phases_and_lanes() -> None:
    writer = Writer()
    for name in ("a", "b"):
        writer.arrival(name, 0, prompt=9)
    writer.step(5, 20, {"a": 9})
    writer.step(30, 20, {"a": 1, "b": 9}, ("a",))
    writer.step(55, 10, {"b": 1}, ("b",))
    log = writer.engine(70, [(0, 70)]).log
    first, second = log.requests
    assert [(name, round(begin * 1e3), round(end * 1e3)) for name, begin, end in spans(first)] == [
        ("waiting", 0, 5), ("prefill", 5, 25), ("decode", 25, 50)
    ]  # fmt: skip
    assert spans(second)[1][0] == "prefill" and second.prompt == 9
    events = lanes(log)
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1}, "both are in flight"
    assert {"strata:a", "strata:b", "strata:decode"} <= {event["name"] for event in events}


def test_waiting_for_a_processor_is_reported() -> None:
    writer = Writer()
    writer.schedule(10, {"a": 1}, delayed=3.0)
    writer.schedule(90, {"a": 1}, delayed=3.02)
    assert summary_of(writer, 100, [(0, 100)]).engines[0].available == pytest.approx(0.8)
    assert summarize([busy_engine()]).engines[0].available == 1.0


def test_a_log_that_was_cut_off_is_read_to_there() -> None:
    writer = Writer()
    writer.arrival("a", 0)
    lines = [json.dumps(writer.lines[0]), '{"scheduled": {"a"']
    assert [each.name for each in scheduler_log.read(lines, 0).requests] == ["a"]


def few_requests() -> Engine:
    writer = Writer()
    writer.arrival("a", 0)
    writer.step(1, 30, {"a": 8}, ("a",))
    return writer.engine(100, [(0, 33)])


def slow_gateway() -> Engine:
    writer = Writer()
    writer.arrival("a", 60)
    writer.step(61, 38, {"a": 8}, ("a",))
    return writer.engine(100, [(0, 100)])


def slow_transfer() -> Engine:
    writer = Writer()
    writer.arrival("a", 0)
    writer.schedule(0, {}, waiting=1, remote=1)
    writer.step(71, 28, {"a": 1}, ("a",))
    return writer.engine(100, [(0, 100)])


def slow_scheduler() -> Engine:
    writer = Writer()
    writer.arrival("a", 0)
    writer.schedule(0, {"a": 8}, length=40)
    writer.range("execute_context_1(8)_generation_0(0)", 40, 59)
    writer.op("aten::mm", 40, 59, [8, 16], [16, 8])
    writer.update(99, "a")
    return writer.engine(100, [(0, 100)])


def small_operators() -> Engine:
    writer = Writer()
    writer.arrival("a", 0)
    writer.step(1, 98, {"a": 8}, ("a",), work=0.3)
    return writer.engine(100, [(0, 100)])


def slow_loop() -> Engine:
    writer = Writer()
    writer.arrival("a", 0)
    writer.step(1, 30, {"a": 8})
    writer.step(69, 30, {"a": 1}, ("a",))
    return writer.engine(100, [(0, 100)])


def slow_sampling() -> Engine:
    writer = Writer()
    writer.arrival("a", 0)
    writer.schedule(0, {"a": 8})
    writer.range("execute_context_1(8)_generation_0(0)", 1, 49)
    writer.op("aten::mm", 1, 49, [8, 16], [16, 8])
    writer.range("gpu_model_runner: sample", 50, 49)
    writer.op("aten::sort", 50, 49)
    writer.update(99, "a")
    return writer.engine(100, [(0, 100)])


def full_queue() -> Engine:
    writer = Writer()
    for name in ("a", "b", "c"):
        writer.arrival(name, 0)
    for number, name in enumerate(("a", "b", "c")):
        writer.step(1 + number * 33, 31, {name: 8}, (name,))
    return writer.engine(100, [(0, 100)])


def full_cache() -> Engine:
    writer = Writer()
    writer.arrival("a", 0)
    for number in range(3):
        writer.step(1 + number * 33, 31, {"a": 8}, ("a",) if number == 2 else ())
        writer.lines[-2]["preempted"] = ["b"]
    return writer.engine(100, [(0, 100)])


def long_prompts() -> Engine:
    writer = Writer()
    writer.arrival("a", 0)
    writer.arrival("b", 20)
    writer.step(1, 6, {"a": 1})
    writer.step(9, 6, {"a": 1})
    writer.step(17, 82, {"a": 1, "b": 8}, ("a", "b"))
    return writer.engine(100, [(0, 100)])


def slow_collectives() -> Engine:
    writer = Writer()
    writer.arrival("a", 0)
    writer.step(1, 98, {"a": 8}, ("a",), work=0.5)
    writer.op("vllm::all_reduce", 50, 49)
    writer.events[-1]["name"] = "c10d::allreduce_"
    return writer.engine(100, [(0, 100)])


@pytest.mark.parametrize(
    ("engine", "cause"),
    [
        (few_requests, "load"),
        (slow_gateway, "front end"),
        (slow_transfer, "KV transfer"),
        (slow_scheduler, "scheduler"),
        (small_operators, "dispatch"),
        (slow_loop, "engine loop"),
        (slow_sampling, "sampling"),
        (full_queue, "queue"),
        (full_cache, "preemption"),
        (long_prompts, "prompts"),
        (slow_collectives, "collectives"),
    ],
)
def test_first_finding_is_the_planted_fault(engine: Callable[[], Engine], cause: str) -> None:
    found = findings(summarize([engine()]))
    assert found and found[0].cause == cause, [each.sentence for each in found]
    assert found[0].sentence.endswith(".") and "%" in found[0].text


def test_engines_of_a_pool_are_compared() -> None:
    idle = Writer()
    idle.arrival("b", 0)
    idle.step(1, 20, {"b": 8}, ("b",))
    found = findings(summarize([busy_engine(), idle.engine(102, [(0, 102)], "decode-1")]))
    assert [each.cause for each in found] == ["uneven engines"] and "decode-0" in found[0].text


def test_page_and_json_hold_the_whole_profile() -> None:
    engine = busy_engine()
    summary = summarize([engine])
    load = measure.summarise([Record("all", 0.0, 0.1, (0.02, 0.1), 9, None)], present.SLO)
    found = findings(summary)
    page = html.page(summary, Machine(peak=1e11), found, load)
    assert page.count("<svg") == 5, "causes, steps, requests, roofline and KV cache" and "http" not in page
    written = json.loads(json.dumps(record.as_json(summary, Machine(peak=1e11), found, load)))
    assert written["benchmark"] == "profile serve" and written["engines"][0]["requests"][0]["request"] == "a"
    assert written["engines"][0]["phases"]["decode step"]["count"] == 8
    product = written["engines"][0]["work"][0]
    assert (product["class"], product["shape"]) == ("matrix products", "1 x 32 x 16")
    assert product["flops"] == 8 * 2 * 32 * 16, "of the eight decode steps"
    console = Console(width=200, record=True)
    for table in (tables.causes(summary), tables.phases(summary), tables.operators(summary.engines[0], 1e11)):
        console.print(table)
    assert "decode step" in console.export_text()


def test_an_engine_that_does_not_confirm_is_named(tmp_path: Path) -> None:
    (tmp_path / "decode-x").mkdir()
    with pytest.raises(UserError, match=r"decode-x did not start their profile within 0.2 s"):
        session.request(tmp_path, START, 0.2)
    (tmp_path / "decode-x" / START).touch()
    session.request(tmp_path, START, 0.2)


def test_failed_requests_are_no_profile() -> None:
    with pytest.raises(UserError, match="1 of 1 requests failed: refused"):
        session.require_answers([Record("all", 0.0, 0.1, (), 0, "refused")])
