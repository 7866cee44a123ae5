"""Plans the training of Llama 3 70B: the cost of one layout, and a search for the best. Needs no GPU and no torch.

python examples/plan.py --gpus 512 --tokens 15e12
"""

import argparse

from strata.planner import Layout, plan_training, search_layouts
from strata.planner.catalogue import library
from strata.planner.catalogue.software import program
from strata.platform.hardware import catalogue as hardware

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="llama-3-70b")
parser.add_argument("--gpu", default="h100")
parser.add_argument("--fabric", default="ndr-400")
parser.add_argument("--gpus", type=int, default=512, help="a multiple of 32")
parser.add_argument("--tokens", type=float, default=1e12)
arguments = parser.parse_args()

shape, gpu = library.model(arguments.model), hardware.gpu(arguments.gpu)
fabric, software = hardware.fabric(arguments.fabric), program("megatron-core")
sequence, batch = 8192, 1024  # tokens, sequences

# One layout: tensor parallelism within a node, four pipeline stages, data parallelism for the rest.
layout = Layout(data=arguments.gpus // 32, tensor=8, pipeline=4, batch=batch, recompute="selective", sequence_parallel=True)
plan = plan_training(shape, layout, sequence, gpu, fabric, software, tokens=arguments.tokens)
assert plan.budget is not None
print(f"{shape.name} on {layout.gpus} {gpu.name}: data {layout.data}, tensor {layout.tensor}, pipeline {layout.pipeline}")
print(f"  memory {plan.memory.peak / 2**30:.0f} of {plan.memory.capacity / 2**30:.0f} GiB, fits: {plan.memory.fits}")
print(f"  step {plan.step.seconds:.2f} s, MFU {plan.step.mfu:.0%}, most time in: {plan.step.limit}")
print(f"  {arguments.tokens:.0e} tokens: {plan.budget.days:.0f} days, ${plan.budget.dollars:,.0f}")

# All layouts: best-first search, ordered by a lower bound on step time.
found = search_layouts(
    shape, gpu, fabric, arguments.gpus, software, batch=batch, sequence=sequence, budget_tokens=arguments.tokens, top=3
)
print(f"best of all layouts, found in {found.seconds:.1f} s:")
for one in found.best:
    cut = f"data {one.layout.data}, tensor {one.layout.tensor}, pipeline {one.layout.pipeline} ({one.layout.schedule})"
    print(f"  {cut}: step {one.step.seconds:.2f} s, MFU {one.step.mfu:.0%}, {one.peak / 2**30:.0f} GiB")
