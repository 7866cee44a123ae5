"""A hand-written CustomResourceDefinition for tests, and the folder of real ones where it is set."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(os.environ["STRATA_KUBERAY_CRDS"]) if os.environ.get("STRATA_KUBERAY_CRDS") else None


def needs(*files: str) -> pytest.MarkDecorator:
    missing = FOLDER is None or not all((FOLDER / f"{file}.yaml").is_file() for file in files)
    return pytest.mark.skipif(missing, reason="STRATA_KUBERAY_CRDS is not set to a folder with these CRDs ('make crds')")


def definition(spec: dict[str, Any], kind: str = "Box", group: str = "example.com", **versions: bool) -> str:
    """YAML of a CRD with this schema of `spec`. `versions`: names, and if each is served."""
    root = {
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {"type": "object", **spec},
        },
    }
    listed = [
        {"name": name, "served": served, "schema": {"openAPIV3Schema": root}}
        for name, served in (versions or {"v1": True}).items()
    ]
    return yaml.safe_dump(
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "spec": {"group": group, "names": {"kind": kind}, "versions": listed},
        }
    )


def box(spec: Any, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": "example.com/v1", "kind": "Box", "metadata": {"name": "a"}, "spec": spec, **fields}
