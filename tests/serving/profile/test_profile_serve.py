"""`strata profile serve` on real engines: findings, time by cause, named requests, and files that a browser opens."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strata.platform import recipe_file
from strata.serving.bench.contenders import dummy_model

pytestmark = [pytest.mark.slow, pytest.mark.rotation, pytest.mark.long]

REQUESTS, OUTPUT = 8, 8


def test_engines_under_load_are_profiled(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    dummy_model.write(model, recipe_file.load("laptop", []))
    words = ["--model", str(model), "--out", str(out), "--requests", str(REQUESTS), "--concurrency", "4"]
    words += ["--input", "64", "--output", str(OUTPUT), "serve.prefill.replicas=1", "serve.remote_prefill.min_tokens=32"]
    done = subprocess.run(
        [sys.executable, "-m", "strata.serving.profile.command", *words],
        env=os.environ | {"STRATA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    profile = json.loads((out / "profile.json").read_text())
    decode, prefill = profile["engines"]
    assert (decode["engine"], prefill["engine"]) == ("decode-0", "prefill-0")
    for engine in (decode, prefill):
        assert sum(engine["seconds"].values()) == pytest.approx(profile["window_s"], rel=1e-3), "every moment has one cause"
        assert 0 < engine["busy_share"] < 1 and engine["peak_memory_bytes"] > 0
        assert engine["seconds"]["products"] > 0 and engine["seconds"]["attention"] > 0
    assert decode["phases"]["decode step"]["count"] >= OUTPUT and prefill["phases"]["prefill step"]["count"] >= REQUESTS / 4
    assert len(decode["requests"]) == REQUESTS and decode["seconds"]["KV transfer"] > 0
    assert any(each["flops"] > 0 for each in prefill["work"])
    assert profile["load_while_profiled"]["errors"] == 0 and profile["peak_flops"] > 0
    with gzip.open(out / "decode-0.trace.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {f"strata:{each['request']}" for each in decode["requests"]} <= names
    assert {"strata:kv transfer", "strata:prefill", "strata:decode", "gpu_model_runner: sample"} <= names
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 8 and "Findings" in page and "src=" not in page
    assert not list((tmp_path / "profile").glob(".serve-*")), "the raw traces are removed"
