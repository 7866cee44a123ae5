"""Reports and tables of plans, from fabricated plans with known figures; arguments of the plan commands."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from strata.planner import ranges
from strata.planner.catalogue.fleets import Rates
from strata.planner.catalogue.library import model
from strata.planner.catalogue.software import program
from strata.planner.cli import report, tables
from strata.planner.collectives.patterns import Place
from strata.planner.layout import Layout
from strata.planner.memory.plan import MemoryPlan, StageMemory
from strata.planner.pipeline.simulate import even, simulate
from strata.planner.plan import TrainingPlan, state_bytes, usual_storage
from strata.planner.reliability.budget import Budget
from strata.planner.reliability.failures import Recovery, plan_failures
from strata.planner.serving.capacity import Pool, ServingPlan
from strata.planner.serving.engine_step import Load
from strata.planner.step.communication import Exchange
from strata.planner.step.step import Step
from strata.planner.validation.trust import Trust
from strata.planner.worksheet import Worksheet
from strata.platform.cli import build
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue as hardware

GIB = 2.0**30


def text_of(part: object) -> str:
    console = Console(width=160, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(part)
    return capture.get()


def rows_of(part: object) -> list[list[str]]:
    """Words of each line of a table, without its heading."""
    return [line.split() for line in text_of(part).splitlines()[1:] if line.strip()]


def stage(number: int, parameters: float, host: float = 0.0) -> StageMemory:
    return StageMemory(number, 4, parameters * GIB, 2 * GIB, 3 * GIB, 4 * GIB, 5 * GIB, 6 * GIB, 7 * GIB, 1 * GIB, 2 * GIB, host)


SPENT = {
    "matrix products": 5.0,
    "attention": 2.0,
    "tensor parallelism": 1.0,
    "data parallelism": 0.5,
    "parameters gathered": 0.25,
}
SPENT |= {"pipeline bubble": 1.5, "hidden": -0.25, "tiny": 0.004}
EXCHANGES = (
    Exchange("tensor", "all_reduce", 1e6, 40, Place(8), 0.002, 3 * 2.0**20, "double_tree"),
    Exchange("tensor", "all_gather", 1e6, 20, Place(8), 0.004, 2.0**20, "ring"),
    Exchange("pipeline", "send", 1e6, 10, Place(1, 2), 0.001, 2.0**20, "direct"),
    Exchange("data", "reduce_scatter", 1e6, 1, Place(1, 4), 0.5, 2.0**30, "pat"),
)


def step_of(seconds: float = 10.004) -> Step:
    return Step(seconds, SPENT, even(1, 1, 1, 1), EXCHANGES, 1e15, 1e15, 0.4, 0.5, 64_000.0)


def training(**changed: Any) -> TrainingPlan:
    given: dict[str, Any] = {
        "shape": model("llama-3.1-8b"),
        "layout": Layout(data=4, tensor=8, pipeline=2, batch=64, micro_batch=2),
        "sequence": 4096,
        "gpu": replace(hardware.gpu("h100"), dollars_per_hour=2.5),
        "fabric": hardware.fabric("ndr-400"),
        "software": program("megatron-core"),
        "memory": MemoryPlan((stage(0, 10), stage(1, 10), stage(2, 20)), 60 * GIB),
        "step": step_of(),
        "failures": None,
        "budget": None,
        "worksheet": Worksheet("test"),
    }
    return TrainingPlan(**(given | changed))


def test_headline() -> None:
    assert report.headline(training()).plain.splitlines() == [
        "llama-3.1-8b (8.03B parameters) on 64 h100-sxm over ndr-400, trained by megatron-core",
        "data 4 x tensor 8 x pipeline 2 (1f1b), ZeRO 1, bf16, no recompute",
        "64 sequences of 4,096 tokens per step (262K), in 8 micro-batches of 2",
    ]
    one = training(shape=model("mixtral-8x7b"), layout=Layout(batch=2, micro_batch=2))
    assert "parameters, 12.9B active)" in report.headline(one).plain and "in 1 micro-batch of 2" in report.headline(one).plain


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(), "one GPU, ZeRO 1, bf16, no recompute"),
        (
            Layout(pipeline=2, schedule="interleaved", interleave=3),
            "pipeline 2 (interleaved, 3 chunks), ZeRO 1, bf16, no recompute",
        ),
        (Layout(data=2, expert=2, zero=3), "data 2, expert 2, ZeRO 3, bf16, no recompute"),
        (
            Layout(tensor=2, sequence=3, context=4, sequence_parallel=True, recompute="full", precision="fp8"),
            "tensor 2 x sequence 3 x context 4, ZeRO 1, fp8, full recompute, sequence-parallel",
        ),
        (Layout(offload="optimizer"), "one GPU, ZeRO 1, bf16, no recompute, optimizer offloaded"),
        (Layout(offload="all"), "one GPU, ZeRO 1, bf16, no recompute, all state offloaded"),
    ],
)
def test_layouts_in_words(layout: Layout, text: str) -> None:
    assert report.describe(layout) == text


def test_verdicts() -> None:
    """Terms of the last stage: 20 + 2 + 3 + 4 + 5 + 6 + 7 + 1 + 2 = 50 GiB."""
    text = report.verdict(training()).plain
    assert text.splitlines()[0] == "fits: 50 GiB of 60 GiB (83.3%) at stage 2, 10 GiB left"
    assert text.splitlines()[1] == (
        "step 10 s · 64K tokens/s (1,000 per GPU) · MFU 40.0% · HFU 50.0% · limited by matrix products (50.0%)"
    )
    exact, over = (training(memory=MemoryPlan((stage(0, 20),), limit * GIB)) for limit in (50, 40))
    assert report.verdict(exact).plain.startswith("fits: 50 GiB of 50 GiB (100.0%) at stage 0, 0 B left")
    assert report.verdict(over).plain.startswith("does not fit: 50 GiB of 40 GiB (125.0%) at stage 0, 10 GiB too much")


def test_memory_tables_join_equal_stages() -> None:
    rows = rows_of(report.memory(training()))
    assert rows[0][:1] == ["stage"] and "host" not in rows[0] and rows[0][-3:] == ["of", "60", "GiB"]
    assert [row[:3] for row in rows[1:]] == [["0", "to", "1"], ["2", "20", "GiB"]]
    assert rows[2][-3:-1] == ["50", "GiB"] and rows[1][-3:-1] == ["40", "GiB"]
    assert report.columns(stage(0, 1))["allowance"] == 3 * GIB
    hosted = training(memory=MemoryPlan((stage(0, 10, host=9 * GIB),), 60 * GIB))
    assert "host" in rows_of(report.memory(hosted))[0] and "9 GiB" in text_of(report.memory(hosted))


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (0.0, "····"),
        (0.5, "██··"),
        (0.25 + 1 / 32, "█▏··"),
        (0.25 + 7 / 32, "█▉··"),
        (1.0, "████"),
        (1.25, "████ 125%"),
    ],
)
def test_bars(part: float, text: str) -> None:
    assert report.bar(part, 4) == text


def test_communication_tables() -> None:
    rows = [" ".join(row) for row in rows_of(report.communication(step_of()))]
    assert rows[1] == "tensor all-reduce 8 inside a domain double tree 120 MiB 40 2 ms 80 ms 1 s"
    assert rows[2] == "all-gather 8 inside a domain ring 20 MiB 20 4 ms 80 ms"
    assert rows[3] == "pipeline send between domains direct 10 MiB 10 1 ms 10 ms"
    assert rows[4] == "data reduce-scatter between 4 domains pat 1 GiB 1 500 ms 500 ms 750 ms"


def test_exposed_communication() -> None:
    step = step_of()
    assert report.exposed(step, "data") == 0.75 and report.exposed(step, "tensor") == 1.0
    assert report.exposed(step, "expert") == 0.0 and report.exposed(step, "pipeline") is None


@pytest.mark.parametrize(
    ("kind", "place", "text"),
    [
        ("send", Place(1, 1), "inside a domain"),
        ("send", Place(1, 2), "between domains"),
        ("all_reduce", Place(8), "8 inside a domain"),
        ("all_reduce", Place(1, 4), "between 4 domains"),
        ("all_reduce", Place(8, 4), "8 x 4 domains"),
        ("all_reduce", Place(1, 1), "1 inside a domain"),
    ],
)
def test_placements_in_words(kind: Any, place: Place, text: str) -> None:
    assert report.where(replace(EXCHANGES[0], kind=kind, place=place)) == text


def test_waterfalls_begin_where_the_previous_bar_ends() -> None:
    """44 characters for 10.004 s: 5 s are 22, 2 s are 9, 1 s is 4 wide. Less than 0.05% of the step is left out."""
    lines = text_of(report.waterfall(step_of())).splitlines()[1:]
    drawn = {line[:20].strip(): line[21:] for line in lines}
    assert "tiny" not in drawn
    bars = [(len(cell) - len(cell.lstrip()), cell.strip().split()[0]) for name, cell in drawn.items() if name != "step"]
    assert bars == [
        (0, "█" * 22),
        (22, "█" * 9),
        (31, "█" * 4),
        (35, "█" * 2),
        (37, "█"),
        (38, "█" * 7),
        (44, "░"),
    ]
    assert lines[0].split()[-3:] == ["5", "s", "50.0%"] and lines[-1].split() == ["step", "10", "s"]


def test_doubt_and_budget() -> None:
    assert report.doubt(Trust(True, "", {})) == [] and report.doubt(Trust(False, "doubtful", {})) == ["doubtful"]
    assert report.budget_lines(training()) == []
    budget = Budget(15e12, 100.0, 125.04, 48_000.0, 120_000.0, 33_600.0)
    assert report.budget_lines(training(budget=budget)) == [
        "15T tokens: 125.0 days with failures (100.0 without), 48,000 GPU-hours, $120,000 at $2.50 per GPU-hour,"
        " 33.6 MWh (GPUs only)"
    ]


# Tables


def test_schedules_are_listed_with_their_peak() -> None:
    found = [simulate("1f1b", 4, 8, 1, even(4, 1, 1, 1)), simulate("interleaved", 4, 8, 2, even(8, 0.5, 0.5, 0.5))]
    rows = rows_of(tables.schedules(found, "1f1b"))
    assert rows[1] == ["1f1b", "33", "s", "27.3%", "4", "1"]
    assert rows[2] == ["interleaved", "28.5", "s", "15.8%", "5.5", "2"]


def test_grids_have_a_header_only_where_a_column_has_a_name() -> None:
    plain, titled = tables.grid("heading", ["", ""]), tables.grid("heading", [""], ["figure"], "a note")
    for table in (plain, titled):
        table.add_row("a", "1")
    assert text_of(plain).splitlines() == ["heading", "a  1"]
    assert [line.split() for line in text_of(titled).splitlines()] == [["heading"], ["figure"], ["a", "1"], ["a", "note"]]
    assert titled.columns[1].justify == "right" and titled.columns[0].justify == "left"


def failing(dollars: float, spares: int | None = None) -> Any:
    rates = Rates("some", "a test", {"GPU": 4e-5})
    return plan_failures(
        1000,
        6e12,
        7.0,
        2e10,
        worksheet=Worksheet("test"),
        rates=rates,
        recovery=Recovery(spares=spares),
        dollars_per_gpu_hour=dollars,
    )


def test_failures_in_words() -> None:
    found = replace(
        failing(2.5, spares=1), goodput=0.876, available=0.75, goodput_per_paid_gpu=0.625, dollars_per_useful_hour=1234.5
    )
    best = found.best
    steps = f"({best.interval_steps:,} steps, peer-memory)"
    assert tables.failures_line(found).startswith("MTBF 25 h; best checkpoint interval ") and steps in tables.failures_line(found)
    assert tables.failures_line(found).endswith("; goodput 87.6% with 1 spare node")
    assert tables.failures_line(replace(found, spares=2)).endswith("with 2 spare nodes")
    once = {"peer-memory": replace(best, interval_steps=1)}
    assert "(1 step, peer-memory)" in tables.failures_line(replace(found, savings=once))
    assert tables.failures_money(found).splitlines() == [
        "save of 5.46 TiB: 5 min; 1 spare nodes suffice 75.0% of the time; goodput per paid GPU 62.5%",
        "cost per hour of useful work: $1,234 on demand",
    ]
    spot = replace(found, spot_dollars_per_useful_hour=99.0)
    assert tables.failures_money(spot).splitlines()[1].endswith("$1,234 on demand, $99.00 on spot instances")
    assert len(tables.failures_money(replace(found, dollars_per_useful_hour=0.0)).splitlines()) == 1


def test_failures_by_checkpoint_mode() -> None:
    found = failing(0.0)
    rows = rows_of(tables.failures(found))
    assert [row[0] for row in rows] == ["mode", "blocking", "asynchronous", "peer-memory"]
    assert rows[1][-1] == f"{found.savings['blocking'].goodput:.1%}" and "5 min" in " ".join(rows[1])


POOL = Pool("aggregated", 0, 3, 12, 17.25, 0.1, 0.9, 0.02, 0.05, 1.5, 7.25)
SERVED = ServingPlan(Load(20.0, 2000, 300), 8 * GIB, 2.0**17, 1234, 5678.0, 0.25, 0.003, POOL, None, None, Worksheet("test"))


def test_replicas_side_by_side() -> None:
    split = replace(POOL, kind="disaggregated", prefill_replicas=2, decode_replicas=5)
    rows = {" ".join(row[:-1]): row[-1] for row in rows_of(tables.pools(SERVED))}
    assert rows["replicas"] == "3" and rows["GPUs"] == "12" and rows["sequences per decode engine"] == "17.2"
    assert rows["cost per million output tokens"] == "$7.25" and rows["cost per million tokens, prompt and output"] == "$1.50"
    assert "disaggregated engines cannot meet these objectives" in text_of(tables.pools(SERVED))
    both = text_of(tables.pools(replace(SERVED, disaggregated=split)))
    assert "2 prefill : 5 decode" in both and "remote prefill pays off for no prompt length" in both
    paying = text_of(tables.pools(replace(SERVED, disaggregated=split, remote_from=4096)))
    assert "remote prefill pays off from prompts of 4,096 tokens" in paying


def test_engines_have_their_figures() -> None:
    text = text_of(tables.engine(SERVED, "h100-sxm", 4))
    assert text.startswith("one replica: 4 x h100-sxm")
    for words in ("8 GiB", "128 KiB", "1,234", "5,678 tokens/s", "prefill of 2,000 tokens", "250 ms", "3 ms"):
        assert words in text


def test_the_catalogue_as_tables() -> None:
    rows = {row[0]: row for row in rows_of(tables.fabrics())}
    assert rows["ndr-400"][1:] == ["infiniband", "rail", "8", "400", "Gb/s", "1"]
    rows = {row[0]: row for row in rows_of(tables.models())}
    assert rows["llama-3.1-8b"][1:4] == ["8.03B", "-", "32"] and rows["mixtral-8x7b"][2] == "12.9B"
    rows = {row[0]: row for row in rows_of(tables.gpus())}
    assert rows["a100-80gb"][3] == "-" and rows["h100-sxm"][3] != "-"
    rows = {row[0]: row for row in rows_of(tables.fleets())}
    assert rows["rsc-1-jobs"][-1] == "8,090"  # 7.9 h x 1,024
    assert "megatron-core" in text_of(tables.programs())


# Checkpoints of a plan


def test_bytes_of_a_checkpoint_and_default_storage() -> None:
    shape = SimpleNamespace(parameters=lambda: 10)
    assert (state_bytes(shape, "fp32"), state_bytes(shape, "bf16")) == (120, 140)  # type: ignore[arg-type]
    assert usual_storage(16384) == pytest.approx(2e12) and usual_storage(8) == pytest.approx(2e12 / 2048)


# Commands


def answered(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(build(), ["plan", *words, "--json", "-"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*words: str) -> str:
    error = CliRunner().invoke(build(), ["plan", *words]).exception
    assert isinstance(error, UserError), error
    return error.cause


def test_failures_need_one_size_of_a_checkpoint() -> None:
    assert "both set the size" in refused("failures", "--gpus", "8", "--model", "llama-3-8b", "--state", "1TB")
    assert "unknown" in refused("failures", "--gpus", "8")


def test_options_of_failures_reach_the_plan() -> None:
    usual = answered("failures", "--gpus", "1024", "--state", "6TB", "--storage", "20GB/s", "--explain")
    lines = {line["name"]: line["value"] for line in usual["explain"]["parts"][0]["lines"]}
    assert (lines["detect_s"], lines["repair_s"], lines["step_s"], usual["save_s"]) == (600, 86_400, 10, 300)
    assert usual["spot_dollars_per_useful_hour"] is None and usual["best"] == "peer-memory" and usual["gpus"] == 1024
    words = ["--detect", "100", "--repair", "2", "--step", "5", "--spares", "3", "--preemptions", "0.001", "--price", "2"]
    found = answered("failures", "--gpus", "1024", "--state", "6TB", "--storage", "20GB/s", "--explain", *words)
    lines = {line["name"]: line["value"] for line in found["explain"]["parts"][0]["lines"]}
    assert (lines["detect_s"], lines["repair_s"], lines["step_s"], found["spares"]) == (100, 7200, 5, 3)
    spot = {line["name"]: line["value"] for part in found["explain"]["parts"][0]["parts"] for line in part["lines"]}
    assert (spot["preemptions_per_hour"], spot["price_ratio"]) == (0.001, 0.4)
    default = answered("failures", "--gpus", "16384", "--model", "llama-3-8b")
    assert default["save_s"] == pytest.approx(model("llama-3-8b").parameters() * 14 / 2e12)


def test_options_out_of_range_are_named() -> None:
    assert refused("schedule", "--stages", "0") == "--stages 0 is out of range."
    assert refused("schedule", "--micro-batches", "10001") == "--micro-batches 10001 is out of range."


def test_schedules_share_the_times_of_a_stage() -> None:
    found = answered("schedule", "--forward", "1", "--backward", "2", "--weight", "1.5")
    assert (found["schedule"], found["stages"], found["micro_batches"]) == ("1f1b", 4, 8)
    assert found["schedules"]["1f1b"]["seconds"] == pytest.approx(11 * 4.5)
    assert found["schedules"]["interleaved"]["seconds"] == pytest.approx(8 * 4.5 + 3 * 4.5 / 2)
    assert found["schedules"]["zbv"]["interleave"] == 2 and "dualpipe" in found["schedules"]
    assert found["timeline"][0][0] == {"kind": "F", "micro_batch": 0, "chunk": 0, "start": 0.0, "end": 1.0}
    three = answered("schedule", "--schedule", "interleaved", "--interleave", "3", "--micro-batches", "7", "--stages", "1")
    assert three["schedules"]["interleaved"]["interleave"] == 3 and "dualpipe" not in three["schedules"]


def test_schedules_with_too_many_operations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "50,001 are too many" in refused("schedule", "--stages", "7", "--micro-batches", "7143")
    monkeypatch.setattr(ranges, "OPERATIONS", 32)
    assert answered("schedule", "--stages", "4", "--micro-batches", "8")["stages"] == 4
    assert "33 are too many" in refused("schedule", "--stages", "3", "--micro-batches", "11")
    assert "64 are too many" in refused("schedule", "--stages", "4", "--micro-batches", "8", "--schedule", "zbv")


def test_collectives_have_default_ranks_and_every_size() -> None:
    found = answered("collectives")
    assert found["place"] == {"inside": 8, "domains": 1, "shared": 1} and len(found["costs"]) == 23
    assert found["costs"][0]["bytes"] == 1024 and found["kind"] == "all_reduce"
    shown = answered("collectives", "--show", "hierarchical", "--inside", "4")
    assert (shown["algorithm"], shown["ranks"], shown["chunks"], len(shown["steps"])) == ("hierarchical", 8, 8, 8)
