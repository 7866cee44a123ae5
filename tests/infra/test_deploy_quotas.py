"""Arithmetic of pods, CPUs, memory and GPUs in a layout, and the fields of the manifests that it fills."""

import copy
from typing import Any

import pytest
import yaml

from strata.deploy.fill import fill
from strata.deploy.layout import Group, engines_per_pod, head_growth, plan
from strata.deploy.targets import TARGETS, GpuType, Machine, Target
from strata.platform.errors import UserError
from strata.platform.recipe import PoolSection, Recipe

MODEL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 512, "context": 64}
# Round numbers: a GPU of `big` has 20 CPUs and 100 GiB, a GPU of `small` 10 CPUs and 60 GiB. Pods get 85% of it.
BIG = GpuType("big-label", (Machine("big-2", 2, 40, 200), Machine("big-4", 4, 80, 400)))
SMALL = GpuType("small-label", (Machine("small-2", 2, 20, 120),))
CLOUD = Target("cloud", storage="the bucket", gpu_label="gpu-label", gpus={"big": BIG, "small": SMALL})
LAPTOP = Target("laptop")


def recipe(**sections: dict[str, Any]) -> Recipe:
    parallel = sections.get("parallel", {})
    train = {"steps": 10, "batch": parallel.get("workers", 1), "micro_batch": 1, "lr": 0.001}
    return Recipe.model_validate({"model": MODEL, "train": train, **sections})


def on_gpus(workers: int = 4, deploy: dict[str, Any] | None = None, **serve: Any) -> Recipe:
    return recipe(
        parallel={"workers": workers, "zero": 3, "device": "gpu"},
        serve={"device": "gpu", **serve},
        deploy={"gpu": "big", **(deploy or {})},
    )


# Layout


def test_a_group_has_no_resources_by_default() -> None:
    group = Group(1, 2, 3)
    assert (group.gpus, group.cpus, group.memory_gib, group.engines, group.node_gpus, group.selector) == (0, 0, 0, 0, 0, {})


def test_cpu_workers_share_a_pod_with_their_cpus_and_a_gib_each_beside_ray() -> None:
    chosen = recipe(parallel={"workers": 3, "cpus_per_worker": 2})
    groups = plan(chosen, LAPTOP, ["train", "lab"])
    assert repr(groups["train"]) == repr(Group(1, 1, 1, cpus=6, memory_gib=4))
    assert repr(groups["lab"]) == repr(Group(0, 0, 1, cpus=6, memory_gib=4))


def test_cpu_engines_have_a_pod_each_with_their_cache() -> None:
    pools = {"prefill": {"replicas": 2}, "decode": {"replicas": 3, "max_replicas": 5, "gpus": 0.5, "gpu_memory": 0.4}}
    groups = plan(recipe(serve={"kv_cache_gib": 3, **pools}), LAPTOP, ["serve"])
    # Memory: 3 of the cache, 1 of the engine, 1 of Ray. `gpus` below 1 has no effect on CPUs.
    assert repr(groups["prefill"]) == repr(Group(0, 2, 2, cpus=1, memory_gib=5, engines=1))
    assert repr(groups["decode"]) == repr(Group(0, 3, 5, cpus=1, memory_gib=5, engines=1))


def test_set_cpus_and_memory_override_the_estimate_on_cpus() -> None:
    chosen = recipe(parallel={"workers": 3, "cpus_per_worker": 2}, deploy={"cpus": 7, "memory_gib": 9})
    groups = plan(chosen, LAPTOP, ["train", "serve"])
    assert {name: (group.cpus, group.memory_gib) for name, group in groups.items()} == {
        "train": (7, 9),
        "prefill": (7, 9),
        "decode": (7, 9),
    }


@pytest.mark.parametrize(("cpus", "fits"), [(5, False), (6, True)])
def test_a_pod_has_at_least_the_cpus_of_its_workers(cpus: int, fits: bool) -> None:
    chosen = recipe(parallel={"workers": 3, "cpus_per_worker": 2}, deploy={"cpus": cpus})
    if fits:
        assert plan(chosen, LAPTOP, ["train"])["train"].cpus == 6
    else:
        with pytest.raises(UserError, match=r"parallel\.workers needs 6 CPUs per pod, but a pod has 5"):
            plan(chosen, LAPTOP, ["train"])


@pytest.mark.parametrize(("cpus", "fits"), [(5, False), (6, True)])
def test_a_pod_has_at_least_two_cpus_for_each_gpu_engine(cpus: int, fits: bool) -> None:
    third = {"replicas": 1, "gpus": 0.33, "gpu_memory": 0.3}  # three engines per GPU
    chosen = on_gpus(deploy={"cpus": cpus}, prefill=third, decode=third)
    if fits:
        group = plan(chosen, CLOUD, ["serve"])["prefill"]
        assert (group.cpus, group.engines) == (6, 3)
    else:
        with pytest.raises(UserError, match=r"serve\.prefill needs 6 CPUs per pod, but a pod has 5"):
            plan(chosen, CLOUD, ["serve"])


def test_gpu_workers_get_their_share_of_the_node() -> None:
    # 85% of 4 x 20 CPUs and 4 x 100 GiB, and of half of the node.
    selector = {"node.kubernetes.io/instance-type": "big-4", "gpu-label": "big-label"}
    whole = plan(on_gpus(8), CLOUD, ["train", "lab"])
    assert whole["train"] == Group(2, 2, 2, gpus=4, cpus=68, memory_gib=340, node_gpus=4, selector=selector)
    assert whole["lab"] == Group(0, 0, 2, gpus=4, cpus=68, memory_gib=340, node_gpus=4, selector=selector)
    half = plan(on_gpus(2), CLOUD, ["train"])["train"]
    assert half == Group(1, 1, 1, gpus=2, cpus=34, memory_gib=170, node_gpus=4, selector=selector)


@pytest.mark.parametrize(("each", "fits"), [(17, True), (18, False)])
def test_the_cpus_of_gpu_workers_fit_their_share_of_the_node(each: int, fits: bool) -> None:
    chosen = recipe(parallel={"workers": 4, "device": "gpu", "cpus_per_worker": each}, deploy={"gpu": "big"})
    if fits:
        assert plan(chosen, CLOUD, ["train"])["train"].cpus == 68
    else:
        with pytest.raises(UserError, match=r"parallel\.cpus_per_worker needs 72 CPUs per pod, but a pod has 68"):
            plan(chosen, CLOUD, ["train"])


def test_set_cpus_and_memory_override_the_share_of_the_node() -> None:
    groups = plan(on_gpus(deploy={"cpus": 11, "memory_gib": 13}), CLOUD, ["train", "serve"])
    assert {(group.cpus, group.memory_gib) for group in groups.values()} == {(11, 13)}


def test_a_smaller_machine_is_selected_by_its_number_of_gpus() -> None:
    train = plan(on_gpus(4, deploy={"gpus_per_node": 2}), CLOUD, ["train"])["train"]
    assert (train.pods, train.gpus, train.node_gpus) == (2, 2, 2)
    assert train.selector["node.kubernetes.io/instance-type"] == "big-2"


@pytest.mark.parametrize(("workers", "nodes", "fits"), [(8, 2, True), (8, 1, False), (12, 2, False), (4, 2, True)])
def test_training_uses_at_most_the_available_nodes(workers: int, nodes: int, fits: bool) -> None:
    chosen = on_gpus(workers, deploy={"nodes": nodes})
    if fits:
        assert plan(chosen, CLOUD, ["train"])["train"].pods == workers // 4
    else:
        with pytest.raises(UserError) as error:
            plan(chosen, CLOUD, ["train"])
        assert f"needs {workers // 4} nodes of 4 GPUs, but deploy.nodes={nodes}" in error.value.cause
        assert f"at most {nodes * 4}, or set deploy.nodes={workers // 4}" in error.value.fix


@pytest.mark.parametrize(("tensor_parallel", "fits"), [(4, True), (5, False)])
def test_an_engine_may_use_all_gpus_of_a_node_and_no_more(tensor_parallel: int, fits: bool) -> None:
    pool = {"replicas": 1, "gpus": tensor_parallel, "tensor_parallel": tensor_parallel}
    chosen = on_gpus(deploy={"nodes": 3}, prefill=pool, decode=pool)
    if fits:
        assert plan(chosen, CLOUD, ["serve"])["decode"].gpus == 4
    else:
        with pytest.raises(UserError, match="tensor_parallel=5: an engine runs in one pod, but big-4 has 4 GPUs"):
            plan(chosen, CLOUD, ["serve"])


@pytest.mark.parametrize(
    ("gpus", "device", "engines"), [(1, "gpu", 1), (2, "gpu", 1), (0.5, "gpu", 2), (0.3, "gpu", 3), (0.5, "cpu", 1)]
)
def test_engines_share_a_pod_only_if_they_share_a_gpu(gpus: float, device: str, engines: int) -> None:
    pool = PoolSection(gpus=gpus, gpu_memory=0.2, tensor_parallel=max(1, int(gpus)))
    assert engines_per_pod(pool, device) == engines


def test_pods_are_rounded_up_to_hold_every_engine() -> None:
    third = {"replicas": 4, "max_replicas": 7, "gpus": 0.33, "gpu_memory": 0.3}  # three engines per GPU
    decode = plan(on_gpus(8, decode=third), CLOUD, ["serve"])["decode"]
    assert (decode.least, decode.pods, decode.most, decode.gpus, decode.engines) == (0, 2, 3, 1, 3)


@pytest.mark.parametrize(
    ("workers", "nodes", "replicas", "needed"),
    [
        # Two pools of 2 GPUs per replica on nodes of 4 GPUs.
        (4, None, 1, None),  # 4 GPUs on 1 node
        (4, None, 2, 8),
        (5, None, 2, None),  # training rounds up to 2 nodes
        (8, None, 2, None),
        (8, None, 3, 12),
        (8, 3, 3, None),  # deploy.nodes counts, not training's
        (8, 2, 3, 12),
    ],
)
def test_pools_on_the_same_gpu_type_share_its_nodes(workers: int, nodes: int | None, replicas: int, needed: int | None) -> None:
    pool = {"replicas": replicas, "gpus": 2, "tensor_parallel": 2}
    chosen = on_gpus(workers, deploy={"nodes": nodes}, prefill=pool, decode=pool)
    if needed is None:
        groups = plan(chosen, CLOUD, ["serve"])
        assert (groups["prefill"].most, groups["decode"].most) == (replicas, replicas)
    else:
        available = (nodes or workers // 4) * 4
        with pytest.raises(UserError) as error:
            plan(chosen, CLOUD, ["serve"])
        assert f"need {needed} GPUs, but {available // 4} x big-4 have {available} big" in error.value.cause
        assert f"serve.prefill ({replicas} replicas of 2) and serve.decode ({replicas} replicas of 2)" in error.value.cause
        assert f"deploy.nodes={needed // 4}" in error.value.fix


def test_pools_on_different_gpu_types_do_not_share_nodes() -> None:
    pool = {"replicas": 1, "gpus": 2, "tensor_parallel": 2}
    deploy = {"nodes": 1, "gpus_per_node": 2}
    with pytest.raises(UserError, match="need 4 GPUs, but 1 x big-2 have 2 big"):
        plan(on_gpus(2, deploy=deploy, prefill=pool, decode=pool), CLOUD, ["serve"])
    groups = plan(on_gpus(2, deploy={**deploy, "decode_gpu": "small"}, prefill=pool, decode=pool), CLOUD, ["serve"])
    assert (groups["prefill"].cpus, groups["prefill"].memory_gib) == (34, 170)
    assert (groups["decode"].cpus, groups["decode"].memory_gib) == (17, 102)


def test_engines_on_cpus_need_no_gpus_of_the_target() -> None:
    chosen = recipe(parallel={"workers": 4, "device": "gpu"}, deploy={"gpu": "big"}, serve={"decode": {"replicas": 40}})
    assert plan(chosen, CLOUD, ["serve"])["decode"].pods == 40


def test_machines_of_the_clouds() -> None:
    """Totals over the machine types, from the clouds' documentation: any changed figure changes one of them."""
    totals = {
        f"{target.name} {name}": tuple(
            sum(values) for values in zip(*((m.gpus, m.cpus, m.memory_gib) for m in gpu.machines), strict=True)
        )
        for target in TARGETS.values()
        for name, gpu in target.gpus.items()
    }
    assert totals == {
        "gke l4": (15, 180, 720),  # 12 CPUs and 48 GiB per GPU
        "gke a100-40gb": (15, 180, 1275),
        "gke a100": (15, 180, 2550),
        "gke h100": (15, 390, 3510),
        "gke h100-mega": (8, 208, 1872),
        "gke h200": (8, 224, 2952),
        "gke b200": (8, 224, 3968),
        "ack a10": (15, 352, 1828),  # the machine with 8 has the CPUs of the one with 4
        "ack l20": (15, 240, 1920),
        "ack a100": (15, 240, 1875),
        "ack h20": (15, 360, 1920),
        "ack rtx-pro-5000": (15, 480, 2880),
    }


def test_machines_of_a_gpu_type_grow_in_proportion() -> None:
    for target in TARGETS.values():
        for name, gpu in target.gpus.items():
            ratios = {(machine.cpus / machine.gpus, machine.memory_gib / machine.gpus) for machine in gpu.machines}
            assert len(ratios) == (2 if name == "a10" else 1), name


def test_a_selector_names_the_gpu_only_where_nodes_have_its_label() -> None:
    machine = Machine("m", 1, 2, 3)
    only_machine = {"node.kubernetes.io/instance-type": "m"}
    assert Target("x", gpu_label="gpu").selector(GpuType("h", ()), machine) == {**only_machine, "gpu": "h"}
    assert Target("x", gpu_label="gpu").selector(GpuType(None, ()), machine) == only_machine
    assert Target("x").selector(GpuType("h", ()), machine) == only_machine


# Manifests

GPU = "nvidia.com/gpu"
TRAIN = Group(2, 3, 4, gpus=8, cpus=160, memory_gib=800, node_gpus=8, selector={"node.kubernetes.io/instance-type": "big-8"})
PREFILL = Group(0, 3, 5, gpus=2, cpus=47, memory_gib=401, engines=1, node_gpus=4)
DECODE = Group(0, 4, 7, gpus=4, cpus=90, memory_gib=1601, engines=2, node_gpus=4)


def pod(requests: dict[str, str], limits: dict[str, str], selector: dict[str, str] | None = None) -> dict[str, Any]:
    containers: list[dict[str, Any]] = [
        {"name": "ray", "resources": {"requests": requests, "limits": limits}},
        {"name": "sidecar", "resources": {"limits": {"cpu": "1"}}},
    ]
    return {"spec": {"containers": containers} | ({"nodeSelector": selector} if selector else {})}


def workers(name: str, template: dict[str, Any]) -> dict[str, Any]:
    return {"groupName": name, "minReplicas": 90, "replicas": 91, "maxReplicas": 92, "template": copy.deepcopy(template)}


def ray_object(kind: str, *groups: dict[str, Any], **spec: Any) -> dict[str, Any]:
    cluster = {"headGroupSpec": {"template": pod({"cpu": "2"}, {"cpu": "2"})}, "workerGroupSpecs": list(groups)}
    inside = {"RayJob": {"rayClusterSpec": cluster}, "RayService": {"rayClusterConfig": cluster}, "RayCluster": cluster}[kind]
    name = {"RayJob": "strata-train", "RayService": "strata", "RayCluster": "strata-lab"}[kind]
    return {"kind": kind, "metadata": {"name": name}, "spec": {**inside, **spec}}


def plain(kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name}, **fields}


def filled(document: dict[str, Any], groups: dict[str, Group], chosen: Recipe | None = None) -> dict[str, Any]:
    [made] = fill([document], chosen or recipe(deploy={"name": "mine"}), groups, "first")
    return made


def test_worker_groups_are_sized() -> None:
    selector = {"node.kubernetes.io/instance-type": "old", "cloud.google.com/gke-accelerator": "old", "zone": "a"}
    template = pod({GPU: "1", "cpu": "1", "disk": "5Gi"}, {GPU: "1", "memory": "1Gi", "disk": "9Gi"}, selector)
    job = filled(ray_object("RayJob", workers("workers", template), workers("others", template)), {"train": TRAIN})
    assert job["spec"]["entrypoint"] == "strata train --recipe /etc/strata/recipe.yaml --run first --or-resume"
    sized, other = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (sized["minReplicas"], sized["replicas"], sized["maxReplicas"]) == (2, 3, 4)
    assert "resources" not in sized, "only engine groups offer Ray resources"
    inside = sized["template"]["spec"]
    assert inside["nodeSelector"] == {"zone": "a", "node.kubernetes.io/instance-type": "big-8"}
    assert inside["containers"][0]["resources"] == {
        "requests": {"cpu": "160", "memory": "800Gi", GPU: "8", "disk": "5Gi"},
        "limits": {"cpu": "160", "memory": "800Gi", GPU: "8", "disk": "9Gi"},
    }
    assert inside["containers"][1]["resources"] == {"limits": {"cpu": "1"}}
    assert other == workers("others", template), "a group without a layout stays as it is"


def test_pods_without_gpus_leave_their_requests_and_drop_a_gpu_limit() -> None:
    template = pod({"cpu": "1", "memory": "1Gi"}, {GPU: "1", "cpu": "9"})
    cluster = filled(ray_object("RayCluster", workers("workers", template)), {"lab": Group(0, 0, 1, cpus=2, memory_gib=3)})
    [sized] = cluster["spec"]["workerGroupSpecs"]
    assert sized["template"]["spec"]["nodeSelector"] == {}
    assert sized["template"]["spec"]["containers"][0]["resources"] == {
        "requests": {"cpu": "1", "memory": "1Gi"},
        "limits": {"cpu": "2", "memory": "3Gi"},
    }


def test_containers_without_resources_get_limits() -> None:
    template = {"spec": {"containers": [{"name": "ray"}]}}
    cluster = filled(ray_object("RayCluster", workers("workers", template)), {"lab": Group(0, 0, 1, cpus=2, memory_gib=3)})
    [sized] = cluster["spec"]["workerGroupSpecs"]
    assert sized["template"]["spec"]["containers"] == [{"name": "ray", "resources": {"limits": {"cpu": "2", "memory": "3Gi"}}}]


def test_a_service_has_its_pools_its_model_and_a_mark_of_its_settings() -> None:
    config = yaml.safe_dump({"applications": [{"name": "a", "args": {"other": 1, "model": "old"}}, {"name": "b"}]})
    template = pod({GPU: "1"}, {GPU: "1"})
    service = ray_object("RayService", workers("prefill", template), workers("decode", template), serveConfigV2=config)
    made = filled(service, {"prefill": PREFILL, "decode": DECODE})
    prefill, decode = made["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (prefill["replicas"], prefill["maxReplicas"], decode["replicas"], decode["maxReplicas"]) == (3, 5, 4, 7)
    assert prefill["resources"] == {"strata-gateway": "1", "strata-prefill": "1"}
    assert decode["resources"] == {"strata-gateway": "1", "strata-decode": "2"}
    args = {"recipe": "/etc/strata/recipe.yaml", "model": "/mnt/strata/runs/first/export"}
    assert yaml.safe_load(made["spec"]["serveConfigV2"]) == {
        "applications": [{"name": "a", "args": {"other": 1, **args}}, {"name": "b", "args": args}]
    }
    head = made["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
    marks = {template["metadata"]["annotations"]["strata.dev/served"] for template in (head, prefill["template"])}
    assert len(marks) == 1 and len(marks.pop()) == 16


def test_the_recipe_of_the_pods_listens_on_every_interface_with_one_gateway() -> None:
    chosen = recipe(serve={"host": "127.0.0.1", "port": 7000, "gateways": 3, "max_sequences": 33})
    made = filled(plain("ConfigMap", "strata-recipe", data={}), {}, chosen)
    serve = yaml.safe_load(made["data"]["recipe.yaml"])["serve"]
    assert (serve["host"], serve["port"], serve["gateways"], serve["max_sequences"]) == ("0.0.0.0", 8000, 1, 33)
    other = plain("ConfigMap", "other", data={"a": "b"})
    assert filled(other, {}, chosen) == other


def test_the_disruption_budget_covers_the_head_and_every_worker() -> None:
    budget = plain("PodDisruptionBudget", "strata-train", spec={"minAvailable": 99})
    assert filled(budget, {"train": TRAIN})["spec"]["minAvailable"] == 4
    assert filled(budget, {"decode": DECODE}) == budget
    serving = plain("PodDisruptionBudget", "strata-serve-decode", spec={"minAvailable": 99})
    assert filled(serving, {"train": TRAIN}) == serving


@pytest.mark.parametrize(
    ("pods", "cpus", "gib"), [(0, 0, 0), (7, 0, 0), (8, 0, 1), (31, 0, 3), (32, 1, 4), (128, 4, 16), (2000, 62, 250)]
)
def test_a_head_grows_with_the_number_of_pods(pods: int, cpus: int, gib: int) -> None:
    assert head_growth(pods) == (cpus, gib)


def test_the_head_of_every_ray_object_grows_with_the_most_pods_of_its_groups() -> None:
    small, large = {"cpu": "500m", "memory": "1536Mi", "disk": "1Gi"}, {"cpu": "2", "memory": "8Gi"}
    service = ray_object(
        "RayService",
        workers("prefill", pod({GPU: "1"}, {GPU: "1"})),
        workers("decode", pod({GPU: "1"}, {GPU: "1"})),
        serveConfigV2="applications: []",
    )
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    head["resources"] = {"requests": small, "limits": large}

    def grown(prefill: int, decode: int) -> dict[str, Any]:
        made = filled(service, {"prefill": Group(0, 1, prefill, gpus=1), "decode": Group(0, 1, decode, gpus=1)})
        found: dict[str, Any] = made["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0][
            "resources"
        ]
        return found

    assert grown(3, 4) == {"requests": small, "limits": large}
    # 40 pods: a CPU and 5 GiB.
    assert grown(30, 10) == {
        "requests": {"cpu": "1500m", "memory": "6656Mi", "disk": "1Gi"},
        "limits": {"cpu": "3", "memory": "13Gi"},
    }


def test_the_volume_names_the_storage_where_its_driver_reads_it() -> None:
    def source(csi: dict[str, Any] | None, storage: str | None) -> dict[str, Any]:
        spec = {"csi": csi} if csi else {"hostPath": {"path": "/x"}}
        made = filled(plain("PersistentVolume", "strata-store", spec=spec), {}, recipe(deploy={"storage": storage}))
        inside: dict[str, Any] = made["spec"]
        return inside

    bucket = {"driver": "gcsfuse.csi.storage.gke.io", "volumeHandle": "before"}
    nas = {"driver": "nasplugin.csi.alibabacloud.com", "volumeAttributes": {"server": "before", "path": "/"}}
    assert source(bucket, "mine")["csi"]["volumeHandle"] == "mine"
    assert source(nas, "mine")["csi"]["volumeAttributes"] == {"server": "mine", "path": "/"}
    assert source(bucket, None)["csi"] == bucket
    assert source({"driver": "other", "volumeHandle": "before"}, "mine")["csi"] == {"driver": "other", "volumeHandle": "before"}
    assert source(None, "mine") == {"hostPath": {"path": "/x"}}


def test_filling_leaves_the_given_documents_unchanged() -> None:
    budget = plain("PodDisruptionBudget", "strata-train", spec={"minAvailable": 99})
    fill([budget], recipe(), {"train": TRAIN}, "first")
    assert budget["spec"]["minAvailable"] == 99
