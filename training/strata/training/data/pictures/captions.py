"""Word-level tokenizer of captions: lower case, one token per word, framed by a begin and an end, padded to a length."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from strata.training.data.sampler import Indices

# The end's id must not be 2, for which transformers' CLIP takes the largest id as the end.
PAD, BEGIN, UNKNOWN, END = "<|pad|>", "<|begin|>", "<|unknown|>", "<|end|>"
SPECIAL = (PAD, BEGIN, UNKNOWN, END)
BEGIN_ID, END_ID, PAD_ID = SPECIAL.index(BEGIN), SPECIAL.index(END), SPECIAL.index(PAD)
TOKENIZER = "tokenizer.json"


def build(captions: Iterable[str], vocab: int) -> Tokenizer:
    """Tokenizer of the most frequent words. Others are unknown."""
    counts = Counter(word for caption in captions for word in re.findall(r"\w+|[^\w\s]+", caption.lower()))
    words = sorted(counts, key=lambda word: (-counts[word], word))[: vocab - len(SPECIAL)]
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate((*SPECIAL, *words))}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    frame = [(BEGIN, BEGIN_ID), (END, END_ID)]
    tokenizer.post_processor = processors.TemplateProcessing(f"{BEGIN} $A {END}", None, frame)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def load(folder: Path, length: int) -> Tokenizer:
    """Tokenizer of prepared data, whose captions all have `length` tokens."""
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=PAD_ID, pad_token=PAD)
    return tokenizer


def encode(tokenizer: Tokenizer, captions: list[str]) -> Indices:
    """[captions, length]"""
    return np.array([encoding.ids for encoding in tokenizer.encode_batch(captions)], np.int64)


def save(tokenizer: Tokenizer, folder: Path, length: int) -> None:
    """Writes the files that transformers' PreTrainedTokenizerFast reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER))
    special = {"pad_token": PAD, "bos_token": BEGIN, "unk_token": UNKNOWN, "eos_token": END}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2))
