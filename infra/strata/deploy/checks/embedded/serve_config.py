"""serveConfigV2 of RayServices: Ray Serve's own schema, unknown fields, and the arguments of Strata's application.

KubeRay passes the text on to Ray Serve without reading it, so an error in it shows only after the cluster has started.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import yaml

from strata.deploy.checks.embedded import mounts, recipes
from strata.deploy.documents import Document, StrictLoader, cluster_spec, pod_templates
from strata.deploy.problem import Finding, dotted

FIELD = "spec.serveConfigV2"
OURS = "strata."
ROUTE = re.compile(r"/|(/[^/{}]+)+")  # Ray Serve checks it only when it deploys the application


def findings(documents: list[Document]) -> Iterator[tuple[Document, Finding]]:
    for document in documents:
        if document["kind"] != "RayService" or cluster_spec(document) is None:
            continue
        text = document["spec"].get("serveConfigV2")
        if text is None:
            yield document, Finding(FIELD, "is not set: the service has no application")
        else:
            yield from ((document, finding.below(FIELD)) for finding in _findings(text, document, documents))


def _findings(text: str, document: Document, documents: list[Document]) -> Iterator[Finding]:
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    try:
        config = yaml.load(text, Loader=StrictLoader)
    except yaml.YAMLError as error:
        yield Finding("", f"is not valid YAML: {' '.join(str(error).split())}")
        return
    if not isinstance(config, dict):
        yield Finding("", "is not a mapping with 'applications'")
        return
    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        for each in error.errors():
            yield Finding(dotted(each["loc"]), each["msg"])
        return
    yield from _unknown(ServeDeploySchema, config, "")
    if not config["applications"]:
        yield Finding("applications", "must not be empty")
    for i, application in enumerate(config["applications"]):
        yield from (finding.below(f"applications[{i}]") for finding in _application(application, document, documents))


def _unknown(model: Any, value: Document, path: str) -> Iterator[Finding]:
    """Fields that Ray Serve does not know. It ignores them, so that newer configurations work with older versions."""
    for name, each in value.items():
        field = model.model_fields.get(name)
        below = f"{path}.{name}" if path else name
        if field is None:
            yield Finding(below, "is not a field of Ray Serve's schema")
            continue
        inside = _model(field.annotation)
        if inside is not None and isinstance(each, dict):
            yield from _unknown(inside, each, below)
        elif inside is not None and isinstance(each, list):
            for i, item in enumerate(each):
                if isinstance(item, dict):
                    yield from _unknown(inside, item, f"{below}[{i}]")


def _model(annotation: Any) -> Any:
    """The pydantic model in an annotation such as Optional[Model] or List[Model]; None if it also allows plain dictionaries."""
    from pydantic import BaseModel

    found: list[Any] = []
    remaining = [annotation]
    while remaining:
        each = remaining.pop()
        origin = getattr(each, "__origin__", each)
        if origin is dict or each is Any:
            return None
        if isinstance(each, type) and issubclass(each, BaseModel):
            found.append(each)
        else:
            remaining += get_args(each)
    return found[0] if len(found) == 1 else None


def _application(application: Document, document: Document, documents: list[Document]) -> Iterator[Finding]:
    prefix = application.get("route_prefix")
    if prefix is not None and not ROUTE.fullmatch(prefix):
        yield Finding("route_prefix", f"'{prefix}' is not a route: it begins with '/', does not end with it, and has no braces")
    module, _, name = application["import_path"].replace(":", ".").rpartition(".")
    if not module.startswith(OURS):
        return
    parameters = _parameters(module, name)
    if parameters is None:
        yield Finding("import_path", f"Strata has no {application['import_path']}")
        return
    given = application.get("args") or {}
    for missing in [key for key, required in parameters.items() if required and given.get(key) in (None, "")]:
        yield Finding(f"args.{missing}", "is not set")
    for key in given:
        if key not in parameters:
            yield Finding(f"args.{key}", f"is not an argument of {name}: {', '.join(parameters)}")
    for key in ("recipe", "model"):
        value = given.get(key)
        if value and not isinstance(value, str):
            yield Finding(f"args.{key}", "is not a text")
            return
    yield from _files(given, document, documents)


def _files(given: Document, document: Document, documents: list[Document]) -> Iterator[Finding]:
    """Requires that every pod sees the recipe and the model, because any of them may build or run the application."""
    for _, template in pod_templates(document):
        reason = recipes.readable(given["recipe"], template, document, documents) if given.get("recipe") else None
        if reason is not None:
            yield Finding("args.recipe", reason)
            break
    model = given.get("model") or ""
    for _, template in pod_templates(document):
        container = template["spec"]["containers"][0]
        if model.startswith("/") and not mounts.is_mounted(container, model):
            yield Finding("args.model", f"no volume is mounted at {model} in the container {container['name']}")
            break


@lru_cache(maxsize=8)
def _parameters(module: str, function: str) -> dict[str, bool] | None:
    """Arguments of an application builder, and if each is required; None if there is no such builder. The source is read, because
    importing it would load an engine."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    if found is None or found.origin is None:
        return None
    body = ast.parse(Path(found.origin).read_text()).body
    builder = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == function), None)
    if builder is None:
        return None
    annotation = builder.args.args[0].annotation if builder.args.args else None
    model = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == getattr(annotation, "id", "")), None)
    fields = [node for node in (model.body if model else []) if isinstance(node, ast.AnnAssign)]
    return {node.target.id: node.value is None for node in fields if isinstance(node.target, ast.Name)}
