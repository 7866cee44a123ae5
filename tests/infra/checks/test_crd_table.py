"""The table of definitions that `make crds` fetches, and the script that fetches them."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from support import ROOT

from strata.deploy.checks import core

TABLE = [line.split() for line in (ROOT / "infra/crds.txt").read_text().splitlines() if not line.startswith("#")]
FILES = [name for _, _, _, *names in TABLE for name in names]


def test_every_kind_in_the_manifests_has_a_schema() -> None:
    rendered = set()
    for file in (ROOT / "infra").glob("*/*/*.yaml"):
        for document in yaml.load_all(file.read_text(), Loader=yaml.CSafeLoader):
            if isinstance(document, dict) and isinstance(document.get("kind"), str) and "apiVersion" in document:
                rendered.add((document["apiVersion"], document["kind"]))
    rendered = {(version, kind) for version, kind in rendered if not version.startswith("kustomize.config.k8s.io/")}
    assert ("ray.io/v1", "RayJob") in rendered
    for version, kind in rendered:
        file = f"{version.rpartition('/')[0]}_{plural(kind)}"
        assert core.knows(version, kind) or file in FILES, f"infra/crds.txt has no definition of {version} {kind}"


def plural(kind: str) -> str:
    """Name of a kind's objects in URLs and file names."""
    name = kind.lower()
    if name.endswith("rules"):
        return name
    if name.endswith("y") and name[-2] not in "aeiou":
        return name[:-1] + "ies"
    return name + ("es" if name.endswith("s") else "s")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("RayJob", "rayjobs"),
        ("Topology", "topologies"),
        ("Gateway", "gateways"),
        ("WorkloadPriorityClass", "workloadpriorityclasses"),
        ("ClusterRules", "clusterrules"),
    ],
)
def test_plurals(kind: str, name: str) -> None:
    assert plural(kind) == name


def test_each_definition_is_listed_once_at_a_pinned_version() -> None:
    assert len(set(FILES)) == len(FILES)
    for version, repository, folder, *names in TABLE:
        assert version.startswith("v") and repository.count("/") == 1 and not folder.startswith("/") and names


@pytest.fixture
def fetch(tmp_path: Path) -> list[str]:
    """Runs the script with a curl that writes each URL into its output file, and fails on one that contains FAIL."""
    curl = tmp_path / "bin" / "curl"
    curl.parent.mkdir()
    curl.write_text(
        """#!/usr/bin/env bash
while read -r key _ value; do
  value=${value//\\"/}
  if [ "$key" = url ]; then url=$value; else echo "$url" > "$value"; fi
  if [ -n "${FAIL:-}" ] && [[ "$value" == *"$FAIL"* ]]; then exit 22; fi
done
"""
    )
    curl.chmod(0o755)
    return ["env", f"PATH={curl.parent}:{os.environ['PATH']}", str(ROOT / "infra/fetch-crds"), str(tmp_path / "crds")]


def test_the_script_fetches_every_definition(fetch: list[str], tmp_path: Path) -> None:
    subprocess.run(fetch, check=True)
    assert sorted(file.stem for file in (tmp_path / "crds").iterdir()) == sorted(FILES)
    url = (tmp_path / "crds" / "ray.io_rayjobs.yaml").read_text().strip()
    assert url == "https://raw.githubusercontent.com/ray-project/kuberay/v1.7.0/ray-operator/config/crd/bases/ray.io_rayjobs.yaml"


def test_a_failed_fetch_leaves_the_folder_as_it_was(fetch: list[str], tmp_path: Path) -> None:
    result = subprocess.run(fetch, env={**os.environ, "FAIL": "localqueues"})
    assert result.returncode == 22
    assert list((tmp_path / "crds").iterdir()) == []
