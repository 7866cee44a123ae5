"""Checks of a further model, before anything of it starts."""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from strata.platform.errors import UserError
from strata.platform.hardware.machine import available_memory
from strata.platform.recipe import ServeSection
from strata.serving.models import adapter, head_size_check, hybrid_check, kv_cache_check, model_dir, quantization_check
from strata.serving.spec import EngineSpec
from strata.serving.speculation import draft

PROCESS_GIB = 1.5  # a CPU engine's two processes before any weights: Python, torch, vLLM


def check_folder(section: ServeSection, folder: Path) -> None:
    """Raises UserError for a model that vLLM cannot serve with this section."""
    model_dir.check(folder)
    quantization_check.check_folder(section, folder)
    if section.device == "cpu":
        head_size_check.check_folder(folder)
    kv_cache_check.check_folder(section, folder)
    if section.adapter == "apart":
        adapter.check(section, folder)
    if section.prefill.replicas > 0:
        hybrid_check.check_folder(folder)
    draft.check(section, folder)


def check_memory(needed_gib: float, subject: str = "Serving this model") -> None:
    """Raises UserError if this machine has less."""
    free = available_memory() / 2**30
    if free < needed_gib:
        raise UserError(
            f"{subject} needs about {needed_gib:.1f} GiB of memory; {free:.1f} are free.",
            "Close something, serve a smaller model, or lower serve.kv_cache_gib.",
        )


def memory_gib(section: ServeSection, folder: Path) -> float:
    """Memory of CPU engines."""
    engines = section.prefill.most + section.decode.most
    return engines * (PROCESS_GIB + section.kv_cache_gib + 2 * (model_dir.weights_gib(folder) + draft.weights_gib(section)))


def check_resources(specs: Iterable[EngineSpec], free: dict[str, float]) -> None:
    """Raises UserError if Ray has too few free resources. `free`: `ray.available_resources()`."""
    needed: Counter[str] = Counter()
    for spec in specs:
        one = spec.resources()
        named = {"CPU": one["num_cpus"], "GPU": one.get("num_gpus", 0), **one.get("resources", {})}
        for resource, amount in named.items():
            needed[resource] += spec.pool.replicas * amount
    missing = {name: amount for name, amount in needed.items() if amount > free.get(name, 0.0) + 1e-9}
    if missing:
        words = ", ".join(f"{_number(amount)} {name} ({_number(free.get(name, 0.0))} free)" for name, amount in missing.items())
        fix = "Remove a model, use fewer replicas, or add nodes to the cluster."
        raise UserError(f"The Ray cluster has too little for this model: it needs {words}.", fix)


def _number(amount: float) -> str:
    return f"{math.floor(amount * 100) / 100:g}"
