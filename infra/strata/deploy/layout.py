"""Pod layout of a recipe: replicas, resources and node selector of each worker group.

Raises a UserError for what the target's nodes cannot provide: such pods would stay pending forever.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from strata.deploy.targets import GpuType, Machine, Target
from strata.platform.errors import UserError
from strata.platform.recipe import PoolSection, Recipe

# Fraction of a machine's CPUs and memory available to pods, after the kubelet, system pods and sidecars.
FREE = 0.85
CPUS_OF_AN_ENGINE = {"cpu": 1, "gpu": 2}  # a replica's CPU request to Ray
# Models on CPUs are laptop-sized: the largest observed memory, rounded up.
GIB_OF_A_CPU_WORKER = 1
GIB_OF_A_CPU_ENGINE = 1  # without its KV cache
GIB_OF_RAY = 1


@dataclass(frozen=True)
class Group:
    """Pods of one worker group: replicas and their bounds, resources of a pod, and node selector. `engines` is the number of
    engines that fit in a pod of an engine group."""

    least: int
    pods: int
    most: int
    gpus: int = 0
    cpus: int = 0
    memory_gib: int = 0
    engines: int = 0
    node_gpus: int = 0
    selector: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    name: str
    gpu: GpuType
    machine: Machine


def head_growth(pods: int) -> tuple[int, int]:
    """CPUs and GiB that a Ray head needs beyond those in the manifests: a CPU for 32 worker pods and a GiB for 8. The GCS holds
    every node, actor and placement group in memory and pushes each change to all nodes, so both grow with their number. A job's
    head then has 8 CPUs and 32 GiB at 128 pods, which Ray's guide for large clusters recommends, and about the 64 CPUs and
    256 GiB at 2,000 pods, with which Ray's release tests run that many nodes."""
    return pods // 32, pods // 8


def plan(recipe: Recipe, target: Target, parts: Collection[str]) -> dict[str, Group]:
    """Worker groups by name: `train`, `lab`, and for the part `serve`, `prefill` and `decode`."""
    groups = {}
    if "train" in parts:
        groups["train"] = _training(recipe, target)
    if "lab" in parts:
        whole = _training(recipe, target)
        groups["lab"] = replace(whole, least=0, pods=0)  # the autoscaler adds pods on demand
    if "serve" in parts:
        groups |= {name: _pool(recipe, target, name) for name in ("prefill", "decode")}
        if recipe.serve.device == "gpu":
            _require_gpus_for_engines(recipe, target, groups)
    return groups


def _training(recipe: Recipe, target: Target) -> Group:
    parallel, deploy = recipe.parallel, recipe.deploy
    if parallel.device == "cpu":
        cpus = parallel.workers * parallel.cpus_per_worker
        memory = parallel.workers * GIB_OF_A_CPU_WORKER + GIB_OF_RAY
        group = Group(1, 1, 1, 0, deploy.cpus or cpus, deploy.memory_gib or memory)
        return _with_cpus_for(group, cpus, "parallel.workers")
    node = _node(recipe, target, "gpu")
    each = min(parallel.workers, node.machine.gpus)
    if parallel.workers % each:
        raise UserError(
            f"parallel.workers={parallel.workers} is not a multiple of the {each} GPUs of a node.",
            f"Set parallel.workers to a multiple of {each}, or change deploy.gpus_per_node.",
        )
    pods = parallel.workers // each
    if deploy.nodes is not None and pods > deploy.nodes:
        raise UserError(
            f"parallel.workers={parallel.workers} needs {pods} nodes of {each} GPUs, but deploy.nodes={deploy.nodes}.",
            f"Set parallel.workers to at most {deploy.nodes * each}, or set deploy.nodes={pods}.",
        )
    group = _on(recipe, target, node, Group(pods, pods, pods, each))
    return _with_cpus_for(group, each * parallel.cpus_per_worker, "parallel.cpus_per_worker")


def _pool(recipe: Recipe, target: Target, name: str) -> Group:
    """Pods of the prefill or decode pool. The minimum is 0, because an incremental upgrade starts its second Ray cluster with the
    minimum and would immediately need twice the GPUs. Ray Serve requests the recipe's replicas, and the autoscaler adds pods."""
    pool, device, deploy = _section(recipe, name), recipe.serve.device, recipe.deploy
    engines = engines_per_pod(pool, device)
    pods, most = math.ceil(pool.replicas / engines), math.ceil(pool.most / engines)
    cpus = engines * CPUS_OF_AN_ENGINE[device]
    if device == "cpu":
        memory = recipe.serve.kv_cache_gib + GIB_OF_A_CPU_ENGINE + GIB_OF_RAY
        group = Group(0, pods, most, 0, deploy.cpus or cpus, deploy.memory_gib or memory, engines)
        return _with_cpus_for(group, cpus, f"serve.{name}")
    node = _node(recipe, target, f"{name}_gpu")
    if pool.tensor_parallel > node.machine.gpus:
        raise UserError(
            f"serve.{name}.tensor_parallel={pool.tensor_parallel}: an engine runs in one pod, but {node.machine.name} has "
            f"{node.machine.gpus} GPUs.",
            "Set a smaller tensor_parallel, or a larger deploy.gpus_per_node.",
        )
    group = _on(recipe, target, node, Group(0, pods, most, pool.tensor_parallel, engines=engines))
    return _with_cpus_for(group, cpus, f"serve.{name}")


def engines_per_pod(pool: PoolSection, device: str) -> int:
    """One engine per pod, so that losing a pod loses one engine. More only if engines share a GPU."""
    return int(1 / pool.gpus) if device == "gpu" and pool.gpus < 1 else 1


def _require_gpus_for_engines(recipe: Recipe, target: Target, groups: dict[str, Group]) -> None:
    """Without `deploy.nodes`, the number of nodes is that of training. Training and serving need not fit together."""
    pools = {name: _node(recipe, target, f"{name}_gpu") for name in ("prefill", "decode")}
    for node in pools.values():
        nodes = recipe.deploy.nodes or math.ceil(recipe.parallel.workers / node.machine.gpus)
        available = nodes * node.machine.gpus
        sharers = [name for name, other in pools.items() if other.name == node.name]
        needed = sum(groups[name].most * groups[name].gpus for name in sharers)
        if needed > available:
            pool_texts = " and ".join(
                f"serve.{name} ({_section(recipe, name).most} replicas of {_section(recipe, name).gpus:g})" for name in sharers
            )
            raise UserError(
                f"{pool_texts} need {needed} GPUs, but {nodes} x {node.machine.name} have {available} {node.name}.",
                f"Lower replicas or max_replicas, or set deploy.nodes={math.ceil(needed / node.machine.gpus)}.",
            )


def _section(recipe: Recipe, name: str) -> PoolSection:
    return recipe.serve.prefill if name == "prefill" else recipe.serve.decode


def _node(recipe: Recipe, target: Target, key: str) -> Node:
    """Node type for `deploy.gpu`, `deploy.prefill_gpu` or `deploy.decode_gpu`."""
    deploy = recipe.deploy
    own = getattr(deploy, key)
    name = own or deploy.gpu
    known = ", ".join(target.gpus)
    if name is None:
        raise UserError(
            f"deploy.gpu is not set, but the recipe runs on GPUs of {target.name}.",
            f"Set deploy.gpu to one of: {known}.",
        )
    gpu = target.gpus.get(name)
    if gpu is None:
        raise UserError(f"deploy.{key if own else 'gpu'}={name}: {target.name} has no such GPU.", f"Set it to one of: {known}.")
    sizes = {machine.gpus: machine for machine in gpu.machines}
    machine = sizes.get(deploy.gpus_per_node or max(sizes))
    if machine is None:
        raise UserError(
            f"deploy.gpus_per_node={deploy.gpus_per_node}: {target.name} has no machine with this number of {name} GPUs.",
            f"Set it to one of: {', '.join(map(str, sizes))}.",
        )
    return Node(name, gpu, machine)


def _on(recipe: Recipe, target: Target, node: Node, group: Group) -> Group:
    share = FREE * group.gpus / node.machine.gpus
    return replace(
        group,
        cpus=recipe.deploy.cpus or int(node.machine.cpus * share),
        memory_gib=recipe.deploy.memory_gib or int(node.machine.memory_gib * share),
        node_gpus=node.machine.gpus,
        selector=target.selector(node.gpu, node.machine),
    )


def _with_cpus_for(group: Group, needed: int, key: str) -> Group:
    if group.cpus < needed:
        raise UserError(
            f"{key} needs {needed} CPUs per pod, but a pod has {group.cpus}. Ray would wait forever.",
            f"Set deploy.cpus={needed} or more, or change {key}.",
        )
    return group
