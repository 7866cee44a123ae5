"""What one replica knows of one request while it works on it.

vLLM's OpenAI classes stand between the call that asks (`replica_api.py`) and the engine that generates (`disaggregation.py`), and
carry nothing of ours from one to the other. A context variable does.
"""

import struct
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field

from strata.serving.routing.policy import Decision

_COUNT = struct.Struct("!BH")  # flags, tokens in this piece
FINISHED = 1


@dataclass
class RequestContext:
    resumed: tuple[int, ...] = ()  # tokens that another replica generated, and the client has
    request: str = field(default_factory=lambda: uuid.uuid4().hex)  # the same on every replica
    strikes: int = 0  # engines that failed while it was on them
    decision: Decision | None = None
    engine: str = ""  # that prefilled, if it was another one
    replaying: bool = False  # vLLM's classes are shown what the client has already
    open: int = 0  # sequences under way: one for each prompt
    finished: bool = False  # all of them
    failure: Exception | None = None
    prompt_tokens: int = 0
    queued_s: float = 0.0
    generated: list[int] = field(default_factory=list)  # by this replica
    unsent: list[int] = field(default_factory=list)  # generated, and not yet handed to the caller

    def pack_event(self, event: str) -> bytes:
        """An event for the client, and before it the tokens that are in it: with them the stream can go on elsewhere."""
        tokens, self.unsent = self.unsent, []
        return _COUNT.pack(FINISHED * self.finished, len(tokens)) + struct.pack(f"!{len(tokens)}I", *tokens) + event.encode()


def unpack_event(piece: bytes) -> tuple[bool, tuple[int, ...], bytes]:
    """Finished or not, the tokens, and the event."""
    flags, count = _COUNT.unpack_from(piece)
    start = _COUNT.size + 4 * count
    return bool(flags & FINISHED), struct.unpack_from(f"!{count}I", piece, _COUNT.size), piece[start:]


current: ContextVar[RequestContext] = ContextVar("context")
