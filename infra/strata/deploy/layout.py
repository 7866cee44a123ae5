"""From a recipe to pods: how many of each worker group, with what in them, on which nodes.

What the target's nodes cannot give is refused here, before it waits for them for ever.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from strata.deploy.targets import GpuType, Machine, Target
from strata.platform.errors import UserError
from strata.platform.recipe import PoolSection, Recipe

# What is left to pods of a machine's CPUs and memory when the kubelet, the system's own pods and sidecars have theirs.
FREE = 0.85
CPUS_OF_AN_ENGINE = {"cpu": 1, "gpu": 2}  # what a replica asks Ray for
# Without GPUs models are laptop-sized: the most that was seen, rounded up.
GIB_OF_A_CPU_WORKER = 1
GIB_OF_A_CPU_ENGINE = 1  # beside its KV cache
GIB_OF_RAY = 1


@dataclass(frozen=True)
class Group:
    """The pods of one worker group: their number and its bounds, what one of them has, and which nodes it runs on.
    `engines` is how many of them a pod has room for, where it is there for engines."""

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


def plan(recipe: Recipe, target: Target, parts: Collection[str]) -> dict[str, Group]:
    """The groups of these parts: `train`, `lab`, and for `serve` `prefill` and `decode`."""
    groups = {}
    if "train" in parts:
        groups["train"] = _training(recipe, target)
    if "lab" in parts:
        whole = _training(recipe, target)
        groups["lab"] = replace(whole, least=0, pods=0)  # they come when somebody asks for them
    if "serve" in parts:
        groups |= {name: _pool(recipe, target, name) for name in ("prefill", "decode")}
        if recipe.serve.device == "gpu":
            _refuse_more_engines_than_gpus(recipe, target, groups)
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
            f"parallel.workers={parallel.workers} do not divide over nodes of {each} GPUs.",
            f"Choose a multiple of {each} workers, or another deploy.gpus_per_node.",
        )
    pods = parallel.workers // each
    if deploy.nodes is not None and pods > deploy.nodes:
        raise UserError(
            f"parallel.workers={parallel.workers} take {pods} nodes of {each} GPUs, and deploy.nodes={deploy.nodes}.",
            f"Choose at most {deploy.nodes * each} workers, or set deploy.nodes={pods}.",
        )
    group = _on(recipe, target, node, Group(pods, pods, pods, each))
    return _with_cpus_for(group, each * parallel.cpus_per_worker, "parallel.cpus_per_worker")


def _pool(recipe: Recipe, target: Target, name: str) -> Group:
    """No minimum of pods: an upgrade in steps begins its second Ray cluster with the minimum, and would take twice the GPUs at
    once. Ray Serve asks for as many engines as the recipe says, and the autoscaler brings the pods for them."""
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
            f"serve.{name}.tensor_parallel={pool.tensor_parallel}: an engine is one pod, and a {node.machine.name} has "
            f"{node.machine.gpus} GPUs.",
            "Choose a smaller tensor_parallel, or a larger deploy.gpus_per_node.",
        )
    group = _on(recipe, target, node, Group(0, pods, most, pool.tensor_parallel, engines=engines))
    return _with_cpus_for(group, cpus, f"serve.{name}")


def engines_per_pod(pool: PoolSection, device: str) -> int:
    """One, with the GPUs it needs, so that a pod that goes takes one engine along; more only where engines share a GPU."""
    return int(1 / pool.gpus) if device == "gpu" and pool.gpus < 1 else 1


def _refuse_more_engines_than_gpus(recipe: Recipe, target: Target, groups: dict[str, Group]) -> None:
    """Without `deploy.nodes` there are as many nodes as training takes. Training and serving need not fit at once."""
    pools = {name: _node(recipe, target, f"{name}_gpu") for name in ("prefill", "decode")}
    for node in pools.values():
        nodes = recipe.deploy.nodes or math.ceil(recipe.parallel.workers / node.machine.gpus)
        there = nodes * node.machine.gpus
        sharers = [name for name, other in pools.items() if other.name == node.name]
        asked = sum(groups[name].most * groups[name].gpus for name in sharers)
        if asked > there:
            who = " and ".join(
                f"serve.{name} ({_section(recipe, name).most} replicas of {_section(recipe, name).gpus:g})" for name in sharers
            )
            raise UserError(
                f"{who} take {asked} GPUs, and {nodes} x {node.machine.name} have {there} {node.name}.",
                f"Lower replicas or max_replicas, or set deploy.nodes={math.ceil(asked / node.machine.gpus)}.",
            )


def _section(recipe: Recipe, name: str) -> PoolSection:
    return recipe.serve.prefill if name == "prefill" else recipe.serve.decode


def _node(recipe: Recipe, target: Target, key: str) -> Node:
    """The nodes that `deploy.gpu`, `deploy.prefill_gpu` or `deploy.decode_gpu` asks for."""
    deploy = recipe.deploy
    own = getattr(deploy, key)
    name = own or deploy.gpu
    known = ", ".join(target.gpus)
    if name is None:
        raise UserError(
            f"The recipe runs on GPUs, and does not say on which of those {target.name} has.",
            f"Set deploy.gpu to one of: {known}.",
        )
    gpu = target.gpus.get(name)
    if gpu is None:
        raise UserError(f"deploy.{key if own else 'gpu'}={name}: {target.name} has none.", f"Choose one of: {known}.")
    sizes = {machine.gpus: machine for machine in gpu.machines}
    machine = sizes.get(deploy.gpus_per_node or max(sizes))
    if machine is None:
        raise UserError(
            f"deploy.gpus_per_node={deploy.gpus_per_node}: {target.name} has no machine with so many {name}.",
            f"Choose one of: {', '.join(map(str, sizes))}.",
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
            f"{key} takes {needed} CPUs in a pod that has {group.cpus}, so Ray would wait for them for ever.",
            f"Set deploy.cpus={needed} or more, or change {key}.",
        )
    return group
