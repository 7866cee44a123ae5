"""Commands of `strata deploy` on this repository's manifests, built by the real kubectl."""

import os
import shutil
import stat
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from strata.deploy import changes, commands, documents, kubectl, render
from strata.deploy.fill import fill
from strata.deploy.kuberay.rules import findings
from strata.deploy.render import Order
from strata.deploy.validate import problems
from strata.platform import recipe_file
from strata.platform.errors import UserError

IMAGE = "example.com/strata:1.0"
GPU = ["deploy.gpu=h100", "deploy.storage=bucket"]
ORDERS = {
    "gke": ("16xh100-3d", ["deploy.gpu=h100", "deploy.storage=my-bucket", "deploy.network=tcp"]),
    "ack": ("8xh100", ["deploy.gpu=h20", "deploy.storage=mine.nas.aliyuncs.com"]),
    "kind": ("laptop", []),
}
BUILD = render.build
GKE = ["--target", "gke", "--recipe", "8xh100", "--image", IMAGE, *GPU]

FAKE_KUBECTL = """#!/bin/sh
# Fake kubectl and cluster. Only `kustomize` runs the real kubectl.
echo "$@" >> "{log}"
case "$1" in
  kustomize) exec {real} "$@" ;;
  version) echo '{{"clientVersion": {{}}, "serverVersion": {{"gitVersion": "v1.33.1"}}}}' ;;
  config) echo fake ;;
  get) {get} ;;
  diff) cat > "{log}.stdin"; {diff} ;;
  apply) cat > "{log}.stdin"; echo "namespace/strata serverside-applied" ;;
esac
"""


@lru_cache
def rendered(target: str) -> dict[str, Any]:
    recipe, overrides = ORDERS[target]
    order = Order(target, recipe_file.load(recipe, overrides), "first", image=IMAGE)
    return {documents.title(document): document for document in render.render(order)}


def strata_deploy(*words: str, answer: str = "") -> Any:
    app = typer.Typer(pretty_exceptions_enable=False)
    for name in ("render", "check", "diff", "apply"):
        app.command(name)(getattr(commands, name))
    result = CliRunner().invoke(app, list(words), input=answer)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a fake kubectl first on PATH. Returns a function that sets its responses and returns the log of its calls."""
    real, log = kubectl._find(), tmp_path / "calls"

    def answering(get: str = "echo namespace/strata", diff: str = "exit 0") -> Path:
        script = tmp_path / "bin" / "kubectl"
        script.parent.mkdir(exist_ok=True)
        script.write_text(FAKE_KUBECTL.format(log=log, real=real, get=get, diff=diff))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere" / "python"))
        monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
        return log

    return answering


def group(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(group for group in documents.worker_groups(document) if group["groupName"] == name)


def limits(group: dict[str, Any]) -> dict[str, str]:
    resources: dict[str, str] = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return resources


@pytest.mark.parametrize("target", ORDERS)
def test_every_image_and_the_recipe_are_filled_in(target: str) -> None:
    objects = rendered(target)
    images = [
        container["image"]
        for document in objects.values()
        for _, template in documents.pod_templates(document)
        for _, container in documents.containers(template)
    ]
    assert set(images) == {IMAGE}
    assert len(images) >= 8  # three heads, four worker groups, and the job's submitter
    inside = recipe_file.check(yaml.safe_load(objects["ConfigMap/strata-first-recipe"]["data"]["recipe.yaml"]), "deployed")
    recipe, overrides = ORDERS[target]
    assert inside.model == recipe_file.load(recipe, overrides).model
    assert (inside.serve.host, inside.serve.port, inside.serve.gateways) == ("0.0.0.0", 8000, 1)


def test_training_job_on_two_nodes() -> None:
    objects = rendered("gke")
    job = objects["RayJob/strata-first"]
    assert job["spec"]["entrypoint"] == "strata train --recipe /etc/strata/recipe.yaml --run first --or-resume"
    workers = group(job, "workers")
    assert (workers["minReplicas"], workers["replicas"], workers["maxReplicas"]) == (2, 2, 2)
    assert limits(workers)["nvidia.com/gpu"] == "8"
    assert workers["template"]["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] == "8"
    selector = workers["template"]["spec"]["nodeSelector"]
    assert selector["cloud.google.com/gke-accelerator"] == "nvidia-h100-80gb"
    assert selector["node.kubernetes.io/instance-type"] == "a3-highgpu-8g"
    assert objects["PodDisruptionBudget/strata-first-train"]["spec"]["minAvailable"] == 3  # the head and both workers


def test_service_with_two_pools() -> None:
    service = rendered("gke")["RayService/strata"]
    for name in ("prefill", "decode"):
        pool = group(service, name)
        assert (pool["minReplicas"], pool["replicas"], pool["maxReplicas"]) == (0, 2, 2)
        assert limits(pool)["nvidia.com/gpu"] == "4"
        assert pool["resources"] == {"strata-gateway": "1", f"strata-{name}": "1"}
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert application["args"] == {"recipe": "/etc/strata/recipe.yaml", "model": "/mnt/strata/runs/first/export"}


def test_a_pod_offers_resources_for_all_engines_that_share_its_gpu() -> None:
    recipe = recipe_file.load(
        "h200", ["deploy.gpu=h200", "deploy.storage=bucket", "serve.decode.gpus=0.25", "serve.decode.gpu_memory=0.2"]
    )
    order = Order("gke", recipe, "demo", only="serve", image=IMAGE)
    [service] = [document for document in render.render(order) if document["kind"] == "RayService"]
    offered = {spec["groupName"]: spec["resources"] for spec in documents.worker_groups(service)}
    assert offered == {
        "prefill": {"strata-gateway": "1", "strata-prefill": "2"},
        "decode": {"strata-gateway": "1", "strata-decode": "4"},
    }


def test_rays_autoscaler_reads_the_group_sizes_and_resources() -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    service = rendered("gke")["RayService/strata"]
    cluster = {"metadata": {"name": "strata-abcde", "namespace": "strata"}, "spec": service["spec"]["rayClusterConfig"]}
    found = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    for name in ("prefill", "decode"):
        assert (found[name]["min_workers"], found[name]["max_workers"]) == (0, 2)
        offered = {"GPU": 4, "strata-gateway": 1, f"strata-{name}": 1}
        assert found[name]["resources"].items() >= offered.items()
    assert found["headgroup"]["resources"].keys() == {"CPU", "memory"}, "no engine and no gateway on the head"
    assert found["headgroup"]["resources"]["CPU"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gke", "ack", "kind"])
def test_every_recipe_renders_for_targets_with_its_devices(root: Path, target: str) -> None:
    """Only the GPU type is overridden, and data of this machine; the image's registry and the bucket are placeholders. Recipes
    for several nodes have a fast network."""
    for file in sorted((root / "platform" / "recipes").glob("*.yaml")):
        recipe = recipe_file.load(file.stem)
        if recipe.serve.device == "gpu" and target == "kind":
            continue
        gpu = {"gke": [], "ack": ["deploy.gpu=h20"], "kind": []}[target]
        data = ["data.path=/mnt/strata/data"] if recipe.data.path else []
        network = {"gke": "network-gke-tcpx", "ack": "network-ack-erdma"}.get(target, "") if recipe.parallel.workers > 8 else ""
        components = (network,) if network else ()
        found = render.render(Order(target, recipe_file.load(file.stem, [*gpu, *data]), "demo", components))
        assert problems(found, None) == [], file.stem
        text = documents.write([document for document in found if document["kind"].startswith("Ray")])
        assert ("nvidia.com/gpu: " in text) == (recipe.serve.device == "gpu"), file.stem
        assert ("gke-accelerator" in text) == (recipe.serve.device == "gpu" and target == "gke"), file.stem


def test_unset_settings_are_noted_by_render_and_rejected_by_apply(cluster: Any) -> None:
    cluster()
    words = ["--target", "gke", "--recipe", "8xh100"]
    result = strata_deploy("render", *words)
    assert "deploy.storage, the name of the Cloud Storage bucket, is not set; the image is not set" in result.stderr
    assert yaml.safe_load_all(result.stdout)
    with pytest.raises(UserError, match=r"cannot be applied: deploy\.storage"):
        strata_deploy("apply", "--yes", *words)
    assert "note" not in strata_deploy("render", *GKE).stderr


@pytest.mark.parametrize(("target", "grace", "drain"), [("gke", 15, "10"), ("ack", 120, "115")])
def test_pods_on_spot_nodes_use_the_notice_of_their_cloud(target: str, grace: int, drain: str) -> None:
    recipe, overrides = ORDERS[target]
    order = Order(target, recipe_file.load(recipe, overrides), "first", ("spot",), image=IMAGE)
    for document in (each for each in render.render(order) if each["kind"] in documents.RAY_KINDS):
        for spec in documents.worker_groups(document):
            pod = spec["template"]["spec"]
            [found] = [variable["value"] for variable in pod["containers"][0]["env"] if variable["name"] == "STRATA_DRAIN_S"]
            assert ((pod["terminationGracePeriodSeconds"], found) == (grace, drain)) is (spec["groupName"] != "decode")


def test_the_reservation_of_the_recipe_is_selected(cluster: Any) -> None:
    words = [*GKE, "--with", "reservation"]
    assert "deploy.reservation, the name of the reservation, is not set" in strata_deploy("render", *words).stderr
    cluster()
    with pytest.raises(UserError, match=r"cannot be applied: deploy\.reservation"):
        strata_deploy("apply", "--yes", *words)
    found = list(yaml.safe_load_all(strata_deploy("render", *words, "deploy.reservation=mine").stdout))
    selectors = [spec["template"]["spec"]["nodeSelector"] for document in found for spec in documents.worker_groups(document)]
    assert len(selectors) == 4 and {each["cloud.google.com/reservation-name"] for each in selectors} == {"mine"}


def test_storage_name_is_filled_in() -> None:
    assert rendered("gke")["PersistentVolume/strata-store"]["spec"]["csi"]["volumeHandle"] == "my-bucket"
    volume = rendered("ack")["PersistentVolume/strata-store"]["spec"]["csi"]
    assert volume["volumeAttributes"]["server"] == "mine.nas.aliyuncs.com"


def test_kind_has_no_gpu_limit_and_the_overlays_requests() -> None:
    workers = group(rendered("kind")["RayJob/strata-first"], "workers")
    assert limits(workers)["cpu"] == "2"
    assert "nvidia.com/gpu" not in limits(workers)
    assert workers["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "1"


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.workers=64", "train.batch=64"],
        ["serve.prefill.replicas=0"],
        ["serve.decode.max_replicas=9", "deploy.nodes=4"],
        ["deploy.name=other", "deploy.gpus_per_node=4"],
        ["deploy.prefill_gpu=l4", "deploy.nodes=2"],
    ],
)
def test_accepted_recipes_meet_the_operators_rules(overrides: list[str]) -> None:
    recipe = recipe_file.load("8xh100", [*GPU, "deploy.network=tcp", *overrides])
    for document in render.render(Order("gke", recipe, "demo", image=IMAGE)):
        if document["kind"] in documents.RAY_KINDS:
            assert list(findings(document)) == []
            assert document["metadata"]["name"].startswith(recipe.deploy.name)


@pytest.mark.parametrize(("target", "machine"), [("gke", "a2-ultragpu-1g"), ("ack", "ecs.gn7e-c16g1.4xlarge")])
def test_the_guides_recipe_selects_the_guides_nodes(root: Path, tmp_path: Path, target: str, machine: str) -> None:
    guide = (root / "docs" / f"cluster-{target}.md").read_text()
    assert machine in guide
    file = tmp_path / f"{target}.yaml"
    file.write_text(guide.split(f"```yaml\n# {target}.yaml\n")[1].split("```")[0])
    for document in render.render(Order(target, recipe_file.load(str(file)), "demo", image=IMAGE)):
        for spec in documents.worker_groups(document):
            assert spec["template"]["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"] == machine
            assert limits(spec)["nvidia.com/gpu"] == "1"


def test_pod_templates_change_with_the_serving_settings() -> None:
    def mark(*overrides: str) -> str:
        recipe = recipe_file.load("8xh100", [*GPU, *overrides])
        [service] = fill([rendered("gke")["RayService/strata"]], recipe, {}, "demo")
        [found] = {template["metadata"]["annotations"]["strata.dev/served"] for _, template in documents.pod_templates(service)}
        return str(found)

    assert mark() == mark("train.steps=5", "train.warmup=1")
    assert mark() != mark("serve.max_sequences=5")


def test_render_prints_only_yaml() -> None:
    result = strata_deploy("render", *GKE, "--only", "train", "--with", "volcano,spot")
    kinds = [document["kind"] for document in yaml.safe_load_all(result.stdout)]
    assert "RayJob" in kinds
    assert not {"RayService", "RayCluster"} & set(kinds)
    assert "Namespace" in kinds
    assert result.stderr == ""


def test_render_to_a_folder_and_diff_against_it(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert "objects in" in strata_deploy("render", *GKE, "-o", str(folder)).stdout
    mine = folder / "mine.yaml"
    mine.write_text("# my own\n")
    assert (folder / "rayservice-strata.yaml").is_file()
    same = strata_deploy("diff", *GKE, "--against", str(folder)).stdout
    assert same == f"Against the rendering at {folder}:\nnothing would change\n"
    mine.unlink()
    other = strata_deploy("diff", *GKE, "--against", str(folder), "--only", "train", "parallel.cpus_per_worker=9").stdout
    assert "-      cpus_per_worker: 8\n+      cpus_per_worker: 9\n" in other
    assert "--- before/RayService/strata" in other  # removed
    mine.write_text("# my own\n")
    strata_deploy("render", *GKE, "-o", str(folder), "--only", "train")
    assert not (folder / "rayservice-strata.yaml").exists()
    assert mine.is_file()


@pytest.mark.slow
def test_render_to_a_single_file(tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    strata_deploy("render", *GKE, "-o", str(file))
    assert strata_deploy("check", "--file", str(file)).exit_code == 0


def test_check_reports_missing_schemas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STRATA_KUBERAY_CRDS", raising=False)
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    result = strata_deploy("check", *GKE, "--with", "kueue,monitoring-gke")
    assert result.exit_code == 0
    for title, kind in (
        ("RayJob/strata-8xh100", "ray.io/v1 RayJob"),
        ("ClusterQueue/strata.strata-8xh100", "kueue.x-k8s.io/v1beta2 ClusterQueue"),
    ):
        assert f"not checked  {title}  there is no schema of {kind}\n" in result.stdout
    assert "ok     Namespace/strata\n" in result.stdout
    assert "Secret strata-link must exist on the cluster in the namespace strata" in result.stdout
    unchecked = result.stdout.count("not checked  ")
    assert result.stdout.endswith(f", {unchecked} not checked, nothing wrong\n")


def test_check_finds_the_definitions_that_make_crds_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STRATA_KUBERAY_CRDS", raising=False)
    monkeypatch.setenv("STRATA_HOME", str(tmp_path))
    (tmp_path / ".strata" / "crds").mkdir(parents=True)
    with pytest.raises(UserError, match="There are no CRDs in"):
        strata_deploy("check", *GKE)


def test_check_prints_the_path_of_a_problem(tmp_path: Path) -> None:
    broken = documents.read(documents.write(list(rendered("gke").values())))
    service = next(document for document in broken if document["kind"] == "RayService")
    group(service, "decode")["minReplicas"] = 30
    file = tmp_path / "broken.yaml"
    file.write_text(documents.write(broken))
    result = strata_deploy("check", "--file", str(file))
    assert result.exit_code == 1
    assert "spec.rayClusterConfig.workerGroupSpecs[1].minReplicas: 30 is more than maxReplicas, 2" in result.stdout
    assert result.stdout.endswith("1 wrong\n")


def test_diff_against_a_cluster(cluster: Any) -> None:
    cluster(diff="echo '+  replicas: 3'; exit 1")
    output = strata_deploy("diff", *GKE).stdout
    assert output == "Against the cluster 'fake' (v1.33.1):\n+  replicas: 3\n"
    cluster()
    assert strata_deploy("diff", *GKE).stdout.endswith("nothing would change\n")
    cluster(diff="echo 'no matches for kind RayJob' >&2; exit 2")
    with pytest.raises(UserError, match="no matches for kind RayJob") as error:
        strata_deploy("diff", *GKE)
    assert "operator" in error.value.fix


def test_diff_without_a_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(UserError, match="cannot reach a cluster") as error:
        strata_deploy("diff", *GKE)
    assert "--against" in error.value.fix


def test_apply_requires_confirmation(cluster: Any) -> None:
    log = cluster(get="true")
    refused = strata_deploy("apply", *GKE, answer="n\n")
    assert refused.exit_code == 1
    assert "has no namespace strata yet: everything is new" in refused.stdout
    assert "+ RayService/strata" in refused.stdout
    assert "Apply this to 'fake'?" in refused.stdout
    assert "apply" not in log.read_text()
    applied = strata_deploy("apply", *GKE, answer="y\n")
    assert "serverside-applied" in applied.stdout
    assert "apply --server-side --field-manager=strata --filename=-" in log.read_text()
    sent = documents.read(log.with_name("calls.stdin").read_text())
    assert sent[0]["kind"] == "Namespace"
    assert {"RayJob", "RayService", "RayCluster"} <= {document["kind"] for document in sent}


def test_apply_with_yes_and_without_changes(cluster: Any) -> None:
    log = cluster(diff="echo '+  a: b'; exit 1")
    assert "serverside-applied" in strata_deploy("apply", *GKE, "--yes").stdout
    log.unlink()
    cluster()
    assert strata_deploy("apply", *GKE).stdout.endswith("nothing would change\n")
    assert "apply" not in log.read_text()


@pytest.mark.parametrize(
    ("words", "cause", "fix"),
    [
        (["--with", "volcano,kueue"], "exclude each other", "Remove all but one"),
        (["--with", "flex-start"], "flex-start needs the component kueue", "--with kueue,flex-start"),
        (["--with", "spot,reservation"], "a node is bought in one way", "Remove all but one"),
        (["--with", "dcgm,dcgm-profiling"], "they are one exporter", "Remove all but one"),
        (["--with", "monitoring,monitoring-gke"], "both would scrape the same pods", "Remove all but one"),
        (["--with", "monitoring-gke,monitoring-arms"], "both would scrape the same pods", "Remove all but one"),
        (["--with", "monitoring-arms"], "not for gke: it is for Alibaba Cloud's", "Remove it"),
        (["--with", "dcgm"], "not for gke: on GKE only the pod that requests a GPU can see it", "Remove it"),
        (["--with", "vulcano"], "no component 'vulcano'", "Did you mean 'volcano'?"),
        (["--only", "everything"], "no part 'everything'", "train, serve, lab"),
        (["serve.decode.max_replicas=1"], "must not exceed max_replicas=1", "Change"),
        (["deploy.bucket=x"], "Unknown recipe key 'deploy.bucket'", "deploy."),
    ],
)
def test_invalid_options_are_rejected(words: list[str], cause: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        strata_deploy("render", *GKE, *words)
    assert cause in error.value.cause
    assert fix in error.value.fix


def test_check_needs_a_target_or_a_file() -> None:
    with pytest.raises(UserError, match="either --target or --file"):
        strata_deploy("check")


@pytest.mark.parametrize("text", ["a: [", "", "- 1"])
def test_files_without_objects_are_rejected(tmp_path: Path, text: str) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"some\.yaml"):
        strata_deploy("check", "--file", str(file))


def test_invalid_previous_renderings_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no rendering at"):
        changes.against_folder([], tmp_path / "nowhere")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(UserError, match="is not valid YAML"):
        changes.against_folder([], tmp_path)


def test_missing_kubectl_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(render, "build", BUILD)
    with pytest.raises(UserError, match="kubectl, which builds the manifests, is not installed"):
        strata_deploy("render", *GKE)
