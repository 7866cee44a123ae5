"""Replicas that have a prefix cached, as a gateway knows them from the replicas' announcements.

A prefix is one entry with a bit per replica, so that the length of the longest cached prefix of 200 replicas is found with one
lookup per point of a request.
"""

from collections.abc import Iterable, Sequence

from strata.serving.routing.kv import prefix_log

_TOKENS_BITS = 32
_TOKENS = 2**_TOKENS_BITS - 1


class Gap(Exception):
    """A frame is missing."""


class PrefixMap:
    def __init__(self) -> None:
        self._entries: dict[int, int] = {}  # by digest: bits of replicas, then the number of tokens
        self._held: dict[int, set[int]] = {}  # digests of each replica, by its slot
        self._sequences: dict[int, int] = {}  # of each replica's next frame

    @property
    def size(self) -> int:
        """Number of prefixes that any replica has."""
        return len(self._entries)

    def join(self) -> int:
        """Slot for a replica: the number of its bit."""
        slot = next(number for number in range(len(self._held) + 1) if number not in self._held)
        self._held[slot] = set()
        return slot

    def leave(self, slot: int) -> None:
        self._clear(slot)
        del self._held[slot]

    def apply(self, slot: int, frame: bytes) -> None:
        """Applies a frame of a replica. Raises `Gap` if one before it is missing."""
        snapshot, sequence, entries = prefix_log.unpack(frame)
        if snapshot:
            self._clear(slot)
        elif self._sequences.get(slot) != sequence:
            self._clear(slot)
            raise Gap(f"expected frame {self._sequences.get(slot)}, received {sequence}")
        self._sequences[slot] = sequence + 1
        self.update(slot, entries)

    def update(self, slot: int, changes: Iterable[tuple[int, int]]) -> None:
        """Changes as (digest, tokens), with `prefix_log.GONE` tokens for a prefix that is no longer cached."""
        bit, held, entries = 1 << slot + _TOKENS_BITS, self._held[slot], self._entries
        for digest, tokens in changes:
            if tokens != prefix_log.GONE:
                entries[digest] = (entries.get(digest, 0) | bit) & ~_TOKENS | min(tokens, _TOKENS)
                held.add(digest)
            elif digest in held:
                held.remove(digest)
                self._release(digest, bit)

    def _release(self, digest: int, bit: int) -> None:
        left = self._entries[digest] & ~bit
        if left >> _TOKENS_BITS:
            self._entries[digest] = left
        else:
            del self._entries[digest]

    def _clear(self, slot: int) -> None:
        for digest in self._held[slot]:
            self._release(digest, 1 << slot + _TOKENS_BITS)
        self._held[slot] = set()
        self._sequences.pop(slot, None)

    def cached_tokens(self, digests: Sequence[int]) -> dict[int, int]:
        """Tokens of the longest cached prefix of each replica that has any, by its slot. `digests` are in order of length."""
        found: dict[int, int] = {}
        entries, seen = self._entries, 0
        for digest in reversed(digests):
            entry = entries.get(digest)
            if entry is None:
                continue
            replicas = entry >> _TOKENS_BITS
            new = replicas & ~seen
            seen |= replicas
            tokens = entry & _TOKENS
            while new:
                lowest = new & -new
                found[lowest.bit_length() - 1] = tokens
                new ^= lowest
        return found
