"""Schema validation: Kubernetes objects by kubernetes-validate, Ray objects by the KubeRay CRDs. Unknown fields are errors."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

from strata.deploy.documents import Document
from strata.deploy.problem import Finding, dotted
from strata.platform.errors import UserError

RAY_GROUP = "ray.io/"
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}


@lru_cache(maxsize=256)
def kubernetes_has(api_version: str, kind: str) -> bool:
    """True for built-in kinds of Kubernetes. Other kinds (monitors, queues) have no schema here."""
    import kubernetes_validate

    try:
        kubernetes_validate.validate({"apiVersion": api_version, "kind": kind}, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return False
    except kubernetes_validate.ValidationError:
        pass
    return True


def of_kubernetes(document: Document) -> Iterator[Finding]:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        yield Finding(dotted(error.absolute_path), error.message)


def of_kuberay(document: Document, crds: Path) -> Iterator[Finding]:
    validator = _validators(crds).get((document["apiVersion"], document["kind"]))
    if validator is None:
        yield Finding("kind", f"{document['apiVersion']} {document['kind']} is not defined by the CRDs in {crds}")
        return
    for error in sorted(validator.iter_errors(document), key=lambda error: dotted(error.absolute_path)):
        yield Finding(dotted(error.absolute_path), error.message)


@lru_cache(maxsize=4)
def _validators(crds: Path) -> dict[tuple[str, str], Any]:
    validators = {}
    for file in sorted(crds.glob("*.yaml")):
        definition = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
        spec = definition["spec"]
        for version in spec["versions"]:
            if version["served"]:
                schema = _strict(version["schema"]["openAPIV3Schema"])
                # The CRDs omit the schema of metadata, which the server adds.
                schema["properties"]["metadata"] = {"type": "object", "properties": {"labels": STRINGS, "annotations": STRINGS}}
                validators[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = _Validator(schema)
    if not validators:
        raise UserError(f"There are no CRDs in {crds}.", "Run 'make crds', or set --crds or STRATA_KUBERAY_CRDS to their folder.")
    return validators


def _strict(schema: Any) -> Any:
    """Schema that forbids unknown fields. The server drops them without a message."""
    if not isinstance(schema, dict):
        return schema
    strict = dict(schema)
    for key in ("properties", "patternProperties"):
        if key in strict:
            strict[key] = {name: _strict(below) for name, below in strict[key].items()}
    for key in ("items", "additionalProperties", "not"):
        if key in strict:
            strict[key] = _strict(strict[key])
    # Branches of anyOf, oneOf and allOf only narrow the schema's own fields, so they must not forbid the others.
    if strict.get("x-kubernetes-int-or-string") and "anyOf" not in strict:
        strict["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in strict and not strict.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    if strict.get("nullable") and "type" in strict:
        strict["type"] = [strict["type"], "null"]
    return strict


def _distinct_keys(_: Any, keys: list[str], items: Any, schema: Document) -> Iterator[ValidationError]:
    """Validates Kubernetes list maps: no two items may have the same keys, with defaults applied."""
    if not isinstance(items, list):
        return
    known = (schema.get("items") or {}).get("properties") or {}
    seen = set()
    for i, item in enumerate(items):
        if isinstance(item, dict):
            key = tuple(str(item.get(name, known.get(name, {}).get("default"))) for name in keys)
            if key in seen:
                yield ValidationError(f"{dict(zip(keys, key, strict=True))} occurs twice", path=[i])
            seen.add(key)


_Validator = extend(Draft202012Validator, {"x-kubernetes-list-map-keys": _distinct_keys})
