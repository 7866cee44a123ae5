"""Blocks in an engine's KV cache, from the events that vLLM publishes, and the prefixes of requests that they hold.

vLLM identifies a block by a hash over all tokens up to its end and reports when blocks are stored and removed. Here a block has
a name of this process, which can be computed from tokens faster than vLLM's hash. A block that is stored twice (by two requests
at a time, or in two tiers) is cached until it was removed as often.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence

import msgspec

from strata.serving.routing.kv.prefix_log import MAX_PREFIXES, PrefixLog

Hash = bytes | int
Salt = tuple[str | None, str | None]  # cache_salt and adapter of a request: others share no blocks with it


class Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """vLLM's event, as far as it is read."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[Hash]
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, array_like=True, gc=False):
    """Events of one engine step."""

    ts: float
    events: list[Event]


class CachedBlocks:
    def __init__(self, block_size: int, log: PrefixLog) -> None:
        """`log` receives the prefixes that become cached, and those that are evicted."""
        self.block_size, self.log = block_size, log
        self._name_of: dict[Hash, int] = {}
        self._copies: dict[int, int] = {}  # of each cached block, by name
        self._digests_at: dict[int, dict[int, None]] = {}  # prefixes that end in a block, by its name
        self._end_of: OrderedDict[int, int] = OrderedDict()  # block in which a prefix ends; least recently used first
        self._tokens: dict[int, int] = {}  # of each prefix, in whole blocks

    def cached_tokens(self, token_ids: Sequence[int], salt: Salt) -> int:
        """Number of prefix tokens that are cached. Never all: the engine must compute at least one token for logits."""
        count = 0
        for name in self._names(token_ids, len(token_ids) - 1, salt):
            if name not in self._copies:
                break
            count += 1
        return count * self.block_size

    def register(self, prefixes: Iterable[tuple[int, int]], token_ids: Sequence[int], salt: Salt) -> None:
        """Records the prefixes of a request as (digest, tokens). They are announced while their last full block is cached."""
        ends = [(digest, tokens // self.block_size) for digest, tokens in prefixes if tokens >= self.block_size]
        if not ends:
            return
        names = list(self._names(token_ids, max(blocks for _, blocks in ends) * self.block_size, salt))
        for digest, blocks in ends:
            if blocks <= len(names):
                self._place(digest, names[blocks - 1], blocks * self.block_size)
        while len(self._end_of) > MAX_PREFIXES:
            self._drop(next(iter(self._end_of)))

    def _place(self, digest: int, name: int, tokens: int) -> None:
        if self._end_of.get(digest) not in (None, name):
            self._drop(digest)
        self._end_of[digest] = name
        self._end_of.move_to_end(digest)
        self._tokens[digest] = tokens
        self._digests_at.setdefault(name, {})[digest] = None
        if name in self._copies:
            self.log.add(digest, tokens)

    def _drop(self, digest: int) -> None:
        name = self._end_of.pop(digest)
        del self._tokens[digest]
        del self._digests_at[name][digest]
        if not self._digests_at[name]:
            del self._digests_at[name]
        self.log.remove(digest)

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self.clear()
            elif event.group_idx:
                continue  # of a hybrid model, the first group of layers stands for all
            elif isinstance(event, Stored):
                self._store(event)
            else:
                for hashed in event.block_hashes:
                    self._remove(hashed)

    def clear(self) -> None:
        for digest in list(self._end_of):
            self._drop(digest)
        self._name_of.clear()
        self._copies.clear()

    def _store(self, event: Stored) -> None:
        hashes, parent = event.block_hashes, event.parent_block_hash
        if not event.token_ids:  # copied to another tier
            for name in (self._name_of[hashed] for hashed in hashes if hashed in self._name_of):
                self._copies[name] += 1
            return
        if event.block_size != self.block_size or len(event.token_ids) != self.block_size * len(hashes):
            return
        salt, further = _keys(event)
        start = hash(salt) if parent is None else self._name_of.get(parent)
        if start is None or further:
            return
        for hashed, name in zip(hashes, self._chain(event.token_ids, len(hashes), start), strict=True):
            self._name_of[hashed] = name
            self._copies[name] = self._copies.get(name, 0) + 1
            for digest in self._digests_at.get(name, ()):
                self.log.add(digest, self._tokens[digest])

    def _remove(self, hashed: Hash) -> None:
        name = self._name_of.get(hashed)
        if name is None:
            return
        self._copies[name] -= 1
        if self._copies[name]:
            return
        del self._copies[name], self._name_of[hashed]
        for digest in list(self._digests_at.get(name, ())):
            self._drop(digest)

    def _names(self, token_ids: Sequence[int], length: int, salt: Hashable) -> Iterator[int]:
        """Name of each full block within the first `length` tokens. A generator, since a lookup ends at the first miss."""
        return self._chain(token_ids, min(length, len(token_ids)) // self.block_size, hash(salt))

    def _chain(self, token_ids: Sequence[int], blocks: int, name: int) -> Iterator[int]:
        tokens = array("I", token_ids)
        content, step = tokens.tobytes(), self.block_size * tokens.itemsize
        for block in range(blocks):
            name = hash((name, content[block * step : (block + 1) * step]))
            yield name


def _keys(event: Stored) -> tuple[Salt, bool]:
    """Salt of a sequence that begins with these blocks, and whether their tokens do not identify them: blocks with pictures, and
    those behind them, have no name. The extra keys of a block are the adapter's name, those of pictures, and for the first block
    the salt."""
    adapter, further = event.lora_name, False
    salt: str | None = None
    for index, keys in enumerate(event.extra_keys or ()):
        own = list(keys or ())
        if adapter is not None and own[:1] == [adapter]:
            own = own[1:]
        if index == 0 and event.parent_block_hash is None and len(own) == 1 and isinstance(own[0], str):
            salt = own[0]
            own = []
        further = further or bool(own)
    return (salt, adapter), further
