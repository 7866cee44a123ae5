"""serveConfigV2 of RayServices: Ray Serve's schema, unknown fields, and the arguments of Strata's application."""

import copy
from typing import Any

import pytest
import yaml

from strata.deploy.checks.embedded import serve_config

Document = dict[str, Any]

APPLICATION = {
    "name": "strata",
    "import_path": "strata.serving.runtime.kuberay_app:application",
    "args": {"recipe": "/etc/strata/recipe.yaml", "model": "/mnt/strata/runs/demo/export"},
}
CONFIG: Document = {"proxy_location": "Disabled", "applications": [APPLICATION]}
MOUNTS = [{"name": "recipe", "mountPath": "/etc/strata"}, {"name": "store", "mountPath": "/mnt/strata"}]


def service(config: Any, worker_mounts: list[Document] = MOUNTS, data: tuple[str, ...] = ("recipe.yaml",)) -> list[Document]:
    def pod(mounts: list[Document]) -> Document:
        volumes = [{"name": "recipe", "configMap": {"name": "m"}}, {"name": "store", "nfs": {}}]
        return {"template": {"spec": {"containers": [{"name": "c", "volumeMounts": mounts}], "volumes": volumes}}}

    cluster = {"headGroupSpec": pod(MOUNTS), "workerGroupSpecs": [{"groupName": "g", **pod(worker_mounts)}]}
    text = config if isinstance(config, str) else yaml.safe_dump(config)
    return [
        {"kind": "RayService", "metadata": {"name": "s"}, "spec": {"serveConfigV2": text, "rayClusterConfig": cluster}},
        {"kind": "ConfigMap", "metadata": {"name": "m"}, "data": dict.fromkeys(data, "")},
    ]


def found(documents: list[Document]) -> list[tuple[str, str]]:
    return [(finding.path, finding.message) for _, finding in serve_config.findings(documents)]


def changed(path: str, value: Any) -> Document:
    """The configuration with one key set, or removed by None."""
    config = copy.deepcopy(CONFIG)
    *steps, last = (int(step) if step.isdecimal() else step for step in path.split("."))
    node: Any = config
    for step in steps:
        node = node[step]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return config


def test_our_configuration_is_valid() -> None:
    assert found(service(CONFIG)) == []


SECOND = {"name": "other", "import_path": "other.app:build", "route_prefix": "/other"}


@pytest.mark.parametrize(
    ("path", "value", "where", "message"),
    [
        ("applications", None, "applications", "Field required"),
        ("applications", "x", "applications", "list"),
        ("applications", [], "applications", "must not be empty"),
        ("proxy_location", "Nowhere", "proxy_location", "Input should be"),
        ("proxy_locaton", "Disabled", "proxy_locaton", "is not a field"),
        ("http_options", {"prot": 1}, "http_options.prot", "is not a field"),
        ("http_options", {"port": "x"}, "http_options.port", "integer"),
        ("applications.0.import_path", None, "applications[0].import_path", "Field required"),
        ("applications.0.import_path", "noattribute", "applications[0].import_path", "import path"),
        ("applications.0.name", "", "applications", "nonempty"),
        ("applications.0.rout_prefix", "/", "applications[0].rout_prefix", "is not a field"),
        ("applications.0.route_prefix", "x", "applications[0].route_prefix", "is not a route"),
        ("applications.0.route_prefix", "/x/", "applications[0].route_prefix", "is not a route"),
        ("applications.0.route_prefix", "/{x}", "applications[0].route_prefix", "is not a route"),
        ("applications.0.args", "x", "applications[0].args", "dictionary"),
        (
            "applications.0.deployments",
            [{"name": "d", "num_replica": 1}],
            "applications[0].deployments[0].num_replica",
            "not a field",
        ),
        ("applications", [APPLICATION, {**SECOND, "name": "strata"}], "applications", "multiple configs"),
        ("applications", [APPLICATION, {**SECOND, "route_prefix": "/"}], "applications", "route prefix"),
        ("applications.0.import_path", "strata.serving.runtime.kuberay_ap:application", "applications[0].import_path", "has no"),
        ("applications.0.import_path", "strata.serving.runtime.kuberay_app:app", "applications[0].import_path", "has no"),
        ("applications.0.args.recipe", None, "applications[0].args.recipe", "is not set"),
        ("applications.0.args.model", None, "applications[0].args.model", "is not set"),
        ("applications.0.args.model", "", "applications[0].args.model", "is not set"),
        ("applications.0.args.models", "x", "applications[0].args.models", "is not an argument of application"),
        ("applications.0.args.recipe", 1, "applications[0].args.recipe", "is not a text"),
        ("applications.0.args.recipe", "/etc/strata/other.yaml", "applications[0].args.recipe", "has no file other.yaml"),
        ("applications.0.args.recipe", "/opt/recipe.yaml", "applications[0].args.recipe", "no volume is mounted"),
        ("applications.0.args.recipe", "8xh1000", "applications[0].args.recipe", "no built-in recipe"),
        ("applications.0.args.model", "/opt/model", "applications[0].args.model", "no volume is mounted at /opt/model"),
    ],
)
def test_broken_configurations(path: str, value: Any, where: str, message: str) -> None:
    [(at, text)] = found(service(changed(path, value)))
    assert at == f"spec.serveConfigV2.{where}"
    assert message in text


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("applications.0.args.model", "organisation/model"),
        ("applications.0.args.recipe", "8xh100"),
        ("applications.0.args.name", "chat"),
        ("applications.0.import_path", "strata.serving.runtime.kuberay_app.application"),
        ("applications", [APPLICATION, SECOND]),
        ("applications.0.deployments", [{"name": "d", "autoscaling_config": {"min_replicas": 1}}]),
        ("applications.0.runtime_env", {"env_vars": {"A": "b"}}),
        ("http_options", {"port": 8000}),
        ("applications.0.route_prefix", "/"),
        ("applications.0.route_prefix", "/v1/chat"),
    ],
)
def test_valid_configurations(path: str, value: Any) -> None:
    assert found(service(changed(path, value))) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("applications: [", "is not valid YAML"),
        ("applications: []\napplications: []\n", "the key 'applications' occurs twice"),
        ("applications", "is not a mapping"),
        ("", "is not a mapping"),
        ("- applications", "is not a mapping"),
    ],
)
def test_texts_that_are_no_configurations(text: str, message: str) -> None:
    [(path, found_message)] = found(service(text))
    assert path == "spec.serveConfigV2"
    assert message in found_message


def test_every_pod_needs_the_recipe_and_the_model() -> None:
    for missing, argument in ((MOUNTS[0], "recipe"), (MOUNTS[1], "model")):
        mounts = [mount for mount in MOUNTS if mount is not missing]
        [(path, message)] = found(service(CONFIG, mounts))
        assert path == f"spec.serveConfigV2.applications[0].args.{argument}"
        assert message.startswith(f"no volume is mounted at {APPLICATION['args'][argument]}")  # type: ignore[index]


def test_other_objects_have_no_configuration() -> None:
    assert found([{"kind": "RayService", "metadata": {"name": "s"}, "spec": {}}]) == []
    [service_, _] = service(CONFIG)
    del service_["spec"]["serveConfigV2"]
    assert found([service_]) == [("spec.serveConfigV2", "is not set: the service has no application")]
    assert found([{"kind": "Other", "metadata": {"name": "s"}, "spec": {"serveConfigV2": "x"}}]) == []
