"""Endpoint of `strata serve`, or of another server with OpenAI's completions and prompt logprobs."""

import os
from contextlib import suppress
from typing import Any

import httpx
from lm_eval.models.openai_completions import LocalCompletionsAPI

from strata.platform import runs
from strata.platform.errors import UserError, shown
from strata.training.evaluation.checked_requests import CheckedRequests
from strata.training.evaluation.progress import RequestProgress

KEY = "STRATA_API_KEY"
PROBE_S = 10.0
REQUEST_S = 300
ATTEMPTS = 3
DEFAULT_CONTEXT = 2048  # of a server that does not report it
PROBE_TEXT = "def main(argv=None):\n\treturn 0  # é\n"  # tokenizers differ on it


class EndpointModel(CheckedRequests, LocalCompletionsAPI):  # type: ignore[misc]
    """The harness's client of OpenAI's completions."""


def open_endpoint(url: str, tokenizer: str | None, batch: int, truncate: bool, progress: RequestProgress) -> EndpointModel:
    """Connects to an endpoint. A request has `batch` prompts, which the endpoint computes together."""
    # Without a header the harness would send OPENAI_API_KEY, which is not meant for this endpoint.
    headers = {"Authorization": f"Bearer {os.environ.get(KEY) or 'none'}"}
    card = _only_model(url, headers)
    context = int(card.get("max_model_len") or DEFAULT_CONTEXT)
    words = tokenizer or _tokenizer_of_run(card["id"], url)
    try:
        model = EndpointModel(
            base_url=f"{url}/v1/completions",
            model=card["id"],
            tokenizer=words,
            tokenizer_backend="huggingface",
            batch_size=batch,
            max_retries=ATTEMPTS,
            max_length=context,
            timeout=REQUEST_S,
            header=headers,
        )
    except (OSError, ValueError) as error:
        cause = f"The tokenizer {shown(words, 200)} cannot be loaded: {shown(error, 200)}"
        raise UserError(cause, "Name the folder or the hub id of the endpoint's tokenizer with --tokenizer.") from None
    _require_same_tokens(url, headers, card["id"], model)
    model.watch(model.max_length, model.max_length, batch, truncate, progress)
    return model


def _only_model(url: str, headers: dict[str, str]) -> dict[str, Any]:
    """Card of the endpoint's first model."""
    try:
        response = httpx.get(f"{url}/v1/models", headers=headers, timeout=PROBE_S)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        fix = "Start the endpoint with 'strata serve', or correct the address."
        raise UserError(f"Nothing answers at {shown(url, 200)}: {shown(error, 200)}", fix) from None
    if response.status_code in (401, 403):
        raise UserError(f"The endpoint at {url} needs an API key that it knows.", f"Set {KEY} to one of its keys.")
    with suppress(ValueError, KeyError, IndexError, TypeError):
        card = response.json()["data"][0]
        if isinstance(card["id"], str):
            return dict(card)
    cause = f"The server at {url} is no endpoint with a model: HTTP {response.status_code}."
    raise UserError(cause, "Name the address of an OpenAI-compatible endpoint.")


def _tokenizer_of_run(model: str, url: str) -> str:
    """Tokenizer of the run that the endpoint serves by its name."""
    if runs.exists(model) and runs.find(model).has_export():
        return str(runs.find(model).export)
    cause = f"The tokenizer of the model '{shown(model)}' at {url} is not on this machine: no run has that name."
    raise UserError(cause, "Name its folder or its id on Hugging Face's hub with --tokenizer.")


def _require_same_tokens(url: str, headers: dict[str, str], name: str, model: EndpointModel) -> None:
    """Compares the tokens of a text: with another tokenizer than the endpoint's, scores would be wrong without an error.
    Servers without `/tokenize` are not checked."""
    body = {"model": name, "prompt": PROBE_TEXT, "add_special_tokens": False}
    try:
        response = httpx.post(f"{url}/tokenize", json=body, headers=headers, timeout=PROBE_S)
        theirs = response.json()["tokens"] if response.status_code == 200 else None
    except (httpx.TransportError, ValueError, KeyError, TypeError):
        return
    if theirs is not None and theirs != model.tok_encode(PROBE_TEXT):
        raise UserError(f"The endpoint at {url} has another tokenizer.", "Name the endpoint's own tokenizer with --tokenizer.")
