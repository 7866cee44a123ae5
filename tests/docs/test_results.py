"""Results pages: fresh, complete, and rendered from the JSON that each benchmark writes."""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import beside
import pytest
import torch
import typer
from docgen import record, results
from typer.testing import CliRunner

from strata.dashboards.bench import report as monitoring_report
from strata.dashboards.bench.fleet import Fleet
from strata.dashboards.bench.measure import Measured as MeasuredBoards
from strata.dashboards.bench.measure import Timing
from strata.kernels.bench import report as kernel_report
from strata.kernels.bench import training_step, vllm_plugin
from strata.kernels.bench.case import OURS, Bar, Case
from strata.kernels.bench.ceilings import Ceilings
from strata.kernels.bench.harness import Result, Row
from strata.kernels.bench.matmul import run as matmul_run
from strata.kernels.bench.matmul.run import CUBLAS
from strata.kernels.bench.vllm_engine import Answer as Generated
from strata.kernels.bench.vllm_engine import Engine
from strata.kernels.compiler.compilation import CudaCompilation
from strata.kernels.compiler.stages import Compiled
from strata.kernels.compiler.view import as_json
from strata.kernels.ladder.cuda_source import SOURCES
from strata.kernels.ladder.steps import STEPS
from strata.planner.cli import comparison, queue
from strata.platform import benchmark_record, recipe_file
from strata.platform.cli import build
from strata.serving.bench import report as serving_report
from strata.serving.bench import startup, tenants, transfer
from strata.serving.bench.clients.calibration import Calibration
from strata.serving.bench.clients.load import Level, Record
from strata.serving.bench.clients.measure import Slo, Summary, by_kind, summarise
from strata.serving.bench.clients.workloads import Workload
from strata.serving.bench.contenders.subject import Subject
from strata.serving.bench.offload import run as offload
from strata.serving.bench.quantized import run as quantized
from strata.serving.bench.quantized.model import Shape
from strata.serving.bench.results import Measured, Ran, Results, Settings
from strata.serving.bench.routing import run as routing_run
from strata.serving.bench.routing.conversations import Load as Conversations
from strata.serving.bench.routing.decision import Scale
from strata.serving.bench.speculative import run as speculative
from strata.serving.bench.startup import Start
from strata.serving.chaos import edges
from strata.serving.chaos import report as chaos_report
from strata.serving.chaos.client import Answer, Attempt
from strata.serving.chaos.kills import Kill, Plan
from strata.serving.chaos.load import Sent
from strata.serving.chaos.requests import Request
from strata.serving.chaos.run import Outcome, Pass
from strata.serving.chaos.victims import Kind
from strata.serving.diffusion.bench.layouts import LayoutRow
from strata.serving.diffusion.bench.one_gpu import PictureRow
from strata.serving.diffusion.bench.one_gpu import Result as PictureResult
from strata.training.bench import copies, memory, stalls
from strata.training.bench import report as training_report
from strata.training.bench.contest import Round

RECIPE = recipe_file.load("laptop")


def serve(name: str) -> record.Run:
    workload = Workload(name, vocab=50, input=6, output=4, long_input=30, long_share=0.25, turns=3)  # type: ignore[arg-type]
    levels = [Level(32, concurrency=16), Level(60, rate=2.0)]
    settings = Settings(workload, levels, clients=2, slo=Slo(0.2, 0.05), seed=0, cross_check=False, rounds=2, side_by_side=True)

    def ran(slower: float) -> Ran:
        kinds = ("short", "long") if name == "mixed" else ("all",)
        records = [_streamed(number / 10, 0.1 * slower, 0.01 * slower, kinds[number % len(kinds)]) for number in range(10)]
        measured = [Measured(level, summarise(records, settings.slo), by_kind(records, settings.slo), [0.1]) for level in levels]
        return Ran(12.5, measured, None)

    found = Results(Calibration(2, 60_000, 0.01, 0.0101, 0.0105), failed={"ray": "It ended with code 1.\nTraceback"})
    for contender, slower in (("vllm", 1.0), ("strata", 2.0)):
        found.add(contender, 0, ran(slower))
    subject = Subject(Path("dummy"), "dummy", RECIPE.serve, (), 600, 256)
    return serving_report.as_json(subject, settings, found)


def _streamed(start: float, ttft: float, itl: float, kind: str) -> Record:
    arrivals = tuple(start + ttft + itl * number for number in range(5))
    return Record(kind, start, arrivals[-1], arrivals, 5, None)


def bench_routing() -> record.Run:
    load = Conversations(24, 5, 6, 1024, 96, 32, 4, 0.2, vocab=512, seed=0)
    found = {
        "least-busy": routing_run.Measured((0.3, 0.3, 0.3), 0.3, 0.8, {}),
        "kv": routing_run.Measured((0.09, 0.09, 0.09), 0.6, 0.8, {}),
    }
    return routing_run.as_json(load, 4, 2, found, Scale(), [5e-4] * 100)


def kernels() -> record.Run:
    case = Case("rms_norm", "forward 8 x 8", lambda device: None, (Bar(0.9, "copy"), Bar(1.0, "Liger")), memory_limit=10)  # type: ignore[arg-type, return-value]
    answers = {OURS: Result(1e-3, (1.0, 0.9, 1.1), extra=100), "Liger": Result(1e-3, (0.5,)), "gone": Result(trouble="missing")}
    row = Row(case, answers, bytes=int(3.8e9), flops=10)
    outcome = kernel_report.Outcome(torch.device("cpu"), [row], Ceilings(copy=4e12, matmul=800e12), {})
    return kernel_report.as_json(outcome)


def plugin() -> record.Run:
    """The comparison with engines that answer from here."""
    draw = random.Random(0)

    def answer(engine: Engine, prompts: list[list[int]], tokens: int, concurrency: int | None = None) -> list[Generated]:
        return [Generated([draw.randrange(2)] * tokens, [{0: -0.5, 1: -0.6}] * tokens) for _ in prompts]

    engines = {name: object.__new__(Engine) for name in (vllm_plugin.PLAIN, vllm_plugin.OURS)}
    run = benchmark_record.header("vllm-plugin") | {"contenders": {name: {} for name in engines}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "answer", answer)
        patch.setattr(Engine, "seconds", lambda engine, prompts, tokens, concurrency=None: 1.0 + draw.random())
        vllm_plugin._compare_answers(engines, 50, run)
        vllm_plugin._compare_speed(engines, 50, 2, float("inf"), run)
    return run


def bench_tenants() -> record.Run:
    def summary(slower: float) -> Summary:
        return summarise([_streamed(0.0, 0.1 * slower, 0.01 * slower, "all")], Slo(0.2, 0.05))

    settings = {"share": 4, "flood": 10.0, "requests": 1, "rounds": 1, "input": 6, "output": 4}
    return tenants.as_json(settings, {tenants.BASELINE: [summary(1.0)], tenants.FLOOD: [summary(2.0)]})


def train() -> record.Run:
    rounds = {"bare": [Round([0.1], 1000.0, 3.0, 2**30)], "ours": [Round([0.1], 900.0, 3.1, None)]}
    outcome = training_report.Outcome(RECIPE, 2, True, rounds, {"liger": "its kernels need a GPU"}, 1e12)  # type: ignore[arg-type]
    return training_report.as_json(outcome)


def chaos() -> record.Run:
    answer, requests = Answer("a", "stop", 1, 1, ()), (Request("/v1/completions", {}), Request("/v1/completions", {}))
    fine, lost = Attempt(0, 1, answer, None, longest_gap_s=1.25), Attempt(0, 1, None, "broken")
    peace = Pass(0, 1, (Sent(0, (fine,)), Sent(1, (fine,))), {})
    storm = Pass(0, 1, (Sent(0, (fine,)), Sent(1, (lost,))), {})
    kills = (Kill(Kind.DECODE, 1, at=0.2, back=3.2), Kill(Kind.GATEWAY, 2, at=0.3, fault=1))
    outcome = Outcome(requests, peace, storm, tuple(Plan((kill.kind,), kill.at) for kill in kills), kills)
    return chaos_report.as_json(outcome)


def chaos_edges() -> record.Run:
    endings = [edges.Ending((Kind.DECODE,), "came up", True), edges.Ending((Kind.GCS, Kind.GATEWAY), "with a traceback", False)]
    return chaos_report.edges_as_json("start", endings)


def hostile() -> record.Run:
    measured = beside.Measured(3, [], 1.03, 0.2, {7: ("engine", 2**20, 3 * 2**20)})
    return beside.as_json(Counter({200: 5, 400: 9, 500: 1}), 1, measured, 7)


def plan_validate() -> record.Run:
    done = CliRunner().invoke(build(), ["plan", "validate", "--json", "-"])
    assert done.exit_code == 0, done.output
    run: record.Run = json.loads(done.stdout)
    return run


def plan_queue() -> record.Run:
    app = typer.Typer()
    app.command()(queue.plan_queue)
    done = CliRunner().invoke(app, ["--gpus", "64", "--jobs", "50", "--json", "-"])
    assert done.exit_code == 0, done.output
    run: record.Run = json.loads(done.stdout)
    return run


def finetune() -> record.Run:
    rounds = {
        "liger": [Round([1.0], 1000.0, 2.0, 2**31)],
        "liger_compiled": [Round([1.0], 900.0, 2.0, 2**30)],
        "ours": [Round([1.0], 1040.0, 2.0, 3 * 2**30)],
    }
    tuned = RECIPE.model_copy(update={"model": RECIPE.model.model_copy(update={"family": "llama"})})
    return training_report.as_json(training_report.Outcome(tuned, 2, False, rounds, {}, 1e12))  # type: ignore[arg-type]


def matmul() -> record.Run:
    steps = [STEPS[0], STEPS[-1]]
    results = {STEPS[0].name: Result(trouble="no such instruction"), STEPS[-1].name: Result(1e-3, (2.5, 2.0, 1.9))}
    results[CUBLAS] = Result(1e-3, (1.5,))
    case = Case("matmul", "", lambda device: None)  # type: ignore[arg-type,return-value]
    rows = [matmul_run.as_json(Row(case, results, 10, 10**12, 4e-3), shape, steps) for shape in ((64, 64, 64), (8, 16, 24))]
    return benchmark_record.header("matmul") | {"copy_bytes_per_s": 4e12, "cases": rows}


def matmul_stages() -> record.Run:
    source = CudaCompilation(SOURCES["naive"])
    counts = {"mma.sync": 0, "wgmma": 2, "tcgen05": 0}
    facts = Compiled(source, 90, {}, 78, 0, 8192, 4, 0, counts, {"loads": 0}, 4, {"128": 4, "16": 1}, 3, 1258, 0.5)
    return benchmark_record.header("matmul-stages") | {"kernels": [{"step": "dot"} | as_json(facts)]}


def dit_pictures() -> record.Run:
    times = {"diffusers": [4.0, 5.0, 4.5], "diffusers + torch.compile": [3.0], "strata": [4.0, 2.0]}
    contenders = {name: PictureResult(seconds) for name, seconds in times.items()}
    row = PictureRow("FLUX", 1024, 28, 1, contenders=contenders)
    slower = PictureRow("SD3", 1024, 20, 2, contenders={**contenders, "strata": PictureResult([4.0])})
    failed = PictureRow("DiT", 512, 25, 2, contenders={"strata": PictureResult(trouble="time limit")})
    attention = kernels()["cases"][:1]
    run = {"attention": attention, "pictures": [asdict(one) for one in (row, slower, failed)], "not_run": ["xDiT: not installed"]}
    return benchmark_record.header("dit") | run


def dit_layouts() -> record.Run:
    rows = [
        LayoutRow("diffusers", 1, 2, [0.5], [1.0], "exact"),
        LayoutRow("strata", 1, 2, [0.4, 0.6, 0.5], [1.0], "exact"),
        LayoutRow("pipefusion 2", 2, 2, [0.25], [0.5], 42.0),
        LayoutRow("ring 2", 2, trouble="RuntimeError: worker died"),
    ]
    return benchmark_record.header("dit") | {"layouts": [asdict(row) for row in rows], "not_run": []}


# A run of each kind, as its benchmark writes it, and what its table must have.
def monitoring() -> record.Run:
    timings = (Timing("strata-cluster", "GPUs", 0.1, 0.05, 3, 9000), Timing("strata-cluster", "Nodes", 2.5, 0.4, 1, 5))
    rules = {"a": 0.2, "b": 0.5}
    return monitoring_report.as_json(MeasuredBoards(Fleet(16), 1000, 1.5, 500, 400, 40, 33.3, 2**30, rules, timings, 0.7))


def compiled() -> record.Run:
    rows = [
        training_step.Measurement("strata", [0.2, 0.3, 0.1], 900.0, 2**30, 3.0, 5.0, 4.5, {"rope": 2}),
        training_step.Measurement("inductor", [0.2], 1000.0, None, 3.0, 5.0, 4.5),
        training_step.Measurement("liger", error="no GPU"),
    ]
    return training_step.as_json(training_step.Settings("tiny", 4, 4096, 3, 1), rows)


def bench_quantized() -> record.Run:
    rates = {"bf16": 100.0, "w4a16": 120.0, "w4a16-strata": 150.0}
    found = {name: quantized.Measured(60.0, {1: (rate,)}, ()) for name, rate in rates.items()}
    return quantized.as_json(Shape(32, 4096, 32, 8, 14336, 128256), quantized.Load((1,), 128, 128, 1, False, True), found)


def bench_offload() -> record.Run:
    seconds = {"cached": [0.02], "tier": [0.04], "computed": [0.1]}
    answers = {state: [[1, 2]] for state in seconds}
    found = {"ttft_s": seconds, "tier_tokens": [256], "answers": answers}
    return offload.as_json(offload.Load(256, 32, 1), {"offload": found})


def bench_speculative() -> record.Run:
    def measured(rate: float, accepted: float, answer: int = 1) -> speculative.Measured:
        counted = {"drafts": 10.0, "draft_tokens": 40.0, "accepted_tokens": accepted}
        return speculative.Measured({1: (rate,)}, ((answer,),), True, counted)

    found = {"none": measured(100.0, 0.0), "ngram": measured(90.0, 20.0, 2), "draft": measured(120.0, 30.0)}
    return speculative.as_json(speculative.Load(16, 256, 96, (1,), 3), speculative.Methods("small", 4), found)


COPIES = copies.Measured([0.11], [0.1], [0.02])

RUNS: dict[str, tuple[Callable[[], record.Run], list[str]]] = {
    "serve": (
        lambda: serve("uniform"),
        ["| 16 concurrent | output tokens/s |", "**2.00**", "2 requests/s", "`ray` has no figures"],
    ),
    "serve, mixed": (lambda: serve("mixed"), ["ITL p99, short prompts", "TTFT p50, long prompts | 100.0 ms | 200 ms | 2.00 |"]),
    "startup": (
        lambda: startup.as_json(
            {startup.OURS: [Start(40.0, {"decode": {"imports": 30.0}}), Start(44.0, {})], startup.BARE: [Start(40.0, {})]},
            partial=True,
        ),
        ["| strata serve | 42.0 s | 40.0 s | 44.0 s |", "| strata serve: decode | 30 s |", "**1.05**", record.PARTIAL],
    ),
    "quantized": (
        bench_quantized,
        [
            "| `w4a16-strata` | 1 | 150 | **1.50** | 1.25 |",
            "| `w4a16` | 1 | 120 | 1.20 |  |",
            "32 layers of 4096",
            "The output layer is quantized, too.",
        ],
    ),
    "offload": (
        bench_offload,
        ["| evicted to host memory | 40.0 ms | **0.40** |", "Greedy tokens are the same in all states."],
    ),
    "speculative": (
        bench_speculative,
        ["16 prompts of 256 characters", "| `draft` | 120 | **1.20** | 75% | yes |", "| `ngram` | 90 | 0.90 | 50% | **no** |"],
    ),
    "routing": (
        bench_routing,
        [
            "24 conversations of 5 turns with 6 system prompts of 1024 tokens, 4 at a time on 4 replicas; 2 rounds",
            "| `kv` | 60.0% | 80.0% | 90.0 ms |",
            "`kv` finds **0.750** of the hits",
            "with 0.30 of the TTFT p50",
            "p99 0.50 ms",
        ],
    ),
    "transfer": (
        lambda: transfer.as_json("gpu", 2**28, {"way": {64: {"first_s": 1.0, "post_s": 0.001, "total_s": 0.002}}}),
        ["256 MiB between two processes, GPU memory", "| way | 64 | 2.0 ms | 1.0 ms | 134.2 GB/s |"],
    ),
    "tenants": (
        bench_tenants,
        ["| 10 times its share |", "| TTFT p99 | 100 ms | 200 ms | **2.00** |", "| ITL p50 | 10.0 ms | 20.0 ms | 2.00 |"],
    ),
    "vllm-plugin": (plugin, ["| served | `strata` |", "±", "of 16"]),
    "train": (train, ["| strata train | 900 |", "**0.90**", "| bare torch | 1,000 |", "Not run: liger"]),
    "finetune": (
        finetune,
        ["All weights are trained.", "| transformers, Liger | 1,000 |", "| **1.04** | **1.50** |", "| 0.90 | 0.50 |"],
    ),
    "checkpoint": (
        lambda: stalls.as_json(RECIPE, {"sync": [0.5], "async": [0.01]}, {"sync": 0.5, "async": 0.01}),
        ["| async | 10.0 ms | 0.020 |"],
    ),
    "memory-copies": (
        lambda: copies.as_json(RECIPE, 1, False, [COPIES], COPIES),
        ["| beside a copy | 110 ms | 1.100 |", "| the copy itself | 20.0 ms |"],
    ),
    "memory": (
        lambda: memory.as_json([memory.Row("data 2, ZeRO 0", 2**30, 2**29, 2**20)]),
        ["| 1024 MiB | 512 MiB | **+100.0%** |"],
    ),
    "kernels": (kernels, ["| forward 8 x 8 | 1 ms | 3,800 GB/s | 95% | **0.50** |", "1 met, 2 missed", "**100 B of memory"]),
    "compile": (
        compiled,
        ["4 sequences of 4,096", '| backend="strata" | 900 | 200.0 ms | 1.0 GiB |', "**0.90**", "| **failed** |", "2 `rope`"],
    ),
    "matmul": (
        matmul,
        [
            "| step | language | 64³, time | TFLOP/s | of cuBLAS | 8 x 16 x 24, time |",
            "| `naive` | CUDA C++ | **failed** | - | - |",
            "| `warp_specialized` | Gluon | 2 ms | 500 | 75.0% |",
            "| cuBLAS |  | 1.5 ms | 667 | 100.0% |",
            "`naive`, 64³: no such instruction.",
        ],
    ),
    "matmul-stages": (
        matmul_stages,
        ["| `dot` | 2 wgmma | 3 cp.async, 4 x 128 bits, 1 x 16 bits | 78 x 128 | 8 KiB | none | 1,258 |"],
    ),
    "chaos": (chaos, ["| answers lost | **1** |", "| decode | 1 | 3.0 s | 3.0 s |", "| gateway | 1 | **never** |"]),
    "chaos-edges": (chaos_edges, ["endpoint starts", "| decode | came up |", "| gcs + gateway | **with a traceback** |"]),
    "hostile": (hostile, ["| 5xx | **1** |", "5 x 200, 9 x 400", "2 MiB", "STRATA_FUZZ_SEED=7 STRATA_HOSTILE=15 pytest"]),
    "monitoring": (
        monitoring,
        [
            "| of these scraped | 400 |",
            "| cluster | 2 | 1,300 ms | **2,500 ms** | Nodes | 400 ms | 3 | 9,000 |",
            "| slowest rule group | b, 0.5 s |",
        ],
    ),
    "dit": (
        dit_pictures,
        [
            "| FLUX | 28 | 4.5 s | 3 s | 3 s | 1.00 |",
            "| SD3 | 20 | 4.5 s | 3 s | 4 s | **0.75** |",
            "| DiT | 25 | - | - | - | - |",
            "| forward 8 x 8 | 1 ms |",
            "Not run: xDiT: not installed.",
        ],
    ),
    "dit, layouts": (
        dit_layouts,
        ["| pipefusion 2 | 2 | 0.25 | 4.00 | 2.00 | 42.0 dB |", "| strata | 1 | 0.5 | 2.00 | 1.00 | exact |", "**failed**"],
    ),
    "plan-validate": (plan_validate, ["| step time | 23 | 3.7% | 11.9% | mean 6%, worst 15% |"]),
    "plan-queue": (
        plan_queue,
        ["50 jobs (generated, seed 0, load 0.9) on 64 GPUs; quotas: a 32, b 32.", "| fair | b | "],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_every_benchmark_has_a_table(kind: str) -> None:
    make, expected = RUNS[kind]
    run = json.loads(json.dumps(make()))
    assert run["benchmark"] == kind.split(",")[0]
    assert {"command", "date", "machine", "versions"} <= set(run)
    text = results.block(run)
    for words in expected:
        assert words in text, text


def test_every_table_is_tested_with_a_run_of_its_benchmark() -> None:
    assert {kind.split(",")[0] for kind in RUNS} == set(results.TABLES) - {"table"}


@pytest.mark.slow
def test_pages_are_fresh() -> None:
    stale = [str(path.relative_to(results.ROOT)) for path, text in results.pages().items() if path.read_text() != text]
    assert not stale, f"run 'make docs': {stale}"


@pytest.mark.slow
def test_every_data_file_is_in_a_table() -> None:
    assert {path.stem for path in results.DATA.glob("*.json")} == results.names_used() - set(results.COMPUTED)


@pytest.mark.slow
def test_every_block_ends() -> None:
    for path in results.pages():
        assert len(results.BLOCK.findall(path.read_text())) == path.read_text().count("<!-- results: "), path


@pytest.mark.slow
def test_recorded_planner_errors_are_those_of_this_planner() -> None:
    recorded = {check["name"]: check for check in results.load("plan-validate")["checks"]}
    found = {check.name: check for check in comparison.checks()}
    assert recorded.keys() == found.keys(), "strata plan validate --json docs/results/data/plan-validate.json"
    for name, check in found.items():
        assert (recorded[name]["mean"], recorded[name]["worst"]) == pytest.approx((check.mean, check.worst)), name
        rows = {
            (table, row["name"], number): row["planned"]
            for table, group in recorded[name]["tables"].items()
            for number, row in enumerate(group)
        }
        planned = {
            (table, row.name, number): row.planned for table, group in check.tables.items() for number, row in enumerate(group)
        }
        assert rows == pytest.approx(planned, rel=1e-6), name


def test_a_stale_page_is_found() -> None:
    page = results.ROOT / "docs" / "results" / "kernels.md"
    assert results.fill(page.read_text().replace("93%", "99%", 1)) == page.read_text()


def test_commands_lose_the_options_that_name_output_files() -> None:
    run = {"command": "strata bench serve --json /tmp/x.json --clients 6 --plot=/tmp/x.png 'serve.engine={a: 1}'"}
    assert record.command(run) == '```sh\nstrata bench serve --clients 6 "serve.engine={a: 1}"\n```'


def test_long_commands_are_wrapped_between_options() -> None:
    lines = record.command({"command": f"strata chaos {'--kill ' + 'decode,' * 14} --requests 5 {'a.b=1 ' * 20}"}).splitlines()
    assert len(lines) > 3 and all(line.endswith(" \\") for line in lines[1:-2])
    assert not any(line.endswith("--kill \\") for line in lines)


def test_the_header_has_the_command_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["/x/python", "/x/bin/strata", "bench", "train", "a b"])
    assert benchmark_record.command() == "strata bench train 'a b'"
    monkeypatch.setattr("sys.orig_argv", ["/x/python", "-m", "strata.kernels.bench.vllm_plugin", "--rounds", "8"])
    assert benchmark_record.command() == "python -m strata.kernels.bench.vllm_plugin --rounds 8"
