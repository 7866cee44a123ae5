"""Routes of an endpoint and the rules of their answers, by the kind of its model: text or pictures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.serving.api import failover, openapi, picture_openapi
from strata.serving.page import state
from strata.serving.transport.link import MAX_ANSWER_BYTES


@dataclass(frozen=True)
class Routes:
    kind: str  # of the model: text or pictures
    generating: Mapping[str, str]  # path to the replicas' call: admitted, streamed, retried
    forwarded: Mapping[str, str]  # path to the replicas' call: one short answer
    document: Callable[[Sequence[str]], dict[str, Any]]  # OpenAPI document for the models' names
    # Reason why a stream of which parts were sent cannot continue on another replica, or None. Reads the parsed request.
    obstacle: Callable[[dict[str, Any]], str | None]
    times_tokens: bool  # the parts of a stream are tokens, and their latencies are measured
    unread_bytes: int | None = None  # of a stream that its client reads slowly; None: the link's limit
    cancels: bool = False  # `DELETE <path>/<request id>` ends a request

    def allowed(self, path: str) -> str | None:
        """Method of a known path, None for an unknown one."""
        if path in self.generating or path in self.forwarded:
            return "POST"
        if path in ("/health", "/ready", "/metrics", "/openapi.json", state.ROUTE) or path.startswith("/v1/models"):
            return "GET"
        return "DELETE" if self.cancelled(path) else None

    def known(self, path: str) -> str:
        """Route of a path for logs: a path that clients make up is not one."""
        return path if path in self.generating or path in self.forwarded or path == "/v1/models" else "other"

    def cancelled(self, path: str) -> str | None:
        """Request id in the path of a DELETE, None for other paths."""
        base, _, name = path.rpartition("/")
        return name if self.cancels and base in self.generating and name else None


TEXT = Routes(
    kind="text",
    generating={"/v1/completions": "completions", "/v1/chat/completions": "chat"},
    forwarded={"/tokenize": "tokenize", "/detokenize": "detokenize"},
    document=openapi.document,
    obstacle=failover.obstacle,
    times_tokens=True,
)
# A stream of pictures continues on another replica, which skips the completed ones. One event holds a whole picture.
PICTURES = Routes(
    kind="pictures",
    generating={"/v1/images/generations": "images"},
    forwarded={},
    document=picture_openapi.document,
    obstacle=lambda tree: None,
    times_tokens=False,
    unread_bytes=MAX_ANSWER_BYTES,
    cancels=True,
)
