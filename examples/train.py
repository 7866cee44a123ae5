"""Trains the laptop recipe with a few changes, and prints the losses.

python examples/train.py train.steps=50
"""

import argparse

from rich.console import Console

import strata.training

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("overrides", nargs="*", default=["train.steps=100"], help="changes to the recipe")
parser.add_argument("--recipe", default="laptop", help="a recipe's name, or a path to one")
parser.add_argument("--run", help="name of the new run")
arguments = parser.parse_args()

# Ray Train starts the workers, DeepSpeed shards the optimizer over them, and checkpoints are written meanwhile.
summary = strata.training.train(arguments.recipe, arguments.overrides, run=arguments.run, console=Console())

print(f"run {summary.run.name}: step {summary.step}")
print(f"validation loss {summary.val_loss:.3f} nats per token; a bigram model reaches {summary.bigram:.3f}")
print(f"Hugging Face folder: {summary.export}")
