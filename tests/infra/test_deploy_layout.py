"""Pod layouts of recipes, and recipes that are rejected."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.deploy import layout, refusals, targets
from strata.deploy.layout import Group, plan
from strata.deploy.names import PARTS
from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe

GKE, ACK, KIND = (targets.find(name) for name in ("gke", "ack", "kind"))
IMAGE = "example.com/strata:1.0"


def recipe(name: str, *overrides: str) -> Recipe:
    return recipe_file.load(name, overrides)


def on_gke(*overrides: str, name: str = "8xh100") -> Recipe:
    return recipe(name, "deploy.gpu=h100", "deploy.storage=bucket", *overrides)


def test_single_node_of_eight_gpus() -> None:
    groups = plan(on_gke(), GKE, PARTS)
    selector = {"node.kubernetes.io/instance-type": "a3-highgpu-8g", "cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert groups["train"] == Group(1, 1, 1, gpus=8, cpus=176, memory_gib=1591, node_gpus=8, selector=selector)
    assert groups["prefill"] == Group(0, 2, 2, gpus=2, cpus=44, memory_gib=397, engines=1, node_gpus=8, selector=selector)
    assert groups["decode"] == groups["prefill"]
    assert (groups["lab"].least, groups["lab"].pods, groups["lab"].most, groups["lab"].gpus) == (0, 0, 1, 8)


def test_workers_spread_over_nodes() -> None:
    train = plan(on_gke(name="16xh100-3d"), GKE, ["train"])["train"]
    assert (train.least, train.pods, train.most, train.gpus) == (2, 2, 2, 8)
    train = plan(on_gke("deploy.gpus_per_node=4", name="16xh100-3d"), GKE, ["train"])["train"]
    assert (train.pods, train.gpus, train.selector["node.kubernetes.io/instance-type"]) == (4, 4, "a3-highgpu-4g")


def test_engines_that_share_a_gpu_share_a_pod() -> None:
    chosen = recipe("h200", "deploy.gpu=h200", "serve.decode.replicas=3", "serve.decode.max_replicas=5")
    groups = plan(chosen, GKE, ["serve"])
    assert (groups["prefill"].pods, groups["prefill"].gpus) == (1, 1)
    assert (groups["decode"].least, groups["decode"].pods, groups["decode"].most, groups["decode"].gpus) == (0, 2, 3, 1)
    assert groups["decode"].engines == 2


def test_pools_on_different_gpus() -> None:
    groups = plan(on_gke("deploy.decode_gpu=h200"), GKE, ["serve"])
    assert groups["prefill"].selector["cloud.google.com/gke-accelerator"] == "nvidia-h100-80gb"
    assert groups["decode"].selector["cloud.google.com/gke-accelerator"] == "nvidia-h200-141gb"


def test_aggregated_serving_has_no_prefill_pods() -> None:
    prefill = plan(on_gke("serve.prefill.replicas=0"), GKE, ["serve"])["prefill"]
    assert (prefill.least, prefill.pods, prefill.most) == (0, 0, 0)


def test_ack_selects_nodes_by_instance_type() -> None:
    train = plan(recipe("8xh100", "deploy.gpu=h20"), ACK, ["train"])["train"]
    assert train.selector == {"node.kubernetes.io/instance-type": "ecs.gn8v-8x.48xlarge"}


def test_laptop_recipe_on_kind() -> None:
    groups = plan(recipe("laptop"), KIND, PARTS)
    assert groups["train"] == Group(1, 1, 1, cpus=2, memory_gib=3)
    assert groups["decode"] == Group(0, 1, 1, cpus=1, memory_gib=3, engines=1)


@pytest.mark.parametrize(
    ("overrides", "cause", "fix"),
    [
        (["serve.prefill.replicas=4"], "need 12 GPUs, but 1 x a3-highgpu-8g have 8 h100", "deploy.nodes=2"),
        (["serve.decode.max_replicas=40"], "serve.decode (40 replicas of 2) need 84 GPUs", "deploy.nodes=11"),
        (["deploy.nodes=1", "parallel.workers=16"], "needs 2 nodes", "deploy.nodes=2"),
        (["parallel.workers=12", "train.batch=12"], "parallel.workers=12 is not a multiple of the 8 GPUs", "multiple of 8"),
        (
            ["serve.decode.tensor_parallel=8", "serve.decode.gpus=8", "deploy.gpus_per_node=4"],
            "tensor_parallel=8: an engine runs in one pod, but a3-highgpu-4g has 4 GPUs",
            "smaller tensor_parallel",
        ),
        (["deploy.gpu=h20"], "deploy.gpu=h20: gke has no such GPU", "h100"),
        (["deploy.prefill_gpu=tpu"], "deploy.prefill_gpu=tpu: gke has no such GPU", "h100"),
        (["deploy.gpu=null"], "deploy.gpu is not set", "h100"),
        (["deploy.gpus_per_node=3"], "no machine with this number of h100 GPUs", "1, 2, 4, 8"),
        (["parallel.cpus_per_worker=64"], "needs 512 CPUs per pod, but a pod has 176", "deploy.cpus=512"),
        (["deploy.cpus=1"], "Ray would wait forever", "deploy.cpus=64"),
    ],
)
def test_requests_beyond_the_nodes_capacity_are_rejected(overrides: list[str], cause: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        plan(on_gke(*overrides), GKE, PARTS)
    assert cause in error.value.cause
    assert fix in error.value.fix


def test_only_deployed_parts_are_checked() -> None:
    too_many = on_gke("serve.prefill.replicas=4")
    assert plan(too_many, GKE, ["train"]).keys() == {"train"}


@pytest.mark.parametrize(
    ("overrides", "cause", "fix"),
    [
        (["deploy.name=" + "a" * 42], "the RayJob aaa", "shorter"),
        (["deploy.name=Strata"], "is not a valid name of a Kubernetes service", "lowercase letters"),
        (["deploy.name=9lives"], "is not a valid name of a Kubernetes service", "beginning with a letter"),
        (["deploy.name=team-lab"], "would be those of the lab of team", "does not end in -lab"),
        (["deploy.namespace=Team"], "is not a valid name of a Kubernetes namespace", "lowercase"),
        (["deploy.namespace=" + "a" * 64], "is not a valid name of a Kubernetes namespace", "at most 63"),
        (["deploy.namespace=kube-system"], "belongs to the cluster", "of your team"),
        (["deploy.namespace=default"], "belongs to the cluster", "of your team"),
        (["deploy.name=strata-"], "is not a valid name of a Kubernetes service", "not ending with '-'"),
        (["train.checkpoints=/checkpoints"], "is not shared storage", "/mnt/strata"),
        (["train.checkpoints=file:///tmp/checkpoints"], "is not shared storage", "gs://"),
        (["train.checkpoints=/mnt/strata/../tmp"], "is not shared storage", "gs://"),
        (["train.checkpoints=memory://checkpoints"], "is not shared storage", "gs://"),
        (["train.checkpoints=checkpoints"], "is not shared storage", "gs://"),
        (["train.checkpoints=/mnt/strata-of-mine"], "is not shared storage", "gs://"),
        (["data.path=/home/me/corpus"], "not visible to pods", "/mnt/strata"),
        (["deploy.storage=gs://bucket"], "is not the name of the Cloud Storage bucket", "only the name"),
        (
            ["serve.decode={replicas: 1, gpus: 0.5, gpu_memory: 0.4, tensor_parallel: 1, sm_share: 0.5}"],
            "serve.decode.sm_share=0.5: engines share a GPU's multiprocessors by CUDA MPS",
            "serve.decode.sm_share=null",
        ),
    ],
)
def test_recipes_that_cannot_work_on_a_cluster_are_rejected(overrides: list[str], cause: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        refusals.refuse(on_gke(*overrides), GKE, PARTS, "demo", IMAGE)
    assert cause in error.value.cause
    assert fix in error.value.fix


@pytest.mark.parametrize(
    "checkpoints", ["gs://bucket/runs", "s3://bucket", "/mnt/strata/checkpoints", "file:///mnt/strata/checkpoints", "/mnt/strata"]
)
def test_shared_storage_is_accepted(checkpoints: str) -> None:
    refusals.refuse(on_gke(f"train.checkpoints={checkpoints}"), GKE, PARTS, "demo", IMAGE)


def test_a_single_part_is_checked_only_for_its_own_settings() -> None:
    refusals.refuse(on_gke("data.path=/home/me/corpus"), GKE, ["serve"], "demo", IMAGE)


def test_kind_has_no_gpus_and_its_own_storage() -> None:
    with pytest.raises(UserError, match="kind has no GPUs"):
        refusals.refuse(recipe("8xh100"), KIND, PARTS, "demo", IMAGE)
    with pytest.raises(UserError, match="has its own storage"):
        refusals.refuse(recipe("laptop", "deploy.storage=bucket"), KIND, PARTS, "demo", IMAGE)
    refusals.refuse(recipe("laptop"), KIND, PARTS, "demo", IMAGE)


@pytest.mark.parametrize("image", ["strata", "strata:latest", "example.com:5000/strata", "a b:1", "strata:", "strata@sha256:12"])
def test_mutable_image_tags_are_rejected(image: str) -> None:
    with pytest.raises(UserError, match="image"):
        refusals.refuse(on_gke(), GKE, PARTS, "demo", image)


@pytest.mark.parametrize("image", ["strata:1", "example.com:5000/a/strata:v1.2-rc3", f"example.com/strata@sha256:{'0' * 64}"])
def test_immutable_image_tags_are_accepted(image: str) -> None:
    refusals.refuse(on_gke(), GKE, PARTS, "demo", image)


@pytest.mark.parametrize("run", ["", "../up", "a b", "-x", "x" * 64])
def test_invalid_run_names_are_rejected(run: str) -> None:
    with pytest.raises(UserError, match="is not a valid run name"):
        refusals.refuse(on_gke(), GKE, PARTS, run, IMAGE)


def test_unknown_target() -> None:
    with pytest.raises(UserError, match="Did you mean 'gke'"):
        targets.find("gkee")


def test_machines_are_listed_in_ascending_order_of_gpus() -> None:
    for target in targets.TARGETS.values():
        for gpu in target.gpus.values():
            sizes = [machine.gpus for machine in gpu.machines]
            assert sizes == sorted(set(sizes))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    workers=st.integers(1, 40),
    per_node=st.sampled_from(["null", "1", "2", "4", "8"]),
    nodes=st.sampled_from(["null", "1", "3", "20"]),
    shape=st.sampled_from([(0.25, 1), (0.3, 1), (0.5, 1), (1, 1), (2, 2), (8, 8)]),
    prefill=st.integers(0, 9),
    decode=st.integers(1, 9),
    spare=st.integers(0, 9),
)
def test_accepted_layouts_fit_the_nodes(
    workers: int, per_node: str, nodes: str, shape: tuple[float, int], prefill: int, decode: int, spare: int
) -> None:
    gpus, tensor = shape
    pool = f"gpus: {gpus}, tensor_parallel: {tensor}, gpu_memory: 0.2"
    chosen = on_gke(
        f"parallel={{workers: {workers}, zero: 3, device: gpu, cpus_per_worker: 2}}",
        f"train.batch={workers}",
        f"deploy.gpus_per_node={per_node}",
        f"deploy.nodes={nodes}",
        f"serve.prefill={{replicas: {prefill}, {pool}}}",
        f"serve.decode={{replicas: {decode}, max_replicas: {decode + spare}, {pool}}}",
    )
    try:
        groups = plan(chosen, GKE, PARTS)
    except UserError:
        return
    machine = next(m for m in GKE.gpus["h100"].machines if m.name == groups["train"].selector[targets.MACHINE_LABEL])
    for group in groups.values():
        assert 0 <= group.least <= group.pods <= group.most
        assert 0 < group.gpus <= machine.gpus
        assert group.cpus * machine.gpus <= machine.cpus * group.gpus
        assert group.memory_gib * machine.gpus <= machine.memory_gib * group.gpus
    assert groups["train"].pods * groups["train"].gpus == workers
    for name, wanted in (("prefill", (prefill, prefill)), ("decode", (decode, decode + spare))):
        each = layout.engines_per_pod(getattr(chosen.serve, name), "gpu")
        assert each * gpus <= groups[name].gpus
        for pods, engines in zip((groups[name].pods, groups[name].most), wanted, strict=True):
            assert (pods - 1) * each < engines <= pods * each or pods == engines == 0
    needed = sum(groups[name].most * groups[name].gpus for name in ("prefill", "decode"))
    available = int(nodes) * machine.gpus if nodes != "null" else machine.gpus * -(-workers // machine.gpus)
    assert needed <= available
