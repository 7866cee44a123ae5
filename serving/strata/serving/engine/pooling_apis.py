"""The APIs of a pooling model on vLLM's serving classes: embeddings, scores and rankings."""

from collections.abc import Awaitable, Callable
from typing import Any

from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreQueriesDocumentsRequest, ScoreTextRequest

from strata.serving.api.dialects import pooling
from strata.serving.api.requests import validate

Serving = Callable[[Any, None], Awaitable[Any]]


def pooling_apis(state: Any) -> dict[str, Serving]:
    """vLLM's classes by the name of the gateway's call, as far as the model has them."""
    found = {
        "embeddings": getattr(state, "serving_embedding", None),
        "score": getattr(state, "serving_scores", None),
        "rerank": getattr(state, "serving_scores", None),
    }
    return {method: serving for method, serving in found.items() if serving is not None}


def read(method: str, tree: dict[str, Any]) -> Any:
    """Request of vLLM's for a client's JSON."""
    if method == "embeddings":
        kind: Any = EmbeddingCompletionRequest
    elif method == "rerank":
        kind = RerankRequest
    else:
        kind = ScoreTextRequest if pooling.pair(tree) == ("text_1", "text_2") else ScoreQueriesDocumentsRequest
    return validate(tree, kind, lambda tree: pooling.check(method, tree))
