"""Refusals by a tenant's limits, in OpenAI's error format."""

from typing import Literal

from strata.serving.api.requests import ApiError

Kind = Literal["requests", "tokens", "insufficient_quota"]


class LimitReached(ApiError):
    """A 429 whose `param` names the limit. Without `retry_after`, the same request would never be admitted."""

    def __init__(self, limit: str, kind: Kind, message: str, retry_after: int | None) -> None:
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        super().__init__(429, message, param=limit, headers=headers)
        self.limit = limit
        self.body["error"] |= {"type": kind, "code": kind if kind == "insufficient_quota" else "rate_limit_exceeded"}
