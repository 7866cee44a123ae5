"""Kueue's quotas admit every rendered Ray cluster, and limit a team's GPUs to its own and those that it borrows."""

import functools
import itertools
from fractions import Fraction
from typing import Any

import pytest

from strata.deploy import render, targets
from strata.deploy.documents import Document
from strata.deploy.render import Order
from strata.deploy.targets import GpuType, Machine, Target
from strata.deploy.teams.queues import team_queues
from strata.deploy.teams.quota import cluster_requests, run_quota, team_quota
from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import DeploySection

IMAGE = "example.com/strata:1.0"
GPU = "nvidia.com/gpu"
GKE = ("deploy.gpu=h100", "deploy.storage=bucket", "deploy.network=tcp")
UNITS = {"m": 0.001, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@functools.cache
def rendered(
    *overrides: str, target: str = "gke", recipe: str = "8xh100", run: str = "demo", only: str | None = None
) -> list[Document]:
    return render.render(Order(target, recipe_file.load(recipe, overrides), run, ("kueue",), only, IMAGE))


def find(found: list[Document], kind: str, name: str | None = None) -> Document:
    [one] = [each for each in found if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return one


def value(quantity: str) -> float:
    unit = next((unit for unit in UNITS if quantity.endswith(unit)), "")
    return float(quantity.removesuffix(unit)) * UNITS.get(unit, 1)


def quota(queue: Document, key: str = "nominalQuota") -> dict[str, float]:
    [group] = queue["spec"]["resourceGroups"]
    [flavor] = group["flavors"]
    assert [resource["name"] for resource in flavor["resources"]] == group["coveredResources"]
    return {resource["name"]: value(resource[key]) for resource in flavor["resources"]}


def pod_sets(document: Document) -> list[tuple[int, dict[str, str]]]:
    """Pods of a Ray cluster with their requests, counted apart from the code under test: all have one container with requests."""
    spec = document["spec"]
    cluster = spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec
    pods = [(1, cluster["headGroupSpec"]["template"])]
    pods += [(group["maxReplicas"], group["template"]) for group in cluster["workerGroupSpecs"]]
    pods += [(1, spec["submitterPodTemplate"])] if "submitterPodTemplate" in spec else []
    sets = [(count, container["resources"]["requests"]) for count, pod in pods for container in pod["spec"]["containers"]]
    return sets + ([(1, cluster["autoscalerOptions"]["resources"]["requests"])] if cluster.get("enableInTreeAutoscaling") else [])


def needed(document: Document) -> dict[str, float]:
    total: dict[str, float] = {}
    for count, requests in pod_sets(document):
        for name, quantity in requests.items():
            total[name] = total.get(name, 0) + count * value(quantity)
    return total


@pytest.mark.parametrize("pods", [1, 41, 128, 2048])
def test_a_runs_quota_admits_its_pods_and_no_more(pods: int) -> None:
    found = rendered(*GKE, f"parallel.workers={8 * pods}", f"train.batch={8 * pods}", only="train")
    job, admitted = find(found, "RayJob"), quota(find(found, "ClusterQueue"))
    wanted = needed(job)
    assert wanted[GPU] == 8 * pods and wanted["ephemeral-storage"] > pods * 50 * 2**30
    assert admitted.keys() >= wanted.keys()
    for name, amount in wanted.items():
        unit = 2**30 if name in ("memory", "ephemeral-storage") else 1
        assert amount <= admitted[name] + 1e-6 < amount + unit + 1e-6, name


@pytest.mark.parametrize(("target", "recipe", "overrides"), [("gke", "8xh100", GKE), ("kind", "laptop", ())])
def test_the_deployments_queue_admits_its_largest_cluster(target: str, recipe: str, overrides: tuple[str, ...]) -> None:
    found = rendered(*overrides, target=target, recipe=recipe)
    clusters = [needed(find(found, kind)) for kind in ("RayService", "RayCluster")]
    admitted = quota(find(found, "ClusterQueue", "strata.strata.deployment"))
    for name in ("cpu", "memory"):
        most = max(cluster[name] for cluster in clusters)
        assert most <= admitted[name] < most + (2**30 if name == "memory" else 1)
    for kind, queue in (("RayJob", "strata-demo"), ("RayService", "strata.deployment"), ("RayCluster", "strata.deployment")):
        assert find(found, kind)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue
        assert find(found, "LocalQueue", queue)["spec"]["clusterQueue"] == f"strata.{queue}"


def test_queues_of_runs_neither_lend_nor_borrow() -> None:
    for queue in (each for each in rendered(*GKE) if each["kind"] == "ClusterQueue"):
        for key in ("borrowingLimit", "lendingLimit"):
            assert set(quota(queue, key).values()) == {0}


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (None, {"strata.strata.deployment", "strata.strata-demo.flex-start"}),
        ("train", {"strata.strata-demo.flex-start"}),
        ("lab", {"strata.strata.deployment"}),
    ],
)
def test_only_queues_with_clusters_are_rendered(only: str | None, names: set[str]) -> None:
    order = Order("gke", recipe_file.load("8xh100", GKE), "demo", ("kueue", "flex-start"), only, IMAGE)
    found = render.render(order)
    assert {each["metadata"]["name"] for each in found if each["kind"] == "ClusterQueue"} == names
    assert {f"strata.{each['metadata']['name']}" for each in found if each["kind"] == "LocalQueue"} == names


def test_an_endpoints_queue_does_not_depend_on_the_run() -> None:
    """Kueue does not let a running Ray object change its queue."""
    one, other = (find(rendered(*GKE, run=run, only="serve"), "RayService") for run in ("one", "other"))
    assert one["metadata"]["labels"] == other["metadata"]["labels"]


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (2, 16), (5, 40)])
def test_all_available_nodes_are_admitted(nodes: int, gpus: int) -> None:
    admitted = quota(find(rendered(*GKE, f"deploy.nodes={nodes}", only="train"), "ClusterQueue"))
    assert admitted[GPU] == gpus
    assert admitted["cpu"] >= nodes * 176 and admitted["memory"] >= nodes * 1591 * 2**30
    assert admitted["ephemeral-storage"] >= nodes * 50 * 2**30


# Sums of pods


def pod(cpu: str, gpus: int = 0, **more: Any) -> Document:
    limits = {GPU: str(gpus)} if gpus else {}
    return {"spec": {"containers": [{"resources": {"requests": {"cpu": cpu}, "limits": limits}}], **more}}


def cluster(*workers: tuple[int, Document], head: Document | None = None, **spec: Any) -> Document:
    groups = [{"groupName": f"g{i}", "maxReplicas": count, "template": each} for i, (count, each) in enumerate(workers)]
    return {
        "kind": "RayCluster",
        "metadata": {"name": "c"},
        "spec": {"headGroupSpec": {"template": head or pod("1")}, "workerGroupSpecs": groups, **spec},
    }


def test_requests_of_a_cluster() -> None:
    assert cluster_requests(cluster((3, pod("2", 4)), (2, pod("500m")))) == {"cpu": 8, GPU: 12}
    autoscaler = {"resources": {"requests": {"cpu": "250m"}, "limits": {"cpu": "1", "memory": "1Gi"}}}
    assert cluster_requests(cluster(enableInTreeAutoscaling=True, autoscalerOptions=autoscaler)) == {"cpu": 1.25, "memory": 2**30}
    assert cluster_requests(cluster(autoscalerOptions=autoscaler)) == {"cpu": 1}, (
        "without an autoscaler, its options are not used"
    )
    hosts = cluster((2, pod("1", 1)))
    hosts["spec"]["workerGroupSpecs"][0]["numOfHosts"] = 3
    assert cluster_requests(hosts) == {"cpu": 7, GPU: 6}
    job = {"kind": "RayJob", "spec": {"rayClusterSpec": cluster()["spec"], "submitterPodTemplate": pod("200m")}}
    assert cluster_requests(job) == {"cpu": Fraction(6, 5)}


def test_init_containers_count_if_they_request_more_and_sidecars_always() -> None:
    first = [{"resources": {"requests": {"cpu": "3", "disk": "5"}}}]
    sidecar = [{"restartPolicy": "Always", "resources": {"requests": {"cpu": "3"}}}]
    assert cluster_requests(cluster(head=pod("1", initContainers=first))) == {"cpu": 3, "disk": 5}
    assert cluster_requests(cluster(head=pod("4", initContainers=first))) == {"cpu": 4, "disk": 5}
    assert cluster_requests(cluster(head=pod("1", initContainers=sidecar))) == {"cpu": 4}


def test_the_quota_of_a_run_is_the_maximum_of_each_resource() -> None:
    one, other = cluster((4, pod("1", 8))), cluster((2, pod("30", 1)))
    assert run_quota([one, other], None, {}) == {"cpu": 61, GPU: 32}


# Teams

BIG = GpuType("big", (Machine("big-4", 4, 40, 400),))
SMALL = GpuType("small", (Machine("small-1", 1, 16, 32),))
CLOUD = Target("cloud", gpus={"big": BIG, "small": SMALL})


def test_a_teams_quota_is_that_of_gpus_alone_in_their_pods_and_clusters() -> None:
    manifests = [cluster((9, pod("2", 8)), head=pod("4")), cluster((1, pod("1", 1)), head=pod("3"))]
    # Each GPU: 16 CPUs of `small`, 100 GiB of `big`, and a head of 4 CPUs.
    assert team_quota(manifests, CLOUD, 3) == {"cpu": 60, "memory": 300 * 2**30, GPU: 3}
    # 64 pods also grow their heads: 2 CPUs and 8 GiB.
    assert team_quota(manifests, CLOUD, 64) == {"cpu": 64 * 20 + 2, "memory": (6400 + 8) * 2**30, GPU: 64}
    assert team_quota(manifests, Target("laptop"), 2) == {"cpu": 12, "memory": 0, GPU: 2}


def every_machine() -> list[tuple[str, str, int]]:
    clouds = [target for target in targets.TARGETS.values() if target.gpus]
    return [(target.name, name, gpu.machines[-1].gpus) for target in clouds for name, gpu in target.gpus.items()]


@pytest.mark.parametrize(("target", "gpu", "gpus"), every_machine())
def test_a_teams_quota_admits_any_cluster_with_its_gpus(target: str, gpu: str, gpus: int) -> None:
    def admitted(workers: int) -> None:
        size = (f"parallel.workers={workers}", f"train.batch={workers}", f"deploy.gpu={gpu}")
        team = (f"deploy.quota_gpus={workers}", "deploy.borrow_gpus=0", "deploy.storage=some", "deploy.network=tcp")
        found = rendered(*size, *team, target=target, only="train")
        wanted, limit = needed(find(found, "RayJob")), quota(find(found, "ClusterQueue"))
        assert limit[GPU] == workers == wanted[GPU]
        assert all(wanted[name] <= limit[name] for name in wanted)

    admitted(1)
    admitted(gpus)
    admitted(50 * gpus)


def test_many_small_clusters_of_a_team_run_at_once() -> None:
    one = rendered(*GKE, "parallel.workers=1", "train.batch=1", "deploy.quota_gpus=64", only="train")
    wanted, limit = needed(find(one, "RayJob")), quota(find(one, "ClusterQueue"))
    assert all(64 * amount <= limit[name] for name, amount in wanted.items())


@pytest.mark.parametrize("target", ["gke", "ack", "kind"])
def test_all_renderings_of_a_team_have_the_same_queue(target: str) -> None:
    gpu = {"gke": ["h100", "l4"], "ack": ["h20", "a10"], "kind": []}[target]
    sizes = [("8xh100", f"deploy.gpu={name}", "deploy.nodes=9", f"serve.max_sequences={i + 5}") for i, name in enumerate(gpu)]
    recipes = sizes or [("laptop", "deploy.cpus=2"), ("laptop", "deploy.cpus=3")]
    team = ("deploy.namespace=team", "deploy.quota_gpus=99", "deploy.borrow_gpus=7")
    queues = [
        find(
            rendered(*overrides, *team, f"deploy.name=d{i}", target=target, recipe=recipe, run=f"r{i}", only=only), "ClusterQueue"
        )
        for (i, (recipe, *overrides)), only in itertools.product(enumerate(recipes), (None, "train", "serve"))
    ]
    assert len(queues) == 6 and all(queue == queues[0] for queue in queues)
    assert (queues[0]["metadata"]["name"], quota(queues[0])[GPU], quota(queues[0], "borrowingLimit")[GPU]) == ("team", 99, 7)
    resources = queues[0]["spec"]["resourceGroups"][0]["flavors"][0]["resources"]
    assert all("lendingLimit" not in resource for resource in resources)


def test_teams_share_a_cohort_and_reclaim_their_quota() -> None:
    queues = [find(rendered(*GKE, f"deploy.namespace={name}", "deploy.quota_gpus=8"), "ClusterQueue") for name in ("one", "two")]
    assert {queue["spec"]["cohortName"] for queue in queues} == {"strata"}
    for queue in queues:
        assert queue["spec"]["preemption"] == {"withinClusterQueue": "LowerPriority", "reclaimWithinCohort": "Any"}
        resources = queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"]
        assert all(resource.keys() == {"name", "nominalQuota"} for resource in resources), "no limit of borrowing"


@pytest.mark.parametrize(("quota_gpus", "borrow", "fits"), [(8, 0, True), (7, 0, False), (7, 1, True), (1, None, True)])
def test_a_cluster_beyond_the_teams_quota_is_rejected(quota_gpus: int, borrow: int | None, fits: bool) -> None:
    limits = (f"deploy.quota_gpus={quota_gpus}", f"deploy.borrow_gpus={'null' if borrow is None else borrow}")
    if fits:
        rendered(*GKE, *limits, only="train")
    else:
        with pytest.raises(UserError, match=rf"requests 8 of {GPU}, but the team's queue admits at most 7") as error:
            rendered(*GKE, *limits, only="train")
        assert "deploy.quota_gpus" in error.value.fix


def test_a_flavor_without_gpus_stays_without_devices_and_devices_are_no_more_than_gpus() -> None:
    names = ("cpu", GPU, "rdma/x")
    flavors = [
        {"name": name, "resources": [{"name": each, "nominalQuota": quota} for each, quota in zip(names, quotas, strict=True)]}
        for name, quotas in (("workers", ("1", "16", "16")), ("heads", ("1", "0", "0")))
    ]
    queue = {
        "kind": "ClusterQueue",
        "metadata": {"name": "team"},
        "spec": {"cohortName": "c", "resourceGroups": [{"coveredResources": list(names), "flavors": flavors}]},
    }
    deploy = DeploySection(namespace="team", quota_gpus=5, borrow_gpus=2)
    team_queues([queue], [cluster((1, pod("2", 1)))], deploy, CLOUD)
    found = {
        flavor["name"]: {each["name"]: (each["nominalQuota"], each["borrowingLimit"]) for each in flavor["resources"]}
        for flavor in flavors
    }
    assert found["workers"] == {"cpu": ("85", "34"), GPU: ("5", "2"), "rdma/x": ("5", "2"), "memory": ("500Gi", "200Gi")}
    assert found["heads"] == found["workers"] | {GPU: ("0", "0"), "rdma/x": ("0", "0")}


@pytest.mark.parametrize("priority", ["low", "normal", "high"])
def test_priorities_are_those_of_the_recipe_and_endpoints_are_above(priority: str) -> None:
    found = rendered(*GKE, f"deploy.priority={priority}")
    values = {each["metadata"]["name"]: each["value"] for each in found if each["kind"] == "WorkloadPriorityClass"}
    classes = {
        kind: find(found, kind)["metadata"]["labels"]["kueue.x-k8s.io/priority-class"]
        for kind in ("RayJob", "RayCluster", "RayService")
    }
    assert classes["RayJob"] == classes["RayCluster"] == f"strata-{priority}"
    assert values["strata-low"] < values["strata-normal"] < values["strata-high"] < values[classes["RayService"]]
