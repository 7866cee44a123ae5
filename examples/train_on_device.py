"""Trains the laptop recipe's model on device `strata` and on the CPU, and prints both losses side by side.

The device is a PrivateUse1 backend in C++ (docs/device.md), built on the first run, which takes about a minute.

python examples/train_on_device.py --steps 60
"""

import argparse

import torch

from strata.kernels import device
from strata.platform import recipe_file
from strata.training.data import shards, windows
from strata.training.data.corpus import open_corpus
from strata.training.model.llama import Llama
from strata.training.schedule.learning_rate import learning_rate

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("overrides", nargs="*", help="changes to the recipe")
parser.add_argument("--steps", type=int, default=60)
arguments = parser.parse_args()

recipe = recipe_file.load("laptop", arguments.overrides)
model, train = recipe.model, recipe.train
data = windows.training_data(shards.prepare(open_corpus(recipe.data), model.vocab, recipe.data.holdout), model.context)


def losses(place: str) -> list[float]:
    """Loss of each step of a plain training loop."""
    llama = Llama(model, train.seed).to(place)
    groups = [{"params": [p], "ratio": train.embedding_lr_ratio if p.shape[0] == model.vocab else 1} for p in llama.parameters()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=train.weight_decay)
    found = []
    for step in range(arguments.steps):
        rows = data.train.read(data.order(step, train.batch, 0, 1, train.seed))
        tokens, targets = (torch.from_numpy(array).to(place) for array in (rows.tokens, rows.targets))
        loss = llama(tokens, targets_bt=targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), train.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train) * group["ratio"]
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


device.load()
pairs = list(zip(losses("strata"), losses("cpu"), strict=True))
print("step  strata     cpu        difference")
for step, (ours, theirs) in enumerate(pairs, 1):
    if step == 1 or step % 10 == 0 or step == len(pairs):
        print(f"{step:4d}  {ours:.6f}  {theirs:.6f}  {ours - theirs:+.1e}")
print(f"largest difference {max(abs(ours - theirs) for ours, theirs in pairs):.1e}\n")
print(torch.strata.memory_summary())  # type: ignore[attr-defined]
print(f"\non the CPU for want of a kernel: {device.fallbacks()}")
