"""Embeddings, scores and rankings: contents that the model cannot read, and sizes. Pictures are refused, also those by URL."""

from typing import Any

from strata.serving.api.requests import ApiError

MAX_INPUTS = 2048  # of one request, as in OpenAI's API
ENCODINGS = ("float", "base64")
# Pairs of parameters of a request for scores.
PAIRS = (("text_1", "text_2"), ("queries", "documents"))
ROUTES = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "embeddings": "/v1/embeddings",
    "score": "/v1/score",
    "rerank": "/v1/rerank",
}


def cannot(method: str, able: list[str]) -> ApiError:
    """Refusal of a call that the model has no output for. `able`: the calls that it has one for."""
    can = ", ".join(ROUTES[each] for each in ROUTES if each in able)
    return ApiError(400, f"The model cannot answer {ROUTES[method]}. It answers {can}.", param="model")


def check(method: str, tree: dict[str, Any]) -> None:
    if method == "embeddings":
        _check_inputs(tree.get("input"))
        if tree.get("encoding_format", "float") not in ENCODINGS:
            raise ApiError(400, f"'encoding_format' may be {' or '.join(ENCODINGS)}.", param="encoding_format")
    elif method == "score":
        for name in pair(tree):
            _check_texts(tree.get(name), name)
    else:
        if not isinstance(tree.get("query"), str):
            raise ApiError(400, "'query' must be text.", param="query")
        _check_texts(tree.get("documents"), "documents")


def pair(tree: dict[str, Any]) -> tuple[str, str]:
    for names in PAIRS:
        if all(name in tree for name in names):
            return names
    wanted = " or ".join(f"'{first}' and '{second}'" for first, second in PAIRS)
    raise ApiError(400, f"A request for scores must have {wanted}.", param=PAIRS[0][0])


def _check_texts(value: Any, name: str) -> None:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"'{name}' must be text or a list of texts.", param=name)
    _check_count(len(texts), name)


def _check_inputs(value: Any) -> None:
    """Text, token ids, or several of either. Checked here: pydantic would build an error for each wrong entry."""
    if isinstance(value, list) and value and (_is_ids(value) or all(isinstance(each, str) or _is_ids(each) for each in value)):
        _check_count(1 if _is_ids(value) else len(value), "input")
    elif not isinstance(value, str):
        raise ApiError(400, "'input' must be text, token ids, or a list of them.", param="input")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0


def _check_count(count: int, name: str) -> None:
    if count > MAX_INPUTS:
        raise ApiError(400, f"'{name}' has {count} entries; {MAX_INPUTS} are allowed.", param=name)
