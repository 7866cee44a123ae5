"""`strata simulate calibrate` and `validate`: records, files, endpoints that do not answer, and wrong options."""

import json
from pathlib import Path

import httpx
import pytest
import typer
from support import ROOT
from typer.testing import CliRunner

from strata.platform.errors import UserError
from strata.serving.calibration import facts, fit
from strata.serving.calibration.command import simulate_calibrate, simulate_validate, table
from strata.serving.simulation import calibration

RECORD = ROOT / "docs/results/data/serve-uniform-h200.json"


def run(*words: str) -> str:
    app = typer.Typer()
    app.command("calibrate")(simulate_calibrate)
    app.command("validate")(simulate_validate)
    answer = CliRunner().invoke(app, words)
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_record_is_fitted_written_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "ITERATIONS", 3)
    monkeypatch.setattr(fit, "ENGINE_SHARES", (0.5,))
    file = tmp_path / "h200.json"
    text = run("calibrate", "--record", str(RECORD), "--contender", "strata", "--levels", "1", "--output", str(file))
    assert "ttft_p50" in text
    found = calibration.load(file)
    assert 0.001 < found.fixed_s < 0.003 and found.max_sequences == 256
    assert found.prompt_s == 0, "on GPUs the front end has cores of its own"
    written = json.loads(file.read_text())
    assert written["benchmark"] == "calibration" and written["loads"][0]["ratios"]["tokens_per_s"] == pytest.approx(1, abs=0.1)
    rows = json.loads(run("validate", str(RECORD), "--calibration", str(file), "--contender", "strata", "--json", "-"))["rows"]
    assert [row["level"]["concurrency"] for row in rows] == [1, 16, 64, 256]
    assert rows[0]["ratios"]["ttft_p50"] == pytest.approx(1, abs=0.1)


def test_table_has_the_range_of_the_rounds() -> None:
    rounds = [{"tokens_per_s": 90.0, "ttft_p50": 0.01}, {"tokens_per_s": 130.0, "ttft_p50": 0.03}]
    simulated, ratios = {"tokens_per_s": 121.0, "ttft_p50": 0.021}, {"tokens_per_s": 1.1, "ttft_p50": 1.05}
    row = {"load": "closed", "measured": {"tokens_per_s": 110.0, "ttft_p50": 0.02}, "simulated": simulated, "ratios": ratios}
    cells = [list(column.cells) for column in table([row | {"rounds": rounds}], "Loads").columns]
    assert cells[3] == ["90 to 130", "10.0 to 30.0"]
    assert len(table([row | {"rounds": rounds[:1]}], "Loads").columns) == len(cells) - 1


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("calibrate",), "An endpoint or a record"),
        (("validate", "--url", "http://127.0.0.1:9", "--start", "vllm"), "An endpoint or a record"),
        (("calibrate", "--record", "missing.json"), "no levels"),
        (("calibrate", "--record", str(RECORD), "--contender", "other"), "no levels of other"),
        (("calibrate", "--record", str(RECORD), "--levels", "7"), "no such levels"),
        (("calibrate", "--record", str(RECORD), "--levels", "some"), "--levels some"),
        (("calibrate", "--url", "ftp://host"), "no http:// address"),
        (("calibrate", "--url", "http://127.0.0.1:9"), "does not answer"),
        (("calibrate", "--start", "other"), "no contender"),
    ],
)
def test_wrong_options_are_refused(words: tuple[str, ...], cause: str) -> None:
    with pytest.raises(UserError, match=cause):
        run(*words)


def test_facts_come_from_the_models_and_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = 'vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="1365"} 1.0\n'

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=metrics)
        return httpx.Response(200, json={"data": [{"id": "dummy", "max_model_len": 2048}]})

    client = httpx.Client
    monkeypatch.setattr(facts.httpx, "Client", lambda **given: client(transport=httpx.MockTransport(answer), **given))
    found = facts.read("http://127.0.0.1:8000")
    assert (found.target.model, found.context, found.block_size, found.kv_tokens) == ("dummy", 2048, 128, 128 * 1365)
    metrics = "# none\n"
    assert facts.read("127.0.0.1:8000").kv_tokens is None


def test_facts_of_one_of_several_models(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = "".join(
        f'vllm:cache_config_info{{role="decode",replica="{name}-1",block_size="16",num_gpu_blocks="{blocks}"}} 1.0\n'
        f'strata_serve_kv_cache_usage{{model="{name}",role="decode",replica="{name}-1"}} 0.0\n'
        for name, blocks in (("main", 100), ("small", 10))
    )

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=metrics)
        return httpx.Response(200, json={"data": [{"id": name, "max_model_len": 64} for name in ("main", "small")]})

    client = httpx.Client
    monkeypatch.setattr(facts.httpx, "Client", lambda **given: client(transport=httpx.MockTransport(answer), **given))
    url = "http://127.0.0.1:8000"
    assert [(found.target.model, found.kv_tokens) for found in (facts.read(url), facts.read(url, "small"))] == [
        ("main", 1600),
        ("small", 160),
    ]
    with pytest.raises(UserError, match="no model 'other'"):
        facts.read(url, "other")
    with pytest.raises(UserError, match="model of a running endpoint"):
        run("calibrate", "--start", "vllm", "--model", "small")
