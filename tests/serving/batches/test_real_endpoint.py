"""Images and batches on a real endpoint: a tiny vision model on one prefill and two decode engines, two gateways, kills."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import psutil
import pytest
from support import STRATA
from tiny_vision import Reference, data_url, image, message

from strata.platform import ports
from strata.serving import client
from strata.serving.chaos.victims import Kind, Processes

pytestmark = [pytest.mark.rotation, pytest.mark.long, pytest.mark.timeout(900)]

TOKENS = 16
WORDS = ["serve.gateways=2", "serve.decode.replicas=2", "serve.max_sequences=8", "serve.engine={max_model_len: 512}"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}


@dataclass(frozen=True)
class Here:
    url: str
    reference: Reference
    processes: Processes
    openai: openai.OpenAI

    def chat(self, *messages: dict[str, Any], **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/chat/completions", json={"messages": messages} | GREEDY | more, timeout=120)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    home = tmp_path_factory.mktemp("vision")
    reference = Reference(home / "model")
    held = ports.reserve()
    with (home / "out").open("wb") as output:
        command = [STRATA, "serve", "--model", str(home / "model"), f"serve.port={held.port}", *WORDS]
        process = subprocess.Popen(command, env=os.environ | {"STRATA_HOME": str(home)}, stdout=output, stderr=output)
    family: list[psutil.Process] = []
    try:
        try:
            client.wait_until_ready(held.url, process, 600)
        except client.NotReady as error:
            raise AssertionError(f"{error.cause}\n{(home / 'out').read_text()}") from None
        yield Here(held.url, reference, Processes(process.pid), client.connect(held.url))
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=90) == 0
    finally:
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, "a process outlived the command"


def tokens(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def test_answers_equal_those_of_transformers(here: Here) -> None:
    first, second = image(1), image(2, 30, 60)
    for pictures in ([first], [second], [first, second], []):
        found = here.chat(message("what is it?", *map(data_url, pictures)), stream=False)
        assert tokens(found) == here.reference.tokens("what is it?", pictures, TOKENS), len(pictures)
    one, other = (here.reference.tokens("what is it?", [each], TOKENS) for each in (first, second))
    assert one != other, "a model that does not see would pass"


def test_prefill_with_images_is_local_and_says_so(here: Here) -> None:
    found = httpx.post(
        f"{here.url}/v1/chat/completions",
        json={"messages": [message("hello", data_url(image(3)))]} | GREEDY,
        headers={"x-strata-explain": "1"},
        timeout=120,
    )
    assert found.headers["x-strata-prefill"] == "local; reason=images"
    assert json.loads(found.headers["x-strata-explain"])["prefill"]["reason"] == "images"
    assert found.json()["usage"]["prompt_tokens"] > 20
    text = here.chat({"role": "user", "content": "a longer text " * 12})
    assert text.headers["x-strata-prefill"].startswith("remote"), "prompts of text are still prefilled remotely"


def test_stream_with_an_image_continues_on_another_replica(here: Here) -> None:
    picture, count = image(4), 300
    expected = here.reference.tokens("tell a story", [picture], count)
    body = {"messages": [message("tell a story", data_url(picture))], "stream": True} | GREEDY | {"max_tokens": count}
    found: list[int] = []
    killed = False
    with httpx.stream("POST", f"{here.url}/v1/chat/completions", json=body, timeout=300) as stream:
        name = stream.headers["x-strata-replica"].split(";")[0]
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                found += [token for choice in choices for token in choice.get("token_ids") or ()]
            if len(found) > 3 and not killed:
                for replica in here.processes.find(Kind.DECODE):  # both: one of them answers this stream
                    here.processes.kill(replica)
                killed = True
    assert name and killed and found == expected
    client.wait_until_ready(here.url, limit_s=300)


def test_wrong_images_are_refused(here: Here) -> None:
    good = data_url(image(5))
    bomb = data_url(image(6).resize((5000, 4000)))
    url = {"type": "image_url", "image_url": {"url": good}}
    cases: list[tuple[Any, str]] = [
        ([{"type": "image_url", "image_url": {"url": "http://169.254.169.254/x.png"}}], "fetches no images"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "fetches no images"),
        ([{"image_url": "http://169.254.169.254/x.png"}], "has no 'image_url'"),
        ([{"type": "image_url", "image_url": {"url": good[:-100]}}], ""),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}], "base64"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "PNG"),
        ([{"type": "image_url", "image_url": {"url": bomb}}], "5000 x 4000 pixels"),
        ([url | {"uuid": "known"}], "An image is"),
        ([url] * 9, "At most 8 image"),
        ([{"type": "video_url", "video_url": {"url": good}}], "text and image_url"),
        ([{"type": "image_url", "image_url": good}], "An image is"),
    ]
    for content, words in cases:
        found = here.chat({"role": "user", "content": content})
        assert found.status_code == 400 and words in found.text, (found.status_code, found.text)
    assert here.chat({"role": "user", "content": "<image> <image>"}).status_code in (200, 400)
    marks = httpx.post(f"{here.url}/v1/completions", json={"prompt": [259, 259, 260], "max_tokens": 2}, timeout=120)
    assert marks.status_code in (200, 400)
    assert tokens(here.chat(message("hello", good))), "every engine is alive"


def test_batch_survives_the_loss_of_a_gateway_and_a_decode_replica(here: Here) -> None:
    pictures = {f"picture-{number}": image(number) for number in range(10, 14)}
    expected = {name: here.reference.tokens("look", [each], TOKENS) for name, each in pictures.items()}
    lines = [_line(name, message("look", data_url(each))) for name, each in pictures.items()]
    texts = [f"text-{number}" for number in range(60)]
    lines += [_line(name, {"role": "user", "content": name}) for name in texts]
    lines.append(_line("wrong", {"role": "nobody", "content": "x"}))
    files, batches = here.openai.files, here.openai.batches
    source = files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = batches.create(input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + 300
    while _retry(lambda: batches.retrieve(batch.id)).request_counts.completed < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for kind in (Kind.GATEWAY, Kind.DECODE):
        here.processes.kill(here.processes.find(kind)[0])
    while (done := _retry(lambda: batches.retrieve(batch.id))).status not in ("completed", "failed"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert done.status == "completed", done
    assert (done.request_counts.completed, done.request_counts.failed) == (64, 1)
    found = [json.loads(line) for line in files.content(str(done.output_file_id)).text.splitlines()]
    assert sorted(each["custom_id"] for each in found) == sorted([*expected, *texts])
    for each in found:
        if each["custom_id"] in expected:
            assert each["response"]["body"]["choices"][0]["token_ids"] == expected[each["custom_id"]]
    assert json.loads(files.content(str(done.error_file_id)).text)["response"]["status_code"] == 400


def _line(name: str, content: dict[str, Any]) -> str:
    body = {"messages": [content]} | GREEDY
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})


def _retry(act: Any) -> Any:
    """Repeats a request whose gateway was killed under it."""
    for _ in range(50):
        try:
            return act()
        except openai.APIConnectionError:
            time.sleep(0.2)
    return act()
