"""Drives the same load with `vllm bench serve`, to check the results of Strata's own clients."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from strata.serving.bench.clients.load import Level, Target
from strata.serving.bench.clients.workloads import Workload
from strata.serving.bench.contenders.subject import Subject

MOST = 64  # at a higher concurrency the single process of that client is the bottleneck
LIMIT_S = 600


def level_for(levels: list[Level]) -> Level | None:
    """The closed loop with the highest concurrency up to `MOST`."""
    closed = [level for level in levels if level.concurrency and level.concurrency <= MOST]
    return max(closed, key=lambda level: level.concurrency or 0, default=None)


def run(target: Target, subject: Subject, workload: Workload, level: Level, seed: int, folder: Path) -> dict[str, Any]:
    """Results of `vllm bench serve` with the field names of `Summary`, in seconds; or `error`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "vllm-bench.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "strata.serving.bench.clients.vllm_client", "--backend", "openai"]
    command += ["--base-url", f"http://{target.host}:{target.port}", "--model", target.model, "--tokenizer", str(subject.folder)]
    command += [
        "--dataset-name",
        "random",
        "--random-input-len",
        str(workload.input),
        "--random-output-len",
        str(workload.output),
    ]
    command += ["--num-prompts", str(level.conversations), "--max-concurrency", str(level.concurrency)]
    command += ["--num-warmups", str(level.concurrency), "--ignore-eos", "--temperature", "0", "--seed", str(seed)]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "99", "--disable-tqdm"]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", file.name]
    log = folder / "vllm-bench.log"
    settings = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if target.key:
        settings["OPENAI_API_KEY"] = target.key
    try:
        with log.open("wb") as output:
            subprocess.run(command, env=os.environ | settings, stdout=output, stderr=output, timeout=LIMIT_S, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return {"error": f"vllm bench serve: {type(error).__name__}, see {log}"}
    return _renamed(json.loads(file.read_text()))


def _renamed(theirs: dict[str, Any]) -> dict[str, Any]:
    return {
        "requests": theirs["completed"] + theirs["failed"],
        "errors": theirs["failed"],
        "requests_per_s": theirs["request_throughput"],
        "tokens_per_s": theirs["output_throughput"],
        "ttft_p50": theirs["median_ttft_ms"] / 1000,
        "ttft_p99": theirs["p99_ttft_ms"] / 1000,
        "itl_p50": theirs["median_itl_ms"] / 1000,
        "itl_p99": theirs["p99_itl_ms"] / 1000,
        "mean_itl_p50": theirs["median_tpot_ms"] / 1000,
        "end_to_end_p50": theirs["median_e2el_ms"] / 1000,
    }
