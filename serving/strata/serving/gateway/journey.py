"""Record of one request on its way through the gateway, for its response headers, the metrics by tenant and the audit log."""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from strata.serving.api.headers import REQUEST_ID
from strata.serving.api.requests import ApiError
from strata.serving.gateway.relay import Relay
from strata.serving.tenants.gate import Entry
from strata.serving.tenants.tenant import Caller

CLIENT_GONE = 499  # status for the log, as of nginx: the client disconnected before the response began


class ClientGone(Exception):
    """The client disconnected."""


class Answer:
    """Response in progress. Adds the request id header, and those of `more`."""

    def __init__(self, send: Callable[[dict[str, Any]], Awaitable[None]], name: str) -> None:
        self._send, self._name = send, name
        self.more: Callable[[], dict[str, str]] = dict
        self.status: int | None = None  # once it has begun

    async def __call__(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            added = {REQUEST_ID: self._name} | self.more()
            message["headers"] = [*message["headers"], *((name.encode(), value.encode()) for name, value in added.items())]
        await self._send(message)


class Journey:
    def __init__(self, route: str) -> None:
        self._began, self._route = time.monotonic(), route
        self._at = datetime.now(UTC)
        self.caller: Caller | None = None
        self.model: str | None = None
        self._relay: Relay | None = None
        self._entry: Entry | None = None

    @property
    def tokens(self) -> tuple[int, int] | None:
        """Input and output tokens, once they are known."""
        return self._relay.usage if self._relay is not None else None

    @property
    def first_token_s(self) -> float | None:
        return self._relay.first_token_s if self._relay is not None else None

    @contextmanager
    def measured(self, entry: Entry | None, relay: Relay) -> Iterator[None]:
        """Charges the tokens that were used when the block ends. A stream that was cut costs the tokens sent so far; an answer
        that its client did not wait for costs its estimate, since its tokens may have been generated."""
        self._entry, self._relay = entry, relay
        abandoned = False
        try:
            yield
        except ClientGone:
            abandoned = True
            raise
        except ApiError as error:
            abandoned = error.status in (409, 504)  # cancelled, or past the client's deadline
            raise
        finally:
            if entry is not None and relay.usage is not None:
                entry.settle(*relay.usage)
            elif entry is not None and relay.sent_tokens:
                entry.settle(output=relay.sent_tokens)
            elif entry is not None and abandoned and entry.started:
                entry.settle()

    def line(self, request_id: str, status: int | None) -> dict[str, Any]:
        """Line of the audit log."""
        relay, caller, tokens = self._relay, self.caller, self.tokens
        return {
            "time": self._at.isoformat(timespec="milliseconds"),
            "request_id": request_id,
            "tenant": caller.tenant.name if caller is not None else None,
            "key": caller.key if caller is not None else None,
            "route": self._route,
            "model": self.model,
            "status": status or CLIENT_GONE,
            "input_tokens": tokens[0] if tokens is not None else None,
            "output_tokens": tokens[1] if tokens is not None else relay.sent_tokens if relay is not None else None,
            "queue_s": _rounded(self._entry.waited_s if self._entry is not None else None),
            "first_token_s": _rounded(self.first_token_s),
            "duration_s": _rounded(time.monotonic() - self._began),
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
