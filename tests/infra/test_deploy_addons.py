"""Models from anywhere, TLS and the history server in rendered manifests."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from strata.deploy import documents, render
from strata.deploy.addons import models
from strata.deploy.render import Order
from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.model_families import copies

IMAGE = "example.com/strata:1.0"
GKE = ["deploy.gpu=h100", "deploy.storage=my-bucket"]
ACK = ["deploy.gpu=h20", "deploy.storage=mine.nas.aliyuncs.com"]
QWEN = "Qwen/Qwen3-8B"


def rendered(*overrides: str, target: str = "gke", only: str | None = None, components: tuple[str, ...] = ()) -> dict[str, Any]:
    recipe = recipe_file.load("8xh100", [*(ACK if target == "ack" else GKE), *overrides])
    order = Order(target, recipe, "first", components, only, IMAGE)
    return {documents.title(document): document for document in render.render(order)}


def served(*overrides: str, **options: Any) -> dict[str, Any]:
    document: dict[str, Any] = rendered(*overrides, only="serve", **options)["RayService/strata"]
    return document


def model_of(service: dict[str, Any]) -> str:
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    model: str = application["args"]["model"]
    return model


def heads_and_workers(document: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = documents.cluster_spec(document)
    assert found
    return found[1]["headGroupSpec"]["template"]["spec"], [group["template"]["spec"] for group in found[1]["workerGroupSpecs"]]


def variables(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "/mnt/strata/runs/first/export"),
        ("other", "/mnt/strata/runs/other/export"),
        ("/mnt/strata/imported/qwen", "/mnt/strata/imported/qwen"),
        ("gs://models/qwen", "gs://models/qwen"),
        (QWEN, QWEN),
    ],
)
def test_the_endpoint_serves_any_model(given: str | None, expected: str) -> None:
    service = served(*([f"deploy.model={given}"] if given else []))
    assert model_of(service) == expected
    head, workers = heads_and_workers(service)
    remote = expected in ("gs://models/qwen", QWEN)
    assert all(("initContainers" in pod) == remote for pod in workers)
    assert "initContainers" not in head, "no engine runs on the head"


def test_pods_copy_a_model_to_a_bounded_volume_before_ray_starts() -> None:
    head, workers = heads_and_workers(served(f"deploy.model={QWEN}", "deploy.model_cache_gib=50"))
    token = {"secretKeyRef": {"name": "strata-hf", "key": "token", "optional": True}}
    assert len(workers) == 2
    for pod in workers:
        [init] = pod["initContainers"]
        [engine] = pod["containers"]
        assert init["command"] == ["strata", "model", "pull", QWEN] and init["image"] == IMAGE
        assert init["securityContext"] == engine["securityContext"] and "nvidia.com/gpu" not in init["resources"]["limits"]
        volume = next(volume for volume in pod["volumes"] if volume["name"] == "models")
        claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert claim == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "50Gi"}}}
        for container in (init, engine):
            assert variables(container)["STRATA_MODELS"] == models.FOLDER and variables(container)["HF_TOKEN"] == token
            assert {"name": "models", "mountPath": models.FOLDER} in container["volumeMounts"]
        assert next(mount for mount in init["volumeMounts"] if mount["name"] == "store")["readOnly"] is True
    assert variables(head["containers"][0])["STRATA_MODELS"] == models.FOLDER, "the application is built there"


def test_the_application_and_the_pods_agree_on_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two packages do not import each other."""
    monkeypatch.setenv(copies.MODELS, models.FOLDER)
    assert str(copies.place(QWEN)).startswith(models.FOLDER + "/")


def test_ack_names_a_storage_class() -> None:
    _, workers = heads_and_workers(served(f"deploy.model={QWEN}", target="ack"))
    claim = workers[0]["volumes"][-1]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["storageClassName"] == "alicloud-disk-topology-alltype"


def test_a_new_model_starts_an_upgrade() -> None:
    def mark(service: dict[str, Any]) -> str:
        spec = documents.cluster_spec(service)
        assert spec
        annotation: str = spec[1]["headGroupSpec"]["template"]["metadata"]["annotations"]["strata.dev/served"]
        return annotation

    assert mark(served(f"deploy.model={QWEN}")) != mark(served("deploy.model=Qwen/Qwen3-4B")) != mark(served())


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Hugging Face's config.json."""
    config = tmp_path / "config.json"
    config.write_text(
        '{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192, "num_hidden_layers": 2, "hidden_size": 64,'
        ' "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1024}'
    )
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: str(config))


def test_training_pods_copy_their_starting_point(imported: None) -> None:
    job = rendered("model.from=Org/base", only="train")["RayJob/strata-first"]
    head, workers = heads_and_workers(job)
    for pod in (head, *workers):  # the driver on the head reads the weights too
        assert pod["initContainers"][0]["command"] == ["strata", "model", "pull", "Org/base"]
    assert "initContainers" not in job["spec"]["submitterPodTemplate"]["spec"]


def test_models_of_this_machine_are_refused(tmp_path: Path, imported: None) -> None:
    for given in ("./model", str(tmp_path), "file:///models/x", "a/b/c"):
        with pytest.raises(UserError, match=r"deploy\.model=.* is not visible to pods") as error:
            served(f"deploy.model={given}")
        assert "/mnt/strata" in error.value.fix
    with pytest.raises(UserError, match=r"model\.from=.* is on this machine"):
        rendered(f"model.from={tmp_path}", only="train")
    rendered(f"model.from={tmp_path}", only="lab")


def test_the_pull_job_copies_every_remote_model_once(imported: None) -> None:
    objects = rendered("model.from=Org/base", f"deploy.model={QWEN}", "deploy.name=team", components=("model-pull",))
    [(title, job)] = [(title, document) for title, document in objects.items() if document["kind"] == "Job"]
    assert title.startswith("Job/team-model-pull-")
    pod = job["spec"]["template"]
    assert pod["spec"]["containers"][0]["args"] == ["Org/base", QWEN]
    assert variables(pod["spec"]["containers"][0])["STRATA_MODELS"] == "/mnt/strata/models"
    assert pod["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true", "the bucket is mounted"
    other = rendered("deploy.model=Qwen/Qwen3-4B", "deploy.name=team", components=("model-pull",))
    assert title not in other, "a job cannot be changed"
    for pod in (*heads_and_workers(objects["RayService/team"])[1], heads_and_workers(objects["RayService/team"])[0]):
        [init] = pod["initContainers"]  # the application is built on the head, from the copy
        assert init["command"] == ["strata", "model", "pull", "--wait", QWEN]
        assert "models" not in {volume["name"] for volume in pod["volumes"]}
        assert "STRATA_MODELS" not in variables(pod["containers"][0])
    same = rendered("model.from=Org/base", "deploy.model=Org/base", components=("model-pull",))
    [job] = [document for document in same.values() if document["kind"] == "Job"]
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == ["Org/base"]


def test_a_pull_job_without_a_model_is_refused() -> None:
    with pytest.raises(UserError, match="has nothing to copy"):
        rendered(components=("model-pull",))


def test_tls_objects_carry_the_endpoints_name() -> None:
    objects = rendered("deploy.name=team", components=("tls",), only="serve")
    gateway, route = objects["Gateway/team-tls"], objects["HTTPRoute/team-tls"]
    https = next(listener for listener in gateway["spec"]["listeners"] if listener["protocol"] == "HTTPS")
    assert https["port"] == 443 and https["tls"]["certificateRefs"] == [{"kind": "Secret", "name": "team-tls"}]
    assert gateway["spec"]["infrastructure"]["parametersRef"]["name"] == "team-tls-gateway"
    assert "ConfigMap/team-tls-gateway" in objects and not any(document["kind"] == "Secret" for document in objects.values())
    [rule] = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "team-gateway-istio", "port": 80}]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    assert route["spec"]["parentRefs"] == [{"name": "team-tls", "sectionName": "https"}]
    assert objects["HTTPRoute/team-tls-redirect"]["spec"]["parentRefs"] == [{"name": "team-tls", "sectionName": "http"}]
    assert not {"Gateway", "HTTPRoute"} & {document["kind"] for document in rendered(components=("tls",), only="train").values()}


def test_the_gateways_may_reach_each_other_and_accept_https() -> None:
    policy = rendered(components=("tls", "network-policy"))["NetworkPolicy/gateway"]["spec"]
    assert {"protocol": "TCP", "port": 443} in policy["ingress"][0]["ports"]
    to_gateways = [rule for rule in policy["egress"] if rule["to"][0].get("podSelector") == policy["podSelector"]]
    assert [rule["ports"] for rule in to_gateways] == [[{"protocol": "TCP", "port": 80}]]


def test_history_uses_the_bucket_and_is_for_gke_only() -> None:
    objects = rendered(components=("history-server",))
    server = objects["Deployment/strata-history"]["spec"]["template"]["spec"]["containers"][0]
    assert variables(server)["GCS_BUCKET"] == "my-bucket"
    for title in ("RayJob/strata-first", "RayCluster/strata-lab"):
        found = documents.cluster_spec(objects[title])
        assert found and variables(found[1]["historyServerOptions"]["collectorOptions"])["GCS_BUCKET"] == "my-bucket"
    with pytest.raises(UserError, match="history-server is not for ack"):
        rendered(target="ack", components=("history-server",))


def test_ray_tls_is_on_for_every_ray_cluster() -> None:
    for document in rendered(components=("ray-tls", "auth")).values():
        if found := documents.cluster_spec(document):
            assert found[1]["tlsOptions"] == {"enabled": True} and found[1]["authOptions"] == {"mode": "token"}
