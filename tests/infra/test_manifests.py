"""Kustomize builds of every overlay with every component, the cluster guides, and the container image."""

import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT

from strata.deploy import render
from strata.deploy.validate import problems
from strata.platform import recipe_file

INFRA = ROOT / "infra"
OVERLAYS = ("gke", "ack", "kind")
COMPONENTS = sorted(path.parent.name for path in INFRA.glob("components/*/kustomization.yaml"))
AS_ROOT = {"DaemonSet/dcgm-exporter"}
CRDS = Path(os.environ["STRATA_KUBERAY_CRDS"]) if os.environ.get("STRATA_KUBERAY_CRDS") else None
IMAGE = "example.com/strata:1.0"

Document = dict[str, Any]


def together(preferred: set[str]) -> tuple[str, ...]:
    """All components; of mutually exclusive ones, the preferred one."""
    sets = [set(rivals) for rivals in render.EXCLUDE_EACH_OTHER]
    left_out = {name for rivals in sets for name in rivals - (rivals & preferred or {min(rivals)})}
    return tuple(name for name in COMPONENTS if name not in left_out)


ALL = [
    together({"volcano", "nvml", "monitoring"}),
    together({"kueue", "dcgm", "monitoring-gke"}),
    together({"kueue", "dcgm", "monitoring-arms"}),
]
# Every overlay with all compatible components, and each component alone on GKE, because it must not depend on another.
BUILDS: list[tuple[str, tuple[str, ...]]] = [(overlay, components) for overlay in OVERLAYS for components in [(), *ALL]]
BUILDS += [("gke", (component,)) for component in COMPONENTS]


def build(overlay: str, components: tuple[str, ...] = ()) -> list[Document]:
    return render.build(INFRA / "overlays" / overlay, components, IMAGE)


def title(document: Document) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


def find(documents: list[Document], name: str) -> Document:
    return next(document for document in documents if title(document) == name)


def ray_spec(document: Document) -> Document:
    key = {"RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}.get(document["kind"])
    spec: Document = document["spec"][key] if key else document["spec"]
    return spec


def ray_objects(documents: list[Document]) -> list[Document]:
    return [document for document in documents if document["apiVersion"].startswith("ray.io/")]


def groups(document: Document) -> dict[str, Document]:
    """Pod specs of a Ray object by group, including the head."""
    spec = ray_spec(document)
    workers = {group["groupName"]: group["template"]["spec"] for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"]["spec"], **workers}


def pod_templates(document: Document) -> Iterator[Document]:
    if document in ray_objects([document]):
        spec = ray_spec(document)
        yield from (group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]))
        if document["kind"] == "RayJob":
            yield document["spec"]["submitterPodTemplate"]
    elif document["kind"] in ("Deployment", "DaemonSet", "StatefulSet"):
        yield document["spec"]["template"]


# Every build


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlay", "components"), BUILDS, ids=lambda given: given if isinstance(given, str) else "+".join(given)
)
def test_every_build_is_valid_and_complete(overlay: str, components: tuple[str, ...]) -> None:
    documents = build(overlay, components)
    titles = {title(document) for document in documents}
    assert {"RayJob/strata-train", "RayService/strata", "RayCluster/strata-lab", "ConfigMap/strata-recipe"} <= titles
    assert not any(document["kind"] == "Secret" for document in documents), "secrets do not belong in a repository"
    for document in documents:
        labels = document["metadata"].get("labels", {})
        assert labels.get("app.kubernetes.io/part-of") == "strata", title(document)
        assert labels.get("strata.dev/part") in ("common", "train", "serve", "lab", "monitoring"), title(document)
        for template in pod_templates(document):
            assert_hardened(document, template)
    assert problems(documents, CRDS) == []


def assert_hardened(document: Document, template: Document) -> None:
    """Non-root without privilege escalation, with requests and limits, and with a pinned image."""
    pod, name = template["spec"], title(document)
    assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "strata", name
    for container in pod["containers"]:
        image = container["image"]
        assert image == IMAGE or re.search(r":[\w.-]*\d", image), f"{name}: {image}"
        if document["apiVersion"].startswith("ray.io/"):
            assert image == IMAGE, f"{name}: {image}"
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys() & container["resources"]["limits"].keys(), name
        security = container["securityContext"]
        if security.get("privileged"):
            assert name in AS_ROOT, name  # dcgm-gke
            continue
        assert security["allowPrivilegeEscalation"] is False and security["capabilities"]["drop"] == ["ALL"], name
        assert "add" not in security["capabilities"] or name in AS_ROOT, name  # test_dcgm_reads_its_own_counters
    if name not in AS_ROOT:
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_components_change_only_ray_objects_and_the_namespace(overlay: str) -> None:
    """Service accounts, volume claims and disruption budgets are unchanged."""
    plain = {title(document): document for document in build(overlay)}
    for components in ALL:
        for document in build(overlay, components):
            if title(document) in plain and document["kind"] not in ("RayJob", "RayService", "RayCluster", "Namespace"):
                assert document == plain[title(document)], f"{'+'.join(components)}: {title(document)}"


# The base


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_drain_before_they_are_stopped(overlay: str) -> None:
    for document in ray_objects(build(overlay)):
        for name, pod in groups(document).items():
            assert pod["restartPolicy"] == "Never", f"{title(document)} {name}"
            container = pod["containers"][0]
            variables = {variable["name"]: variable.get("value") for variable in container["env"]}
            if name != "head":
                assert container["lifecycle"]["preStop"]["exec"]["command"] == ["strata-drain"]
                assert int(variables["STRATA_DRAIN_S"]) < pod["terminationGracePeriodSeconds"]
            if name in ("prefill", "decode"):
                assert int(variables["STRATA_DRAIN_S"]) > 30, "an engine drains for 30 s"
            assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
            shm = next(volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
            assert shm["medium"] == "Memory" and shm["sizeLimit"]
            assert not {"RAY_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_enable_autoscaler_v2"} & variables.keys(), "set by the operator"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_engine_pods_have_a_readiness_probe_and_resources_for_one_gateway(overlay: str) -> None:
    service = find(build(overlay), "RayService/strata")
    for group in ray_spec(service)["workerGroupSpecs"]:
        container = group["template"]["spec"]["containers"][0]
        assert {"name": "serve", "containerPort": 8000} in container["ports"]
        assert container["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": "serve"}
        assert "livenessProbe" not in container, (
            "the operator probes the raylet; a probe of the gateway would kill a loading engine"
        )
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["resources"] == {"strata-gateway": "1", f"strata-{group['groupName']}": "1"}
        assert "resources" not in group["rayStartParams"], "the operator sets it from the group's resources"
    assert "resources" not in ray_spec(service)["headGroupSpec"], "no gateway and no engine on the head"
    assert ray_spec(service)["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert yaml.safe_load(service["spec"]["serveConfigV2"])["proxy_location"] == "Disabled"


@pytest.mark.parametrize("overlay", ["gke", "ack"])
def test_upgrades_are_incremental_on_clouds(overlay: str) -> None:
    spec = find(build(overlay), "RayService/strata")["spec"]
    options = spec["upgradeStrategy"]["clusterUpgradeOptions"]
    assert spec["upgradeStrategy"]["type"] == "NewClusterWithIncrementalUpgrade" and options["gatewayClassName"]
    assert 0 < options["stepSizePercent"] <= options["maxSurgePercent"] < 100 and options["intervalSeconds"] > 0
    cluster = spec["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] and cluster["autoscalerOptions"]["version"] == "v2"
    assert spec["rayClusterDeletionDelaySeconds"] > 30
    least = [group["minReplicas"] for group in cluster["workerGroupSpecs"]]
    assert least == [0, 0], "a new version's cluster starts with this many pods, before it has traffic"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_disruption_budgets_use_integer_min_available(overlay: str) -> None:
    """A Ray cluster has no scale subresource, which percentages and maxUnavailable need."""
    budgets = [document for document in build(overlay) if document["kind"] == "PodDisruptionBudget"]
    assert {document["metadata"]["labels"]["strata.dev/part"] for document in budgets} == {"train", "serve"}
    assert all(isinstance(document["spec"]["minAvailable"], int) for document in budgets)


def test_a_retried_job_resumes_and_releases_its_gpus() -> None:
    spec = find(build("gke"), "RayJob/strata-train")["spec"]
    assert spec["entrypoint"].endswith("--or-resume") and spec["backoffLimit"] > 0
    assert spec["shutdownAfterJobFinishes"] and "deletionStrategy" not in spec and "suspend" not in spec


# Overlays


@pytest.mark.parametrize(
    ("overlay", "driver"), [("gke", "gcsfuse.csi.storage.gke.io"), ("ack", "nasplugin.csi.alibabacloud.com")]
)
def test_storage_is_shared_by_all_pods(overlay: str, driver: str) -> None:
    documents = build(overlay)
    volume, claim = find(documents, "PersistentVolume/strata-store"), find(documents, "PersistentVolumeClaim/strata-store")
    assert volume["spec"]["csi"]["driver"] == driver
    assert volume["spec"]["claimRef"] == {key: claim["metadata"][key] for key in ("namespace", "name")}
    assert claim["spec"]["volumeName"] == "strata-store" and claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for document in ray_objects(documents):
        spec = ray_spec(document)
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            annotations = group["template"]["metadata"].get("annotations", {})
            assert (annotations.get("gke-gcsfuse/volumes") == "true") is (overlay == "gke")


@pytest.mark.parametrize(
    ("overlay", "label"), [("gke", "cloud.google.com/gke-accelerator"), ("ack", "node.kubernetes.io/instance-type")]
)
def test_gpu_pods_select_and_tolerate_gpu_nodes(overlay: str, label: str) -> None:
    for document in ray_objects(build(overlay)):
        for name, pod in groups(document).items():
            limits = pod["containers"][0]["resources"]["limits"]
            assert ("nvidia.com/gpu" in limits) is (label in pod["nodeSelector"]) is (name != "head")
            if name != "head":
                assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def test_pods_have_a_cloud_identity() -> None:
    for document in ray_objects(build("gke")):
        for pod in groups(document).values():
            assert pod["nodeSelector"]["iam.gke.io/gke-metadata-server-enabled"] == "true"
            assert pod["serviceAccountName"] in ("strata-train", "strata-serve")
    for name in ("strata-train", "strata-serve"):
        account = find(build("ack"), f"ServiceAccount/{name}")
        assert account["metadata"]["annotations"]["pod-identity.alibabacloud.com/role-name"] == name


def test_kind_needs_no_gpu_and_each_part_fits_a_laptop() -> None:
    for document in ray_objects(build("kind")):
        spec, requested = ray_spec(document), 0.0
        for name, pod in groups(document).items():
            resources = pod["containers"][0]["resources"]
            assert "nvidia.com/gpu" not in resources["limits"] | resources["requests"]
            copies = {group["groupName"]: group["replicas"] for group in spec["workerGroupSpecs"]}.get(name, 1)
            requested += copies * gibibytes(resources["requests"]["memory"])
        requested += gibibytes(spec.get("autoscalerOptions", {}).get("resources", {}).get("requests", {}).get("memory", "0Gi"))
        assert requested <= 6, f"{title(document)} requests {requested} GiB"


def gibibytes(quantity: str) -> float:
    number, unit = float(quantity[:-2]), quantity[-2:]
    return number * {"Gi": 1, "Mi": 1 / 1024}[unit]


# Components


@pytest.mark.parametrize(
    ("component", "label", "queue"),
    [("volcano", "volcano.sh/queue-name", "Queue/strata"), ("kueue", "kueue.x-k8s.io/queue-name", "LocalQueue/strata")],
)
def test_gang_scheduling_queues_every_ray_cluster(component: str, label: str, queue: str) -> None:
    documents = build("gke", (component,))
    assert find(documents, queue)
    for document in ray_objects(documents):
        assert document["metadata"]["labels"][label] == queue.partition("/")[2]
    for name in ("RayService/strata", "RayCluster/strata-lab"):
        elastic = find(documents, name)["metadata"].get("annotations", {}).get("kueue.x-k8s.io/elastic-job")
        assert (elastic == "true") is (component == "kueue")


def test_the_queue_covers_every_requested_resource() -> None:
    documents = build("gke", ("kueue",))
    quota = find(documents, "ClusterQueue/strata")["spec"]["resourceGroups"]
    covered = {name for group in quota for name in group["coveredResources"]}
    for document in ray_objects(documents):
        for pod in groups(document).values():
            assert pod["containers"][0]["resources"]["requests"].keys() <= covered


@pytest.mark.parametrize("overlay", ["gke", "ack"])
def test_only_interruptible_groups_run_on_spot(overlay: str) -> None:
    for document in ray_objects(build(overlay, ("spot",))):
        for name, pod in groups(document).items():
            on_spot = any(toleration["key"] == "cloud.google.com/gke-spot" for toleration in pod["tolerations"])
            assert on_spot is ("affinity" in pod) is (name in ("workers", "prefill")), f"{title(document)} {name}"
            if on_spot:
                variables = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
                assert int(variables["STRATA_DRAIN_S"]) < pod["terminationGracePeriodSeconds"] <= 15
                assert any(toleration["key"] == "nvidia.com/gpu" for toleration in pod["tolerations"])


def test_redis_stores_the_head_state_of_the_service_and_the_lab() -> None:
    documents = build("gke", ("gcs-ft",))
    port = find(documents, "Service/strata-redis")["spec"]["ports"][0]["port"]
    for name in ("RayService/strata", "RayCluster/strata-lab"):
        options = ray_spec(find(documents, name))["gcsFaultToleranceOptions"]
        assert options["backend"] == "redis" and options["redisAddress"] == f"redis://strata-redis:{port}"
        assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "strata-redis", "key": "password"}
    assert "gcsFaultToleranceOptions" not in ray_spec(find(documents, "RayJob/strata-train"))


def test_auth_sets_the_key_file_only_where_it_is_mounted() -> None:
    """A gateway with STRATA_API_KEYS_FILE rejects all requests if the file is missing."""

    def has_keys(components: tuple[str, ...]) -> dict[str, bool]:
        found = {}
        for name, pod in groups(find(build("gke", components), "RayService/strata")).items():
            container = pod["containers"][0]
            files = [variable["value"] for variable in container["env"] if variable["name"] == "STRATA_API_KEYS_FILE"]
            mounts = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "api-keys"]
            secrets = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "api-keys"]
            found[name] = bool(files)
            assert (files, mounts, secrets) in (
                ([], [], []),
                (["/etc/strata-keys/keys"], ["/etc/strata-keys"], [{"secretName": "strata-api-keys"}]),
            )
        return found

    assert has_keys(()) == {"head": False, "prefill": False, "decode": False}
    assert has_keys(("auth",)) == {"head": False, "prefill": True, "decode": True}
    documents = build("gke", ("auth",))
    assert all(ray_spec(document)["authOptions"] == {"mode": "token"} for document in ray_objects(documents))


@pytest.mark.slow
def test_network_policies_allow_only_required_traffic() -> None:
    documents = build("gke", ("network-policy",))
    policies = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "NetworkPolicy"}
    assert policies["default-deny"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert {port["port"] for port in policies["dns"]["egress"][0]["ports"]} == {53}
    assert policies["dns"]["podSelector"] == policies["prometheus"]["podSelector"] == {}
    opened = {port["port"] for port in policies["prometheus"]["ingress"][0]["ports"]}
    scraped = {
        port["containerPort"]
        for document in build("gke", together({"nvml"})) + build("gke", ("dcgm",))
        for template in pod_templates(document)
        for container in template["spec"]["containers"]
        for port in container.get("ports", [])
        if port["name"] == "serve" or port["name"].endswith("metrics")
    }
    assert opened == scraped, "exactly the ports with metrics"
    assert {port["port"] for port in policies["api-server"]["egress"][0]["ports"]} == {443, 6443}
    for part in ("train", "serve", "lab"):
        within = policies[f"within-{part}"]
        peers = [{"podSelector": {"matchLabels": {"strata.dev/part": part}}}]
        assert (within["ingress"], within["egress"]) == ([{"from": peers}], [{"to": peers}])
    assert policies["clients"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 8000}]
    # Links, NIXL's side channel and UCX listen on arbitrary ports, reachable only from pods of the same part.
    any_port = {name for name, policy in policies.items() if any("ports" not in rule for rule in policy.get("ingress", []))}
    assert any_port == {"within-train", "within-serve", "within-lab"}
    pods = [template["spec"] for document in documents for template in pod_templates(document)]
    assert pods and not any(pod.get("hostNetwork") for pod in pods), "network policies do not apply to the host network"


EXPORTERS = [
    *((component, "dcgm-exporter") for component in ("dcgm", "dcgm-gke", "dcgm-profiling")),
    ("nvml", "strata-gpu-exporter"),
]


@pytest.mark.parametrize(("component", "exporter"), EXPORTERS)
def test_gpu_exporters_run_on_every_gpu_node_without_a_gpu_request(component: str, exporter: str) -> None:
    documents = build("ack", (component,))
    found = find(documents, f"DaemonSet/{exporter}")
    pod = found["spec"]["template"]["spec"]
    assert all("nvidia.com/gpu" not in resources for resources in pod["containers"][0]["resources"].values())
    assert pod["tolerations"] == [{"operator": "Exists", "effect": "NoSchedule"}]
    # The exporter reads the host, which requires a privileged namespace; that of the Ray pods is none.
    enforced = "pod-security.kubernetes.io/enforce"
    assert found["metadata"]["namespace"] == "strata-monitoring"
    assert find(documents, "Namespace/strata-monitoring")["metadata"]["labels"][enforced] == "privileged"
    assert find(documents, "Namespace/strata") == find(build("ack"), "Namespace/strata")
    assert find(documents, "Namespace/strata")["metadata"]["labels"][enforced] != "privileged"
    assert not [title(document) for document in build("ack") if document["metadata"]["name"] == "strata-monitoring"]


@pytest.mark.parametrize(("component", "added"), [("dcgm", None), ("dcgm-profiling", ["SYS_ADMIN"])])
def test_dcgm_reads_its_own_counters(component: str, added: list[str] | None) -> None:
    """Profiling fields come with their capability, and only then."""
    documents = build("ack", (component,))
    [counters] = [document for document in documents if document["kind"] == "ConfigMap" and "counters.csv" in document["data"]]
    assert counters["metadata"]["namespace"] == "strata-monitoring"
    pod = find(documents, "DaemonSet/dcgm-exporter")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [volume] = [volume for volume in pod["volumes"] if "configMap" in volume]
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
    assert volume["configMap"]["name"] == counters["metadata"]["name"], (
        "with the hash of the content, so that a change restarts it"
    )
    settings = {each["name"]: each.get("value") for each in container["env"]}
    assert settings["DCGM_EXPORTER_COLLECTORS"] == f"{mount['mountPath']}/counters.csv"
    assert settings["DCGM_EXPORTER_KUBERNETES"] == "true"
    capabilities = container["securityContext"]["capabilities"]
    assert capabilities["drop"] == ["ALL"] and capabilities.get("add") == added
    assert bool(re.search(r"^DCGM_FI_PROF_", counters["data"]["counters.csv"], re.MULTILINE)) == bool(added)


def test_dcgm_on_gke_takes_the_driver_from_the_host() -> None:
    plain, google = (find(build("gke", (name,)), "DaemonSet/dcgm-exporter") for name in ("dcgm", "dcgm-gke"))
    (before, after) = (each["spec"]["template"]["spec"] for each in (plain, google))
    [container] = after["containers"]
    assert container["securityContext"] == {"privileged": True, "runAsUser": 0}
    driver = {"name": "driver", "hostPath": {"path": "/home/kubernetes/bin/nvidia", "type": "Directory"}}
    assert after["volumes"] == [*before["volumes"], driver]
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "driver"]
    libraries = {"name": "LD_LIBRARY_PATH", "value": f"{mount['mountPath']}/lib64"}
    assert container["env"] == [*before["containers"][0]["env"], libraries]


# The guides


@pytest.mark.parametrize("target", ["gke", "ack"])
def test_a_guides_recipe_and_components_render(target: str, tmp_path: Path) -> None:
    """Renders the recipe of a cluster guide with the guide's components and a placeholder image."""
    guide = (ROOT / "docs" / f"cluster-{target}.md").read_text()
    recipe = tmp_path / f"{target}.yaml"
    recipe.write_text(guide.partition("```yaml\n")[2].partition("```")[0])
    named = re.search(rf'common="--target {target} --recipe {target}.yaml .* --with ([\w,-]+)"', guide)
    assert named
    order = render.Order(target, recipe_file.load(str(recipe)), "demo", tuple(named[1].split(",")), image=IMAGE)
    documents = render.render(order)
    assert {title(document) for document in documents} >= {"RayJob/strata-train", "RayService/strata"}
    for link in re.findall(r"\]\((?!https)([^)]+)\)", guide):
        assert (ROOT / "docs" / link).exists(), link
    for mentioned in re.findall(r"--with ([a-z-]+)", guide):
        assert mentioned in COMPONENTS, mentioned


# The image


@pytest.fixture(scope="module")
def dockerfile() -> list[list[str]]:
    """Instructions as words, continued lines joined."""
    text = (INFRA / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def stages(dockerfile: list[list[str]]) -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for words in dockerfile:
        if words[0] == "FROM":
            assert words[2] == "AS", words
            found[words[3]] = list(found.get(words[1], []))  # a stage inherits the instructions of its base
        found[list(found)[-1]].append(words)
    return found


def test_images_have_a_pinned_base_and_a_non_root_user(dockerfile: list[list[str]]) -> None:
    found = stages(dockerfile)
    for words in dockerfile:
        if words[0] == "FROM" and words[1] not in found:
            assert re.fullmatch(r"python:3\.1[123]\.\d+-slim-bookworm", words[1]), words
    for target in ("gpu", "cpu"):
        assert [words[1] for words in found[target] if words[0] == "USER"][-1] == "1000:1000"
        assert ["COPY", f"--from=build-{target}", "/opt/strata", "/opt/strata"] in found[target]
        packages = {word for words in found[target] if words[0] == "RUN" for word in words}
        assert {"wget", "procps", "g++", "libnuma1", "libssl3"} <= packages
        assert any(words[0] == "ENV" and "HOME=/home/strata" in words for words in found[target]), (
            "compiled kernels are cached in HOME"
        )
        finds_driver = any(words[0] == "ENV" and "LD_LIBRARY_PATH=/usr/local/nvidia/lib64" in words for words in found[target])
        assert finds_driver is (target == "gpu"), "GKE mounts the driver's libraries there"
        installs = " ".join(word for words in found[f"build-{target}"] for word in words)
        assert ("--extra gpu" in installs, "whl/cpu" in installs) == ((True, False) if target == "gpu" else (False, True))
    for words in dockerfile:
        if "apt-get" in words:
            assert "/var/lib/apt/lists/*" in words, "the package lists would stay in the layer"
        if words[:3] == ["RUN", "pip", "install"]:
            assert "--no-cache-dir" in words and all("==" in word for word in words[4:]), words


def test_dockerignore_includes_every_file_the_image_needs(dockerfile: list[list[str]]) -> None:
    ignore = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert ignore[0] == "*", "everything is ignored except listed files"
    let_in = {line[1:] for line in ignore if line.startswith("!")}
    sources = [word for words in dockerfile if words[0] == "COPY" for word in words[1:-1] if not word.startswith("--")]
    for source in sources:
        if source not in (".", "/opt/strata"):
            assert (ROOT / source).is_file() and source.partition("/")[0] in let_in, source
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {package.partition("/")[0] for package in packages} <= let_in, "a package of the wheel is ignored"
    assert {"pyproject.toml", project["project"]["readme"]} <= let_in


@pytest.mark.slow
@pytest.mark.parametrize("accepted", [True, False])
def test_drain_hook_drains_the_ray_node_and_waits(tmp_path: Path, accepted: bool) -> None:
    """With a fake raylet and a fake `ray` command, which ends the raylet as a drained node does."""
    raylet = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--node_id=c0ffee"])
    try:
        end = f"(sleep 0.3; kill {raylet.pid}) >/dev/null 2>&1 &" if accepted else "exit 1"
        for name, line in {"pgrep": f"echo {raylet.pid}", "ray": f'echo "$@" > {tmp_path}/arguments\n{end}'}.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
            (tmp_path / name).chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RAY_ADDRESS": "head:6379", "STRATA_DRAIN_S": "20"}
        start = time.monotonic()
        waiter = subprocess.Popen([INFRA / "docker" / "strata-drain"], env=environment)
        if accepted:
            raylet.wait(timeout=10)  # reap it; otherwise its entry under /proc would remain
        assert waiter.wait(timeout=10) == 0
        assert time.monotonic() - start < 10, "still waiting for a raylet that has exited"
        arguments = (tmp_path / "arguments").read_text()
        assert "--address head:6379 --node-id c0ffee" in arguments and "--deadline-remaining-seconds 20" in arguments
    finally:
        raylet.kill()
        raylet.wait()
