"""Prompts of the check: the lines of a file, or random token ids of the model's vocabulary, always the same ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from strata.platform.errors import UserError, shown

LONGEST = 48
WIDEST_WINDOW = 512  # a prompt exceeds a sliding window up to this one, so that the check covers it


def from_vocabulary(config: Any, count: int, longest: int) -> list[list[int]]:
    """Random ids; the lengths grow evenly from 1 to the longest, which exceeds the sliding window if there is one."""
    window = getattr(config, "sliding_window", None) or 0
    most = max(1, min(longest, max(LONGEST, window + 8 if window <= WIDEST_WINDOW else 0)))
    lengths = [1 + round((most - 1) * number / max(1, count - 1)) for number in range(count)]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, config.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def from_file(file: Path, folder: Path, count: int, longest: int) -> list[list[int]]:
    """Token ids of the first lines with text. Longer ones than the model's context allows lose their beginning."""
    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()][:count]
    except UnicodeDecodeError:
        raise UserError(f"--prompts {file} is not text in UTF-8.", "Name a text file with a prompt on each line.") from None
    if not lines:
        raise UserError(f"--prompts {file} has no line with text.", "Write a prompt on each line.")
    try:
        words = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise many kinds
        cause = f"The tokenizer in {folder} cannot be loaded: {shown(error, 200)}"
        raise UserError(cause, "Leave --prompts out: the check then uses token ids.") from None
    ids: Sequence[list[int]] = [words(line).input_ids[-longest:] for line in lines]
    return [each for each in ids if each]
