"""The endpoint through the official OpenAI client and raw HTTP, with `transformers` as the reference for tokens."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from support import Served, prefill_header
from transformers import AutoModelForCausalLM, AutoTokenizer

from strata.serving import client as timed_client
from strata.serving.spec import CPU_BLOCK

CONTEXT = 256
TEXT = "def close(self):\n    for name, value in self.items():\n        self.file.write(value)\n" * 40


@pytest.fixture(scope="module")
def client(endpoint: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def judge(endpoint: Served):
    tokenizer = AutoTokenizer.from_pretrained(endpoint.folder)
    model = AutoModelForCausalLM.from_pretrained(endpoint.folder, dtype=torch.float32)

    def generate(prompt_ids: list[int], count: int) -> list[int]:
        with torch.no_grad():
            out = model.generate(torch.tensor([prompt_ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return out[0, len(prompt_ids) :].tolist()

    return tokenizer, generate


def test_models_and_health(endpoint: Served, client: openai.OpenAI) -> None:
    assert httpx.get(f"{endpoint.url}/health").status_code == 200
    assert [m.id for m in client.models.list().data] == [endpoint.model]
    assert client.models.retrieve(endpoint.model).id == endpoint.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


# One token, around the size of a KV block, several blocks, and as long as fits.
@pytest.mark.parametrize("length", [1, 2, 37, CPU_BLOCK - 1, CPU_BLOCK, CPU_BLOCK + 1, 200, CONTEXT - 16])
def test_greedy_tokens_equal_transformers(endpoint: Served, judge, length: int) -> None:
    tokenizer, generate = judge
    prompt = tokenizer(TEXT)["input_ids"][:length]
    assert len(prompt) == length
    request = {"model": endpoint.model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{endpoint.url}/v1/completions", json=request | {"return_token_ids": True}, timeout=60)
    assert prefill_header(response).startswith("remote; engine=")
    assert response.json()["choices"][0]["token_ids"] == generate(prompt, 16)


def test_streamed_text_equals_whole_text(client: openai.OpenAI, endpoint: Served) -> None:
    asked = {"model": endpoint.model, "prompt": "import os\n", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    streamed = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    events = list(streamed)
    assert "".join(e.choices[0].text for e in events if e.choices) == whole.choices[0].text
    assert events[-1].usage == whole.usage
    assert len(events) > 10  # token by token, not as a whole


def test_chat_with_and_without_streaming(client: openai.OpenAI, endpoint: Served) -> None:
    messages = [{"role": "system", "content": "You are Python."}, {"role": "user", "content": "class Error"}]
    asked = {"model": endpoint.model, "messages": messages, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    deltas = [e.choices[0].delta.content or "" for e in client.chat.completions.create(**asked, stream=True) if e.choices]
    assert "".join(deltas) == whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 12


def test_sampling_with_a_seed_is_reproducible(client: openai.OpenAI, endpoint: Served) -> None:
    asked = {"model": endpoint.model, "prompt": "import ", "max_tokens": 16, "temperature": 1.0}
    first, again, other = (client.completions.create(**asked, seed=seed).choices[0].text for seed in (1, 1, 2))
    assert first == again != other


def test_stop_string_ends_the_answer(client: openai.OpenAI, endpoint: Served) -> None:
    asked = {"model": endpoint.model, "prompt": "import os\n", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[9:12]  # somewhere in it, perhaps across tokens
    cut = whole[: whole.index(stop)]
    answer = client.completions.create(**asked, stop=[stop]).choices[0]
    assert (answer.text, answer.finish_reason) == (cut, "stop")
    events = [e.choices[0] for e in client.completions.create(**asked, stop=[stop], stream=True)]
    assert "".join(event.text for event in events) == cut and events[-1].finish_reason == "stop"


def test_logprobs_of_a_chat(client: openai.OpenAI, endpoint: Served) -> None:
    messages = [{"role": "user", "content": "def f"}]
    asked = {
        "model": endpoint.model,
        "messages": messages,
        "max_tokens": 5,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(whole) == 5 and all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in whole)
    streamed = [
        t
        for e in client.chat.completions.create(**asked, stream=True)
        for c in e.choices
        if c.logprobs
        for t in c.logprobs.content
    ]
    assert [token.token for token in streamed] == [token.token for token in whole]


def test_structured_output_follows_its_schema(client: openai.OpenAI, endpoint: Served) -> None:
    schema = {"type": "string", "enum": ["ready", "not ready"]}  # no space for blanks, of which so small a model writes many
    answer = client.chat.completions.create(
        model=endpoint.model,
        messages=[{"role": "user", "content": "Is it?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "state", "schema": schema}},
        max_tokens=40,
    )
    assert json.loads(answer.choices[0].message.content) in schema["enum"]


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"n": 2, "temperature": 1.0}, "several-sequences"),
        ({"echo": True, "logprobs": 1}, "prompt-logprobs"),
        ({"prompt_logprobs": 1}, "prompt-logprobs"),
    ],
)
def test_unsupported_parameters_are_prefilled_locally(endpoint: Served, extra: dict, reason: str) -> None:
    request = {"model": endpoint.model, "prompt": "import os", "max_tokens": 4, "temperature": 0} | extra
    response = httpx.post(f"{endpoint.url}/v1/completions", json=request, timeout=60)
    assert response.status_code == 200, response.text
    assert prefill_header(response) == f"local; reason={reason}"


def test_several_prompts_are_each_prefilled_remotely(endpoint: Served) -> None:
    request = {"model": endpoint.model, "prompt": ["import os", "import sys"], "max_tokens": 4, "temperature": 0}
    response = httpx.post(f"{endpoint.url}/v1/completions", json=request, timeout=60)
    assert prefill_header(response).startswith("remote; engine=")
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1]


def test_min_tokens_does_not_apply_to_the_prefill(endpoint: Served) -> None:
    request = {"model": endpoint.model, "prompt": "import os", "max_tokens": 9, "min_tokens": 9}
    response = httpx.post(f"{endpoint.url}/v1/completions", json=request, timeout=60)
    assert response.json()["usage"]["completion_tokens"] == 9


def test_tokenize_and_detokenize(endpoint: Served) -> None:
    tokens = httpx.post(f"{endpoint.url}/tokenize", json={"prompt": "import os"}).json()["tokens"]
    assert httpx.post(f"{endpoint.url}/detokenize", json={"tokens": tokens}).json()["prompt"] == "import os"


def test_concurrent_requests_receive_their_own_answers(endpoint: Served, judge) -> None:
    tokenizer, generate = judge
    prompts = [tokenizer(TEXT)["input_ids"][start : start + 20 + 9 * start] for start in range(12)]

    def ask(prompt: list[int]) -> list[int]:
        request = {"model": endpoint.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        response = httpx.post(f"{endpoint.url}/v1/completions", json=request | {"return_token_ids": True}, timeout=120)
        return response.json()["choices"][0]["token_ids"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers == [generate(prompt, 8) for prompt in prompts]


def test_explanation_of_an_answer_by_real_engines(endpoint: Served) -> None:
    def moved() -> float:
        lines = httpx.get(f"{endpoint.url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("strata_serve_kv_transfer_bytes_total"))

    httpx.post(f"{endpoint.url}/v1/completions", json={"prompt": [3, 4, 5], "max_tokens": 2}, timeout=60)
    before = moved()
    request = {
        "model": endpoint.model,
        "prompt": [7 + at % 5 for at in range(150)],
        "max_tokens": 8,
        "ignore_eos": True,
    }  # two blocks
    headers = {"x-strata-explain": "1"}
    response = httpx.post(f"{endpoint.url}/v1/completions", json=request, headers=headers, timeout=60)
    found = json.loads(response.headers["x-strata-explain"])
    assert found["prefill"]["where"] == "remote" and f"engine={found['prefill']['engine']}" in prefill_header(response)
    assert found["prompt_tokens"] == found["moved_tokens"] == 150
    assert found["moved_bytes"] == pytest.approx(moved() - before, rel=0.1), "blocks are moved whole"
    state = httpx.get(f"{endpoint.url}/-/state", timeout=60).json()
    assert {one["role"] for one in state["replicas"]} == {"decode", "prefill"} and found["replicas"][0]["name"] in {
        one["name"] for one in state["replicas"]
    }
    assert all(0 <= one["kv_usage"] <= 1 and one["healthy"] for one in state["replicas"])


def test_timed_completion_has_counts_and_the_prefill_reason(endpoint: Served) -> None:
    timed = timed_client.complete(timed_client.connect(endpoint.url), endpoint.model, "import os\n", max_tokens=8)
    assert timed.tokens <= 8 and timed.text
    assert 0 < timed.itl_s < timed.ttft_s < 30
    assert timed.prefill.startswith("remote; engine=")


BAD = {
    "malformed JSON": (b'{"model": ', 400, "not valid JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', 400, "not valid JSON"),
    "not an object": (b"[1, 2]", 400, "must be a JSON object"),
    "deep nesting": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, ""),
    "unknown model": (b'{"model": "gpt-5", "prompt": "x"}', 404, "serves 'tiny'"),
    "prompt longer than the context": (
        b'{"model": "tiny", "prompt": "' + b"import os " * 500 + b'"}',
        400,
        "context length is 256 tokens",
    ),
    "more asked than the context has": (b'{"model": "tiny", "prompt": "x", "max_tokens": 9999}', 400, "max_tokens=9999"),
    "no prompt": (b'{"model": "tiny"}', 400, ""),
    "wrong type": (b'{"model": "tiny", "prompt": {"a": 1}}', 400, ""),
    "absurd temperature": (b'{"model": "tiny", "prompt": "x", "temperature": -5}', 400, "temperature"),
    "absurd n": (b'{"model": "tiny", "prompt": "x", "n": -1}', 400, "n"),
    "token out of range": (b'{"model": "tiny", "prompt": [99999999]}', 400, ""),
    "one token too many": (b'{"model": "tiny", "prompt": [1024]}', 400, "token id 1024; the model has the ids 0 to 1023"),
    "unknown parameter": (b'{"model": "tiny", "prompt": "x", "max_token": 5}', 400, "Did you mean 'max_tokens'?"),
    "ignored parameter": (b'{"model": "tiny", "prompt": "x", "best_of": 5}', 400, "'best_of'"),
    "empty prompt": (b'{"model": "tiny", "prompt": []}', 400, ""),
    "stream_options of a wrong type": (b'{"model": "tiny", "prompt": "x", "stream_options": 5}', 400, ""),
    "kv_transfer_params": (
        b'{"model": "tiny", "prompt": "x", "kv_transfer_params": {"do_remote_prefill": true}}',
        400,
        "kv_transfer_params",
    ),
    "kv_transfer_params null": (b'{"model": "tiny", "prompt": "x", "kv_transfer_params": null}', 400, "kv_transfer_params"),
    "kv_transfer_params in vllm_xargs": (
        b'{"model": "tiny", "prompt": "x", "vllm_xargs": {"kv_transfer_params": "x"}}',
        400,
        "kv_transfer_params",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_receive_a_4xx_in_the_openai_format(endpoint: Served, name: str) -> None:
    body, status, says = BAD[name]
    response = httpx.post(f"{endpoint.url}/v1/completions", content=body, timeout=60)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert error["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert says in error["message"]


V = 1024  # embeddings of the model
PLACES = {
    "prompt": lambda token: {"prompt": [5, token]},
    "prompts": lambda token: {"prompt": [[5], [token, 5]]},
    "streamed prompt": lambda token: {"prompt": [token], "stream": True},
    "echoed prompt": lambda token: {"prompt": [token], "echo": True, "logprobs": 1},
    "prompt for beams": lambda token: {"prompt": [token], "use_beam_search": True, "n": 2},
    "truncated prompt": lambda token: {"prompt": [token, token], "truncate_prompt_tokens": 1},
    "logit_bias": lambda token: {"logit_bias": {str(token): 5}},
    "stop_token_ids": lambda token: {"stop_token_ids": [token], "min_tokens": 1},
    "allowed_token_ids": lambda token: {"allowed_token_ids": [5, token]},
    "logprob_token_ids": lambda token: {"logprobs": 1, "logprob_token_ids": [token]},
}


@pytest.mark.parametrize("place", PLACES)
def test_token_ids_at_the_limit_of_the_embedding(endpoint: Served, place: str) -> None:
    def status(token: int) -> int:
        request = {"model": endpoint.model, "prompt": "import os", "max_tokens": 2} | PLACES[place](token)
        response = httpx.post(f"{endpoint.url}/v1/completions", json=request, timeout=60)
        if response.status_code != 200:
            assert response.json()["error"]["type"] == "invalid_request_error", response.text
        return response.status_code

    assert [status(token) for token in (0, V - 1)] == [200, 200]
    assert {status(token) for token in (V, V + 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -1)} == {400}


def test_bad_chat_requests(endpoint: Served) -> None:
    for messages in ("hello", [], [{"role": "user", "content": TEXT * 10}], [5]):
        request = {"model": endpoint.model, "messages": messages}
        response = httpx.post(f"{endpoint.url}/v1/chat/completions", json=request, timeout=60)
        assert 400 <= response.status_code < 500, (messages, response.text)
        assert response.json()["error"]["message"]


def test_tools_without_a_parser_name_the_recipe_key(endpoint: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    request = {"model": endpoint.model, "messages": [{"role": "user", "content": "x"}], "tools": tools}
    for choice in ("auto", "required"):
        response = httpx.post(f"{endpoint.url}/v1/chat/completions", json=request | {"tool_choice": choice}, timeout=60)
        error = response.json()["error"]
        assert response.status_code == 400 and "serve.tool_parser" in error["message"] and "--" not in error["message"]


def test_oversized_body(endpoint: Served) -> None:
    response = httpx.post(f"{endpoint.url}/v1/completions", content=b'{"prompt": "' + b"x" * (17 * 2**20) + b'"}', timeout=60)
    assert response.status_code == 413
    assert "16 MiB" in response.json()["error"]["message"]


def test_unoffered_vllm_routes_do_not_exist(endpoint: Served) -> None:
    for path in ("/inference/v1/generate", "/invocations", "/v1/completions/render"):
        response = httpx.post(f"{endpoint.url}{path}", json={"kv_transfer_params": {}})
        assert response.status_code == 404 and response.json()["error"]["code"] == 404
    assert httpx.get(f"{endpoint.url}/v1/completions").status_code == 405


def test_endpoint_answers_after_the_bad_requests(client: openai.OpenAI, endpoint: Served) -> None:
    assert client.completions.create(model=endpoint.model, prompt="import os", max_tokens=2).usage.completion_tokens
