"""Examples rendered to token ids and a loss mask, by the model's tokenizer and chat template.

A conversation is tokenized as a whole, as the server does, and the characters that count are mapped to tokens by their offsets. A
token that begins before a counted span and ends in it counts, unless it is a special token: it has the answer's first characters,
which no other token has.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strata.platform.errors import UserError, shown
from strata.training.data.digests import Files
from strata.training.data.finetuning.examples import Chat, Completion, Example, Text
from strata.training.data.finetuning.templates import ChatTemplate, Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Files that decide the tokens. The weights beside them do not.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", "config.json"),
)


@dataclass(frozen=True)
class Document:
    """Tokens of one document. `mask` is 1 for a token that counts as a target."""

    ids: NDArray[np.uint32]
    mask: NDArray[np.uint8]


def tokenizer_digest(folder: Path) -> str:
    """Digest of the files of a tokenizer."""
    return Files(sorted(path for name in TOKENIZER_FILES for path in folder.glob(name))).digest()


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    if not folder.is_dir():
        raise UserError(f"{shown(folder, 200)} is not a folder with a tokenizer.", "Pass the folder of a Hugging Face model.")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises many unrelated types for missing and damaged files
        fix = "Pass the folder of a Hugging Face model, with tokenizer.json and tokenizer_config.json."
        raise UserError(f"The tokenizer in {shown(folder, 200)} cannot be loaded: {shown(error, 200)}.", fix) from None
    if not tokenizer.is_fast:
        cause = f"The tokenizer in {shown(folder, 200)} does not report which characters a token has."
        raise UserError(cause, "Use a folder with tokenizer.json.")
    tokenizer.model_max_length = 10**12  # the limit only produces warnings here: long examples are handled later
    return tokenizer


class Renderer:
    def __init__(self, tokenizer: "PreTrainedTokenizerFast", template: str | None, mask: str) -> None:
        self._tokenizer, self._mask = tokenizer, mask
        self._template = ChatTemplate(tokenizer, template)
        added = tokenizer.added_tokens_decoder
        self._added = frozenset(added)
        self.added_ids = np.array(sorted(added), np.uint32)
        names = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)
        self._special_names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        first = tokenizer("").input_ids[:1]
        self._begin = first if first == [tokenizer.bos_token_id] else []

    def render(self, examples: Sequence[Example]) -> list[list[Document]]:
        """Documents of each example: one, several if a conversation cannot be one, or the chosen and the rejected one."""
        texts = [(number, each) for number, one in enumerate(examples) for each in one.sequences if isinstance(each, Text)]
        documents: list[list[Document]] = [[] for _ in examples]
        # Text is not markup: a special token's name in it is encoded as text, as in training from scratch.
        for (number, _), (ids, _) in zip(texts, self._encode([text.text for _, text in texts], split=True), strict=True):
            ids = [*self._begin, *ids, self._end_of_text(examples[number])]
            documents[number].append(_document(ids, [(0, len(ids))]))
        rendered = [(number, each) for number, one in enumerate(examples) for each in self._rendered(one)]
        for (number, one), (ids, offsets) in zip(rendered, self._encode([one.text for _, one in rendered]), strict=True):
            ranges = self._token_ranges(one, ids, offsets)
            if not isinstance(examples[number].sequences[0], Chat):
                ids, ranges = self._closed(ids, ranges, examples[number])
            documents[number].append(_document(ids, ranges))
        for example, found in zip(examples, documents, strict=True):
            _require_counted(example, found)
        return documents

    def names_special_token(self, example: Example) -> bool:
        """True if a text or a message contains the name of a special token."""
        texts = [each.text for each in example.sequences if isinstance(each, Text)]
        texts += [message["content"] for each in example.sequences if isinstance(each, Chat) for message in each.messages]
        return any(self._special_names.search(text) for text in texts)

    def _rendered(self, example: Example) -> list[Rendered]:
        found: list[Rendered] = []
        for sequence in example.sequences:
            if isinstance(sequence, Completion):
                text = sequence.prompt + sequence.answer
                begin = 0 if self._mask == "all" else len(sequence.prompt)
                found.append(Rendered(text, ((begin, len(text)),)))
            elif isinstance(sequence, Chat):
                found += self._template.render(sequence, example, self._mask)
        compared = len(example.sequences) == 2 or example.label is not None
        if compared and len(found) != len(example.sequences):
            raise example.refusal(
                "has an answer with several turns, of which the chat template renders earlier ones differently",
                "Use one turn as the answer, or set data.chat_template to a template that renders earlier turns alike.",
            )
        return found

    def _encode(self, texts: list[str], split: bool = False) -> list[tuple[list[int], NDArray[np.int64]]]:
        """Ids and character offsets [tokens, 2] of each text."""
        if not texts:
            return []
        options: dict[str, Any] = {"add_special_tokens": False, "return_offsets_mapping": True, "split_special_tokens": split}
        encoded = self._tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, **options)
        offsets = [np.array(each, np.int64).reshape(-1, 2) for each in encoded["offset_mapping"]]
        return list(zip(encoded["input_ids"], offsets, strict=True))

    def _token_ranges(self, one: Rendered, ids: list[int], offsets: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Token ranges of the counted spans. Byte-level tokenizers trim whitespace off the offsets of a token, so a token inside
        a span may have an empty range of characters; ranges of tokens have no such gaps."""
        begins, ends = offsets[:, 0], offsets[:, 1]
        ranges = []
        for begin, end in one.spans:
            first = int(np.searchsorted(ends, begin, side="right")) if begin else 0
            while first < len(ids) and begins[first] < begin and ids[first] in self._added:
                first += 1
            last = int(np.searchsorted(begins, end, side="left")) if end < len(one.text) else len(ids)
            ranges.append((first, last))
        return ranges

    def _closed(self, ids: list[int], ranges: list[tuple[int, int]], example: Example) -> tuple[list[int], list[tuple[int, int]]]:
        """Completion with a BOS token where the model expects one, and an EOS token that counts."""
        [(first, _)] = ranges
        begin = self._begin if ids[:1] != self._begin else []
        end = self._end_of_text(example)
        ids = [*begin, *ids] if ids[-1:] == [end] else [*begin, *ids, end]
        return ids, [(first + len(begin), len(ids))]

    def _end_of_text(self, example: Example) -> int:
        if self._tokenizer.eos_token_id is None:
            raise example.refusal("cannot be ended: the tokenizer has no EOS token", "Set eos_token in tokenizer_config.json.")
        end: int = self._tokenizer.eos_token_id
        return end


def _document(ids: list[int], ranges: list[tuple[int, int]]) -> Document:
    mask = np.zeros(len(ids), np.uint8)
    for first, last in ranges:
        mask[first:last] = 1
    return Document(np.array(ids, np.uint32), mask)


def _require_counted(example: Example, documents: list[Document]) -> None:
    """Refuses a document without a target. Its first token is none: nothing comes before it."""
    for document in documents:
        if not document.mask[1:].any():
            raise example.refusal("has no token that counts in the loss", "Remove the example, or check the chat template.")
