"""API keys on one machine: refusals before the start, and the key that commands send."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.serving import access, client, terminal
from strata.serving.bench.clients import load
from strata.serving.bench.clients.workloads import Request
from strata.serving.chaos.client import fresh_connections
from strata.serving.gateway.keys import FILE
from strata.serving.runtime.deployments import gateways
from strata.serving.runtime.endpoint import Endpoint
from strata.serving.runtime.gateway_replica import GatewayReplica
from strata.serving.spec import GatewaySpec, Network

HERE = "http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (FILE, access.KEY):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "the keys"
    file.write_text("\n  first-key \nsecond-key\n")
    monkeypatch.setenv(FILE, str(file))
    return file


def serve(*words: str) -> None:
    access.require_safe(recipe_file.load("laptop", words).serve)


@pytest.mark.parametrize("host", ["0.0.0.0", "'::'", "192.0.2.7", "no-such-host.invalid", "''"])
def test_public_hosts_require_a_key(host: str, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(f"serve.host={host}")
    monkeypatch.delenv(FILE)
    with pytest.raises(UserError, match="without an API key") as error:
        serve(f"serve.host={host}")
    assert FILE in error.value.fix and "serve.allow_unauthenticated=true" in error.value.fix
    serve(f"serve.host={host}", "serve.allow_unauthenticated=true")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.9", "'::1'"])
def test_loopback_hosts_require_no_key(host: str) -> None:
    serve(f"serve.host={host}")


@pytest.mark.parametrize(
    ("content", "error"), [(None, "cannot be read: No such file"), ("", "has no key"), (" \n\n", "has no key")]
)
def test_key_file_without_keys_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, error: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv(FILE, str(file))
    for words in ((), ("serve.host=0.0.0.0", "serve.allow_unauthenticated=true")):  # it was asked for by name
        with pytest.raises(UserError, match=error):
            serve(*words)


def test_folder_or_empty_path_as_key_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE, str(tmp_path))
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        serve()
    monkeypatch.setenv(FILE, "")
    with pytest.raises(UserError, match="set to nothing"):
        serve()


def test_commands_send_the_first_key_of_the_local_key_file(keys: Path) -> None:
    assert access.key_for(HERE) == "first-key"
    assert access.key_for("http://[::1]:8000") == "first-key"
    assert access.headers_for(HERE) == {"authorization": "Bearer first-key"}
    assert access.headers_for("http://192.0.2.7:8000") == {}, "another machine's endpoint does not receive this one's keys"
    assert client.connect(HERE).api_key == "first-key"
    assert fresh_connections(HERE).headers["authorization"] == "Bearer first-key"
    sent = load.message(load.Target("127.0.0.1", 8000, "m", access.key_for(HERE)), Request([1], 2, "all"))
    assert b"\r\nAuthorization: Bearer first-key\r\n" in sent


def test_key_in_the_environment_overrides_the_key_file(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(access.KEY, "mine")
    assert access.key_for(HERE) == access.key_for("http://192.0.2.7:8000") == "mine"


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "/v1"])
def test_an_address_without_a_host_gets_no_key(keys: Path, url: str) -> None:
    assert access.key_for(url) is None


def test_no_header_is_sent_without_keys() -> None:
    assert access.headers_for(HERE) == {}
    assert b"Authorization" not in load.message(load.Target("127.0.0.1", 8000, "m"), Request([1], 2, "all"))


def test_gateways_receive_the_path_of_the_key_file(keys: Path) -> None:
    spec = GatewaySpec("m", ("m",), "127.0.0.1", 8000, 1, 1, 8, 8, False, Network("127.0.0.1", bytes(32)), keys_file=str(keys))
    assert gateways(GatewayReplica, spec, 1).ray_actor_options["runtime_env"] == {"env_vars": {FILE: str(keys)}}


def test_printed_commands_do_not_contain_the_key(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    terminal._print_usage(Endpoint(HERE, "m", {}))
    printed = capsys.readouterr().out
    assert "first-key" not in printed
    assert f"export {access.KEY}=$(head -n 1 '{keys}')" in printed
    assert f'-H "Authorization: Bearer ${access.KEY}"' in printed and f"api_key=os.environ['{access.KEY}']" in printed


@pytest.fixture
def refusing() -> Iterator[str]:
    """URL of an endpoint that refuses every key."""

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "no such key", "type": "authentication_error"}}')

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_chat_without_a_key_names_the_variable_to_set(refusing: str) -> None:
    assert httpx.get(refusing).status_code == 401
    with pytest.raises(UserError, match="needs an API key") as error:
        terminal.chat(refusing, 8, 0)
    assert access.KEY in error.value.fix
