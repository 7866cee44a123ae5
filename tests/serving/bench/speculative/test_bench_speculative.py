"""`strata bench speculative`: prompts, requests, counters and the report."""

import json
from io import StringIO
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from strata.platform.errors import UserError
from strata.serving.bench.speculative import run
from strata.serving.bench.speculative.run import Load, Measured, Methods

LOAD = Load(prompts=3, characters=4, tokens=2, concurrency=(1, 2), rounds=2)
METRICS = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m",replica="a"} 10.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m",replica="b"} 5.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
"""


def test_prompts_are_from_all_over_the_text() -> None:
    assert run.parts("abcdefghij", LOAD) == ["abcd", "cdef", "efgh"]
    assert run.parts("abcd", LOAD) == ["abcd"] * 3
    with pytest.raises(UserError, match="has 3 characters"):
        run.parts("abc", LOAD)


def test_counters_of_all_replicas_are_added() -> None:
    assert run.counters(METRICS) == {"drafts": 15.0, "draft_tokens": 40.0, "accepted_tokens": 30.0}
    assert run.counters("") == {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}


def test_every_level_and_round_is_driven() -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, text=METRICS)
        body = json.loads(request.content)
        asked.append(body["prompt"])
        assert body["temperature"] == 0 and body["max_tokens"] == LOAD.tokens
        return httpx.Response(200, json={"choices": [{"token_ids": [len(asked) if body["prompt"] == "odd" else 1, 2]}]})

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x") as http:
        same = run.drive(http, "m", ["a", "b", "c"], LOAD)
        other = run.drive(http, "m", ["a", "odd", "c"], LOAD)
    assert len(asked) == 2 * (2 + 2 * 2 * 3)
    assert same.stable and same.answers == ((1, 2),) * 3 and not other.stable
    assert {level: len(rates) for level, rates in same.rates.items()} == {1: 2, 2: 2}
    assert set(same.counted.values()) == {0.0}


def measured(rate: float, token: int, accepted: float = 0.0) -> Measured:
    counted = {"drafts": accepted / 2, "draft_tokens": 2 * accepted, "accepted_tokens": accepted}
    return Measured({1: (rate, rate, 9 * rate), 2: (2 * rate,)}, ((token,),), True, counted)


def test_report_compares_with_no_speculation() -> None:
    record = run.as_json(
        LOAD, Methods("small", 4), {"none": measured(10, 1), "ngram": measured(20, 1, 8), "draft": measured(5, 2)}
    )
    assert record["methods"]["ngram"]["ratio"] == {1: 2.0, 2: 2.0}
    assert record["methods"]["ngram"]["accepted_share"] == 0.5 and record["methods"]["ngram"]["accepted_per_draft"] == 2.0
    assert [each["same_tokens"] for each in record["methods"].values()] == [True, True, False]
    console = Console(width=160, record=True, file=StringIO())
    console.print(run.table(record))
    text = console.export_text()
    assert "50.0%" in text and "no" in text.splitlines()[-1]


def test_values_of_the_recipe(tmp_path: Path) -> None:
    assert list(Methods(None, 3).words()) == ["none", "ngram"]
    assert Methods(str(tmp_path), 3).words()["draft"] == f"{{method: draft, draft: {tmp_path}, tokens: 3}}"
