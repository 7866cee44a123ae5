"""What cannot work on a cluster and can be seen from the recipe alone, refused with the reason."""

import re
from collections.abc import Collection
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from strata.deploy.kuberay.rules import DNS_1035, LONGEST
from strata.deploy.names import NAME_ENDS, STORE
from strata.deploy.targets import Target
from strata.platform import runs
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe

HERE_ALONE = ("", "file", "local", "memory")  # schemes of storage that one machine, or one process, has to itself
# As in [host[:port]/]path[:tag][@digest].
IMAGE = re.compile(r"([\w.-]+(:\d+)?/)?[a-z0-9][a-z0-9._/-]*(:(?P<tag>\w[\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?")


def refuse(recipe: Recipe, target: Target, parts: Collection[str], run: str, image: str) -> None:
    _names(recipe, run)
    _devices(recipe, target, parts)
    _image(image)
    _storage(recipe, target)
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
                f"deploy.name={name}: the {kind} would be {whole}, of {len(whole)} characters; KubeRay takes {longest}.",
                "Choose a shorter name.",
            )
    if not DNS_1035.fullmatch(name):
        raise UserError(
            f"deploy.name={name} cannot name a Kubernetes service.",
            "Use small letters, digits and '-', a letter first and no '-' last.",
        )
    if not runs.NAME.fullmatch(run):
        raise UserError(
            f"'{run}' cannot name a run.", "Use letters, digits, '.', '_' and '-', at most 63, a letter or digit first."
        )


def _devices(recipe: Recipe, target: Target, parts: Collection[str]) -> None:
    devices = {"serve.device": recipe.serve.device} if "serve" in parts else {}
    if {"train", "lab"} & set(parts):
        devices["parallel.device"] = recipe.parallel.device
    for key, device in devices.items():
        if device == "gpu" and not target.gpus:
            raise UserError(
                f"{key}=gpu: {target.name} has no GPUs.", "Choose a recipe for CPUs, such as laptop, or another target."
            )


def _image(image: str) -> None:
    found = IMAGE.fullmatch(image)
    if found is None:
        raise UserError(f"'{image}' is not the name of a container image.", "Give REPOSITORY:TAG, or REPOSITORY@sha256:DIGEST.")
    if found["digest"] is None and found["tag"] in (None, "latest"):
        raise UserError(
            f"The image {image} may be another one tomorrow, and a pod that restarts would then run other code than its peers.",
            "Give a tag that stays, such as the commit's, or a digest.",
        )


def _storage(recipe: Recipe, target: Target) -> None:
    storage = recipe.deploy.storage
    if storage and not target.storage:
        raise UserError(f"deploy.storage={storage}: {target.name} brings its own storage.", "Leave deploy.storage out.")
    if storage and "/" in storage:
        raise UserError(f"deploy.storage={storage} is not the name of {target.storage}.", "Give the name alone, with no '/'.")


def _training_files(recipe: Recipe) -> None:
    checkpoints = recipe.train.checkpoints
    if checkpoints is not None and not _is_shared(checkpoints):
        raise UserError(
            f"train.checkpoints={checkpoints} is not shared storage: each pod has another folder of that name, "
            "and loses it when it goes.",
            f"Leave it out (then they are in the run's folder under {STORE}), or give a path there or a bucket (gs://, s3://).",
        )
    data = recipe.data.path
    if data is not None and not _is_shared(str(data)):
        raise UserError(
            f"data.path={data} is a folder of this machine, which no pod sees.",
            f"Copy it to the shared storage and give {STORE}/...",
        )


def _shared_gpus(recipe: Recipe) -> None:
    for name, pool in (("prefill", recipe.serve.prefill), ("decode", recipe.serve.decode)):
        if pool.sm_share is not None:
            raise UserError(
                f"serve.{name}.sm_share={pool.sm_share}: engines share a GPU's multiprocessors by CUDA MPS, whose daemon is the "
                "node's there, not a pod's.",
                f"Leave it out: serve.{name}.sm_share=null. Engines of one kind then take turns on a GPU they share.",
            )


def _is_shared(place: str) -> bool:
    parts = urlsplit(place)
    if parts.scheme not in HERE_ALONE:
        return True
    path = PurePosixPath(parts.path)
    return parts.scheme != "memory" and ".." not in path.parts and path.is_relative_to(STORE)
