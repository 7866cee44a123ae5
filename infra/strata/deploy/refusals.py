"""Rejects recipes that cannot work on a cluster, with the reason and the fix."""

import re
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from strata.deploy.addons import models
from strata.deploy.kuberay.rules import DNS_1035, LONGEST
from strata.deploy.layout import Group
from strata.deploy.names import STORE
from strata.deploy.networks import facts as networks
from strata.deploy.targets import MACHINE_LABEL, Target
from strata.deploy.teams.scopes import run_name
from strata.platform import runs
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe

DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
# Namespaces of Kubernetes and of what the cluster guides install. Those of Kubernetes itself begin with kube-.
OTHERS_NAMESPACES = (
    "default",
    "kuberay",
    "istio-system",
    "monitoring",
    "gmp-system",
    "gke-gmp-system",
    "arms-prom",
    "kueue-system",
)
LOCAL_SCHEMES = ("", *models.LOCAL_SCHEMES)  # storage of a single machine or process
# [host[:port]/]path[:tag][@digest]
IMAGE = re.compile(r"([\w.-]+(:\d+)?/)?[a-z0-9][a-z0-9._/-]*(:(?P<tag>\w[\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?")


def refuse(recipe: Recipe, target: Target, parts: Collection[str], run: str, image: str) -> None:
    _names(recipe, run)
    _devices(recipe, target, parts)
    _image(image)
    _storage(recipe, target)
    models.refuse(recipe, parts)
    if "train" in parts:
        _training_files(recipe)
    if "serve" in parts:
        _shared_gpus(recipe)


def _names(recipe: Recipe, run: str) -> None:
    name, namespace = recipe.deploy.name, recipe.deploy.namespace
    shortest = run_name(name, "")  # of a job: the names of runs are shortened
    for kind, whole in (("RayJob", shortest), ("RayService", name), ("RayCluster", f"{name}-lab")):
        longest = LONGEST[kind]
        if len(whole) > longest:
            raise UserError(
                f"deploy.name={name}: the {kind} {whole} would have {len(whole)} characters; KubeRay allows {longest}.",
                "Set a shorter deploy.name.",
            )
    if not DNS_1035.fullmatch(name):
        raise UserError(
            f"deploy.name={name} is not a valid name of a Kubernetes service.",
            "Use lowercase letters, digits and '-', beginning with a letter and not ending with '-'.",
        )
    if name.endswith("-lab"):
        raise UserError(
            f"deploy.name={name}: its Services would be those of the lab of {name.removesuffix('-lab')}.",
            "Set a deploy.name that does not end in -lab.",
        )
    if not DNS_1123.fullmatch(namespace) or len(namespace) > 63:
        raise UserError(
            f"deploy.namespace={namespace} is not a valid name of a Kubernetes namespace.",
            "Use at most 63 lowercase letters, digits and '-', not beginning or ending with '-'.",
        )
    if namespace in OTHERS_NAMESPACES or namespace.startswith("kube-"):
        raise UserError(
            f"deploy.namespace={namespace} belongs to the cluster: Strata's policies and pod security would apply to its pods.",
            "Set a namespace of your team.",
        )
    if not runs.NAME.fullmatch(run):
        raise UserError(
            f"'{run}' is not a valid run name.",
            "Use at most 63 letters, digits, '.', '_' and '-', beginning with a letter or digit.",
        )


def _devices(recipe: Recipe, target: Target, parts: Collection[str]) -> None:
    devices = {"serve.device": recipe.serve.device} if "serve" in parts else {}
    if {"train", "lab"} & set(parts):
        devices["parallel.device"] = recipe.parallel.device
    for key, device in devices.items():
        if device == "gpu" and not target.gpus:
            raise UserError(f"{key}=gpu: {target.name} has no GPUs.", "Use a recipe for CPUs, such as laptop, or another target.")


def _image(image: str) -> None:
    found = IMAGE.fullmatch(image)
    if found is None:
        raise UserError(f"'{image}' is not a valid container image name.", "Use REPOSITORY:TAG or REPOSITORY@sha256:DIGEST.")
    if found["digest"] is None and found["tag"] in (None, "latest"):
        raise UserError(
            f"The image {image} has no fixed version: a restarted pod could run different code from the others.",
            "Use an immutable tag, such as a commit hash, or a digest.",
        )


def _storage(recipe: Recipe, target: Target) -> None:
    storage = recipe.deploy.storage
    if storage and not target.storage:
        raise UserError(f"deploy.storage={storage}: {target.name} has its own storage.", "Remove deploy.storage.")
    if storage and "/" in storage:
        raise UserError(f"deploy.storage={storage} is not the name of {target.storage}.", "Use only the name, without '/'.")


def _training_files(recipe: Recipe) -> None:
    checkpoints = recipe.train.checkpoints
    if checkpoints is not None and not _is_shared(checkpoints):
        raise UserError(
            f"train.checkpoints={checkpoints} is not shared storage: the folder is local to each pod and is deleted with it.",
            f"Remove it (the default is the run's folder under {STORE}), or set a path under {STORE} or a bucket (gs://, s3://).",
        )
    for number, one in enumerate(recipe.data.all_sets):
        key, place = ("path", one.path) if one.path else ("uri", one.uri)
        if place is not None and not _is_shared(str(place)):
            name = f"data.sets.{number}.{key}" if recipe.data.sets else f"data.{key}"
            raise UserError(
                f"{name}={place} is on this machine and not visible to pods.",
                f"Copy it to the shared storage and set {name}={STORE}/...",
            )
    template = recipe.data.chat_template
    if template is not None and not _is_shared(str(template)):
        raise UserError(
            f"data.chat_template={template} is on this machine and not visible to pods.",
            f"Copy it to the shared storage and set data.chat_template={STORE}/...",
        )


def _shared_gpus(recipe: Recipe) -> None:
    for name, pool in (("prefill", recipe.serve.prefill), ("decode", recipe.serve.decode)):
        if pool.sm_share is not None:
            raise UserError(
                f"serve.{name}.sm_share={pool.sm_share}: engines share a GPU's multiprocessors by CUDA MPS, whose daemon runs on "
                "the node, not in a pod.",
                f"Set serve.{name}.sm_share=null. Engines of one pool then time-share a GPU.",
            )


def _is_shared(place: str) -> bool:
    parts = urlsplit(place)
    if parts.scheme not in LOCAL_SCHEMES:
        return True
    path = PurePosixPath(parts.path)
    return parts.scheme != "memory" and ".." not in path.parts and path.is_relative_to(STORE)


def refuse_networks(recipe: Recipe, target: Target, groups: Mapping[str, Group], components: Collection[str]) -> None:
    """Rejects training on several GPU nodes over TCP, unless `deploy.network` allows it, and networks of other machines."""
    with_gpus = {name: group for name, group in groups.items() if group.gpus}
    chosen = next((component for component in components if component in networks.NETWORKS), None)
    if chosen is not None:
        _network_of_pods(chosen, recipe, target, with_gpus)
    elif recipe.deploy.network != networks.TCP:
        _fast_network(recipe, target, with_gpus)
    if networks.TOPOLOGY in components:
        _topology(groups, components)
    if networks.FABRIC_CHECK in components and "train" not in groups:
        raise UserError(f"The component {networks.FABRIC_CHECK} is for training, which is not rendered.", "Remove it.")


def _fast_network(recipe: Recipe, target: Target, groups: Mapping[str, Group]) -> None:
    training = next((groups[name] for name in ("train", "lab") if name in groups), None)
    if training is None or training.most < 2:
        return
    machine = training.selector[MACHINE_LABEL]
    known = networks.of_machine(target.name, machine)
    fast = f"Add --with {' or '.join(known)}" if known else f"{machine} has no faster network: choose another deploy.gpu"
    raise UserError(
        f"parallel.workers={recipe.parallel.workers} needs {training.most} nodes of {machine}, which NCCL would connect by TCP.",
        f"{fast}, or set deploy.network={networks.TCP} to train over TCP.",
    )


def _network_of_pods(name: str, recipe: Recipe, target: Target, groups: Mapping[str, Group]) -> None:
    network = networks.NETWORKS[name]
    if recipe.deploy.network == networks.TCP:
        raise UserError(f"deploy.network={networks.TCP} and the component {name} contradict each other.", "Remove one of them.")
    if recipe.deploy.rdma_resource and name not in networks.CHOSEN_BY_RECIPE:
        raise UserError(
            f"deploy.rdma_resource={recipe.deploy.rdma_resource}: the component {name} has a fixed resource or none.",
            f"Remove it, or use {' or '.join(networks.CHOSEN_BY_RECIPE)}.",
        )
    used_by = {key: group for key, group in groups.items() if network.engines or key in ("train", "lab")}
    if not used_by:
        raise UserError(f"The component {name} has no pods: it is for training on GPUs.", "Remove it.")
    for key, group in used_by.items():
        machine = group.selector[MACHINE_LABEL]
        if not network.is_of(machine):
            others = networks.of_machine(target.name, machine)
            fix = f"Use {' or '.join(others)}" if others else f"Remove it: {machine} has no fast network"
            raise UserError(
                f"The component {name} is not for the machine {machine} of {key}: {network.label} is of "
                f"{' and '.join(network.machines)}.",
                f"{fix}, or render parts on other machines separately (--only).",
            )
        if network.whole_nodes and group.gpus != group.node_gpus:
            wanted = "parallel.workers" if key in ("train", "lab") else f"serve.{key}.tensor_parallel"
            raise UserError(
                f"The component {name} gives all interfaces of a node to one pod, but a pod of {key} has {group.gpus} of "
                f"{group.node_gpus} GPUs.",
                f"Set {wanted}={group.node_gpus}, or render without it what needs no fast network (--only).",
            )


def _topology(groups: Mapping[str, Group], components: Collection[str]) -> None:
    if "kueue" not in components:
        raise UserError(f"The component {networks.TOPOLOGY} needs Kueue.", f"Use --with kueue,{networks.TOPOLOGY}.")
    if groups.keys() != {"train"} or not groups["train"].gpus:
        raise UserError(
            f"The component {networks.TOPOLOGY} is for training on GPUs: Kueue does not place autoscaled clusters by topology.",
            f"Set --only train; for the endpoint and the lab, use --with {networks.COMPACT}.",
        )
