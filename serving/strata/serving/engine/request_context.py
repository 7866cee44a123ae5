"""Per-request state of a replica, in a context variable.

vLLM's OpenAI classes are between the RPC handler (`replica_api.py`) and the engine (`disaggregation.py`) and cannot carry this
state from one to the other.
"""

import struct
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strata.serving.metrics import tracing
from strata.serving.routing.kv.prefix_chain import Chain
from strata.serving.routing.policy import Decision

if TYPE_CHECKING:  # gateways import this module
    from vllm.lora.request import LoRARequest

_COUNT = struct.Struct("!BH")  # flags, number of tokens
FINISHED = 1


@dataclass
class RequestContext:
    resumed: tuple[int, ...] = ()  # tokens that another replica generated and the client has received
    request: str = field(default_factory=lambda: uuid.uuid4().hex)  # request id, the same on every replica
    strikes: int = 0  # engines that failed while running this request
    decision: Decision | None = None
    engine: str = ""  # id of the remote prefill engine
    replaying: bool = False  # vLLM's classes receive the resumed tokens; their events are not sent
    open: int = 0  # sequences in progress, one per prompt
    finished: bool = False  # all sequences
    failure: Exception | None = None
    prompt_tokens: int = 0
    queued_s: float = 0.0
    cached_tokens: int = 0  # of the prompt, in this engine's KV cache
    prefill_cached_tokens: int = 0  # of the prompt, in the KV cache of the remote prefill engine
    moved_tokens: int = 0  # of the prompt, whose KV blocks came from the prefill engine
    moved_blocks: int = 0
    prefill_s: float = 0.0  # of the remote prefill
    cache_salt: str | None = None  # of the tenant
    speculate: bool = True  # tokens may be drafted
    adapter: dict[str, Any] | None = None  # that comes and goes, as the gateway named it
    lora: "LoRARequest | None" = None  # the same, in this engine
    chain: Chain | None = None  # names of the prompt's prefixes
    prefilled: tuple[int, float] | None = None  # tokens of a local prefill, and its seconds
    answer: list[str] = field(default_factory=list)  # text by this replica, if `chain` is set
    generated: list[int] = field(default_factory=list)  # by this replica
    unsent: list[int] = field(default_factory=list)  # generated and not yet sent to the gateway
    created: int = field(default_factory=lambda: int(time.time()))  # the same on every replica
    events: int = 0  # sent to the client before, by this and other replicas; counted only where events have numbers
    span: tracing.Span = tracing.OFF  # of this request on this replica
    first_token_at: float = 0.0
    # Called when vLLM's classes have made all events of an output and want the next one.
    output_done: Callable[[], None] | None = None

    def pack_event(self, event: str) -> bytes:
        """Serializes an event with its token ids, with which the gateway can resume the stream on another replica."""
        tokens, self.unsent = self.unsent, []
        return _COUNT.pack(FINISHED * self.finished, len(tokens)) + struct.pack(f"!{len(tokens)}I", *tokens) + event.encode()


def unpack_event(payload: bytes) -> tuple[bool, tuple[int, ...], bytes]:
    """Inverse of `pack_event`: finished flag, token ids, event."""
    flags, count = _COUNT.unpack_from(payload)
    start = _COUNT.size + 4 * count
    return bool(flags & FINISHED), struct.unpack_from(f"!{count}I", payload, _COUNT.size), payload[start:]


current: ContextVar[RequestContext] = ContextVar("request_context")
