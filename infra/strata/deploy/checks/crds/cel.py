"""CEL rules of CRDs (x-kubernetes-validations), evaluated as for a new object: rules about changes are skipped."""

import importlib.util
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from strata.deploy.documents import Document
from strata.deploy.problem import Finding

# Words of CEL and characters that cannot be in its identifiers; Kubernetes escapes them in field names.
RESERVED = re.compile(
    "true|false|null|in|as|break|const|continue|else|for|function|if|import|let|loop|package|namespace|return|var|void|while"
)
ESCAPES = (("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__"))


def is_available() -> bool:
    return importlib.util.find_spec("cel_expr_python") is not None


def findings(schema: Document, value: Any) -> Iterator[Finding]:
    """Violated rules of a value and of everything in it. The value has the schema's types and defaults."""
    for path, rule, escaped in _rules(schema, value, ""):
        if _program(rule["rule"]) is not None and (reason := _violation(rule, escaped)) is not None:
            yield Finding((path + rule.get("fieldPath", "")).lstrip("."), reason)


def unsupported(schema: Document, value: Any) -> list[str]:
    """Rules about a value that use functions which only Kubernetes has. They are not evaluated."""
    return sorted({rule["rule"] for _, rule, _ in _rules(schema, value, "") if _program(rule["rule"]) is None})


def _rules(schema: Document, value: Any, path: str) -> Iterator[tuple[str, Document, Any]]:
    """(path, rule, value of `self`) for each rule about a new value."""
    rules = [rule for rule in schema.get("x-kubernetes-validations") or [] if not re.search(r"\boldSelf\b", rule["rule"])]
    escaped = _escaped(schema, value) if rules else None
    yield from ((path, rule, escaped) for rule in rules)
    if isinstance(value, dict):
        properties, others = schema.get("properties") or {}, schema.get("additionalProperties")
        for name, each in value.items():
            below = properties.get(name, others)
            if isinstance(below, dict):
                yield from _rules(below, each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _rules(schema.get("items") or {}, item, f"{path}[{i}]")


def _violation(rule: Document, value: Any) -> str | None:
    """Message of a violated rule. A rule that fails on the value, such as by a missing key, is violated too."""
    from cel_expr_python import cel

    outcome = _program(rule["rule"]).eval(data={"self": value})
    if outcome.type() == cel.Type.BOOL and outcome.value():
        return None
    if outcome.type() != cel.Type.BOOL:
        return f"violates '{rule['rule']}': {outcome.value()}"
    expression = _program(rule["messageExpression"]) if "messageExpression" in rule else None
    if expression is not None:
        message = expression.eval(data={"self": value})
        if message.type() == cel.Type.STRING:
            return str(message.value())
    return str(rule.get("message") or f"violates '{rule['rule']}'")


@lru_cache(maxsize=1024)
def _program(expression: str) -> Any:
    """Compiled expression; None if it uses a function that is not defined here."""
    try:
        return _environment().compile(expression)
    except RuntimeError:
        return None


@lru_cache(maxsize=1)
def _environment() -> Any:
    from cel_expr_python import cel
    from cel_expr_python.ext import ext_strings

    text, boolean = cel.Type.STRING, cel.Type.BOOL
    is_url = cel.Overload("is_url", return_type=boolean, parameters=[text], is_member=False, impl=_is_url)
    return cel.NewEnv(
        variables={"self": cel.Type.DYN},
        extensions=[ext_strings.ExtStrings()],
        functions=[cel.FunctionDecl("isURL", [is_url])],
    )


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return bool(parts.scheme and (parts.netloc or parts.path.startswith("/")))


def _escaped(schema: Document, value: Any) -> Any:
    """Value with its declared field names written as CEL identifiers; keys of maps are unchanged."""
    if isinstance(value, list):
        return [_escaped(schema.get("items") or {}, item) for item in value]
    if not isinstance(value, dict):
        return value
    properties, others = schema.get("properties") or {}, schema.get("additionalProperties")
    return {
        _identifier(name) if name in properties else name: _escaped(
            properties.get(name) or (others if isinstance(others, dict) else {}), each
        )
        for name, each in value.items()
    }


def _identifier(name: str) -> str:
    if RESERVED.fullmatch(name):
        return f"__{name}__"
    for text, escape in ESCAPES:
        name = name.replace(text, escape)
    return name
