"""References between small objects, and the accessors that find pods in them."""

from typing import Any

import pytest

from strata.deploy import documents
from strata.deploy.checks import pods, references, selectors
from strata.deploy.problem import Finding, Problem, dotted

Document = dict[str, Any]


def named(kind: str, name: str, spec: Document | None = None, **fields: Any) -> Document:
    return {"kind": kind, "metadata": {"name": name}, **({"spec": spec} if spec is not None else {}), **fields}


def deployment(container: Document | None = None, labels: dict[str, str] | None = None, **pod: Any) -> Document:
    inside = {"name": "c", "image": "strata:1", **(container or {})}
    template = {"metadata": {"labels": labels or {"app": "a"}}, "spec": {"containers": [inside], **pod}}
    return named("Deployment", "d", {"template": template})


def ray_cluster(container: Document | None = None, name: str = "lab", part: str = "lab", **pod: Any) -> Document:
    inside = {"name": "ray", "image": "strata:1", **(container or {})}
    template = {"spec": {"containers": [inside], **pod}}
    cluster = {
        "headGroupSpec": {"template": template},
        "workerGroupSpecs": [{"groupName": name, "template": template} for name in ("small", "large")],
    }
    document = named("RayCluster", name, cluster)
    document["metadata"]["labels"] = {"strata.dev/part": part}
    return document


def found(*objects: Document) -> list[tuple[str, str, str]]:
    pairs = [*references.findings(list(objects)), *selectors.findings(list(objects))]
    pairs += [(each, finding) for each in objects for finding in pods.findings(each)]
    return [(documents.title(each), finding.path, finding.message) for each, finding in pairs]


def noted(*objects: Document) -> list[str]:
    return [finding.message for _, finding in references.notes(list(objects))]


CONTAINER = "spec.template.spec.containers[0]"


# Paths


def test_paths_are_dotted_with_indices() -> None:
    assert dotted(["spec", "groups", 0, "name"]) == "spec.groups[0].name"
    assert dotted([0, "name"]) == "[0].name"
    assert dotted([]) == ""


def test_a_finding_moves_below_a_path() -> None:
    assert Finding("name", "is bad").below("spec") == Finding("spec.name", "is bad")
    assert Finding("", "is bad").below("spec") == Finding("spec", "is bad")
    assert str(Problem("Pod/a", "spec", "is bad")) == "Pod/a: spec: is bad"


# Accessors


def test_empty_documents_are_skipped() -> None:
    assert documents.read("a: 1\n---\n---\nb: 2\n") == [{"a": 1}, {"b": 2}]


def test_titles_of_incomplete_objects() -> None:
    assert documents.title({"kind": "Pod", "metadata": {"name": "a"}}) == "Pod/a"
    assert documents.title({}) == "?/?"
    assert documents.title({"kind": "Pod", "metadata": {}}) == "Pod/?"
    assert documents.title({"kind": "Pod", "metadata": None}) == documents.title({"kind": "Pod", "metadata": "a"}) == "Pod/?"


def test_the_part_of_an_object_is_its_label() -> None:
    assert documents.part({"metadata": {"labels": {"strata.dev/part": "train"}}}) == "train"
    assert documents.part({"metadata": {"labels": {"other": "train"}}}) is None
    assert documents.part({"metadata": {"labels": None}}) is None


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (named("RayCluster", "a", {"x": 1}), ("spec", {"x": 1})),
        (named("RayCluster", "a"), ("spec", {})),
        (named("RayJob", "a", {"rayClusterSpec": {"x": 1}}), ("spec.rayClusterSpec", {"x": 1})),
        (named("RayJob", "a", {"clusterSelector": {}}), None),
        (named("RayService", "a", {"rayClusterConfig": {"x": 1}}), ("spec.rayClusterConfig", {"x": 1})),
        (named("RayService", "a", {"rayClusterSpec": {"x": 1}}), None),
        (named("Deployment", "a", {"rayClusterSpec": {"x": 1}}), None),
    ],
)
def test_the_cluster_of_a_ray_object(document: Document, expected: Any) -> None:
    assert documents.cluster_spec(document) == expected


def test_worker_groups_of_other_objects() -> None:
    assert documents.worker_groups(named("Deployment", "a", {"workerGroupSpecs": [{}]})) == []
    assert documents.worker_groups(named("RayCluster", "a", {"workerGroupSpecs": [{"groupName": "g"}]})) == [{"groupName": "g"}]
    assert documents.worker_groups(named("RayCluster", "a", {"workerGroupSpecs": None})) == []


POD_SPEC = {"spec": {"containers": []}}


@pytest.mark.parametrize(
    ("document", "paths"),
    [
        (
            named(
                "RayJob",
                "a",
                {
                    "rayClusterSpec": {
                        "headGroupSpec": {"template": POD_SPEC},
                        "workerGroupSpecs": [{}, {"template": POD_SPEC}],
                    },
                    "submitterPodTemplate": POD_SPEC,
                },
            ),
            [
                "spec.rayClusterSpec.headGroupSpec.template",
                "spec.rayClusterSpec.workerGroupSpecs[1].template",
                "spec.submitterPodTemplate",
            ],
        ),
        (named("RayJob", "a", {"rayClusterSpec": {"headGroupSpec": None}}), []),
        (named("Deployment", "a", {"template": POD_SPEC}), ["spec.template"]),
        (named("StatefulSet", "a", {"template": POD_SPEC}), ["spec.template"]),
        (named("DaemonSet", "a", {"template": POD_SPEC}), ["spec.template"]),
        (named("Job", "a", {"template": POD_SPEC}), ["spec.template"]),
        (named("CronJob", "a", {"jobTemplate": {"spec": {"template": POD_SPEC}}}), ["spec.jobTemplate.spec.template"]),
        (named("Pod", "a", POD_SPEC["spec"]), [""]),
        (named("Service", "a", {"template": POD_SPEC}), []),
    ],
)
def test_pod_templates_of_every_kind(document: Document, paths: list[str]) -> None:
    templates = list(documents.pod_templates(document))
    assert [path for path, _ in templates] == paths
    assert all("containers" in template["spec"] for _, template in templates)


def test_init_containers_come_first() -> None:
    template = {"spec": {"containers": [{"name": "a"}, {"name": "b"}], "initContainers": [{"name": "i"}]}}
    assert [(path, container["name"]) for path, container in documents.containers(template)] == [
        ("spec.initContainers[0]", "i"),
        ("spec.containers[0]", "a"),
        ("spec.containers[1]", "b"),
    ]


# Names


@pytest.mark.parametrize(
    ("pod", "path", "missing"),
    [
        ({"serviceAccountName": "me"}, "serviceAccountName", "ServiceAccount me"),
        ({"volumes": [{"name": "v", "configMap": {"name": "m"}}]}, "volumes[0].configMap", "ConfigMap m"),
        (
            {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "p"}}]},
            "volumes[0].persistentVolumeClaim",
            "PersistentVolumeClaim p",
        ),
    ],
)
def test_names_in_a_pod_must_exist(pod: Document, path: str, missing: str) -> None:
    kind, _, name = missing.partition(" ")
    assert found(deployment(**pod)) == [("Deployment/d", f"spec.template.spec.{path}", f"{missing} is not among the objects")]
    assert found(deployment(**pod), named(kind, name)) == []


@pytest.mark.parametrize(
    ("reference", "kind"),
    [("configMapKeyRef", "ConfigMap"), ("configMapRef", "ConfigMap")],
)
def test_names_in_the_environment_must_exist(reference: str, kind: str) -> None:
    def using(**value: Any) -> Document:
        return deployment({"env": [{"name": "A", "valueFrom": {reference: value}}]})

    path = f"{CONTAINER}.env[0].valueFrom.{reference}"
    missing = ("Deployment/d", path, f"{kind} it is not among the objects")
    assert found(using(name="it")) == [missing]
    assert found(using(name="it", optional=True)) == []
    assert found(using(name="it", optional=False)) == [missing]


@pytest.mark.parametrize("field", ["data", "stringData", "binaryData"])
def test_keys_must_exist_in_objects_with_data(field: str) -> None:
    user = deployment({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "password"}}}]})
    path = f"{CONTAINER}.env[0].valueFrom.secretKeyRef"
    assert found(user, named("Secret", "s", **{field: {"password": "x"}})) == []
    assert found(user, named("Secret", "s", **{field: {"other": "x"}})) == [
        ("Deployment/d", path, "Secret s has no key password")
    ]
    assert found(user, named("Secret", "s")) == [], "an object without data is filled in elsewhere"


@pytest.mark.parametrize(
    "user",
    [
        deployment(volumes=[{"name": "v", "secret": {"secretName": "s"}}]),
        deployment(volumes=[{"name": "v", "projected": {"sources": [{"secret": {"name": "s"}}]}}]),
        deployment(imagePullSecrets=[{"name": "s"}]),
        deployment({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}),
        deployment({"envFrom": [{"secretRef": {"name": "s"}}]}),
    ],
)
def test_secrets_may_be_created_by_hand_and_are_noted(user: Document) -> None:
    assert found(user) == []
    assert noted(user) == noted(user, user) == ["Secret s must exist on the cluster"]
    assert noted(user, named("Secret", "s")) == []
    assert noted(user, named("Certificate", "c", {"secretName": "s", "issuerRef": {"name": "i"}})) == [
        "Issuer i must exist on the cluster"
    ]


def test_a_reference_does_not_leave_its_namespace() -> None:
    user, target = deployment(volumes=[{"name": "v", "configMap": {"name": "m"}}]), named("ConfigMap", "m")
    user["metadata"]["namespace"] = target["metadata"]["namespace"] = "one"
    assert found(user, target) == []
    assert noted(user, target) == ["Namespace one must exist on the cluster"]
    assert noted(user, target, named("Namespace", "one")) == []
    target["metadata"]["namespace"] = "two"
    assert [message for _, _, message in found(user, target)] == ["ConfigMap m is not among the objects"]


def labelled(kind: str, label: str, value: str) -> Document:
    return {"kind": kind, "metadata": {"name": "a", "labels": {label: value}}}


QUEUE = {"resourceGroups": [{"flavors": [{"name": "f"}]}], "admissionChecksStrategy": {"admissionChecks": [{"name": "c"}]}}


@pytest.mark.parametrize(
    ("user", "path", "kind", "name"),
    [
        (labelled("RayJob", "kueue.x-k8s.io/queue-name", "q"), "metadata.labels.kueue.x-k8s.io/queue-name", "LocalQueue", "q"),
        (
            labelled("RayJob", "kueue.x-k8s.io/priority-class", "q"),
            "metadata.labels.kueue.x-k8s.io/priority-class",
            "WorkloadPriorityClass",
            "q",
        ),
        (labelled("RayJob", "volcano.sh/queue-name", "q"), "metadata.labels.volcano.sh/queue-name", "Queue", "q"),
        (named("LocalQueue", "l", {"clusterQueue": "q"}), "spec.clusterQueue", "ClusterQueue", "q"),
        (named("ClusterQueue", "q", QUEUE), "spec.resourceGroups[0].flavors[0].name", "ResourceFlavor", "f"),
        (named("ClusterQueue", "q", QUEUE), "spec.admissionChecksStrategy.admissionChecks[0].name", "AdmissionCheck", "c"),
        (named("ResourceFlavor", "f", {"topologyName": "t"}), "spec.topologyName", "Topology", "t"),
        (
            named("AdmissionCheck", "c", {"parameters": {"kind": "ProvisioningRequestConfig", "name": "p"}}),
            "spec.parameters.name",
            "ProvisioningRequestConfig",
            "p",
        ),
        (
            named("Network", "n", {"parametersRef": {"kind": "GKENetworkParamSet", "name": "p"}}),
            "spec.parametersRef.name",
            "GKENetworkParamSet",
            "p",
        ),
        (deployment(priorityClassName="p"), "spec.template.spec.priorityClassName", "PriorityClass", "p"),
        (named("PersistentVolumeClaim", "c", {"volumeName": "v"}), "spec.volumeName", "PersistentVolume", "v"),
        (named("Certificate", "c", {"issuerRef": {"name": "i"}}), "spec.issuerRef.name", "Issuer", "i"),
        (named("HTTPRoute", "r", {"parentRefs": [{"name": "g"}]}), "spec.parentRefs[0].name", "Gateway", "g"),
    ],
)
def test_objects_of_an_administrator_are_required_only_beside_others_of_their_kind(
    user: Document, path: str, kind: str, name: str
) -> None:
    others = [("ClusterQueue", "q"), ("ResourceFlavor", "f"), ("AdmissionCheck", "c")]
    beside = [named(other, title) for other, title in others if other not in (kind, user["kind"])]
    assert found(user, *beside) == []
    assert f"{kind} {name} must exist on the cluster" in noted(user, *beside)
    assert found(user, *beside, named(kind, name)) == []
    assert found(user, *beside, named(kind, "other")) == [
        (documents.title(user), path, f"{kind} {name} is not among the objects")
    ]


def test_services_of_routes_are_rendered_or_kuberays() -> None:
    def route(service: str) -> Document:
        return named("HTTPRoute", "r", {"rules": [{"backendRefs": [{"name": service}]}]})

    missing = ("HTTPRoute/r", "spec.rules[0].backendRefs[0].name", "Service strata-serve-svc is not among the objects")
    assert found(route("strata-serve-svc")) == [missing]
    assert found(route("strata-serve-svc"), named("RayService", "strata")) == []
    assert found(route("strata-serve-svc"), named("RayService", "other")) == [missing]
    assert found(route("strata-head-svc"), named("RayCluster", "strata")) == []
    options = {"clusterUpgradeOptions": {"gatewayClassName": "istio"}}
    assert found(route("strata-gateway-istio"), named("RayService", "strata", {"upgradeStrategy": options})) == []
    assert found(route("own-istio"), named("Gateway", "own", {"gatewayClassName": "istio"})) == []
    assert found(route("own-istio"), named("Gateway", "own", {"gatewayClassName": "other"})) != []


def test_networks_of_a_pod() -> None:
    pod = deployment()
    interfaces = '[{"interfaceName":"eth0","network":"default"},{"interfaceName":"eth1","network":"fast"}]'
    pod["spec"]["template"]["metadata"]["annotations"] = {"networking.gke.io/interfaces": interfaces}
    assert noted(pod) == ["Network fast must exist on the cluster"]
    [(_, path, message)] = found(pod, named("Network", "slow"))
    assert path == "spec.template.metadata.annotations.networking.gke.io/interfaces"
    assert message == "Network fast is not among the objects"


def test_fields_that_only_look_like_references_are_ignored() -> None:
    assert found(deployment(volumes=[{"name": "v", "secret": {"items": []}}, {"name": "w", "configMap": {"items": []}}])) == []
    assert found(named("StatefulSet", "x", {"template": {"spec": {"serviceAccountName": None}}})) == []


@pytest.mark.parametrize(("namespace", "occurs"), [("one", 1), ("other", 0)])
def test_an_object_occurs_once_per_namespace(namespace: str, occurs: int) -> None:
    first, second = named("Secret", "s"), named("Secret", "s")
    first["metadata"]["namespace"], second["metadata"]["namespace"] = "one", namespace
    assert found(first, second) == [("Secret/s", "metadata.name", "Secret/s occurs twice")] * occurs


# Containers


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("strata:1", None),
        ("example.com:5000/strata:1", None),
        ("strata@sha256:0", None),
        ("", "is not set"),
        ("strata", "strata has no immutable tag or digest"),
        ("strata:latest", "strata:latest has no immutable tag or digest"),
        ("example.com:5000/strata", "example.com:5000/strata has no immutable tag or digest"),
        ("user@example.com/strata", "user@example.com/strata has no immutable tag or digest"),
    ],
)
def test_images_need_a_fixed_version(image: str, message: str | None) -> None:
    expected = [("Deployment/d", f"{CONTAINER}.image", message)] if message else []
    assert found(deployment({"image": image})) == expected


def test_mounts_need_a_volume() -> None:
    mounts = {"volumeMounts": [{"name": "v", "mountPath": "/v"}, {"name": "w", "mountPath": "/w"}]}
    volumes = [{"name": "v", "emptyDir": {}}]
    missing = f"{CONTAINER}.volumeMounts[1].name", "the pod has no volume w"
    assert found(deployment(mounts, volumes=volumes)) == [("Deployment/d", *missing)]
    claimed = deployment(mounts, volumes=volumes)
    claimed["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "w"}}]
    assert found(claimed) == [("Deployment/d", *missing)], "only a StatefulSet has claim templates"
    assert found({**claimed, "kind": "StatefulSet"}) == []


@pytest.mark.parametrize("probe", ["readinessProbe", "livenessProbe", "startupProbe"])
def test_probes_need_a_named_port(probe: str) -> None:
    def probing(port: str | int) -> list[tuple[str, str, str]]:
        return found(deployment({"ports": [{"name": "http", "containerPort": 80}], probe: {"httpGet": {"port": port}}}))

    assert probing("http") == []
    assert probing(81) == []
    assert probing("https") == [("Deployment/d", f"{CONTAINER}.{probe}.httpGet.port", "the container has no port named https")]


@pytest.mark.parametrize(
    ("home", "mounted", "volume", "shared"),
    [
        ("/mnt/strata", "/mnt/strata", {"nfs": {}}, True),
        ("/mnt/strata/home", "/mnt/strata", {"csi": {}}, True),
        ("/mnt/strata/home", "/mnt/strata/", {"nfs": {}}, True),
        ("/mnt/strata", "/", {"nfs": {}}, True),
        ("/mnt/strata", "/mnt/strata", {"emptyDir": {}}, False),
        ("/mnt/strata-2", "/mnt/strata", {"nfs": {}}, False),
        ("/mnt", "/mnt/strata", {"nfs": {}}, False),
    ],
)
def test_the_home_of_ray_pods_is_on_shared_storage(home: str, mounted: str, volume: Document, shared: bool) -> None:
    container = {"env": [{"name": "STRATA_HOME", "value": home}], "volumeMounts": [{"name": "v", "mountPath": mounted}]}
    problems = found(ray_cluster(container, volumes=[{"name": "v", **volume}]))
    assert [path for _, path, _ in problems] == [
        f"spec.{group}.template.spec.containers[0].env"
        for group in ("headGroupSpec", "workerGroupSpecs[0]", "workerGroupSpecs[1]")
        if not shared
    ]
    assert all("is not on shared storage" in message for _, _, message in problems)
    assert found(deployment(container, volumes=[{"name": "v", **volume}])) == [], "other pods may have a home of their own"


# Selectors


def budget(**selector: Any) -> Document:
    return named("PodDisruptionBudget", "b", {"selector": selector})


def expression(key: str, operator: str, *values: str) -> Document:
    return {"matchExpressions": [{"key": key, "operator": operator, **({"values": list(values)} if values else {})}]}


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ({"matchLabels": {"app": "a"}}, True),
        ({"matchLabels": {"app": "b"}}, False),
        ({"matchLabels": {"app": "a", "tier": "x"}}, False),
        ({"matchLabels": {"ray.io/cluster": "any"}}, False),  # not a Ray pod
        (expression("app", "In", "a", "b"), True),
        (expression("app", "In", "b"), False),
        (expression("tier", "In", "b"), False),
        (expression("app", "NotIn", "b"), True),
        (expression("app", "NotIn", "a"), False),
        (expression("tier", "NotIn", "a"), True),
        (expression("app", "Exists"), True),
        (expression("tier", "Exists"), False),
        (expression("app", "DoesNotExist"), False),
        (expression("tier", "DoesNotExist"), True),
        ({"matchLabels": {"app": "a"}, **expression("app", "NotIn", "a")}, False),
        ({"matchLabels": {"app": "b"}, **expression("app", "In", "a")}, False),
        ({}, True),  # selects nothing by design
    ],
)
def test_a_budgets_selector_matches_a_pod(selector: Document, matches: bool) -> None:
    expected = [] if matches else [("PodDisruptionBudget/b", "spec.selector", "no pod of these objects has these labels")]
    assert found(deployment(), budget(**selector)) == expected


@pytest.mark.parametrize(
    ("labels", "matches"),
    [
        ({"ray.io/node-type": "head", "ray.io/group": "headgroup"}, True),
        ({"ray.io/node-type": "worker", "ray.io/group": "small"}, True),
        ({"ray.io/node-type": "worker", "ray.io/group": "large"}, True),
        ({"ray.io/node-type": "head", "ray.io/group": "small"}, False),
        ({"ray.io/node-type": "worker", "ray.io/group": "headgroup"}, False),
        ({"ray.io/is-ray-node": "yes", "ray.io/serve": "true"}, True),
        ({"ray.io/cluster": "x", "ray.io/identifier": "y", "ray.io/originated-from-cr-name": "z"}, True),
        ({"ray.io/is-ray-node": "no"}, False),
    ],
)
def test_kuberay_labels_the_pods_of_a_cluster(labels: dict[str, str], matches: bool) -> None:
    assert (found(ray_cluster(), budget(matchLabels=labels)) == []) is matches


@pytest.mark.parametrize(("operator", "matches"), [("In", True), ("NotIn", True), ("Exists", True), ("DoesNotExist", False)])
def test_a_label_with_a_value_known_only_at_run_time_matches_any_value(operator: str, matches: bool) -> None:
    values = ("x",) if operator in ("In", "NotIn") else ()
    assert (found(ray_cluster(), budget(**expression("ray.io/cluster", operator, *values))) == []) is matches


def test_a_services_named_ports_exist_on_its_pods() -> None:
    pods = deployment({"ports": [{"name": "http", "containerPort": 80}]})

    def service(*ports: Any) -> Document:
        listed = [{"name": f"p{i}", "port": i, "targetPort": port} for i, port in enumerate(ports)]
        return named("Service", "s", {"selector": {"app": "a"}, "ports": listed})

    assert found(pods, service("http", 81)) == []
    assert found(pods, service("http", "https")) == [
        ("Service/s", "spec.ports[1].targetPort", "none of the selected pods has a port named https")
    ]
    assert found(pods, named("Service", "s", {"selector": {"app": "b"}})) == [
        ("Service/s", "spec.selector", "no pod of these objects has these labels")
    ]
    assert found(pods, named("Service", "s", {"ports": [{"port": 1, "targetPort": "https"}]})) == [], "endpoints set by hand"


def monitor(kind: str, endpoints: str, selector: Document, port: str = "metrics") -> Document:
    return named(kind, "m", {"selector": selector, endpoints: [{"port": port}]})


@pytest.mark.parametrize(("kind", "endpoints"), [("PodMonitor", "podMetricsEndpoints"), ("PodMonitoring", "endpoints")])
def test_monitors_of_our_pods_find_them_if_all_parts_are_present(kind: str, endpoints: str) -> None:
    container = {"ports": [{"name": "metrics", "containerPort": 80}]}
    parts = [ray_cluster(container, name=part, part=part) for part in ("train", "serve", "lab")]
    ours, theirs = {"matchLabels": {"ray.io/group": "none"}}, {"matchLabels": {"app": "none"}}
    nothing = (f"{kind}/m", "spec.selector", "no pod of these objects has these labels")
    assert found(*parts, monitor(kind, endpoints, ours)) == [nothing]
    assert found(*parts, monitor(kind, endpoints, expression("strata.dev/part", "In", "none"))) == [nothing]
    assert found(*parts, monitor(kind, endpoints, theirs)) == []
    assert found(*parts[:2], monitor(kind, endpoints, ours)) == []
    every = {"matchLabels": {"ray.io/is-ray-node": "yes"}}
    assert found(*parts, monitor(kind, endpoints, every)) == []
    assert found(*parts, monitor(kind, endpoints, every, "other")) == [
        (f"{kind}/m", f"spec.{endpoints}[0].port", "none of the selected pods has a port named other")
    ]


def test_limits_of_budgets() -> None:
    def limits(**spec: Any) -> list[str]:
        return [message for _, _, message in found(named("PodDisruptionBudget", "b", spec))]

    assert limits(minAvailable=0) == limits(maxUnavailable="10%") == []
    assert limits(minAvailable=0, maxUnavailable=1) == ["minAvailable and maxUnavailable exclude each other"]


def in_namespace(document: Document, namespace: str) -> Document:
    return {**document, "metadata": {**document["metadata"], "namespace": namespace}}


def test_selectors_match_pods_of_their_own_namespace() -> None:
    pods_of_one = in_namespace(deployment(), "one")
    for selecting in (budget(matchLabels={"app": "a"}), named("Service", "s", {"selector": {"app": "a"}})):
        assert found(pods_of_one, in_namespace(selecting, "one")) == []
        assert [message for _, _, message in found(pods_of_one, in_namespace(selecting, "two"))] == [
            "no pod of these objects has these labels"
        ]


@pytest.mark.parametrize(
    ("kind", "endpoints", "selected", "matches"),
    [
        ("PodMonitor", "podMetricsEndpoints", {}, False),
        ("PodMonitor", "podMetricsEndpoints", {"any": True}, True),
        ("PodMonitor", "podMetricsEndpoints", {"matchNames": ["one"]}, True),
        ("PodMonitor", "podMetricsEndpoints", {"matchNames": ["two"]}, False),
        ("PodMonitoring", "endpoints", {}, False),
        ("ClusterPodMonitoring", "endpoints", {}, True),
    ],
)
def test_namespaces_of_monitors(kind: str, endpoints: str, selected: Document, matches: bool) -> None:
    container = {"ports": [{"name": "metrics", "containerPort": 80}]}
    parts = [in_namespace(ray_cluster(container, name=part, part=part), "one") for part in ("train", "serve", "lab")]
    other = in_namespace(monitor(kind, endpoints, {"matchLabels": {"ray.io/is-ray-node": "yes"}}), "two")
    other["spec"]["namespaceSelector"] = selected
    assert (found(*parts, other) == []) is matches


@pytest.mark.parametrize(
    ("labels", "whole", "matches"),
    [
        ({"strata.dev/part": "other"}, True, False),
        ({"ray.io/node-type": "head"}, True, True),
        ({"strata.dev/part": "other"}, False, True),
        ({"gateway.networking.k8s.io/gateway-name": "g"}, True, True),  # pods of others
    ],
)
def test_network_policies_select_our_pods(labels: dict[str, str], whole: bool, matches: bool) -> None:
    parts = [ray_cluster(name=part, part=part) for part in ("train", "serve", "lab")]
    policy = named("NetworkPolicy", "n", {"podSelector": {"matchLabels": labels}})
    problems = found(*parts[: 3 if whole else 2], policy)
    assert (problems == []) is matches
    assert matches or problems[0][:2] == ("NetworkPolicy/n", "spec.podSelector")


def test_workloads_select_their_own_pods() -> None:
    workload = deployment()
    workload["spec"]["selector"] = {"matchLabels": {"app": "a"}}
    assert found(workload) == []
    workload["spec"]["selector"] = {"matchLabels": {"app": "b"}}
    assert found(workload) == [("Deployment/d", "spec.selector", "does not match the labels of spec.template")]


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        ([{"port": 80}], None),
        ([{"port": 80}, {"port": 81}], "each needs a name, because there are several"),
        ([{"port": 80, "name": "a"}, {"port": 81, "name": "a"}], "the name a occurs twice"),
        ([{"port": 80, "name": "a"}, {"port": 80, "name": "b"}], "the port 80 (TCP) occurs twice"),
        ([{"port": 80, "name": "a"}, {"port": 80, "name": "b", "protocol": "UDP"}], None),
    ],
)
def test_ports_of_services(ports: list[Document], message: str | None) -> None:
    expected = [("Service/s", "spec.ports", message)] if message else []
    assert found(named("Service", "s", {"ports": ports})) == expected
