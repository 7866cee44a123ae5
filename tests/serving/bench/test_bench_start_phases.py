"""Phases of an engine's start from logs of vLLM 0.29."""

from datetime import datetime
from pathlib import Path

from strata.serving.bench import start_phases

BEGAN = datetime(2026, 11, 18, 12, 0, 0)
GPU = """\
:job_id:01000000
:actor_name:ServeReplica:strata:prefill
INFO 11-18 12:00:14 [model.py:684] Resolved architecture: LlamaForCausalLM
(EngineCore pid=8) INFO 11-18 12:00:31 [core.py:123] Initializing a V1 LLM engine (v0.29.0) with config: model='/m'
(EngineCore pid=8) INFO 11-18 12:00:36 [default_loader.py:430] Loading weights took 0.92 seconds
(EngineCore pid=8) INFO 11-18 12:00:37 [model_runner.py:405] Model loading took 1.94 GiB memory and 1.5 seconds
(EngineCore pid=8) INFO 11-18 12:00:43 [backends.py:1156] Dynamo bytecode transform time: 4.10 s
(EngineCore pid=8) INFO 11-18 12:00:57 [monitor.py:53] torch.compile took 19.20 s in total
(EngineCore pid=8) INFO 11-18 12:00:59 [monitor.py:82] Initial profiling/warmup run took 1.75 s
(EngineCore pid=8) INFO 11-18 12:01:06 [model_runner.py:961] Graph capturing finished in 6 secs, took 0.41 GiB
(EngineCore pid=8) INFO 11-18 12:01:07 [gpu_worker.py:626] Available KV cache memory: 50.1 GiB
(EngineCore pid=8) INFO 11-18 12:01:07 [kv_cache_utils.py:2032] GPU KV cache size: 1,048,576 tokens
(EngineCore pid=8) INFO 11-18 12:01:14 [model_runner.py:961] Graph capturing finished in 6 secs, took 0.41 GiB
(EngineCore pid=8) INFO 11-18 12:01:16 [core.py:368] init engine (profile, create kv cache, warmup model) took 39.10 s
"""
CPU = """\
INFO 11-18 12:00:11 [model.py:684] Resolved architecture: LlamaForCausalLM
(EngineCore pid=8977) INFO 11-18 12:00:33 [core.py:123] Initializing a V1 LLM engine (v0.29.0) with config: model='/m'
(EngineCore pid=8977) INFO 11-18 12:00:38 [default_loader.py:430] Loading weights took 0.02 seconds
(EngineCore pid=8977) INFO 11-18 12:00:38 [kv_cache_utils.py:2032] GPU KV cache size: 1,048,576 tokens
(EngineCore pid=8977) INFO 11-18 12:00:39 [core.py:368] init engine (profile, create kv cache, warmup model) took 1.07 s
"""


def test_phases_add_up_to_the_time_of_the_answer(tmp_path: Path) -> None:
    (tmp_path / "1").write_text(GPU)
    (tmp_path / "2").write_text(CPU)
    (tmp_path / "3").write_text("INFO 11-18 12:00:11 [gateway.py:1] no engine\n")
    answered = BEGAN.replace(minute=1, second=20)
    found = start_phases.of_engines(tmp_path.iterdir(), BEGAN, answered)
    assert found["prefill"] == {
        "imports": 31,
        "weights": 6,
        "compile": 22,
        "KV cache size": 8,
        "graphs": 7,
        "warm-up": 2,
        "first answer": 4,
    }
    assert found["engine"] == {"imports": 33, "weights": 5, "KV cache size": 0, "warm-up": 1, "first answer": 41}
    assert found.keys() == {"prefill", "engine"}
    assert all(sum(phases.values()) == 80 for phases in found.values())


def test_log_of_an_earlier_start_is_not_read() -> None:
    assert start_phases.of(GPU, BEGAN.replace(hour=13), BEGAN.replace(hour=14)) == {}
