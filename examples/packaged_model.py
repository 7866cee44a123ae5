"""Generates text with an AOTInductor package. Needs torch and tokenizers; neither Strata nor transformers.

strata export RUN --package model.pt2
python packaged_model.py model.pt2 runs/RUN/export/tokenizer.json "def main("
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer


def generate(package: Callable[..., Any], facts: dict[str, str], prompt: Sequence[int], tokens: int) -> Iterator[int]:
    """Greedy tokens. The first step computes the prompt without a past, each later one a token with the cache before it."""
    device, dtype = facts["device"], getattr(torch, facts["dtype"])
    past = [torch.zeros(1, heads, 0, width, dtype=dtype, device=device) for heads, width in json.loads(facts["cache"])]
    new, seen = list(prompt), 0
    for _ in range(tokens):
        ids = torch.tensor([new], device=device)
        positions = torch.arange(seen, seen + len(new), device=device)[None]
        seen += len(new)
        mask = torch.ones(1, seen, dtype=torch.long, device=device)
        logits, past = package(ids, mask, positions, past)
        new = [int(logits[0, -1].argmax())]
        if new[0] in json.loads(facts["eos_token_id"]):
            return
        yield new[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="FILE.pt2 of strata export --package")
    parser.add_argument("tokenizer", help="tokenizer.json of the model")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    words = Tokenizer.from_file(given.tokenizer)
    package = torch._inductor.aoti_load_package(given.package)
    ids = words.encode(given.prompt).ids
    answer = list(generate(package, package.loader.get_metadata(), ids, given.tokens))
    print(given.prompt + words.decode(answer))


if __name__ == "__main__":
    main()
