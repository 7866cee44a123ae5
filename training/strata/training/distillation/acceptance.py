"""Greedy acceptance of a draft model, measured offline.

Greedy speculative decoding accepts drafted tokens up to the first that the teacher would not choose. So all accepted tokens
follow the teacher's own continuation, and one forward pass of the draft model over that continuation decides every acceptance.
"""

from pathlib import Path

import torch
from torch import Tensor

from strata.training.quantization import model_folder, quality
from strata.training.quantization.rows import Tokens


@torch.no_grad()
def equal_tokens(draft: Path, teacher: Path, held_out: Tokens, device: torch.device) -> Tensor:
    """[prompts, new tokens]: whether the draft model chooses the token of the teacher's greedy continuation of a prompt."""
    continued = quality.greedy(model_folder.load(teacher, device), held_out)
    student = model_folder.load(draft, device)
    rows = []
    for row in continued.ids:
        logits = student(row[None, :-1].to(device), use_cache=False).logits[0]
        rows.append(logits[continued.prompt - 1 :].argmax(-1).cpu() == row[continued.prompt :])
    return torch.stack(rows)


def tokens_per_step(equal_pt: Tensor, drafted: int) -> float:
    """Mean number of tokens that a step of the teacher emits, with so many drafted tokens: the accepted ones, and its own."""
    steps = 0
    for row in equal_pt.tolist():
        at = 0
        while at < len(row):
            accepted = 0
            while accepted < drafted and at + accepted < len(row) and row[at + accepted]:
                accepted += 1
            at += accepted + 1
            steps += 1
    return equal_pt.numel() / steps
