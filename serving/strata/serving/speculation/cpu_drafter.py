"""vLLM's proposer of an engine on a CPU, on `draft_decoder.py`.

vLLM gives a proposer the tokens of every row of its batch, not the requests. Rows are recognized by their tokens: the cache of a
row counts as far as its tokens are those that it was computed from. So a draft that was rejected, a request in another row, one
that was preempted, and one whose prompt was computed by a prefill engine are all the same case.

Contexts are bounded. A row that reaches the end of the decoder's capacity starts again with the tokens of its last half.

Imports vLLM: only engine processes import this file.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from vllm.config import VllmConfig

from strata.serving.speculation.dense import capacity, least_capacity, section_of
from strata.serving.speculation.draft_decoder import DraftDecoder, Whole
from strata.serving.speculation.settings import DRAFT_DIR

TOGETHER = 16  # tokens of a row that are computed with those of the others; more are computed before
CHUNK = 512  # tokens of a row that are computed at once

Tokens = NDArray[np.int32]


class Row:
    """Tokens of a sequence from `start` on whose keys and values are in the cache."""

    def __init__(self) -> None:
        self.start = 0
        self.tokens: Tokens = np.empty(0, np.int32)

    def common(self, sequence: Tokens) -> int:
        """Tokens of the cache that the sequence has at the same places."""
        own = sequence[self.start : self.start + len(self.tokens)]
        differ = np.flatnonzero(own != self.tokens[: len(own)])
        return int(differ[0]) if len(differ) else len(own)


class CpuDrafter:
    """`wanted` tokens are drafted in a step; the scheduler of the same process sets it."""

    latest: "CpuDrafter | None" = None  # of this process

    def __init__(self, config: VllmConfig) -> None:
        self._folder = Path(config.additional_config[DRAFT_DIR])
        section = section_of(self._folder)
        assert section is not None
        self._section = section
        self.wanted = config.speculative_config.num_speculative_tokens
        self._longest = config.model_config.max_model_len
        rows = config.scheduler_config.max_num_seqs
        self._capacity = min(capacity(section, rows), self._longest)
        self._rows = [Row() for _ in range(rows)]
        CpuDrafter.latest = self

    def load_model(self, target: nn.Module) -> None:
        # Rows are padded to the longest: what the padding computes has a place behind every context.
        places = self._capacity + TOGETHER + self.wanted
        self._decoder = DraftDecoder(self._folder, self._section, len(self._rows), places)

    def propose(self, sampled: list[list[int]], lengths: NDArray[np.int32], tokens: Tokens, **_: Any) -> list[list[int]]:
        """Drafts for the rows that have sampled tokens in this step. `tokens` [rows, longest] are all of a row."""
        count = self.wanted
        sequences = {
            row: tokens[row, : lengths[row]] for row, own in enumerate(sampled) if own and lengths[row] + count < self._longest
        }
        drafts: list[list[int]] = [[] for _ in sampled]
        if not count or not sequences or least_capacity(count) > self._capacity:
            return drafts
        self._match(sequences)
        for row, sequence in sequences.items():
            self._catch_up(row, sequence, count)
        end = max(sequences) + 1
        for row, drafted in zip(range(end), self._draft(end, sequences, count), strict=True):
            if row in sequences:
                drafts[row] = drafted
        return drafts

    def _match(self, sequences: dict[int, Tokens]) -> None:
        """Gives every row a cache with tokens of its sequence, if there is one."""
        moved = {}
        for row, sequence in sequences.items():
            if 2 * self._rows[row].common(sequence) >= len(sequence) - self._rows[row].start:
                continue
            found = [each.common(sequence) for each in self._rows]
            best = max(range(len(found)), key=found.__getitem__)
            if found[best] > TOGETHER and best != row:
                moved[row] = best
        if moved:
            self._decoder.move(list(moved.values()), list(moved))
            copies = {row: (self._rows[source].start, self._rows[source].tokens) for row, source in moved.items()}
            for row, (start, cached) in copies.items():
                self._rows[row].start, self._rows[row].tokens = start, cached

    def _catch_up(self, row: int, sequence: Tokens, count: int) -> None:
        """Computes the cache of a row up to its last tokens."""
        own = self._rows[row]
        known = min(own.common(sequence), len(sequence) - own.start - 1)
        if known <= 0 or len(sequence) - own.start + count > self._capacity:
            own.start = len(sequence) - self._capacity // 2 if len(sequence) + count > self._capacity else 0
            known = 0
        while len(sequence) - own.start - known > TOGETHER:
            chunk = sequence[own.start + known :][: min(CHUNK, len(sequence) - own.start - known - 1)]
            self._compute(slice(row, row + 1), [chunk], np.array([known]))
            known += len(chunk)
        own.tokens = sequence[own.start : own.start + known].copy()

    def _compute(self, rows: slice, new: list[Tokens], starts: Whole) -> Whole:
        longest = max(map(len, new))
        padded = np.zeros((len(new), longest), np.int64)
        for each, tokens in zip(padded, new, strict=True):
            each[: len(tokens)] = tokens
        return self._decoder.next_tokens(rows, padded, starts, np.array([len(tokens) for tokens in new]))

    def _draft(self, end: int, sequences: dict[int, Tokens], count: int) -> list[list[int]]:
        rows, owns = slice(0, end), self._rows[:end]
        nothing = np.zeros(1, np.int32)
        new = [sequences[row][own.start + len(own.tokens) :] if row in sequences else nothing for row, own in enumerate(owns)]
        # Rows without a sequence compute what nobody reads, behind their caches.
        places = np.array([len(own.tokens) for own in owns])
        drafted = [self._compute(rows, new, places)]
        places += [len(tokens) for tokens in new]
        one = np.ones(end, np.int64)
        for step in range(count - 1):
            drafted.append(self._decoder.next_tokens(rows, drafted[-1][:, None], places + step, one))
        table = np.stack(drafted, 1)
        for row, sequence in sequences.items():
            own = self._rows[row]
            own.tokens = np.concatenate([sequence[own.start :], table[row, :-1].astype(np.int32)])
        return table.tolist()  # type: ignore[no-any-return]
