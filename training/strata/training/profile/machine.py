"""Peaks of the device that a profile ran on: a GPU's by the catalogue, a CPU's measured."""

import torch

from strata.platform.recipe import Recipe
from strata.training.model.flops import peak_flops
from strata.training.profile.analysis import expected
from strata.training.profile.analysis.expected import Faster, Machine
from strata.training.profile.analysis.summary import Summary


def of(summary: Summary) -> Machine:
    return expected.on_gpu(summary) if summary.ranks[0].trace.on_gpu else _cpu(summary.recipe)


def _cpu(recipe: Recipe) -> Machine:
    """Rates that matrix products reach on this machine. A profile of another machine's CPUs has none to compare with."""
    train, threads = recipe.train, recipe.parallel.cpus_per_worker
    rates, before = {}, torch.get_float32_matmul_precision()
    for matmul in dict.fromkeys((train.matmul, "medium")):
        torch.set_float32_matmul_precision(matmul)
        rates[matmul] = peak_flops("cpu", train.precision, threads)
    torch.set_float32_matmul_precision(before)
    own, medium = rates[train.matmul], rates["medium"]
    faster = Faster("train.matmul=medium", medium / own) if own and medium and train.precision == "fp32" else None
    return Machine(own, None, train.precision, faster)
