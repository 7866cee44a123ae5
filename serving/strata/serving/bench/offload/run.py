"""Starts engines that differ in `serve.kv_offload` alone, one after the other, and compares second turns of conversations."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from strata.platform import benchmark_record, processes
from strata.platform.errors import UserError
from strata.platform.files import cache_dir, write_atomic
from strata.platform.recipe import ServeSection
from strata.serving.bench.contenders.subject import Subject
from strata.serving.kv_offload.settings import GIB
from strata.serving.spec import CPU_BLOCK, EngineSpec, Network

QUESTION = 64  # new tokens of the second turn
CACHE = 2.5  # conversations that the KV cache holds
HOST_MEMORY = 8  # conversations that the tier holds
BLOCK = {"cpu": CPU_BLOCK, "gpu": 16}  # tokens; 16 is vLLM's choice
LIMIT_S = 900.0
WIDTH = {"float32": 4}  # bytes; 2 of all others
STATES = {"cached": "in the KV cache", "tier": "evicted to host memory", "computed": "computed again"}


@dataclass(frozen=True)
class Load:
    input: int  # tokens of the first turn
    output: int
    rounds: int

    @property
    def longest(self) -> int:
        return self.input + 2 * self.output + QUESTION


@dataclass(frozen=True)
class Task:
    """Task of the process that runs an engine."""

    folder: str
    section: dict[str, Any]
    vocab: int
    load: Load
    answer: str  # file


def bench(served: Subject, load: Load, baseline: bool, path: Path, console: Console) -> bool:
    """Returns whether blocks from host memory gave the tokens of those from the KV cache."""
    if load.longest > served.context:
        cause = f"Two turns have {load.longest} tokens, and the model's context is {served.context}."
        raise UserError(cause, "Lower --input or --output.")
    found = {}
    for name in ("offload", "none") if baseline else ("offload",):
        with console.status(f"serve.kv_offload: {name}, {load.rounds} conversations …"):
            found[name] = _measure(served, load, name == "offload")
    record = as_json(load, found)
    console.print(table(record))
    write_atomic(path, json.dumps(record, indent=2))
    console.print(f"written to {path}")
    return bool(record["same_tokens"])


def _measure(served: Subject, load: Load, offload: bool) -> dict[str, Any]:
    log = cache_dir() / "bench" / "logs" / f"offload-{'on' if offload else 'off'}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    changed = section(served, load, offload)
    environment = EngineSpec.of("decode", changed, served.folder, served.model_id, Network.within(True)).environment()
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as temporary, log.open("wb") as output:
        answer = Path(temporary) / "answer.json"
        task = Task(str(served.folder), changed.model_dump(mode="json"), served.vocab, load, str(answer))
        # In a process of its own: vLLM reads its environment once, and an engine's memory is free for the next.
        command = [sys.executable, "-m", "strata.serving.bench.offload.turns", json.dumps(asdict(task))]
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=processes.ending_with_us(),
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise UserError(f"The engine needed more than {LIMIT_S:.0f} s.", f"See {log}.") from None
        finally:
            processes.stop_family([process], 30.0)
        if code != 0:
            raise UserError(f"The engine failed: {processes.last_lines(log)}", f"See {log}.")
        measured: dict[str, Any] = json.loads(answer.read_text())
    if offload and min(measured["tier_tokens"]) < load.input // 2:
        cause = f"Host memory had only {min(measured['tier_tokens'])} of {load.input} tokens of a conversation."
        raise UserError(cause, "Raise serve.kv_offload.cpu_gib.")
    return measured


def section(served: Subject, load: Load, offload: bool) -> ServeSection:
    """One engine with a small KV cache, so that a few prompts evict a conversation, and with vLLM's own kernels."""
    given = served.section
    changes: dict[str, Any] = {
        "prefill": {"replicas": 0, "max_replicas": None},
        "decode": {"replicas": 1, "max_replicas": None, "step_tokens": None},
        "slo": None,
        "speculative": None,
        "adapters": None,
        "prefix_caching": True,
        "kernels": "vllm",
        "kv_offload": None,
    }
    if given.device == "gpu":
        changes["decode"] |= {"gpus": given.decode.tensor_parallel, "gpu_memory": 0.9, "sm_share": None}
    blocks = int(CACHE * load.longest / BLOCK[given.device]) + 2
    changes["engine"] = given.engine | {"num_gpu_blocks_override": blocks, "max_model_len": load.longest}
    if offload:
        least = HOST_MEMORY * load.longest * token_bytes(served) / GIB
        own = given.kv_offload.model_dump() if given.kv_offload is not None else {"cpu_gib": least}
        changes["kv_offload"] = own | {"disk": None, "disk_gib": None}
    return given.further(changes)


def token_bytes(served: Subject) -> int:
    """KV cache of a token, in bytes."""
    config = json.loads((served.folder / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    dtype = served.section.dtype if served.section.dtype != "auto" else config.get("dtype", config.get("torch_dtype", "bfloat16"))
    return int(2 * config["num_hidden_layers"] * heads * size * WIDTH.get(dtype, 2))


def as_json(load: Load, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    offload, plain = found["offload"], found.get("none")
    again = statistics.median(offload["ttft_s"]["computed"])
    rows = {state: {"ttft_s": statistics.median(seconds)} for state, seconds in offload["ttft_s"].items()}
    for row in rows.values():
        row["ratio"] = row["ttft_s"] / again
    record = {
        **benchmark_record.header("offload"),
        "load": asdict(load),
        "states": rows,
        "tier_tokens": statistics.median(offload["tier_tokens"]),
        "same_tokens": offload["answers"]["tier"] == offload["answers"]["cached"],
        "same_tokens_computed": offload["answers"]["tier"] == offload["answers"]["computed"],
    }
    if plain is not None:
        evicted = statistics.median(plain["ttft_s"]["tier"])
        record["without_offload"] = {"evicted_ttft_s": evicted, "ratio": rows["tier"]["ttft_s"] / evicted}
        record["without_offload"]["computed_ttft_s"] = statistics.median(plain["ttft_s"]["computed"])
    return record


def table(record: dict[str, Any]) -> Table:
    made = Table("KV blocks of the second turn", "TTFT ms", "ratio", "same tokens", box=None, header_style="bold")
    same = {"tier": record["same_tokens"], "computed": record["same_tokens_computed"]}
    for state, row in record["states"].items():
        word = {True: "yes", False: "no", None: ""}[same.get(state)]
        made.add_row(STATES[state], f"{1000 * row['ttft_s']:,.1f}", f"{row['ratio']:.2f}", word)
    if (plain := record.get("without_offload")) is not None:
        made.add_row("evicted, without offload", f"{1000 * plain['evicted_ttft_s']:,.1f}", f"{1 / plain['ratio']:.2f} x tier", "")
    return made
