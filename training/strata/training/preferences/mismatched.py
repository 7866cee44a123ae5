"""Rows of mismatched answers, from which KTO estimates its reference point: each prompt has the answer to another prompt.

A mismatched row has the prompts of the row with the same number, with the row's answers rotated among them, so it has exactly as
many tokens and is packed as well. The rotation is the shortest that leaves no prompt with one of its own answers. In a row that
has no such rotation, as with a single prompt, each prompt has the answer of the first document with another prompt in the rows
that follow, cut to the length that the row can hold.

So mismatched answers depend on the prepared data only. The reference model's log-probabilities of them are computed once, and
the batch and the layout do not change them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from strata.platform.errors import UserError
from strata.training.data.finetuning.rows import Rows
from strata.training.data.sampler import Indices


@dataclass(frozen=True)
class _Document:
    """Document divided before its first counted token. `counted` is the mask of the answer."""

    prompt: Indices
    answer: Indices
    counted: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)

    def same_prompt(self, other: "_Document") -> bool:
        return np.array_equal(self.prompt, other.prompt)

    def answered_by(self, other: "_Document", length: int) -> "_Document":
        """This prompt with the answer of another document, at most `length` tokens together."""
        space = length - len(self.prompt)
        return replace(self, answer=other.answer[:space], counted=other.counted[:space])


class MismatchedRows(Rows):
    """Mismatched rows of a split, each with the documents, in number and order, of the row that it is made from."""

    def content(self, index: int) -> tuple[Indices, NDArray[np.bool_], Indices]:
        own = list(self._divided(index))
        found = _rotated(own, self.meta.context) or self._from_other_rows(index, own)
        ids = np.concatenate([part for each in found for part in (each.prompt, each.answer)])
        counted = np.concatenate([part for each in found for part in (np.zeros(len(each.prompt), bool), each.counted)])
        return ids, counted, np.cumsum([0, *map(len, found)])

    def require_two_prompts(self, split: str) -> None:
        """Refuses a split in which no answer is to another prompt."""
        first = next(self._divided(0))
        if all(each.same_prompt(first) for index in range(len(self)) for each in self._divided(index)):
            cause = f"All examples for {split} have the same prompt, and train.preference.loss=kto needs answers to another one."
            raise UserError(cause, "Add examples with other prompts, or raise data.holdout.")

    def _divided(self, index: int) -> Iterator[_Document]:
        ids, counted, starts = super().content(index)
        for begin, end in pairwise(starts.tolist()):
            at = begin + int(counted[begin:end].argmax())
            yield _Document(ids[begin:at], ids[at:end], counted[at:end])

    def _from_other_rows(self, index: int, own: list[_Document]) -> list[_Document]:
        space = (self.meta.context - sum(map(len, own))) // len(own)  # that each document may use in addition
        found = []
        for document in own:
            following = (each for number in range(1, len(self) + 1) for each in self._divided((index + number) % len(self)))
            other = next(each for each in following if not each.same_prompt(document))
            found.append(document.answered_by(other, len(document) + space))
        return found


def _rotated(own: list[_Document], context: int) -> list[_Document] | None:
    for distance in range(1, len(own)):
        others = own[-distance:] + own[:-distance]
        if not any(document.same_prompt(other) for document, other in zip(own, others, strict=True)):
            return [document.answered_by(other, context) for document, other in zip(own, others, strict=True)]
    return None
