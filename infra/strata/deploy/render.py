"""From a recipe and a target to the objects that Kubernetes is given."""

import difflib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import yaml

from strata.deploy import kubectl, layout, names, refusals, targets
from strata.deploy.documents import Document, part, read, title, write
from strata.deploy.fill import fill
from strata.platform.errors import UserError
from strata.platform.files import write_atomic
from strata.platform.recipe import Recipe

EXCLUDE_EACH_OTHER = {
    ("volcano", "kueue"): "each would have jobs wait for the other's leave",
    ("dcgm", "nvml"): "both would count the same GPUs",
    ("monitoring", "monitoring-gke", "monitoring-arms"): "both would scrape the same pods",
}
NO_NVIDIA_RUNTIME = "GKE shows a GPU only to the pod that has it, and runs NVIDIA's exporter itself (--monitoring=SYSTEM,DCGM)"
# Components for some targets only: which, and why not for the others.
ONLY_ON = {
    "monitoring-gke": (("gke",), "it is for Google's managed Prometheus"),
    "monitoring-arms": (("ack",), "it is for Alibaba Cloud's managed Prometheus"),
    "dcgm": (("ack", "kind"), NO_NVIDIA_RUNTIME),
    "nvml": (("ack", "kind"), NO_NVIDIA_RUNTIME),
}
HEADER = "# By 'strata deploy render': rendering again overwrites it.\n"


@dataclass(frozen=True)
class Order:
    """What to render: `only` one of the parts beside what is common to all, or all of them."""

    target: str
    recipe: Recipe
    run: str
    components: tuple[str, ...] = ()
    only: str | None = None
    image: str | None = None


def render(order: Order) -> list[Document]:
    target = targets.find(order.target)
    parts = _parts(order.only)
    _refuse_components(order.components, target.name)
    image = order.image or order.recipe.deploy.image or _own_image(order.recipe, parts)
    refusals.refuse(order.recipe, target, parts, order.run, image)
    groups = layout.plan(order.recipe, target, parts)
    built = build(manifests_dir() / "overlays" / target.name, order.components, image)
    left_out = set(names.PARTS) - set(parts)
    return fill([document for document in built if part(document) not in left_out], order.recipe, groups, order.run)


def unsaid(order: Order) -> list[str]:
    """What a cluster in a cloud needs and neither recipe nor order say: good enough to read and check, not to apply."""
    target = targets.find(order.target)
    found = []
    if target.storage and not order.recipe.deploy.storage:
        found.append(f"deploy.storage does not name {target.storage}")
    if target.storage and not (order.image or order.recipe.deploy.image):
        found.append("no image is named (--image REPOSITORY:TAG, or deploy.image)")
    return found


def _own_image(recipe: Recipe, parts: Sequence[str]) -> str:
    """As the Dockerfile's targets are tagged by who builds them here."""
    devices = {recipe.serve.device if part == "serve" else recipe.parallel.device for part in parts}
    return f"{names.IMAGE}:{version('strata')}-{'gpu' if 'gpu' in devices else 'cpu'}"


def build(overlay: Path, components: Sequence[str], image: str) -> list[Document]:
    """`kubectl kustomize` of an overlay with components added. Its paths must be relative, and links resolved."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        added = [manifests_dir() / "components" / component for component in components]
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [os.path.relpath(overlay.resolve(), folder)],
            "components": [os.path.relpath(path.resolve(), folder) for path in added],
            "images": [{"name": names.IMAGE, **_image_parts(image)}],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return read(kubectl.run_or_refuse(["kustomize", str(folder)]))


def manifests_dir() -> Path:
    """In a wheel the manifests lie inside this package; in a checkout two folders up, where people look for them."""
    packaged = Path(__file__).parent / "manifests"
    return packaged if packaged.is_dir() else Path(__file__).parents[2]


def components_known() -> list[str]:
    return sorted(path.parent.name for path in (manifests_dir() / "components").glob("*/kustomization.yaml"))


def write_to(place: Path, documents: list[Document]) -> list[Path]:
    """One file for a name that ends in .yaml, else a folder with one for each object. Files of a former rendering go."""
    if place.suffix in (".yaml", ".yml"):
        write_atomic(place, HEADER + write(documents))
        return [place]
    if place.is_file():
        raise UserError(f"{place} is a file.", "Give a folder, or a name that ends in .yaml.")
    files = {place / file_name(document): document for document in documents}
    for old in place.glob("*.yaml"):
        if old not in files and old.read_text().startswith(HEADER):
            old.unlink()
    for path, document in files.items():
        write_atomic(path, HEADER + write([document]))
    return list(files)


def file_name(document: Document) -> str:
    return title(document).lower().replace("/", "-") + ".yaml"


def _parts(only: str | None) -> tuple[str, ...]:
    if only is None:
        return names.PARTS
    if only not in names.PARTS:
        raise UserError(f"There is no part '{only}'.", f"Parts: {', '.join(names.PARTS)}.")
    return (only,)


def _refuse_components(components: Sequence[str], target: str) -> None:
    known = components_known()
    for component in components:
        if component not in known:
            near = difflib.get_close_matches(component, known, n=1)
            hint = f"Did you mean '{near[0]}'? " if near else ""
            raise UserError(f"There is no component '{component}'.", f"{hint}Components: {', '.join(known)}.")
    for rivals, reason in EXCLUDE_EACH_OTHER.items():
        chosen = [component for component in rivals if component in components]
        if len(chosen) > 1:
            raise UserError(f"{' and '.join(chosen)} exclude each other: {reason}.", "Choose one.")
    for component in components:
        targets_of_it, reason = ONLY_ON.get(component, ((target,), ""))
        if target not in targets_of_it:
            raise UserError(f"The component {component} is not for {target}: {reason}.", "Leave it out.")


def _image_parts(image: str) -> dict[str, str]:
    name, _, digest = image.partition("@")
    if digest:
        return {"newName": name.rpartition(":")[0] if ":" in name.rpartition("/")[2] else name, "digest": digest}
    name, _, tag = image.rpartition(":")
    return {"newName": name, "newTag": tag}
