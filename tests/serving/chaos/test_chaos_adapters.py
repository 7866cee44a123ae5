"""Adapters that come and go in `strata chaos`: their folders, and what counts as a failure. Without engines."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from strata.platform.errors import UserError
from strata.serving.chaos import adapters, requests
from strata.serving.chaos.adapters import Churn, Result


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    weight = np.zeros((6, 8), np.float32)
    names = [f"model.layers.0.self_attn.{target}.weight" for target in ("q_proj", "v_proj")]
    save_file(dict.fromkeys(names, weight) | {"model.norm.weight": weight[0]}, tmp_path / "model.safetensors")
    return tmp_path


def test_half_of_the_adapters_is_steady(base: Path) -> None:
    made = adapters.make(base, 3, seed=1)
    assert list(made.steady) == ["adapter-0", "adapter-1"] and list(made.passing) == ["adapter-2"]
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in made.steady.values())
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert len(first) == 4 and first[name].shape == (adapters.RANK, 8) and not np.array_equal(first[name], second[name])
    assert made.overrides()[0].startswith("serve.adapters={slots: 1, in_memory: 2, rank: 8, roots: [")
    (base / "model.safetensors").unlink()
    with pytest.raises(UserError, match="none of the projections"):
        adapters.make(base, 2, seed=1)


def test_requests_name_the_model_and_its_adapters() -> None:
    plain, named = requests.make(60, 3, "m", 64), requests.make(60, 3, "m", 64, ["a", "b"])
    assert {one.body["model"] for one in named} == {"m", "a", "b"}
    assert [one.body | {"model": "m"} for one in named] == [one.body for one in plain]


def churned(answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, turns: int = 2) -> Churn:
    """`answers` by route, in order; the last one stays."""
    seen: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        given = answers[request.url.path.rpartition("/")[2]]
        found = given.pop(0) if len(given) > 1 else given[0]
        if isinstance(found, Exception):
            raise found
        status, headers, content = (*found, {}, b"")[:3]
        return httpx.Response(status, headers=headers, content=content)

    def connect(url: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=url, transport=httpx.MockTransport(handle))

    monkeypatch.setattr(adapters, "fresh_connections", connect)
    monkeypatch.setattr(adapters, "WAIT_S", 0.0)
    churn = Churn("http://test", {"a": Path("/a")})
    asyncio.run(churn.go(lambda: seen.count("/v1/completions") >= turns))
    return churn


def completion(text: str) -> tuple[int, dict[str, str], bytes]:
    event = {"id": "1", "choices": [{"text": text, "finish_reason": "length"}]}
    return 200, {}, f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()


def test_answers_must_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = {"load_lora_adapter": [(200,)], "unload_lora_adapter": [(200,)]}
    good = churned(fine | {"completions": [completion("x")]}, monkeypatch)
    assert (good.answered, good.failures, len(good.load_s)) == (2, [], 2)
    wrong = churned(fine | {"completions": [completion("x"), completion("y")]}, monkeypatch)
    assert wrong.answered == 1 and "'y' instead of 'x'" in wrong.failures[0]
    lost = churned(fine | {"completions": [(404, {}, b"{}")]}, monkeypatch, turns=1)
    assert "HTTP 404" in lost.failures[0]


def test_changes_that_a_gateways_death_breaks_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = httpx.ReadError("the connection broke")
    answers = {"load_lora_adapter": [broken, (503,), (200,)], "unload_lora_adapter": [broken, (404,), (200,)]}
    churn = churned(answers | {"completions": [completion("x")]}, monkeypatch, turns=2)
    assert churn.failures == [] and len(churn.load_s) == 1  # the first took three tries
    refused = churned(
        {"load_lora_adapter": [(400, {}, b"no")], "unload_lora_adapter": [(404, {}, b"none")], "completions": [completion("x")]},
        monkeypatch,
        turns=1,
    )
    assert [line.partition(":")[0] for line in refused.failures] == ["load a", "unload a"]


def test_load_times_are_those_of_the_undisturbed_run() -> None:
    churn = Churn("http://test", {}, load_s=[0.1, 0.3, 9.0], answered=3)
    result = Result.of(churn, undisturbed=2)
    assert (result.loads, result.load_p50_s, result.load_max_s) == (3, 0.2, 0.3) and "0.200 s" in result.line()
    assert Result.of(Churn("http://test", {}), 0).line().startswith("adapters: 0 loads;")
