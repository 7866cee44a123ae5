"""A simulated replica, as the routing code of production sees it."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

from strata.serving.engine.pool_load import PoolLoad
from strata.serving.routing.policy import RateMeter
from strata.serving.simulation.engine import Engine
from strata.serving.simulation.requests import Request
from strata.serving.simulation.sequence import Sequence
from strata.serving.transport.link import PING_S

Role = Literal["prefill", "decode"]


class Replica:
    """An engine with its calls. `PoolLoad` reads it in the place of a peer (`name`, `link.load`) and of the engine's statistics
    (`running`, `waiting`, `transfer_s_per_token`, `remote_prefills`)."""

    def __init__(self, name: str, role: Role, engine: Engine, min_tokens: int, now: Callable[[], float]) -> None:
        self.name, self.role, self.engine, self._now = name, role, engine, now
        self.up_since = now()
        self.busy = 0  # calls in progress
        self.flights: dict[Flight, None] = {}
        self.prefilled: dict[Sequence, None] = {}  # remote prefills whose blocks have not been read yet
        self.prefilling: dict[Sequence, None] = {}  # remote prefills in progress
        self.remote_prefills = 0
        self.transfers = RateMeter()
        stats: Any = self
        self.pool_load = PoolLoad(stats, min_tokens, now)
        self.link = _Report(self)
        self._queued_tokens = self._reported_tokens = 0
        self._changed_at = 0.0

    @property
    def in_use(self) -> bool:
        return bool(self.flights or self.prefilling or self.prefilled)

    @property
    def running(self) -> int:
        return self.engine.running

    @property
    def waiting(self) -> int:
        return self.engine.waiting

    @property
    def transfer_s_per_token(self) -> float | None:
        return self.transfers.seconds_each(self._now())

    def reported_tokens(self) -> int:
        """Queued tokens as they were at the last ping."""
        self.queue(0)
        return self._reported_tokens

    def queue(self, tokens: int) -> None:
        """Adds prompt tokens to those that wait for or are in a remote prefill here."""
        now = self._now()
        if math.floor(now / PING_S) > math.floor(self._changed_at / PING_S):
            self._reported_tokens = self._queued_tokens
        self._changed_at = now
        self._queued_tokens += tokens


class _Report:
    """The last ping's report of a replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    @property
    def load(self) -> dict[str, int]:
        return {"queued_tokens": self._replica.reported_tokens()}


class Flight:
    """A request between its arrival and its end, as the gateway sees it."""

    __slots__ = (
        "admission", "arrived_at", "emitted", "epoch", "first_token_at", "handed_at", "last_token_at", "lost", "prefill", "queue",
        "queue_s", "queued", "replica", "request", "sequence", "source", "stranded_at", "stranded_s", "tried", "tries",
    )  # fmt: skip

    def __init__(self, request: Request, admission: AbstractContextManager[None], now: float) -> None:
        self.request, self.admission, self.arrived_at = request, admission, now
        self.emitted = 0  # tokens that the client has
        self.last_token_at = 0.0
        self.first_token_at = -1.0
        self.queue_s = -1.0
        self.tries = 0
        self.epoch = 0  # of the present call; events of earlier ones are void
        self.lost: frozenset[str] = frozenset()
        self.replica: Replica | None = None
        self.sequence: Sequence | None = None  # on the replica
        self.tried: frozenset[str] = frozenset()  # prefill replicas
        self.prefill: Sequence | None = None  # remote prefill in progress
        self.source: tuple[Replica, Sequence] | None = None  # finished remote prefill whose blocks are not yet read
        self.handed_at = 0.0
        self.queue: AbstractContextManager[None] | None = None  # its tokens in a queue of `PoolLoad`
        self.queued: tuple[str, int] | None = None  # replica and tokens, of a prompt without a first token
        self.stranded_at = self.stranded_s = 0.0
