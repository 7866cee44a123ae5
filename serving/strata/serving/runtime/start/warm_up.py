"""The first requests to the engines of a model, before users have any."""

from collections.abc import Sequence
from typing import Any

REQUESTS = 3  # KV transfers, enough to measure their rate


def first_request(able: Sequence[str], token: int, tokens: int) -> tuple[str, dict[str, Any]]:
    """Route and request for what the model can do."""
    prompt = [token] * max(tokens, 1)
    if "completions" in able:
        return "/v1/completions", {"prompt": prompt, "max_tokens": 1}
    if "embeddings" in able:
        return "/v1/embeddings", {"input": prompt}
    return "/v1/score", {"text_1": str(token), "text_2": "0"}
