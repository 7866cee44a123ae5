"""Changes that the components for networks make to filled manifests."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from strata.deploy.documents import Document
from strata.deploy.layout import Group
from strata.deploy.networks import fabric_check, placement, pods
from strata.deploy.networks.facts import COMPACT, FABRIC_CHECK, NETWORKS, TOPOLOGY
from strata.platform.recipe import Recipe


def add(
    documents: list[Document], components: Sequence[Path], recipe: Recipe, target: str, groups: Mapping[str, Group], run: str
) -> list[Document]:
    """`components` are the folders of the chosen components. Changes the documents in place and returns them with new ones."""
    fabric = None
    names = {folder.name for folder in components}
    for folder in components:
        if folder.name in NETWORKS:
            pods.add(documents, folder, recipe, groups)
            fabric = NETWORKS[folder.name].fabric
    if TOPOLOGY in names:
        documents = placement.add_topology(documents, target, groups)
    if COMPACT in names:
        placement.add_compact(documents, target, groups)
    if FABRIC_CHECK in names:
        fabric_check.add(documents, run, fabric)
    return documents
