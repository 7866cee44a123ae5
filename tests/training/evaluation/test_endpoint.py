"""Evaluation of an endpoint: a small server with OpenAI's completions and prompt logprobs, as vLLM answers them."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from strata.platform.errors import UserError
from strata.platform.runs import Run
from strata.training.evaluation import evaluate as running
from strata.training.evaluation.subject import resolve
from strata.training.metrics.evaluations import Evaluation, Settings

from .conftest import CONTEXT

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")


class Endpoint:
    """Serves the model of a folder as `r`. Its attributes change how it answers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model, self.words = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        self.card: dict[str, Any] | None = {"id": "r", "max_model_len": CONTEXT}
        self.key: str | None = None
        self.tokenizes = True
        self.other_tokens = False
        self.fail_after: int | None = None
        self.seen: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.lock = threading.Lock()

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index, prompt in enumerate(request["prompt"]):
            tokens = torch.tensor([prompt])
            with torch.no_grad():
                made = self.model.generate(tokens, max_new_tokens=request["max_tokens"], do_sample=False, pad_token_id=0)[0]
                rows = self.model(made[None]).logits[0].log_softmax(-1)
            choice: dict[str, Any] = {"index": index, "text": self.words.decode(made[len(prompt) :], skip_special_tokens=True)}
            if request.get("echo"):
                scored = [None, *(float(rows[at - 1, made[at]]) for at in range(1, len(made)))]
                top = [
                    None,
                    *({"best": float(rows[at - 1].max()), "own": float(rows[at - 1, made[at]])} for at in range(1, len(made))),
                ]
                choice["logprobs"] = {"token_logprobs": scored, "top_logprobs": top}
            choices.append(choice)
        return {"choices": choices}

    def handler(self) -> type[BaseHTTPRequestHandler]:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not self.authorized():
                    return
                self.answer(200, {"data": [endpoint.card] if endpoint.card else []} if self.path == "/v1/models" else {})

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if not self.authorized():
                    return
                if self.path == "/tokenize":
                    ids = endpoint.words(request["prompt"], add_special_tokens=request["add_special_tokens"]).input_ids
                    self.answer(200 if endpoint.tokenizes else 404, {"tokens": ids[1:] if endpoint.other_tokens else ids})
                    return
                with endpoint.lock:
                    endpoint.seen.append(request)
                    if endpoint.fail_after is not None and len(endpoint.seen) > endpoint.fail_after:
                        self.answer(500, {"error": {"message": "the engine died"}})
                    else:
                        self.answer(200, endpoint.complete(request))

            def authorized(self) -> bool:
                endpoint.keys.add(self.headers["authorization"])
                if endpoint.key in (None, (self.headers["authorization"] or "").removeprefix("Bearer ")):
                    return True
                self.answer(401, {"error": {"message": "no key"}})
                return False

            def answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


@pytest.fixture
def endpoint(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Endpoint, str]]:
    monkeypatch.delenv("STRATA_API_KEY", raising=False)
    served = Endpoint(model_folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), served.handler())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield served, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def evaluated(name: str, include: Path, *tasks: str, tokenizer: str | None = None, **settings: Any) -> Evaluation:
    console = Console(file=io.StringIO())
    chosen = Settings(tasks or ("words",), **settings)
    return running.evaluate(resolve(name), chosen, console, include=[include], tokenizer=tokenizer, batch=4, device="cpu")


def test_scores_equal_those_of_the_folder(endpoint: tuple[Endpoint, str], run: Run, own_task: Path) -> None:
    pytest.importorskip("accelerate")
    served, url = endpoint
    found = evaluated(f"{url}/v1/", own_task)
    assert found.scores == evaluated("r", own_task).scores and (found.subject, found.step) == (url, None)
    assert [len(request["prompt"]) for request in served.seen] == [4, 4, 4]
    assert all(request["echo"] and request["model"] == "r" for request in served.seen)


def test_generations_arrive(endpoint: tuple[Endpoint, str], run: Run, own_task: Path) -> None:
    served, url = endpoint
    expected = served.complete({"prompt": [served.words("the cat").input_ids], "max_tokens": 5})["choices"][0]["text"]
    (own_task / "answers.jsonl").write_text(json.dumps({"text": "the cat", "answer": expected}) + "\n")
    (own_task / "answers.yaml").write_text(
        f"task: answers\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {own_task}/answers.jsonl}}}}\n"
        'test_split: test\noutput_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{answer}}"\n'
        "generation_kwargs: {max_gen_toks: 5, until: ['<never>']}\nmetric_list: [{metric: exact_match}]\n"
    )
    [score] = evaluated(url, own_task, "answers").scores
    assert score.value == 1.0 and served.seen[-1]["temperature"] == 0


def test_key_of_the_endpoint(endpoint: tuple[Endpoint, str], run: Run, own_task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, url = endpoint
    served.key = "secret"
    monkeypatch.setenv("OPENAI_API_KEY", "not for this endpoint")
    with pytest.raises(UserError, match="needs an API key") as caught:
        evaluated(url, own_task)
    assert "Set STRATA_API_KEY" in caught.value.fix and served.keys == {"Bearer none"}
    monkeypatch.setenv("STRATA_API_KEY", "secret")
    evaluated(url, own_task)
    assert served.keys == {"Bearer none", "Bearer secret"}


def test_nothing_answers(run: Run, own_task: Path) -> None:
    with pytest.raises(UserError) as caught:
        evaluated("http://127.0.0.1:9", own_task)
    assert "Nothing answers at http://127.0.0.1:9" in caught.value.cause and "strata serve" in caught.value.fix
    with pytest.raises(UserError, match="Nothing answers"):
        evaluated("http://[broken", own_task)


@pytest.mark.parametrize("card", [None, {}, {"id": 3}])
def test_server_without_a_model(endpoint: tuple[Endpoint, str], run: Run, own_task: Path, card: dict[str, Any] | None) -> None:
    endpoint[0].card = card
    with pytest.raises(UserError, match="is no endpoint with a model"):
        evaluated(endpoint[1], own_task)


def test_endpoint_that_fails_meanwhile(
    endpoint: tuple[Endpoint, str], run: Run, own_task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.training.evaluation.endpoint_model.ATTEMPTS", 1)
    served, url = endpoint
    served.fail_after = 2
    with pytest.raises(UserError) as caught:
        evaluated(url, own_task)
    assert f"The endpoint at {url} failed after words: 0 of 12 requests: 500" in caught.value.cause
    assert "the engine died" in caught.value.cause and len(served.seen) == 3
    assert not (run.path / "evaluations").exists()


def test_tokenizer_of_a_model_that_is_no_run(
    endpoint: tuple[Endpoint, str], model_folder: Path, home: Path, own_task: Path
) -> None:
    _, url = endpoint
    with pytest.raises(UserError, match="The tokenizer of the model 'r'") as caught:
        evaluated(url, own_task)
    assert "--tokenizer" in caught.value.fix
    assert evaluated(url, own_task, tokenizer=str(model_folder)).scores
    with pytest.raises(UserError, match="cannot be loaded"):
        evaluated(url, own_task, tokenizer=str(home))


@pytest.mark.parametrize("tokenizes", [True, False])
def test_another_tokenizer_is_refused_where_it_can_be_checked(
    endpoint: tuple[Endpoint, str], run: Run, own_task: Path, tokenizes: bool
) -> None:
    served, url = endpoint
    served.other_tokens, served.tokenizes = True, tokenizes
    if not tokenizes:
        assert evaluated(url, own_task).scores
        return
    with pytest.raises(UserError, match="has another tokenizer"):
        evaluated(url, own_task)
    assert not served.seen


@pytest.mark.parametrize(("context", "fits"), [(9, True), (8, False)])
def test_context_of_the_endpoint(endpoint: tuple[Endpoint, str], run: Run, own_task: Path, context: int, fits: bool) -> None:
    """One token of the context is generated, which the harness ignores."""
    served, url = endpoint
    longest = max(
        len(served.words(row["text"] + choice).input_ids)
        for row in map(json.loads, (own_task / "rows.jsonl").read_text().splitlines())
        for choice in row["choices"]
    )
    served.card = {"id": "r", "max_model_len": context - 8 + longest}
    if fits:
        assert evaluated(url, own_task).truncated == 0
        return
    with pytest.raises(UserError, match=f"a request of {longest} tokens"):
        evaluated(url, own_task)
    assert not served.seen
