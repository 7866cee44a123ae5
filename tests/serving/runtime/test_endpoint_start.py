"""Start of the endpoint while replicas die, without engines."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from strata.platform.errors import UserError
from strata.serving import access
from strata.serving.api.requests import ApiError
from strata.serving.gateway.keys import FILE, Keys
from strata.serving.runtime import endpoint
from strata.serving.runtime.start import failures
from strata.serving.runtime.start.progress import StartProgress
from strata.serving.runtime.start.warm_up import first_request
from strata.serving.spec import Network

NETWORK = Network.within(one_machine=True)


class Directory:
    """A directory whose entries change with each query: the decode replica died after Serve reported it as up."""

    def __init__(self, *looks: dict[str, dict[str, Any]]) -> None:
        self._looks = list(looks)

    async def names(self, role: str) -> set[str]:
        if role == "decode" and len(self._looks) > 1:
            self._looks.pop(0)
        return {name for name in self._looks[0] if name.startswith(role)}

    async def entry(self, role: str, name: str) -> dict[str, Any] | None:
        return self._looks[0].get(name)


def progress(limit_s: float = 20) -> StartProgress:
    return StartProgress(limit_s, lambda line: None, list, lambda: "0 of 1 decode up")


def test_start_waits_for_a_replaced_decode_replica() -> None:
    decode, prefill = {"decode-1": {"context": 64}}, {"prefill-1": {"phases": {}}}
    coming = Directory({}, {}, prefill, decode | prefill)
    found = progress().during("waiting", lambda: endpoint.published(coming, ("decode", "prefill")))  # type: ignore[arg-type]
    assert found == {"decode": [{"context": 64}], "prefill": [{"phases": {}}]}


def test_start_fails_if_a_replica_is_not_replaced() -> None:
    with pytest.raises(UserError, match="still waiting for the engines: 0 of 1 decode up"):
        progress(0.5).during("waiting for the engines", lambda: endpoint.published(Directory({}), ("decode",)))  # type: ignore[arg-type]


class Gateway(HTTPServer):
    """Answers with these statuses in order and then repeats the last. 0 closes the connection."""

    statuses: list[int]
    keys: list[str | None]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Gateway)
        self.rfile.read(int(self.headers["content-length"]))
        statuses = self.server.statuses
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        self.server.keys.append(self.headers["authorization"])
        if not status:
            self.connection.close()
            return
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "RuntimeError: this engine has no such layer"}}')

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway(("127.0.0.1", 0), Handler) as server:
        server.keys = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def warm_up(gateway: Gateway, *statuses: int, limit_s: float = 20) -> None:
    gateway.statuses = list(statuses)
    start = progress(limit_s)
    url = f"http://127.0.0.1:{gateway.server_port}"
    start.during("waiting for a first answer", lambda: endpoint._warm_up(url, NETWORK, "m", ["completions"], 4, start, 0.0))


@pytest.mark.slow
def test_warm_up_is_retried_if_a_replica_dies(gateway: Gateway) -> None:
    warm_up(gateway, 503, 0, 200, 503, 200)
    assert len(gateway.keys) == 6 and set(gateway.keys) == {None}


def test_start_fails_without_a_first_answer(gateway: Gateway) -> None:
    with pytest.raises(UserError, match="still waiting for a first answer"):
        warm_up(gateway, 503, limit_s=0.6)


def test_model_that_fails_on_the_first_request_is_refused(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "cause_of", lambda failure, began: failure)
    with pytest.raises(UserError, match=r"vLLM cannot serve this model: HTTP 500: .*no such layer"):
        warm_up(gateway, 500)
    assert len(gateway.keys) == 1


def test_engine_death_without_a_cause_is_not_blamed_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "cause_of", lambda failure, began: None)
    monkeypatch.setattr(failures, "logs", lambda began: [])
    monkeypatch.setattr(failures, "statuses", list)
    refused = endpoint._refused("Deploying application strata failed:\n\nThe actor died.\nExit code 137.\n", 0.0)
    assert refused.cause == "An engine ended while it started: The actor died. Exit code 137."
    assert "Start it again" in refused.fix
    monkeypatch.setattr(failures, "statuses", lambda: [KILLED])
    assert endpoint._refused("failed", 0.0).cause == "An engine ended while it started: EngineCore was killed by signal 9."


KILLED = """The deployment failed to start 1 times in a row. Error:
ray::ServeReplica:strata:decode.initialize_and_get_metadata() (pid=7, ip=127.0.0.1)
RuntimeError: Traceback (most recent call last):
  File "replica.py", line 1, in initialize
    await self._user_callable_wrapper.initialize_callable()
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}"""
UNKNOWN = KILLED.replace("RuntimeError: Engine core initialization failed. See root", "ValueError: no such layer. See root")


@pytest.mark.parametrize(("message", "cause"), [(KILLED, None), (UNKNOWN, "ValueError: no such layer. See root")])
def test_cause_is_distinguished_from_an_engine_death(message: str, cause: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    deployed = SimpleNamespace(applications={"strata": SimpleNamespace(deployments={"decode": SimpleNamespace(message=message)})})
    monkeypatch.setattr("ray.serve.status", lambda: deployed)
    monkeypatch.setattr(failures, "logs", lambda began: [])
    found = failures.cause_of("Deploying application strata failed", 0.0)
    assert found == cause or (cause and found and found.startswith(cause))


def test_warm_up_needs_no_key_of_the_file(gateway: Gateway, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of tenants has only hashes, so the starter has a key of its own, derived from the endpoint's secret."""
    file = tmp_path / "keys"
    file.write_text("tenants: {a: {keys: [{sha256: " + 64 * "0" + "}]}}\n")
    monkeypatch.setenv(FILE, str(file))
    monkeypatch.setenv(access.KEY, "not-in-the-file")
    warm_up(gateway, 200)
    (sent,) = set(gateway.keys)
    headers = [(b"authorization", sent.encode())]
    assert Keys(file, NETWORK.secret).check(headers) is None
    for other in (Keys(file, bytes(32)), Keys(file)):
        with pytest.raises(ApiError):
            other.check(headers)


@pytest.mark.parametrize(
    ("able", "path", "request_"),
    [
        (["completions", "chat"], "/v1/completions", {"prompt": [3, 3], "max_tokens": 1}),
        (["embeddings", "score", "rerank"], "/v1/embeddings", {"input": [3, 3]}),
        (["score", "rerank"], "/v1/score", {"text_1": "3", "text_2": "0"}),
    ],
)
def test_first_request_is_one_that_the_model_can_answer(able: list[str], path: str, request_: dict[str, Any]) -> None:
    assert first_request(able, 3, 2) == (path, request_)
