"""Validation by the structural schema of a CRD, as an API server does it with fieldValidation=Strict."""

from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

from strata.deploy.checks import patterns
from strata.deploy.documents import Document
from strata.deploy.problem import Finding, dotted

STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
# The server adds the schema of metadata, which CRDs omit. Fields that only the server sets may have any value.
METADATA = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in ("name", "generateName", "namespace", "uid", "resourceVersion", "selfLink")},
        **{name: {} for name in ("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")},
        **{name: {"type": "array"} for name in ("finalizers", "ownerReferences", "managedFields")},
        "labels": STRINGS,
        "annotations": STRINGS,
    },
    "additionalProperties": False,
}
INTEGERS = {"int32": 2**31, "int64": 2**63}


def validator(schema: Document) -> Any:
    """Validator of a whole object by its CRD's schema."""
    strict = _strict(schema)
    strict["properties"] = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}} | strict.get("properties", {})
    strict["properties"]["metadata"] = METADATA
    strict.setdefault("additionalProperties", False)
    return _Validator(strict)


def findings(validator: Any, document: Document) -> Iterator[Finding]:
    yield from sorted((Finding(dotted(error.absolute_path), error.message) for error in validator.iter_errors(document)), key=str)


def defaulted(schema: Document, value: Any) -> Any:
    """Value with the schema's defaults, and without the nulls that the server drops: those of fields that are not nullable."""
    if isinstance(value, list):
        return [defaulted(schema.get("items") or {}, item) for item in value]
    if not isinstance(value, dict):
        return value
    properties, others = schema.get("properties") or {}, schema.get("additionalProperties")
    below = {name: properties.get(name, others if isinstance(others, dict) else {}) for name in {**value, **properties}}
    dropped = {name for name, each in value.items() if each is None and name in properties and not below[name].get("nullable")}
    present = {name: each for name, each in value.items() if name not in dropped}
    missing = {name: each["default"] for name, each in properties.items() if name not in present and "default" in each}
    return {name: defaulted(below[name], each) for name, each in (present | missing).items()}


def _strict(schema: Any) -> Any:
    """Schema that forbids unknown fields."""
    if not isinstance(schema, dict):
        return schema
    strict = dict(schema)
    if "properties" in strict:
        strict["properties"] = {name: _strict(below) for name, below in strict["properties"].items()}
    for key in ("items", "additionalProperties", "not"):
        if key in strict:
            strict[key] = _strict(strict[key])
    # Branches of anyOf, oneOf and allOf only narrow the schema's own fields, so they must not forbid the others.
    if strict.get("x-kubernetes-int-or-string") and "anyOf" not in strict:
        strict["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if strict.get("x-kubernetes-embedded-resource"):
        strict["properties"] = strict.get("properties", {}) | {"apiVersion": {}, "kind": {}, "metadata": METADATA}
    if strict.get("type") == "object" and not strict.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    for bound, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        flag = strict.get(bound)
        if isinstance(flag, bool):  # OpenAPI 3.0 has a flag where JSON Schema has a number
            del strict[bound]
            strict |= {bound: strict.pop(limit)} if flag else {}
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


def _distinct_items(_: Any, kind: str, items: Any, schema: Document) -> Iterator[ValidationError]:
    if kind == "set" and isinstance(items, list):
        for i, item in enumerate(items):
            if item in items[:i]:
                yield ValidationError(f"{item!r} occurs twice", path=[i])


def _integer_range(_: Any, name: str, value: Any, schema: Document) -> Iterator[ValidationError]:
    limit = INTEGERS.get(name)
    if limit is not None and isinstance(value, int) and not -limit <= value < limit:
        yield ValidationError(f"{value} is out of the range of {name}")


def _matches(_: Any, pattern: str, value: Any, schema: Document) -> Iterator[ValidationError]:
    if isinstance(value, str) and not patterns.compiled(pattern).search(value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


_Validator = extend(
    Draft202012Validator,
    {
        "x-kubernetes-list-map-keys": _distinct_keys,
        "x-kubernetes-list-type": _distinct_items,
        "format": _integer_range,
        "pattern": _matches,
    },
)
