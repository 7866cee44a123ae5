"""Checks of requests for embeddings, scores and rankings."""

from typing import Any

import pytest

from strata.serving.api.dialects import pooling
from strata.serving.api.requests import ApiError

MOST = pooling.MAX_INPUTS
PICTURE = {"content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}


@pytest.mark.parametrize(
    ("method", "tree", "param"),
    [
        ("embeddings", {"input": "x"}, None),
        ("embeddings", {"input": ["x", "y"]}, None),
        ("embeddings", {"input": [1, 2]}, None),
        ("embeddings", {"input": [[1, 2], [3]]}, None),
        ("embeddings", {"input": ["x"] * MOST}, None),
        ("embeddings", {"input": ["x"] * (MOST + 1)}, "input"),
        ("embeddings", {"input": [[1]] * (MOST + 1)}, "input"),
        ("embeddings", {"input": [1] * (MOST + 1)}, None),  # one text of many tokens
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": [[]]}, "input"),
        ("embeddings", {"input": [1, "x"]}, "input"),
        ("embeddings", {"input": [-1]}, "input"),
        ("embeddings", {"input": [True]}, "input"),
        ("embeddings", {"input": [{"role": "user", **PICTURE}]}, "input"),
        ("embeddings", {"messages": [{"role": "user", **PICTURE}]}, "input"),
        ("embeddings", {"input": "x", "encoding_format": "base64"}, None),
        ("embeddings", {"input": "x", "encoding_format": "bytes"}, "encoding_format"),
        ("score", {"text_1": "x", "text_2": ["y", "z"]}, None),
        ("score", {"queries": ["x"], "documents": "y"}, None),
        ("score", {"text_1": "x"}, "text_1"),
        ("score", {"text_1": "x", "documents": "y"}, "text_1"),
        ("score", {"text_1": "x", "text_2": PICTURE}, "text_2"),
        ("score", {"text_1": "x", "text_2": []}, "text_2"),
        ("score", {"text_1": ["x"] * (MOST + 1), "text_2": "x"}, "text_1"),
        ("rerank", {"query": "x", "documents": ["y"]}, None),
        ("rerank", {"query": ["x"], "documents": ["y"]}, "query"),
        ("rerank", {"query": "x", "documents": [PICTURE]}, "documents"),
        ("rerank", {"query": "x"}, "documents"),
        ("rerank", {"query": "x", "documents": ["y"] * (MOST + 1)}, "documents"),
    ],
)
def test_inputs(method: str, tree: dict[str, Any], param: str | None) -> None:
    if param is None:
        pooling.check(method, tree)
        return
    with pytest.raises(ApiError) as caught:
        pooling.check(method, tree)
    assert caught.value.status == 400 and caught.value.body["error"]["param"] == param


def test_refusal_names_what_the_model_can() -> None:
    assert str(pooling.cannot("chat", ["rerank", "score"])) == (
        "The model cannot answer /v1/chat/completions. It answers /v1/score, /v1/rerank."
    )
