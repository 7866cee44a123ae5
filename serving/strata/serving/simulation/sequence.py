"""State of a request on a simulated engine."""

from typing import Any

from strata.serving.simulation.requests import Request


class Sequence:
    """A request on one engine. Where it is continued from another engine, the tokens generated there belong to its prompt."""

    __slots__ = (
        "admitted_at", "base", "begun", "blocks", "cached", "cancelled", "computed", "emitted", "finish", "flight", "held", "itl",
        "joined", "last_token_at", "named", "output", "ready_at", "remote", "replica", "request", "submitted_at", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, emitted: int = 0, prefill_only: bool = False, last_token_at: float = 0.0) -> None:
        self.request = request
        self.itl: Any = None  # histogram of its tenant
        self.flight: Any = None  # for the listener
        self.replica: Any = None
        self.emitted = emitted  # output tokens so far
        self.output = emitted + 1 if prefill_only else request.output
        self.held = prefill_only  # its blocks stay in use at its end, until another engine has read them
        self.remote = False  # its blocks are read from a prefill engine
        self.cancelled = False
        self.tokens = request.prompt + emitted  # of prompt and output so far; those of a running decode are in `joined`
        self.computed = 0  # of these, tokens with KV entries
        self.named: list[int] = []  # its blocks with names
        self.blocks = 0  # all of its blocks
        self.base = 0  # full blocks whose names were looked up or given
        self.joined = 0  # engine's decode steps when it joined them
        self.finish = -1  # engine's decode steps when it ends; -1 while it does not decode
        self.cached = -1  # prefix tokens found in the cache at the first admission
        self.submitted_at = self.admitted_at = -1.0
        self.ready_at = 0.0  # submitted, or its blocks read
        self.last_token_at = last_token_at
        self.begun = False  # it has emitted a token on this engine
