"""Routes of the page: static files, state, and the explanation of an answer. No browser."""

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest
from page_stand_in import EXPLAINED, Endpoint, Script, endpoint

from strata.serving.api import openapi, picture_openapi
from strata.serving.page import files, state

ASKED = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def text() -> Iterator[Endpoint]:
    with endpoint() as made:
        yield made


def ask(made: Endpoint, explain: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if explain is None else {"x-strata-explain": explain}
    return made.client.post("/v1/chat/completions", json=ASKED | body, headers=headers)


def test_every_file_is_served_with_its_type_and_policy(text: Endpoint) -> None:
    assert {"/", "/page/app.js", "/page/style.css"} < set(files.table())
    for path, file in files.table().items():
        got = text.client.get(path)
        assert got.status_code == 200 and got.content == file.body and got.headers["content-type"] == file.media
        policy = {part.split()[0]: part.split()[1:] for part in got.headers["content-security-policy"].split("; ")}
        assert policy["default-src"] == ["'none'"]
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == ["'self'"]
        assert policy["frame-ancestors"] == ["'none'"] and policy["require-trusted-types-for"] == ["'script'"]
        assert got.headers["x-content-type-options"] == "nosniff" and got.headers["cache-control"] == "no-cache"
        head = text.client.head(path)
        assert head.status_code == 200 and not head.content and head.headers["content-length"] == str(len(file.body))


@pytest.mark.parametrize(
    ("sent", "status"),
    [("{etag}", 304), ("W/{etag}", 304), ('"other", {etag}', 304), ("*", 304), ('"other"', 200), ("{bare}", 200), ("", 200)],
)
def test_known_files_are_not_sent_again(text: Endpoint, sent: str, status: int) -> None:
    etag = text.client.get("/").headers["etag"]
    got = text.client.get("/", headers={"if-none-match": sent.format(etag=etag, bare=etag.strip('"'))})
    assert got.status_code == status and got.headers["etag"] == etag and bool(got.content) == (status == 200)
    assert text.client.get("/page/app.js").headers["etag"] != etag


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/page/app.js", "/-/state"])
def test_other_methods_are_not_allowed(text: Endpoint, path: str, method: str) -> None:
    got = text.client.request(method, path)
    assert got.status_code == 405 and got.headers["allow"] == "GET" and got.json()["error"]["code"] == 405


@pytest.mark.parametrize(
    "path",
    [
        *("/page/", "/page", "/page/index.html", "/page/../files.py", "/page/..%2ffiles.py", "/page/%2e%2e/files.py"),
        *("/page//etc/passwd", "/page/static/app.js", "/page/APP.JS", "/page/app.js/", "/page/app.js%00", "/index.html", "//"),
    ],
)
def test_other_paths_do_not_exist(text: Endpoint, path: str) -> None:
    connection = http.client.HTTPConnection(text.url.removeprefix("http://"), timeout=10)  # it sends a path as it is
    connection.request("GET", path)
    assert connection.getresponse().status == 404
    connection.close()


def test_the_page_refers_to_its_own_files_only(text: Endpoint) -> None:
    """It works offline, without a script or a style in the markup, and behind a prefix."""
    index = files.table()["/"].body.decode()
    referred = re.findall(r'(?:src|href)="([^"#][^"]*)"', index)
    assert referred and all(f"/{path}" in files.table() for path in referred)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*src=)", index)
    for path, file in files.table().items():
        source = file.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|url\(|@import", source), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", source), path
        for module in re.findall(r'from "\./([^"]+)"', source):
            assert f"/page/{module}" in files.table(), path


def test_keys_protect_the_state_but_not_the_page(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with endpoint(keys=keys) as made:
        for path in files.table():
            assert made.client.get(path).status_code == 200
        assert made.client.post("/").status_code == 405
        refused = made.client.get("/-/state")
        assert refused.status_code == 401 and "replicas" not in refused.text
        assert made.client.get("/-/state", headers={"authorization": "Bearer secret"}).json()["kind"] == "text"


def test_state_has_replicas_and_totals_alone(text: Endpoint) -> None:
    schema = openapi.document(["tiny", "tuned"])["components"]["schemas"]["State"]
    before = text.client.get("/-/state").json()
    jsonschema.validate(before, schema)
    assert [(one["name"], one["role"]) for one in before["replicas"]] == [("decode-0", "decode"), ("prefill-0", "prefill")]
    assert before["replicas"][0] | {"calls": 0, "running": 0} == {
        **{"name": "decode-0", "model": "tiny", "role": "decode", "healthy": True, "calls": 0},
        **{"running": 0, "waiting": 2, "kv_usage": 0.25},
    }
    ask(text)
    ask(text, stream=False, stream_options=None)
    after = text.client.get("/-/state").json()
    assert after["totals"]["produced"] == before["totals"]["produced"] + 3 + 3
    assert after["totals"]["first_tokens"] == before["totals"]["first_tokens"] + 1
    assert after["totals"]["first_token_seconds"] > before["totals"]["first_token_seconds"]
    assert after["totals"]["in_flight"] == 0 and after.keys() == schema["properties"].keys()
    assert text.client.head("/-/state").status_code == 200


def test_totals_are_those_of_all_gateways() -> None:
    """A gateway that has not answered a ping yet counts, with nothing."""
    others: Any = [SimpleNamespace(link=SimpleNamespace(load=load)) for load in ({"produced": 5, "calls": 9}, {})]
    found = state.state("text", ["m"], [], {"produced": 2, "queued": 1.0}, others)
    assert found["gateways"] == 3 and found["totals"] == {"produced": 7, "queued": 1.0} and found["replicas"] == []


def test_requests_in_progress_are_counted(text: Endpoint) -> None:
    script = text.scripts["slowly"] = Script(waits_at=1)
    body = ASKED | {"messages": [{"role": "user", "content": "slowly"}]}
    with text.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        assert any("Hello" in line for line in lines)
        seen = text.client.get("/-/state").json()
        assert seen["totals"]["in_flight"] == 1 and seen["replicas"][0]["calls"] == 1
        script.go.set()
        assert any("[DONE]" in line for line in lines)


def test_state_of_an_endpoint_for_pictures() -> None:
    with endpoint(("painter",), pictures=True) as made:
        seen = made.client.get("/-/state").json()
        jsonschema.validate(seen, picture_openapi.document(["painter"])["components"]["schemas"]["State"])
        assert seen["kind"] == "pictures" and [one["role"] for one in seen["replicas"]] == ["pictures"]


def test_explanation_is_a_comment_that_plain_clients_never_get(text: Endpoint) -> None:
    plain, explained = ask(text), ask(text, "1")
    assert "x-strata-explain" not in plain.text and not any("x-strata-explain" in name for name in plain.headers)
    assert explained.text.startswith(plain.text)
    added = explained.text.removeprefix(plain.text)
    assert added.startswith(": x-strata-explain {") and added.endswith("}\n\n") and added.count("\n") == 2
    tree = json.loads(added.removeprefix(": x-strata-explain "))
    assert tree | EXPLAINED == tree and tree["replicas"] == [{"name": "decode-0", "after": 0}]
    assert tree["queued_s"] >= 0.0125 and tree["waited_s"] == 0
    for other in ("0", "yes", ""):
        assert ask(text, other).text == plain.text


def test_whole_answers_have_the_explanation_in_a_header(text: Endpoint) -> None:
    whole = {"stream": False, "stream_options": None}
    plain, explained = ask(text, **whole), ask(text, "1", **whole)
    assert "x-strata-explain" not in plain.headers and explained.content == plain.content
    assert json.loads(explained.headers["x-strata-explain"])["moved_bytes"] == EXPLAINED["moved_bytes"]


def test_explanation_names_the_replicas_of_a_migrated_stream() -> None:
    with endpoint(replicas=2) as made:
        made.scripts["hello"] = Script(dies_at=2)
        answer = ask(made, "1")
        tree = json.loads(answer.text[answer.text.index(": x-strata-explain ") + 19 :])
        first, second = (one["replica"] for one in made.asked)
        assert first != second and tree["replicas"] == [{"name": first, "after": 0}, {"name": second, "after": 2}]
