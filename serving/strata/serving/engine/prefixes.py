"""Prefixes of a replica's requests: which of them its engine has cached, from the engine's KV cache events."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.serving.engine.request_context import RequestContext
from strata.serving.routing.kv import prefix_chain
from strata.serving.routing.kv.cached_blocks import CachedBlocks, Salt
from strata.serving.routing.kv.prefix_tokens import tokens_before


class Prefixes:
    def __init__(self, blocks: CachedBlocks | None = None, lengths: NDArray[np.int32] | None = None) -> None:
        """`blocks`: None for an engine without KV cache events. `lengths` of the vocabulary's tokens: None where no gateway
        routes by prefixes."""
        self.blocks, self._lengths = blocks, lengths

    def cached_tokens(self, token_ids: Sequence[int], salt: Salt) -> int:
        return 0 if self.blocks is None else self.blocks.cached_tokens(token_ids, salt)

    def register_prompt(self, context: RequestContext, prompt: Any, salt: Salt) -> None:
        if _has_images(prompt):
            return
        ids = prompt.get("prompt_token_ids", ())
        self._register(context, ids[: len(ids) - len(context.resumed)], salt, first=0)

    def register_answer(self, context: RequestContext, prompt: Any, salt: Salt) -> None:
        """The last token has no KV entry."""
        if context.chain is None or self._lengths is None or _has_images(prompt):
            return
        known = len(context.chain.points)
        prefix_chain.add_answer(context.chain, "".join(context.answer), context.generated)
        self._register(context, [*prompt.get("prompt_token_ids", ()), *context.generated[:-1]], salt, known)

    def _register(self, context: RequestContext, ids: Sequence[int], salt: Salt, first: int) -> None:
        """Registers the points of the chain from `first` on. `ids` are the tokens of the whole chain."""
        if context.chain is None or self.blocks is None or self._lengths is None or not ids:
            return
        tokens = tokens_before(context.chain, ids, self._lengths)
        found = zip(context.chain.points[first:], tokens[first:], strict=True)
        self.blocks.register(((point.digest, count) for point, count in found), ids, salt)


def _has_images(prompt: Any) -> bool:
    """The tokens of such a prompt do not identify it: those of all images are equal."""
    return bool(prompt.get("type") == "multimodal")
