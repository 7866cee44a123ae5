"""Rejects recipes that cannot work on a cluster, with the reason and the fix."""

import re
from collections.abc import Collection
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from strata.deploy.addons import models
from strata.deploy.kuberay.rules import DNS_1035, LONGEST
from strata.deploy.names import NAME_ENDS, STORE
from strata.deploy.targets import Target
from strata.platform import runs
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe

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
    name = recipe.deploy.name
    for kind, end in NAME_ENDS.items():
        whole, longest = name + end, LONGEST[kind]
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
