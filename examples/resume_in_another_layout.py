"""Trains on two data-parallel workers, then continues the same run with tensor parallelism.

A checkpoint holds whole tensors, so that any layout can read it: the loss continues where it was.

python examples/resume_in_another_layout.py
"""

import argparse
import json

import strata.training

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("overrides", nargs="*", default=["train.batch=16"], help="changes to the recipe")
parser.add_argument("--run", help="a run to continue; default: train a new one first")
parser.add_argument("--steps", type=int, default=20, help="steps in each layout")
arguments = parser.parse_args()

if arguments.run is None:
    first = ["parallel.workers=2", "parallel.zero=1", f"train.steps={arguments.steps}", *arguments.overrides]
    before = strata.training.train("laptop", first)
    run, step = before.run, before.step
    print(f"run {run.name}: step {step}, validation loss {before.val_loss:.3f} on two data-parallel workers")
else:
    from strata.platform import runs

    run = runs.find(arguments.run)
    step = run.state().step

second = ["parallel.workers=2", "parallel.tensor=2", "parallel.zero=0", f"train.steps={step + arguments.steps}"]
after = strata.training.resume(run, second)
print(f"run {run.name}: step {after.step}, validation loss {after.val_loss:.3f} on two tensor-parallel workers")

losses = [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]
print(f"loss around the change: {losses[step - 1]:.3f} -> {losses[step]:.3f}")
