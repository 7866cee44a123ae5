"""Metrics, workloads, tables and JSON of `strata bench serve`."""

import io
import json
import os
import sys
from pathlib import Path

import numpy
import psutil
import pytest
import typer
from rich.console import Console
from tokenizers import Tokenizer
from typer.testing import CliRunner

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.serving.bench import compare, plot, report
from strata.serving.bench.clients.calibration import Calibration
from strata.serving.bench.clients.load import Level, Record
from strata.serving.bench.clients.measure import Slo, by_kind, percentile, summarise
from strata.serving.bench.clients.workloads import Workload
from strata.serving.bench.command import bench_serve
from strata.serving.bench.contenders import dummy_model, engines, server, subject
from strata.serving.bench.contenders.contenders import CONTENDERS, Contender, Launch, find
from strata.serving.bench.results import Measured, Ran, Results, Settings
from strata.serving.models import model_dir

TINY = ["model.layers=1", "model.hidden=64", "model.heads=2", "model.kv_heads=1", "model.ffn=64", "model.vocab=600"]
UNIFORM = Workload("uniform", vocab=50, input=6, output=4, long_input=30, long_share=0.25, turns=3)
LEVELS = [Level(32, concurrency=1), Level(64, concurrency=16), Level(60, rate=2.0)]
SETTINGS = Settings(UNIFORM, LEVELS, clients=2, slo=Slo(0.2, 0.05), seed=0, cross_check=True)


def record(start: float, ttft: float, itl: float, tokens: int = 5, kind: str = "all", error: str | None = None) -> Record:
    arrivals = () if error else tuple(start + ttft + itl * number for number in range(tokens))
    return Record(kind, start, start + ttft + itl * (tokens - 1), arrivals, tokens, error)


def test_summary_by_hand() -> None:
    records = [record(0, 0.1, 0.01), record(0, 0.1, 0.10), record(0.5, 0.3, 0.01), record(0, 0, 0.25, error="no")]
    summary = summarise(records, Slo(ttft_s=0.2, itl_s=0.05))
    assert (summary.requests, summary.errors, summary.first_error) == (4, 1, "no")
    assert summary.seconds == pytest.approx(1.0)  # the failed request ends last
    assert summary.tokens_per_s == pytest.approx(15)
    assert summary.requests_per_s == pytest.approx(3)
    assert summary.ttft_p50 == pytest.approx(0.1)
    assert summary.ttft_p99 == pytest.approx(0.296)
    assert summary.itl_p50 == pytest.approx(0.01)
    assert summary.itl_p99 == pytest.approx(0.1)
    assert summary.end_to_end_p50 == pytest.approx(0.34)
    # Only the first: the ITL of the second and the TTFT of the third are too high, and the fourth failed.
    assert (summary.goodput_share, summary.goodput_per_s) == (0.25, pytest.approx(1))


def test_percentiles_interpolate() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile(list(range(101)), 99) == 99
    assert percentile([], 50) is None


def test_kinds_are_summarised_separately() -> None:
    records = [record(0, 0.1, 0.01, kind="short"), record(0, 0.9, 0.05, kind="long")]
    kinds = by_kind(records, Slo(1, 1))
    assert list(kinds) == ["long", "short"]
    assert kinds["short"].itl_p99 == pytest.approx(0.01)
    assert by_kind(records[:1], Slo(1, 1)) == {}


@pytest.mark.parametrize("name", ["uniform", "mixed", "multiturn"])
def test_workload_is_reproducible(name: str) -> None:
    workload = Workload(name, 50, 6, 4, 30, 0.25, 3)  # type: ignore[arg-type]
    once = [workload.conversation(7, number) for number in range(40)]
    assert once == [workload.conversation(7, number) for number in range(40)]
    assert once != [workload.conversation(8, number) for number in range(40)]
    assert len({request.prompt for conversation in once for request in conversation}) == sum(map(len, once))
    assert all(0 <= token < 50 for conversation in once for request in conversation for token in request.prompt)
    longest = max(len(request.prompt) + request.output for conversation in once for request in conversation)
    assert longest == workload.longest


def test_lengths() -> None:
    assert {len(UNIFORM.conversation(0, number)[0].prompt) for number in range(20)} == {6}
    mixed = Workload("mixed", 50, 6, 4, 30, 0.25, 3)
    requests = [mixed.conversation(0, number)[0] for number in range(400)]
    assert {(request.kind, len(request.prompt)) for request in requests} == {("short", 6), ("long", 30)}
    assert numpy.mean([request.kind == "long" for request in requests]) == pytest.approx(0.25, abs=0.06)
    turns = Workload("multiturn", 50, 6, 4, 30, 0.25, 3).conversation(0, 1)
    assert [len(turn.prompt) for turn in turns] == [6, 16, 26]
    assert turns[1].prompt[:6] == turns[0].prompt and turns[2].prompt[:16] == turns[1].prompt


def results(*kinds: str) -> Results:
    def ran(slower: float) -> Ran:
        records = [record(number / 10, 0.1 * slower, 0.01 * slower) for number in range(10)]
        summary = summarise(records, SETTINGS.slo)
        apart = {kind: summarise(records[: 2 + number], SETTINGS.slo) for number, kind in enumerate(kinds)}
        check = {"tokens_per_s": 40.0, "requests_per_s": 8.0, "ttft_p50": 0.1, "ttft_p99": 0.1, "itl_p50": 0.01, "itl_p99": 0.01}
        check |= {"mean_itl_p50": 0.01, "end_to_end_p50": 0.14}
        return Ran(12.5, [Measured(level, summary, apart, [0.1, 0.2]) for level in LEVELS], check)

    calibration = Calibration(2, 60_000, 0.01, 0.0101, 0.0105)
    results = Results(calibration, failed={"ray": "It ended with code 1.\nTraceback"})
    for contender, speed in (("vllm", 1), ("strata", 2)):
        results.add(contender, 0, ran(speed))
    return results


def chosen(tmp_path: Path) -> subject.Subject:
    folder = tmp_path / "dummy"
    dummy_model.write(folder, recipe_file.load("laptop", TINY))
    return subject.choose(TINY, None, folder, "laptop")


def test_json_has_machine_versions_settings_and_results(tmp_path: Path) -> None:
    tree = json.loads(json.dumps(report.as_json(chosen(tmp_path), SETTINGS, results())))
    header = {"benchmark", "command", "date", "machine", "versions"}
    assert header | {"model", "settings", "calibration", "contenders", "failed"} == set(tree)
    assert {"cores", "gpus", "memory_gib", "processor"} <= set(tree["machine"])
    assert {"python", "ray", "torch"} <= set(tree["versions"])
    assert tree["settings"]["serve"]["max_sequences"] == 64 and tree["settings"]["workload"]["input"] == 6
    assert tree["settings"]["serve"]["prefix_caching"] is False
    assert tree["model"] == {"id": "dummy", "vocab": 600, "context": 256}
    assert list(tree["contenders"]) == ["vllm", "strata"] and list(tree["failed"]) == ["ray"]
    first = tree["contenders"]["strata"]["levels"][0]
    assert first["ratios"]["ttft_p50"] == pytest.approx(2) and first["ratios"]["itl_p99"] == pytest.approx(2)
    assert first["level"] == {"conversations": 32, "concurrency": 1, "rate": None}
    assert first["summary"]["itl_p50"] == pytest.approx(0.02) and first["client_cpu"] == [0.1, 0.2]


def test_tables_show_every_contender_and_the_reason_of_a_missing_one() -> None:
    output = io.StringIO()
    compare.show(SETTINGS, results(), Console(file=output, width=180))
    text = output.getvalue()
    for words in ("concurrency 16", "2 req/s", "vllm", "strata", "TTFT p50", "within SLO", "÷ vllm", "vllm bench serve"):
        assert words in text
    assert "ray has no results: It ended with code 1." in text
    assert "may be the bottleneck" not in text


def test_busy_clients_are_reported() -> None:
    summary = summarise([record(0, 0.1, 0.01)], SETTINGS.slo)
    calm = Calibration(2, 60_000, 0.01, 0.01, 0.01)
    assert Measured(LEVELS[0], summary, {}, [0.1]).doubts(calm) is None
    assert "66% of a core" in str(Measured(LEVELS[0], summary, {}, [0.1, 0.66]).doubts(calm))
    most = 2 * summary.events_per_s / 0.6  # capacity of two clients; one was busy
    assert "60% of the clients' capacity" in str(
        Measured(LEVELS[0], summary, {}, [0.1]).doubts(Calibration(2, most, 0.01, 0.01, 0.01))
    )


def test_kinds_have_their_own_ratios(tmp_path: Path) -> None:
    table = report.ratio_table(SETTINGS, results("long", "short"))
    assert [cell.strip() for cell in table.columns[1].cells] == ["strata", "long", "short"] * 3
    first = report.as_json(chosen(tmp_path), SETTINGS, results("long", "short"))["contenders"]["strata"]["levels"][0]
    assert first["ratios_of_kinds"]["short"]["itl_p99"] == pytest.approx(2) and first["ratios"]["itl_p99"] == pytest.approx(2)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [(), ("long", "short")])
def test_plot_is_a_png(kinds: tuple[str, ...]) -> None:
    assert plot.draw(SETTINGS, results(*kinds)).startswith(b"\x89PNG")


def test_dummy_model_is_a_model_folder(tmp_path: Path) -> None:
    made = chosen(tmp_path)
    model_dir.check(made.folder)
    assert (made.model_id, made.vocab, made.context) == ("dummy", 600, 256)
    tokenizer = Tokenizer.from_file(str(made.folder / "tokenizer.json"))
    ids = [2, 599, 17, 300]
    assert tokenizer.get_vocab_size() == 600
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids


def test_every_contender_has_the_same_engine(tmp_path: Path) -> None:
    made = chosen(tmp_path)
    launches = {name: contender.launch(made, False, 8123) for name, contender in CONTENDERS.items()}
    bare = launches["vllm"].command
    assert bare[bare.index("--dtype") + 1] == "float32" and bare[bare.index("--max-num-seqs") + 1] == "64"
    assert "--no-enable-prefix-caching" in bare and "--enforce-eager" in bare
    for name in ("ray", "ray-best", "ray-direct", "ray-pd"):
        for config in json.loads(launches[name].command[-1])["configs"]:
            settings = {key: value for key, value in config["engine_kwargs"].items() if key != "kv_transfer_config"}
            assert engines.flags(settings) == bare[-len(engines.flags(settings)) :]
            assert config["accelerator_config"] == {"kind": "cpu"}
    assert launches["ray-direct"].environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    ours = launches["strata"].command
    assert {"serve.prefill.replicas=0", "serve.prefix_caching=false", "serve.port=8123"} <= set(ours)
    assert ours[ours.index("--recipe") + 1] == "laptop" and set(TINY) <= set(ours)


def test_pairs_share_a_gpu_and_others_use_all_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "dummy"
    small = [*TINY, "model.context=256"]
    dummy_model.write(folder, recipe_file.load("h200", small))
    made = subject.choose(small, None, folder, "h200")
    bare = CONTENDERS["vllm"].launch(made, False, 1).command
    assert bare[bare.index("--gpu-memory-utilization") + 1] == "0.85"
    pair = json.loads(CONTENDERS["ray-pd"].launch(made, False, 1).command[-1])["configs"]
    assert [config["engine_kwargs"]["gpu_memory_utilization"] for config in pair] == [0.4, 0.4]
    assert [config["placement_group_config"]["bundles"] for config in pair] == [[{"CPU": 1, "GPU": 0.5}]] * 2
    assert {"serve.decode.gpus=1", "serve.decode.gpu_memory=0.85"} <= set(CONTENDERS["strata"].launch(made, True, 1).command)


def test_strata_contender_with_overrides(tmp_path: Path) -> None:
    found = find("strata-pd+serve.prefill.sm_share=0.25+serve.decode.step_tokens=512")
    assert found.about.endswith("prefill and decode, serve.prefill.sm_share=0.25, serve.decode.step_tokens=512")
    made = chosen(tmp_path)
    command = found.launch(made, False, 8123).command
    assert command[-2:] == ["serve.prefill.sm_share=0.25", "serve.decode.step_tokens=512"]
    assert command[:-2] == CONTENDERS["strata-pd"].launch(made, False, 8123).command


def test_failed_contender_shows_the_reason_and_leaves_no_process(tmp_path: Path) -> None:
    sleep = ["sleep", str(100_000 + os.getpid())]  # another run of the tests has its own
    script = f"import subprocess, sys; subprocess.Popen({sleep}); print('no such model'); sys.exit(3)"
    broken = Contender("broken", lambda *_: Launch([sys.executable, "-c", script], {}))
    with (
        pytest.raises(server.Failed, match=r"(?s)code 3.*no such model"),
        server.running(broken, chosen(tmp_path), False, tmp_path / "broken.log"),
    ):
        pass
    assert not [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == sleep]


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--workload", "odd"], "no workload 'odd'"),
        (["--contenders", "vllm,odd"], "no contender 'odd'"),
        (["--contenders", "vllm+serve.eager=true"], "'vllm+serve.eager=true' is no contender"),
        (["--contenders", "strata+model.layers=1"], "Change the serve section"),
        (["--concurrency", "1,x"], "not a list of positive numbers"),
        (["--input", "300"], "the model's context is 256"),
        (["--workload", "mixed", "--cross-check"], "uniform"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(words: list[str], cause: str) -> None:
    app = typer.Typer()
    app.command()(bench_serve)
    done = CliRunner().invoke(app, ["--dummy-model", *words, *TINY])
    assert isinstance(done.exception, UserError) and cause in str(done.exception)
