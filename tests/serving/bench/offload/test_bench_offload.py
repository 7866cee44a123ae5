"""Settings and record of `strata bench offload`. The slow test runs engines."""

import asyncio
import json
from collections.abc import AsyncIterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.serving.bench.contenders import dummy_model
from strata.serving.bench.contenders.subject import Subject, choose
from strata.serving.bench.offload import run
from strata.serving.bench.offload.run import Load
from strata.serving.bench.offload.turns import Turns

SIZES = ["model.layers=2", "model.hidden=128", "model.heads=4", "model.kv_heads=2", "model.ffn=256", "model.vocab=512"]
SIZES += ["model.context=2048", "serve.eager=true", "serve.dtype=float32"]


@pytest.fixture
def served(tmp_path: Path) -> Subject:
    dummy_model.write(tmp_path / "dummy", recipe_file.load("laptop", SIZES))
    return choose(SIZES, None, tmp_path / "dummy", None)


def test_engines_differ_in_offload_alone(served: Subject) -> None:
    load = Load(1000, 16, 1)
    on, off = run.section(served, load, True), run.section(served, load, False)
    assert on.model_copy(update={"kv_offload": None}) == off and on.kv_offload is not None and off.kv_offload is None
    assert on.prefill.replicas == 0 and on.engine == {"num_gpu_blocks_override": 87, "max_model_len": 1096}
    assert run.token_bytes(served) == 2 * 2 * 2 * 32 * 4
    assert on.kv_offload.cpu_gib * 2**30 == pytest.approx(8 * 1096 * run.token_bytes(served))


def test_section_of_a_recipe_for_gpus(served: Subject) -> None:
    section = recipe_file.load("h200", ["serve.kv_offload={cpu_gib: 40, disk: /kv, disk_gib: 1}"]).serve
    made = run.section(Subject(served.folder, "m", section, (), 512, 16384), Load(8192, 32, 1), True)
    assert (made.kernels, made.decode.gpus, made.decode.gpu_memory, made.device) == ("vllm", 1, 0.9, "gpu")
    assert made.kv_offload is not None and (made.kv_offload.cpu_gib, made.kv_offload.disk) == (40, None)


def measured(tier: float, tokens: list[int]) -> dict[str, Any]:
    return {
        "ttft_s": {"cached": [0.1, 0.1], "tier": [tier, tier], "computed": [1.0, 1.0]},
        "answers": {"cached": [[1, 2]], "tier": [tokens], "computed": [[1, 2]]},
        "tier_tokens": [900, 1000],
    }


def test_record_and_table() -> None:
    record = run.as_json(Load(1000, 16, 2), {"offload": measured(0.2, [1, 2]), "none": measured(0.8, [1, 2])})
    assert record["states"]["tier"] == {"ttft_s": 0.2, "ratio": 0.2} and record["same_tokens"]
    assert record["without_offload"]["ratio"] == pytest.approx(0.25)
    output = StringIO()
    Console(file=output, width=120).print(run.table(record))
    assert "evicted to host memory" in output.getvalue() and "0.20" in output.getvalue()
    assert not run.as_json(Load(1000, 16, 2), {"offload": measured(0.2, [1, 3])})["same_tokens"]


def test_turns_longer_than_the_context_are_refused(served: Subject, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Two turns have 2128 tokens, and the model's context is 2048"):
        run.bench(served, Load(2000, 32, 1), True, tmp_path / "x.json", Console(file=StringIO()))


class Recorded:
    """Engine that answers with the number of prompt tokens, and records prompts by salt."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=128))
        self.asked: list[tuple[str, list[int]]] = []

    async def generate(self, prompt: dict[str, Any], params: Any, request_id: str) -> AsyncIterator[Any]:
        ids = prompt["prompt_token_ids"]
        self.asked.append((prompt["cache_salt"], ids))
        for length in range(1, params.max_tokens + 1):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[len(ids)] * length)], num_cached_tokens=7)


def test_states_of_a_conversation_differ_in_their_salts_alone() -> None:
    engine = Recorded()
    found = asyncio.run(Turns(SimpleNamespace(vllm=engine), Load(500, 4, 1), vocab=512).conversation("x"))
    others = [ids for salt, ids in engine.asked if salt.startswith("other")]
    assert len(others) == 3 and sum(map(len, others)) >= 1280, "they fill the KV cache"
    assert len({tuple(ids) for ids in others}) == 3
    turns = [(salt, len(ids)) for salt, ids in engine.asked if not salt.startswith("other")]
    second = 500 + 4 + 64
    assert turns == [("x-cached", 500), ("x-cached", second), ("x-tier", 500), ("x-tier", second), ("x-computed", second)]
    assert len({tuple(ids) for _, ids in engine.asked if len(ids) == second}) == 1
    assert {state: (answer, cached) for state, (_, answer, cached) in found.items()} == dict.fromkeys(
        ("cached", "tier", "computed"), ([second] * 4, 7)
    )


@pytest.mark.slow
@pytest.mark.rotation
@pytest.mark.timeout(900)
def test_engine_reads_evicted_blocks(served: Subject, tmp_path: Path) -> None:
    assert run.bench(served, Load(1000, 8, 2), False, tmp_path / "record.json", Console(file=StringIO()))
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["same_tokens"] and record["same_tokens_computed"] and record["tier_tokens"] >= 896
