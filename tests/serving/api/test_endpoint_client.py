"""Client of an endpoint: readiness, errors and latencies, with stand-ins for HTTP and the clock."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from strata.platform.errors import UserError
from strata.serving import access, client

URL = "http://127.0.0.1:81"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Answers of `GET /ready`, in their order; the last is repeated."""
    found: list[Any] = []

    def get(url: str, params: dict[str, str], timeout: float) -> httpx.Response:
        assert (url, params, timeout) == (f"{URL}/ready", {}, 10.0)
        answer = found.pop(0) if len(found) > 1 else found[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(httpx, "get", get)
    return found


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (httpx.Response(200, text="no JSON"), None),
        (
            httpx.Response(503, json={"error": {"message": "No healthy decode replica is up."}}),
            "No healthy decode replica is up.",
        ),
        (httpx.Response(503, json={"error": "x"}), 'HTTP 503 {"error":"x"}'),
        (httpx.Response(404, text="y" * 300), f"HTTP 404 {'y' * 200}"),
        (httpx.Response(201, json=[]), "HTTP 201 []"),
        (httpx.ConnectError("refused"), f"Nothing answers at {URL}: refused"),
    ],
)
def test_reason_why_an_endpoint_is_not_ready(answers: list[Any], answer: Any, reason: str | None) -> None:
    answers.append(answer)
    assert client.obstacle(URL) == reason


def test_readiness_of_one_of_several_models(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(httpx, "get", lambda url, **options: asked.append((url, options)) or httpx.Response(200))
    assert client.obstacle(URL, "second") is None
    assert asked == [(f"{URL}/ready", {"params": {"model": "second"}, "timeout": client.PROBE_S})]


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    fake = SimpleNamespace(monotonic=lambda: 1000 + sum(found), sleep=found.append)
    monkeypatch.setattr(client, "time", fake)
    return found


NOT_YET = httpx.Response(503, json={"error": {"message": "not yet"}})


def test_readiness_is_polled(answers: list[Any], slept: list[float]) -> None:
    answers += [NOT_YET, NOT_YET, httpx.Response(200)]
    client.wait_until_ready(URL)
    assert slept == [0.2, 0.2]


@pytest.mark.parametrize(("limit_s", "seconds"), [(None, 600.0), (3.0, 3.0)])
def test_waiting_ends_at_the_limit(answers: list[Any], slept: list[float], limit_s: float | None, seconds: float) -> None:
    answers.append(NOT_YET)
    with pytest.raises(client.NotReady, match=f"not ready within {seconds:.0f} s: not yet"):
        client.wait_until_ready(URL, **({} if limit_s is None else {"limit_s": limit_s}))  # type: ignore[arg-type]
    assert seconds < sum(slept) + 0.1 < seconds + 0.4


def test_waiting_ends_with_the_process(answers: list[Any], slept: list[float]) -> None:
    answers.append(NOT_YET)
    codes = iter((None, None, 3))
    process: Any = SimpleNamespace(poll=lambda: next(codes), returncode=3)
    with pytest.raises(client.NotReady, match="ended with code 3 before it was ready"):
        client.wait_until_ready(URL, process)
    assert len(slept) == 2


def events(*texts: str | None, tokens: int | None = None) -> list[Any]:
    found = [SimpleNamespace(usage=None, choices=[SimpleNamespace(text=text)]) for text in texts]
    usage = None if tokens is None else SimpleNamespace(completion_tokens=tokens)
    return [*found, SimpleNamespace(usage=usage, choices=[])]


@pytest.mark.parametrize(
    ("streamed", "moments", "expected"),
    [
        # From 10 s: TTFT 2 s; from 12 to 19 s there are 8 tokens, so 7 intervals.
        (events("", "a", "b", "c", tokens=8), (10, 12, 13, 19), ("abc", 8, 2, 1.0)),
        (events("a", tokens=1), (10, 14), ("a", 1, 4, 0)),
        (events("a", "b", tokens=2), (10, 11, 14), ("ab", 2, 1, 3)),
        (events(), (10,), ("", 0, 0, 0)),
    ],
)
def test_latencies_of_a_completion(
    monkeypatch: pytest.MonkeyPatch, streamed: list[Any], moments: tuple[float, ...], expected: tuple[Any, ...]
) -> None:
    clock = iter(moments)
    monkeypatch.setattr(client, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    asked: list[dict[str, Any]] = []
    raw = SimpleNamespace(parse=lambda: iter(streamed), headers={"x-strata-prefill": "remote"})
    create = SimpleNamespace(create=lambda **more: asked.append(more) or raw)
    openai: Any = SimpleNamespace(completions=SimpleNamespace(with_raw_response=create))
    timed = client.complete(openai, "m", "p", 5, "\n")
    assert (timed.text, timed.tokens, timed.ttft_s, timed.itl_s) == expected
    assert (timed.prompt, timed.prefill) == ("p", "remote") and list(clock) == []
    [sent] = asked
    assert sent == {
        "model": "m",
        "prompt": "p",
        "max_tokens": 5,
        "temperature": 0,
        "stop": "\n",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("key", ["mine", None])
def test_connections_use_the_key_and_retry_nothing(monkeypatch: pytest.MonkeyPatch, key: str | None) -> None:
    monkeypatch.setattr(access, "key_for", lambda url: key if url == URL else pytest.fail(url))
    made = client.connect(URL)
    assert (str(made.base_url), made.api_key, made.max_retries, made.timeout) == (f"{URL}/v1/", key or "none", 0, 120.0)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (200, {"data": [{"id": "tiny"}, {"id": "other"}]}, None),
        (200, {"data": []}, "is no endpoint with a model"),
        (401, {}, "needs an API key that it knows"),
        (500, {}, "is no endpoint with a model"),
        (None, {}, "Nothing answers"),
    ],
)
def test_name_of_the_model(status: int | None, body: dict[str, Any], error: str | None) -> None:
    openai = pytest.importorskip("openai")

    def respond(request: httpx.Request) -> httpx.Response:
        if status is None:
            raise httpx.ConnectError("no")
        return httpx.Response(status, json=body)

    http = httpx.Client(transport=httpx.MockTransport(respond))
    made = openai.OpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0, http_client=http)
    if error is None:
        assert client.only_model(made, URL) == "tiny"
    else:
        with pytest.raises(UserError, match=error):
            client.only_model(made, URL)
