"""Routes of an endpoint and the rules of their answers, by the kind of its model: text or pictures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.serving.adapters import api as adapters
from strata.serving.api import failover, picture_openapi
from strata.serving.api.dialects import messages, openapi, responses
from strata.serving.page import state
from strata.serving.transport.link import MAX_ANSWER_BYTES


@dataclass(frozen=True)
class Routes:
    kind: str  # of the model: text or pictures
    generating: Mapping[str, str]  # path to the replicas' call: admitted, streamed, retried
    forwarded: Mapping[str, str]  # path to the replicas' call: one short answer
    document: Callable[[Sequence[str]], dict[str, Any]]  # OpenAPI document for the models' names
    # By call: the reason why a stream of which parts were sent cannot continue on another replica, or None. Reads the parsed
    # request. Streams of other calls can always continue.
    obstacles: Mapping[str, Callable[[dict[str, Any]], str | None]]
    times_tokens: bool  # the parts of a stream are tokens, and their latencies are measured
    unread_bytes: int | None = None  # of a stream that its client reads slowly; None: the link's limit
    cancels: bool = False  # `DELETE <path>/<request id>` ends a request

    def method(self, path: str) -> str | None:
        """The replicas' call for a path."""
        return self.generating.get(path) or self.forwarded.get(path)

    def allowed(self, path: str) -> str | None:
        """Method of a known path, None for an unknown one."""
        if self.method(path) or path in adapters.ROUTES:
            return "POST"
        if path in ("/health", "/ready", "/metrics", "/openapi.json", state.ROUTE) or path.startswith("/v1/models"):
            return "GET"
        return "DELETE" if self.cancelled(path) else None

    def known(self, path: str) -> str:
        """Route of a path for logs: a path that clients make up is not one."""
        return path if path in self.generating or path in self.forwarded or path in ("/v1/models", *adapters.ROUTES) else "other"

    def cancelled(self, path: str) -> str | None:
        """Request id in the path of a DELETE, None for other paths."""
        base, _, name = path.rpartition("/")
        return name if self.cancels and base in self.generating and name else None


TEXT = Routes(
    kind="text",
    generating={
        "/v1/completions": "completions",
        "/v1/chat/completions": "chat",
        "/v1/responses": "responses",
        "/v1/messages": "messages",
        "/v1/embeddings": "embeddings",
        "/v1/score": "score",
        "/v1/rerank": "rerank",
    },
    forwarded={"/tokenize": "tokenize", "/detokenize": "detokenize", "/v1/messages/count_tokens": "count_tokens"},
    document=openapi.document,
    obstacles={
        "completions": failover.obstacle,
        "chat": failover.obstacle,
        "responses": responses.obstacle,
        "messages": messages.obstacle,
    },
    times_tokens=True,
)
# A stream of pictures continues on another replica, which skips the completed ones. One event holds a whole picture.
PICTURES = Routes(
    kind="pictures",
    generating={"/v1/images/generations": "images"},
    forwarded={},
    document=picture_openapi.document,
    obstacles={},
    times_tokens=False,
    unread_bytes=MAX_ANSWER_BYTES,
    cancels=True,
)
