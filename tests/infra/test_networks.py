"""Fast networks: refusals, pods, placement, and the measurement before training."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT

from strata.deploy import render
from strata.deploy.documents import title, worker_groups
from strata.deploy.networks.facts import LEVELS, NEAREST, NETWORKS, of_machine
from strata.deploy.networks.pods import merged
from strata.deploy.render import Order
from strata.deploy.targets import TARGETS
from strata.deploy.validate import problems
from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.hardware import catalogue

Document = dict[str, Any]
Render = Callable[..., dict[str, Document]]
CRDS = Path(os.environ["STRATA_KUBERAY_CRDS"]) if os.environ.get("STRATA_KUBERAY_CRDS") else None
COMPONENTS = ROOT / "infra" / "components"
IMAGE = "example.com/strata:1.0"
STORAGE = {"gke": "bucket", "ack": "mine.nas.aliyuncs.com"}
# A GPU of each network, in training on two nodes; engines have a node each.
WHOLE = ["serve.prefill={replicas: 1, gpus: 8, tensor_parallel: 8}", "serve.decode={replicas: 1, gpus: 8, tensor_parallel: 8}"]
FLAT = ["parallel.tensor=1", "parallel.pipeline=1"]  # any number of workers
GPUS = {
    "network-gke-tcpx": "h100",
    "network-gke-tcpxo": "h100-mega",
    "network-gke-rdma": "h200",
    "network-ack-erdma": "h20",
    "network-rdma": "h20",
    "network-sriov": "h20",
}


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> Render:
    """Renders for the first target of the component. Components that only change the namespace are not built by kustomize."""
    real = render.build

    def build(overlay: Path, components: tuple[str, ...], image: str) -> list[Document]:
        built = real(overlay, tuple(each for each in components if each in ("kueue", "topology")), image)
        if NETWORKS.keys() & set(components):
            [namespace] = [document for document in built if document["kind"] == "Namespace"]
            namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] = "privileged"
        return built

    monkeypatch.setattr(render, "build", build)

    def rendered(*components: str, only: str | None = None, gpu: str | None = None, overrides: Any = (), target: str = "") -> Any:
        network = next((each for each in components if each in NETWORKS), None)
        where = target or (NETWORKS[network].targets[0] if network else "gke")
        chosen = [f"deploy.gpu={gpu or GPUS[network or 'network-gke-tcpx']}", f"deploy.storage={STORAGE[where]}"]
        recipe = recipe_file.load("16xh100-3d", [*chosen, *WHOLE, *overrides])
        order = Order(where, recipe, "demo", components, only, IMAGE)
        return {title(document): document for document in render.render(order)}

    return rendered


def pods(documents: dict[str, Document], name: str) -> list[Document]:
    return [spec["template"] for spec in worker_groups(documents[name])]


def ray(template: Document) -> Document:
    container: Document = template["spec"]["containers"][0]
    assert container["name"] == "ray-worker"
    return container


def env(template: Document) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in ray(template)["env"]}


def refused(make: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(UserError) as error:
        make()
    return error.value.cause, error.value.fix


# Refusals


@pytest.mark.parametrize(
    ("gpu", "overrides", "machine", "fix"),
    [
        ("h100", [], "2 nodes of a3-highgpu-8g", "Add --with network-gke-tcpx, or set deploy.network=tcp"),
        ("h100-mega", [], "2 nodes of a3-megagpu-8g", "Add --with network-gke-tcpxo, or"),
        ("h200", [], "2 nodes of a3-ultragpu-8g", "Add --with network-gke-rdma, or"),
        ("b200", ["parallel.workers=24", "train.batch=768"], "3 nodes of a4-highgpu-8g", "Add --with network-gke-rdma, or"),
        ("a100", [], "2 nodes of a2-ultragpu-8g", "a2-ultragpu-8g has no faster network: choose another deploy.gpu, or set"),
        ("h100", ["deploy.gpus_per_node=4"], "4 nodes of a3-highgpu-4g", "a3-highgpu-4g has no faster network"),
    ],
)
@pytest.mark.parametrize("part", ["train", "lab"])
def test_several_gpu_nodes_over_tcp_are_refused(
    rendered: Render, gpu: str, overrides: list[str], machine: str, fix: str, part: str
) -> None:
    cause, hint = refused(lambda: rendered(gpu=gpu, only=part, overrides=[*FLAT, *overrides]))
    assert machine in cause and "TCP" in cause
    assert hint.startswith(fix) and "deploy.network=tcp" in hint
    assert rendered(gpu=gpu, only=part, overrides=[*FLAT, *overrides, "deploy.network=tcp"])


def test_ack_names_its_own_network_before_generic_ones(rendered: Render) -> None:
    _, fix = refused(lambda: rendered(target="ack", gpu="h20", only="train"))
    assert fix.startswith("Add --with network-ack-erdma or network-rdma or network-sriov")
    _, fix = refused(lambda: rendered(target="ack", gpu="a100", only="train"))
    assert fix.startswith("Add --with network-rdma or network-sriov")


def test_one_node_and_serving_need_no_fast_network(rendered: Render) -> None:
    assert rendered(only="serve")
    one = [*FLAT, "parallel.workers=8"]
    assert rendered(only="train", overrides=one) and rendered(only="lab", overrides=one)


@pytest.mark.parametrize(
    ("component", "options", "cause", "fix"),
    [
        ("network-gke-tcpxo", {"gpu": "h100"}, "not for the machine a3-highgpu-8g of train", "Use network-gke-tcpx,"),
        ("network-gke-tcpx", {"gpu": "h100-mega"}, "not for the machine a3-megagpu-8g", "Use network-gke-tcpxo,"),
        ("network-gke-tcpx", {"gpu": "h200"}, "not for the machine a3-ultragpu-8g", "Use network-gke-rdma,"),
        ("network-gke-rdma", {"gpu": "a100"}, "not for the machine a2-ultragpu-8g", "a2-ultragpu-8g has no fast network"),
        (
            "network-gke-tcpx",
            {"overrides": ["deploy.gpus_per_node=4"], "only": "lab"},
            "not for the machine a3-highgpu-4g",
            "Remove it",
        ),
        ("network-ack-erdma", {"gpu": "a100"}, "not for the machine ecs.gn7e", "Use network-rdma or network-sriov"),
        ("network-gke-rdma", {"target": "ack", "gpu": "h20"}, "is not for ack: GPUDirect RDMA is for gke", "Remove it"),
        ("network-ack-erdma", {"target": "gke", "gpu": "h200"}, "is not for gke: eRDMA is for ack", "Remove it"),
        ("network-rdma", {"target": "gke", "gpu": "h200"}, "is not for gke: GKE's own networks", "Remove it"),
        ("network-gke-rdma", {"overrides": ["deploy.network=tcp"]}, "deploy.network=tcp and the component", "Remove one"),
        ("network-gke-rdma", {"overrides": ["deploy.rdma_resource=rdma/hca"]}, "deploy.rdma_resource=rdma/hca", "network-rdma"),
        ("network-gke-tcpx", {"only": "serve"}, "has no pods: it is for training", "Remove it"),
        (
            "network-gke-rdma",
            {"overrides": ["serve.decode={replicas: 1, gpus: 4, tensor_parallel: 4}"]},
            "a pod of decode has 4 of 8 GPUs",
            "Set serve.decode.tensor_parallel=8",
        ),
        (
            "network-gke-rdma",
            {"overrides": ["deploy.prefill_gpu=l4", "serve.prefill={replicas: 1, gpus: 1}", "deploy.nodes=4"]},
            "not for the machine g2-standard-96 of prefill",
            "separately (--only)",
        ),
        (
            "network-gke-rdma",
            {"overrides": [*FLAT, "parallel.workers=4"], "only": "train"},
            "a pod of train has 4 of 8 GPUs",
            "Set parallel.workers=8",
        ),
    ],
)
def test_a_network_for_other_pods_is_refused(
    rendered: Render, component: str, options: dict[str, Any], cause: str, fix: str
) -> None:
    found = refused(lambda: rendered(component, **options))
    assert component in found[0] or "rdma_resource" in found[0]
    assert cause in found[0] and fix in found[1]


def test_a_pod_has_one_network(rendered: Render) -> None:
    assert "exclude each other" in refused(lambda: rendered("network-gke-tcpx", "network-gke-rdma"))[0]
    assert "exclude each other" in refused(lambda: rendered("network-gke-rdma", "kueue", "topology", "compact", only="train"))[0]


# Facts


def test_networks_are_of_known_machines_and_fabrics() -> None:
    for name, network in NETWORKS.items():
        names = [machine.name for each in network.targets for gpu in TARGETS[each].gpus.values() for machine in gpu.machines]
        for beginning in network.machines:
            assert any(machine.startswith(beginning) for machine in names), f"{name}: {beginning}"
        if network.fabric:
            assert catalogue.fabric(network.fabric).nics >= 2, name
    assert {path.name for path in COMPONENTS.glob("network-*")} - {"network-policy"} == NETWORKS.keys()
    assert of_machine("kind", "any") == [] and of_machine("gke", "g2-standard-12") == []


@pytest.mark.parametrize("component", NETWORKS)
def test_every_network_lowers_the_namespaces_pod_security(component: str) -> None:
    """Host folders and IPC_LOCK are only allowed in `privileged` namespaces; the API server would refuse the pods."""
    kustomization = yaml.safe_load((COMPONENTS / component / "kustomization.yaml").read_text())
    namespace = yaml.safe_load((COMPONENTS / component / "namespace.yaml").read_text())
    assert kustomization["patches"] == [{"path": "namespace.yaml"}]
    assert namespace["kind"] == "Namespace"
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "privileged"}


# Pods


@pytest.mark.parametrize("component", NETWORKS)
def test_rendered_networks_are_valid_and_change_only_gpu_pods(rendered: Render, component: str) -> None:
    plain = rendered(gpu=GPUS[component], target=NETWORKS[component].targets[0], overrides=["deploy.network=tcp"])
    changed = rendered(component)
    assert problems(list(changed.values()), CRDS) == []
    assert plain.keys() == changed.keys()
    differing = {name for name in plain if plain[name] != changed[name]} - {"ConfigMap/strata-demo-recipe", "Namespace/strata"}
    trained = {"RayJob/strata-demo", "RayCluster/strata-lab"}
    assert differing == (trained | {"RayService/strata"} if NETWORKS[component].engines else trained)
    for name in differing:
        for template in pods(changed, name):
            mounted = {mount["name"] for each in _containers(template) for mount in each.get("volumeMounts", [])}
            volumes = [volume["name"] for volume in template["spec"]["volumes"]]
            assert mounted == set(volumes) and len(set(volumes)) == len(volumes), name
            container = ray(template)
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert container["securityContext"]["capabilities"].get("add", []) in ([], ["IPC_LOCK"])
            assert template["spec"]["securityContext"]["runAsNonRoot"] is True
            variables = [each["name"] for each in container["env"]]
            assert len(set(variables)) == len(variables)
            assert env(template)["NCCL_SOCKET_IFNAME"] == "eth0"


def _containers(template: Document) -> list[Document]:
    return [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]


@pytest.mark.parametrize(
    ("component", "networks"),
    [
        ("network-gke-tcpx", [f"vpc{i}" for i in range(1, 5)]),
        ("network-gke-tcpxo", [f"vpc{i}" for i in range(1, 9)]),
        ("network-gke-rdma", [f"rdma-{i}" for i in range(8)]),
    ],
)
def test_gke_pods_have_all_interfaces_of_their_machine(rendered: Render, component: str, networks: list[str]) -> None:
    [template] = pods(rendered(component, only="train"), "RayJob/strata-demo")
    annotations = template["metadata"]["annotations"]
    assert annotations["gke-gcsfuse/volumes"] == "true", "the bucket's annotations are still there"
    assert annotations["networking.gke.io/default-interface"] == "eth0"
    first, *others = json.loads(annotations["networking.gke.io/interfaces"])
    assert first == {"interfaceName": "eth0", "network": "default"}
    assert [each["network"] for each in others] == networks
    names = [each["interfaceName"] for each in others]
    start = 2 if component == "network-gke-rdma" else 1  # eth1 is the second network of the host
    assert names == [f"eth{i}" for i in range(start, start + len(networks))]
    assert len(networks) == catalogue.fabric(str(NETWORKS[component].fabric)).nics


@pytest.mark.parametrize(
    ("component", "daemon", "capabilities", "devices"),
    [
        ("network-gke-tcpx", "tcpx-daemon", ["NET_ADMIN"], 10),
        ("network-gke-tcpxo", "tcpxo-daemon", ["NET_ADMIN", "NET_BIND_SERVICE"], 11),
    ],
)
def test_the_daemon_is_a_sidecar_with_the_gpus_devices(
    rendered: Render, component: str, daemon: str, capabilities: list[str], devices: int
) -> None:
    [template] = pods(rendered(component, only="train"), "RayJob/strata-demo")
    [sidecar] = template["spec"]["initContainers"]
    assert sidecar["name"] == daemon and sidecar["restartPolicy"] == "Always"
    assert re.search(r":v\d+\.\d+\.\d+$", sidecar["image"])
    assert sidecar["securityContext"]["capabilities"] == {"add": capabilities}
    assert (sidecar["securityContext"]["runAsUser"], sidecar["securityContext"]["runAsNonRoot"]) == (0, False)
    assert "resources" not in sidecar, "Kueue's quota has no CPUs for it"
    paths = [each["path"] for each in yaml.safe_load(template["metadata"]["annotations"][f"devices.gke.io/container.{daemon}"])]
    assert paths[:8] == [f"/dev/nvidia{i}" for i in range(8)] and len(paths) == devices
    assert "nvidia.com/gpu" not in sidecar.get("resources", {})


@pytest.mark.parametrize(
    ("component", "script"),
    [
        ("network-gke-tcpxo", "usr/local/nvidia/lib64/nccl-env-profile.sh"),
        ("network-gke-rdma", "usr/local/gib/scripts/set_nccl_env.sh"),
    ],
)
def test_ray_inherits_the_plugins_variables(rendered: Render, tmp_path: Path, component: str, script: str) -> None:
    """KubeRay runs `<command> && ulimit -n ...; ray start ...` in bash, so a failed command alone would not stop Ray."""
    [template] = pods(rendered(component, only="train"), "RayJob/strata-demo")
    command = " ".join(ray(template)["command"]).replace(f"/{script}", str(tmp_path / script))
    assert str(tmp_path) in command

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", "-c", f"{command} && ulimit -n 64; echo net=$NCCL_NET"], capture_output=True, text=True)

    assert (run().returncode, run().stdout) == (1, ""), "a pod without the plugin fails before Ray starts"
    file = tmp_path / script
    file.parent.mkdir(parents=True)
    file.write_text("export NCCL_NET=gIB\nfalse\n")  # a script whose last test fails is not an error
    assert run().stdout == "net=gIB\n"


def test_engines_use_rdma_only_where_it_is(rendered: Render) -> None:
    for component, expected in (
        ("network-gke-rdma", "rc,cuda_copy,cuda_ipc,sm,self"),
        ("network-rdma", "rc,cuda_copy,cuda_ipc,sm,self"),
        ("network-sriov", "rc,cuda_copy,cuda_ipc,sm,self"),
        ("network-ack-erdma", "tcp,cuda_copy,cuda_ipc,sm,self"),
        ("network-gke-tcpxo", "all"),
    ):
        found = {env(template)["UCX_TLS"] for template in pods(rendered(component), "RayService/strata")}
        assert found == {expected}, component


def test_erdma_carries_the_engines_tcp_and_nccls_own_transport(rendered: Render) -> None:
    documents = rendered("network-ack-erdma")
    smcr = "network.alibabacloud.com/erdma-smcr"
    assert all(each["metadata"]["annotations"][smcr] == "true" for each in pods(documents, "RayService/strata"))
    [training] = pods(documents, "RayJob/strata-demo")
    assert smcr not in training["metadata"].get("annotations", {})
    assert env(training)["NCCL_IB_HCA"] == "erdma" and env(training)["NCCL_NET_GDR_LEVEL"] == "SYS"
    assert "NCCL_IB_HCA" not in env(pods(documents, "RayService/strata")[0])


@pytest.mark.parametrize(
    ("component", "resource", "count"),
    [
        ("network-ack-erdma", "aliyun/erdma", "1"),
        ("network-rdma", "rdma/hca_shared_devices_a", "1"),
        ("network-sriov", "nvidia.com/sriov_rdma", "8"),
    ],
)
def test_pods_request_devices_that_kueue_covers(rendered: Render, component: str, resource: str, count: str) -> None:
    documents = rendered(component, "kueue")
    for name in ("RayJob/strata-demo", "RayService/strata", "RayCluster/strata-lab"):
        for template in pods(documents, name):
            resources = ray(template)["resources"]
            assert resources["requests"][resource] == resources["limits"][resource] == count
    [covered] = documents["ClusterQueue/strata.strata-demo"]["spec"]["resourceGroups"]
    assert covered["coveredResources"].count(resource) == 1
    for flavor in covered["flavors"]:
        quotas = {each["name"]: int(each["nominalQuota"]) for each in flavor["resources"] if "/" in each["name"]}
        assert quotas[resource] == 2 * int(count) and quotas["nvidia.com/gpu"] == 16, "of the two nodes"


def test_the_recipe_names_the_device_plugins_resource(rendered: Render) -> None:
    for component, count in (("network-rdma", "1"), ("network-sriov", "8")):
        documents = rendered(component, "kueue", overrides=["deploy.rdma_resource=rdma/hca"])
        [template] = pods(documents, "RayJob/strata-demo")
        limits = ray(template)["resources"]["limits"]
        assert limits["rdma/hca"] == count and not {str(NETWORKS[component].resource)} & limits.keys()
        assert "rdma/hca" in documents["ClusterQueue/strata.strata-demo"]["spec"]["resourceGroups"][0]["coveredResources"]


def test_each_sriov_device_has_an_attachment(rendered: Render) -> None:
    half = "serve.decode={replicas: 1, gpus: 4, tensor_parallel: 4}"
    prefill, decode = pods(rendered("network-sriov", overrides=[half]), "RayService/strata")
    assert prefill["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"].split(",") == ["strata-rdma"] * 8
    assert decode["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"].split(",") == ["strata-rdma"] * 4
    assert ray(decode)["resources"]["limits"]["nvidia.com/sriov_rdma"] == "4"


@pytest.mark.parametrize(
    ("base", "added", "expected"),
    [
        ({"a": 1, "b": 2}, {"b": 3, "c": 4}, {"a": 1, "b": 3, "c": 4}),
        ({"a": {"x": 1}}, {"a": {"y": 2}}, {"a": {"x": 1, "y": 2}}),
        ([{"name": "a", "value": 1}], [{"name": "a", "value": 2}], [{"name": "a", "value": 2}]),
        ([{"name": "a"}], [{"name": "b"}], [{"name": "a"}, {"name": "b"}]),
        ([{"mountPath": "/a"}], [{"mountPath": "/a", "readOnly": True}], [{"mountPath": "/a", "readOnly": True}]),
        (["ALL"], ["ALL", "NET_ADMIN"], ["ALL", "NET_ADMIN"]),
        ([{"effect": "x"}], [{"effect": "y"}], [{"effect": "x"}, {"effect": "y"}]),
        ({"a": False}, {}, {"a": False}),
        ({"a": True}, {"a": False}, {"a": False}),
    ],
)
def test_fragments_merge_by_name(base: Any, added: Any, expected: Any) -> None:
    assert merged(base, added) == expected


# Placement


@pytest.mark.parametrize("component", ["network-gke-rdma", "network-ack-erdma"])
def test_kueue_places_training_by_the_clouds_topology(rendered: Render, component: str) -> None:
    target = NETWORKS[component].targets[0]
    documents = rendered(component, "kueue", "topology", only="train")
    levels = [each["nodeLabel"] for each in documents["Topology/strata"]["spec"]["levels"]]
    assert tuple(levels) == LEVELS[target] and levels[-1] == "kubernetes.io/hostname"
    assert NEAREST[target] in levels[:-1]
    [template] = pods(documents, "RayJob/strata-demo")
    assert template["metadata"]["annotations"]["kueue.x-k8s.io/podset-preferred-topology"] == NEAREST[target]
    head = documents["RayJob/strata-demo"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    assert not any(key.startswith("kueue") for key in head["metadata"].get("annotations", {})), "heads run outside the topology"

    machine = {"gke": "a3-ultragpu-8g", "ack": "ecs-gn8v-8x-48xlarge"}[target]
    flavor, heads = documents[f"ResourceFlavor/strata-{machine}"], documents["ResourceFlavor/strata-heads"]
    assert flavor["spec"]["topologyName"] == "strata"
    assert flavor["spec"]["nodeLabels"].items() <= template["spec"]["nodeSelector"].items() and flavor["spec"]["nodeLabels"]
    assert flavor["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert "topologyName" not in (heads.get("spec") or {})
    [covered] = documents[f"ClusterQueue/strata.strata-demo.{machine}"]["spec"]["resourceGroups"]
    with_gpus, without = ({each["name"]: each["nominalQuota"] for each in one["resources"]} for one in covered["flavors"])
    assert [one["name"] for one in covered["flavors"]] == [f"strata-{machine}", "strata-heads"]
    assert list(with_gpus) == list(without) == covered["coveredResources"], "Kueue requires the same order"
    assert with_gpus["nvidia.com/gpu"] == "16" and without["nvidia.com/gpu"] == "0"
    assert {quota for name, quota in without.items() if "/" in name} == {"0"} and without["cpu"] == with_gpus["cpu"]
    local = documents[f"LocalQueue/strata-demo.{machine}"]
    assert local["spec"]["clusterQueue"] == f"strata.strata-demo.{machine}"
    assert documents["RayJob/strata-demo"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]


def test_runs_on_other_machines_have_other_flavors(rendered: Render) -> None:
    """Kueue does not let a flavor's node labels change."""
    found = {}
    for gpu in ("h200", "b200"):
        documents = rendered("network-gke-rdma", "kueue", "topology", only="train", gpu=gpu, overrides=["deploy.quota_gpus=64"])
        found[gpu] = {
            name: document for name, document in documents.items() if name.startswith(("ResourceFlavor", "ClusterQueue"))
        }
    shared = found["h200"].keys() & found["b200"].keys()
    assert shared == {"ResourceFlavor/strata-heads"}
    assert all(found["h200"][name] == found["b200"][name] for name in shared)


def test_topology_needs_kueue_and_training_alone(rendered: Render) -> None:
    cause, fix = refused(lambda: rendered("network-gke-rdma", "topology", only="train"))
    assert "needs Kueue" in cause and "kueue,topology" in fix
    for only in (None, "serve", "lab"):
        cause, fix = refused(lambda part=only: rendered("network-gke-rdma", "kueue", "topology", only=part))  # type: ignore[misc]
        assert "is for training on GPUs" in cause and "--only train" in fix and "compact" in fix


@pytest.mark.parametrize(
    ("component", "weights"),
    [
        ("network-gke-rdma", {"cloud.google.com/gce-topology-block": 50, "cloud.google.com/gce-topology-subblock": 100}),
        ("network-ack-erdma", {"topology.kubernetes.io/zone": 100}),
    ],
)
def test_compact_pods_prefer_nodes_near_their_cluster(rendered: Render, component: str, weights: dict[str, int]) -> None:
    documents = rendered(component, "compact")
    for name, part in (("RayJob/strata-demo", "train"), ("RayService/strata", "serve"), ("RayCluster/strata-lab", "lab")):
        for template in pods(documents, name):
            terms = template["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
            assert {each["podAffinityTerm"]["topologyKey"]: each["weight"] for each in terms} == weights
            for each in terms:
                assert each["podAffinityTerm"]["labelSelector"] == {"matchLabels": {"strata.dev/part": part}}
                assert each["podAffinityTerm"]["matchLabelKeys"] == ["ray.io/cluster"]
    assert problems(list(documents.values()), CRDS) == []


# Measurement before training


@pytest.mark.parametrize(
    ("components", "fabric"),
    [(("network-gke-tcpxo",), ["--fabric", "gke-a3-mega"]), (("network-rdma",), []), ((), [])],
)
def test_the_fabric_is_measured_before_training(rendered: Render, components: tuple[str, ...], fabric: list[str]) -> None:
    tcp = [] if components else ["deploy.network=tcp"]
    documents = rendered(*components, "fabric-check", only="train", overrides=tcp)
    [template] = pods(documents, "RayJob/strata-demo")
    assert {"name": "STRATA_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}} in ray(template)["env"]
    assert problems(list(documents.values()), CRDS) == []
    shell, option, script = shlex.split(documents["RayJob/strata-demo"]["spec"]["entrypoint"])
    assert (shell, option) == ("bash", "-c") and not set("\"'$\\`") & set(script), "Ray quotes it again, with double quotes"
    measured, trained = (shlex.split(each) for each in script.split(" && "))
    assert measured[:3] == ["strata", "bench", "fabric"]
    assert measured[3:] == ["--recipe", "/etc/strata/recipe.yaml", "--json", "/mnt/strata/fabric/demo.json", *fabric]
    assert trained[0] == "exec" and trained[1:3] == ["strata", "train"] and trained[-1] == "--or-resume"
    result = subprocess.run(["bash", "-c", f'strata() {{ echo "$@"; return 1; }}; {script}'], capture_output=True, text=True)
    assert result.returncode == 1 and "train" not in result.stdout.split()[2:], "a slow node stops the job before training"


def test_the_fabric_check_is_for_training(rendered: Render) -> None:
    assert "is for training" in refused(lambda: rendered("fabric-check", only="serve"))[0]
