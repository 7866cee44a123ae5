"""Files of a profile: requests to engines and their confirmations, collected traces, and the settings of vLLM."""

import asyncio
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.serving.bench.clients.load import Record
from strata.serving.engine import profiled
from strata.serving.engine.profiled import LOG, START, STOP
from strata.serving.profile import folder, session
from strata.serving.spec import EngineSpec, Network

from .synthetic import BASE_NS, FACTS, Writer


def config(traces: Path | None, asynchronous: bool = True) -> Any:
    return SimpleNamespace(
        profiler_config=SimpleNamespace(profiler="torch" if traces else None, torch_profiler_dir=str(traces or "")),
        scheduler_config=SimpleNamespace(
            async_scheduling=asynchronous, scheduler_cls=None, max_num_seqs=4, max_num_batched_tokens=64
        ),
        cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=SimpleNamespace(dtype="torch.bfloat16"),
    )


def test_engines_have_folders_of_their_own_and_a_scheduler_that_records(tmp_path: Path) -> None:
    chosen = config(tmp_path)
    assert profiled.prepare(chosen, "decode", "x") == tmp_path / "decode-x"
    assert chosen.profiler_config.torch_profiler_dir == str(tmp_path / "decode-x")
    assert chosen.scheduler_config.scheduler_cls.endswith(".RecordedAsyncScheduler")
    without = config(None)
    assert profiled.prepare(without, "decode", "x") is None and without.scheduler_config.scheduler_cls is None


class Vllm:
    """Stand-in for an engine: the real one is in `test_profile_serve.py`."""

    def __init__(self, traces: Path) -> None:
        self.vllm_config, self.calls = config(traces), list[str]()

    async def start_profile(self) -> None:
        self.calls.append("start")

    async def stop_profile(self) -> None:
        self.calls.append("stop")


def test_a_profile_starts_and_stops_on_request(tmp_path: Path) -> None:
    engine, own = Vllm(tmp_path), tmp_path / "decode-x"
    own.mkdir()

    async def run() -> None:
        following = asyncio.create_task(profiled.follow(engine, own, "decode", "x"))
        await asyncio.sleep(0.3)
        assert engine.calls == []
        await asyncio.to_thread(session.request, tmp_path, START, 5)
        assert engine.calls == ["start"]
        await asyncio.to_thread(session.request, tmp_path, STOP, 5)
        await following

    asyncio.run(run())
    assert engine.calls == ["start", "stop"]
    facts = json.loads((own / STOP).read_text())
    assert (facts["role"], facts["kv_tokens"], facts["dtype"]) == ("decode", 160, "bfloat16")


def written(source: Path) -> None:
    """Files of one engine, as vLLM and its scheduler leave them."""
    writer = Writer()
    writer.arrival("cmpl-a", 10)
    writer.step(11, 80, {"cmpl-a": 8}, ("cmpl-a",))
    own = source / "decode-x"
    own.mkdir(parents=True)
    with gzip.open(own / "123-rank-0.456.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": writer.events, "baseTimeNanoseconds": BASE_NS}, file)
    (own / LOG).write_text("".join(json.dumps(line) + "\n" for line in writer.lines))
    (own / STOP).write_text(json.dumps(FACTS | {"role": "decode", "replica": "x"}))
    (source / STOP).touch()


def test_traces_are_collected_with_their_requests(tmp_path: Path) -> None:
    written(tmp_path / "source")
    target = tmp_path / "target"
    target.mkdir()
    (target / "prefill-0.trace.json.gz").touch()  # of an older profile
    records = [Record("all", 5.0, 5.1, (5.05, 5.1), 2, None)]
    folder.collect(tmp_path / "source", target, records, BASE_NS / 1e9 - 5.0)
    names = {"decode-0.json", "decode-0.scheduler.jsonl", "decode-0.trace.json.gz", "requests.json"}
    assert {each.name for each in target.iterdir()} == names
    [engine] = folder.read(target)
    assert engine.name == "decode-0" and engine.facts["device"] == "cpu"
    assert engine.window == pytest.approx((0.0, 0.1), abs=1e-6), "the clients' clock is converted to that of the trace"
    assert [each.name for each in engine.log.requests] == ["cmpl-a"] and len(engine.trace.steps()) == 1
    with gzip.open(target / "decode-0.trace.json.gz") as file:
        assert "strata:cmpl-a" in {event["name"] for event in json.load(file)["traceEvents"]}


def test_an_engine_without_a_trace_is_named(tmp_path: Path) -> None:
    written(tmp_path / "source")
    next((tmp_path / "source" / "decode-x").glob("*.gz")).unlink()
    with pytest.raises(UserError, match="decode-0 wrote no trace"):
        folder.collect(tmp_path / "source", tmp_path / "target", [], 0.0)


def test_vllm_names_its_ranges_in_profiled_engines_only(tmp_path: Path) -> None:
    section = recipe_file.load("laptop", []).serve
    for engine, there in (({}, False), ({"profiler_config": session.profiler(tmp_path)}, True)):
        chosen = section.model_copy(update={"engine": engine})
        spec = EngineSpec.of("decode", chosen, tmp_path, "m", Network("127.0.0.1", b""))
        assert ("VLLM_CUSTOM_SCOPES_FOR_PROFILING" in spec.environment()) == there
        assert spec.engine_kwargs().get("profiler_config", {}) == engine.get("profiler_config", {})
