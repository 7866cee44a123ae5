"""Limits of names and images, options of a rendering, files that it writes, and strict schemas."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from strata.deploy import changes, kubectl, refusals, render, schemas, targets, validate
from strata.deploy.render import Order
from strata.platform.errors import UserError
from strata.platform.recipe import Recipe

MODEL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 512, "context": 64}
TRAIN = {"steps": 10, "batch": 1, "micro_batch": 1, "lr": 0.001}
IMAGE = "strata:1"
GKE, KIND = targets.find("gke"), targets.find("kind")
HALF = {"gpus": 0.5, "gpu_memory": 0.4}


def recipe(**sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({"model": MODEL, **sections, "train": {**TRAIN, **sections.get("train", {})}})


def accepts(chosen: Recipe, target: targets.Target = GKE, *parts: str, run: str = "demo", image: str = IMAGE) -> bool:
    try:
        refusals.refuse(chosen, target, parts or ("train", "serve", "lab"), run, image)
    except UserError:
        return False
    return True


# Refusals


@pytest.mark.parametrize(("length", "accepted"), [(1, True), (41, True), (42, False)])
def test_the_longest_name_leaves_space_for_the_suffix_of_the_job(length: int, accepted: bool) -> None:
    """KubeRay allows 47 characters for a RayJob; `-train` has 6."""
    assert accepts(recipe(deploy={"name": "a" * length})) is accepted


@pytest.mark.parametrize(("run", "accepted"), [("x" * 63, True), ("x" * 64, False), ("a.b_c-d", True), (".a", False)])
def test_run_names(run: str, accepted: bool) -> None:
    assert accepts(recipe(), run=run) is accepted


@pytest.mark.parametrize(
    ("serve", "train", "part", "accepted"),
    [
        ("gpu", "cpu", "serve", False),
        ("gpu", "cpu", "train", True),
        ("gpu", "cpu", "lab", True),
        ("cpu", "gpu", "serve", True),
        ("cpu", "gpu", "train", False),
        ("cpu", "gpu", "lab", False),
        ("cpu", "cpu", "serve", True),
    ],
)
def test_a_target_without_gpus_refuses_only_parts_that_need_them(serve: str, train: str, part: str, accepted: bool) -> None:
    chosen = recipe(serve={"device": serve}, parallel={"device": train})
    assert accepts(chosen, KIND, part) is accepted
    assert accepts(chosen, GKE, part)


@pytest.mark.parametrize(
    ("image", "accepted"),
    [
        ("strata:1", True),
        ("strata:" + "t" * 128, True),
        ("strata:" + "t" * 129, False),
        ("strata:latest", False),
        ("strata", False),
        ("strata@sha256:" + "0" * 64, True),
        ("strata:latest@sha256:" + "0" * 64, True),
        ("strata@sha256:" + "0" * 63, False),
        ("Strata:1", False),
    ],
)
def test_images(image: str, accepted: bool) -> None:
    assert accepts(recipe(), image=image) is accepted


@pytest.mark.parametrize(
    ("storage", "target", "accepted"), [("mine", GKE, True), ("mine/x", GKE, False), ("mine", KIND, False), (None, KIND, True)]
)
def test_storage(storage: str | None, target: targets.Target, accepted: bool) -> None:
    assert accepts(recipe(deploy={"storage": storage}), target) is accepted


@pytest.mark.parametrize("part", ["train", "serve", "lab"])
def test_local_files_matter_only_to_training(part: str) -> None:
    assert accepts(recipe(data={"path": "/home/me"}), GKE, part) is (part != "train")
    assert accepts(recipe(train={"checkpoints": "/home/me"}), GKE, part) is (part != "train")
    assert accepts(recipe(data={"path": "/mnt/strata/corpus"}, train={"checkpoints": "gs://bucket"}), GKE, part)


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_shares_of_multiprocessors_matter_only_to_serving(pool: str) -> None:
    chosen = recipe(serve={pool: {**HALF, "sm_share": 0.5}})
    assert not accepts(chosen, GKE, "serve")
    assert accepts(chosen, GKE, "train")
    assert accepts(recipe(serve={pool: HALF}), GKE, "serve")


# Options of a rendering


def test_missing_settings_of_a_cloud() -> None:
    def missing(target: str, option: str | None, **deploy: str) -> list[str]:
        return [each.partition(" is")[0] for each in render.unset(Order(target, recipe(deploy=deploy), "r", image=option))]

    both = ["deploy.storage, the name of the Cloud Storage bucket,", "the image"]
    assert missing("gke", None) == both
    assert missing("gke", IMAGE) == both[:1]
    assert missing("gke", None, image=IMAGE) == both[:1]
    assert missing("gke", None, storage="mine") == both[1:]
    assert missing("gke", IMAGE, storage="mine") == []
    assert missing("kind", None) == []


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...], str]]:
    """Arguments of the build, which returns an object of each part."""
    calls = []

    def build(overlay: Path, components: tuple[str, ...], image: str) -> list[dict[str, Any]]:
        calls.append((f"{overlay.parent.name}/{overlay.name}", components, image))
        labels = [{"strata.dev/part": part} for part in ("train", "serve", "lab", "common")]
        return [{"kind": "Secret", "metadata": {"name": each["strata.dev/part"], "labels": each}} for each in labels] + [
            {"kind": "Secret", "metadata": {"name": "unlabelled"}}
        ]

    monkeypatch.setattr(render, "build", build)
    return calls


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (None, {"train", "serve", "lab", "common", "unlabelled"}),
        ("train", {"train", "common", "unlabelled"}),
        ("serve", {"serve", "common", "unlabelled"}),
    ],
)
def test_a_single_part_includes_the_common_objects(built: list[Any], only: str | None, names: set[str]) -> None:
    documents = render.render(Order("kind", recipe(), "r", ("volcano",), only, IMAGE))
    assert {document["metadata"]["name"] for document in documents} == names
    assert built == [("overlays/kind", ("volcano",), IMAGE)]


@pytest.mark.parametrize(("option", "key", "expected"), [("o:1", "k:1", "o:1"), (None, "k:1", "k:1"), (None, None, None)])
def test_the_image_is_the_options_the_recipes_or_our_own(
    built: list[Any], option: str | None, key: str | None, expected: str | None
) -> None:
    render.render(Order("kind", recipe(deploy={"image": key}), "r", image=option))
    [(_, _, image)] = built
    assert image == expected if expected else image.endswith("-cpu")


@pytest.mark.parametrize(
    ("only", "serve", "train", "kind"),
    [
        ("serve", "gpu", "cpu", "gpu"),
        ("serve", "cpu", "gpu", "cpu"),
        ("train", "cpu", "gpu", "gpu"),
        ("train", "gpu", "cpu", "cpu"),
        (None, "gpu", "cpu", "gpu"),
        (None, "cpu", "cpu", "cpu"),
    ],
)
def test_our_own_image_has_the_device_of_the_rendered_parts(
    built: list[Any], only: str | None, serve: str, train: str, kind: str
) -> None:
    chosen = recipe(serve={"device": serve}, parallel={"device": train}, deploy={"gpu": "h100"})
    render.render(Order("gke", chosen, "r", only=only))
    [(_, _, image)] = built
    assert image.startswith("strata:") and image.endswith(f"-{kind}")


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("a/b:1", {"newName": "a/b", "newTag": "1"}),
        ("host:5000/a:1", {"newName": "host:5000/a", "newTag": "1"}),
        ("host:5000/a@sha256:0", {"newName": "host:5000/a", "digest": "sha256:0"}),
        ("host:5000/a:1@sha256:0", {"newName": "host:5000/a", "digest": "sha256:0"}),
    ],
)
def test_kustomize_gets_the_name_and_the_tag_or_digest(image: str, expected: dict[str, str]) -> None:
    assert render._image_parts(image) == expected


@pytest.mark.parametrize(
    ("target", "components", "cause"),
    [
        ("gke", ("volcano", "kueue"), "volcano and kueue exclude each other"),
        ("gke", ("kueue",), None),
        ("kind", ("dcgm", "dcgm-profiling"), "dcgm and dcgm-profiling exclude each other"),
        ("kind", ("dcgm", "nvml"), None),
        ("gke", ("dcgm-gke",), None),
        ("ack", ("dcgm-gke",), "The component dcgm-gke is not for ack"),
        ("ack", ("dcgm",), None),
        ("kind", ("nvml",), None),
        ("gke", ("nvml",), "The component nvml is not for gke"),
        ("gke", ("monitoring-gke",), None),
        ("ack", ("monitoring-gke",), "The component monitoring-gke is not for ack"),
        ("ack", ("monitoring-arms",), None),
        ("kind", ("monitoring", "monitoring-gke"), "monitoring and monitoring-gke exclude each other"),
        ("kind", ("monitoring", "spot", "auth"), None),
        ("kind", ("zzz",), "There is no component 'zzz'"),
    ],
)
def test_components_of_a_target(built: list[Any], target: str, components: tuple[str, ...], cause: str | None) -> None:
    order = Order(target, recipe(deploy={"storage": None}), "r", components, image=IMAGE)
    if cause is None:
        assert render.render(order)
    else:
        with pytest.raises(UserError) as error:
            render.render(order)
        assert error.value.cause.startswith(cause)
        assert ("Did you mean" in error.value.fix) is False


def test_targets_are_suggested_only_if_they_are_near() -> None:
    with pytest.raises(UserError) as near:
        targets.find("gkee")
    with pytest.raises(UserError) as far:
        targets.find("zzzzz")
    assert near.value.fix == "Did you mean 'gke'? Targets: gke, ack, kind."
    assert far.value.fix == "Targets: gke, ack, kind."


# Files


def test_a_folder_has_a_file_per_object_and_loses_those_of_a_previous_rendering(tmp_path: Path) -> None:
    objects = [{"kind": "Secret", "metadata": {"name": name}} for name in ("a", "b")]
    first = render.write_to(tmp_path, objects)
    assert [path.name for path in first] == ["secret-a.yaml", "secret-b.yaml"]
    (tmp_path / "mine.yaml").write_text("# mine\n# Generated by 'strata deploy render'\n")
    (tmp_path / "notes.txt").write_text("# Generated by 'strata deploy render'\n")
    render.write_to(tmp_path, objects[:1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "notes.txt", "secret-a.yaml"]
    text = (tmp_path / "secret-a.yaml").read_text()
    assert text.startswith("# Generated by 'strata deploy render'; overwritten by the next rendering.\n")
    assert "name: a" in text


@pytest.mark.parametrize("name", ["all.yaml", "all.yml"])
def test_a_yaml_file_has_every_object(tmp_path: Path, name: str) -> None:
    objects = [{"kind": "Secret", "metadata": {"name": each}} for each in ("a", "b")]
    assert render.write_to(tmp_path / name, objects) == [tmp_path / name]
    assert (tmp_path / name).read_text().count("kind: Secret") == 2


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        render.write_to(tmp_path / "out", [])


# Changes


def test_changes_against_a_rendering(tmp_path: Path) -> None:
    def secret(name: str, value: str) -> dict[str, Any]:
        return {"kind": "Secret", "metadata": {"name": name}, "data": {"x": value}}

    render.write_to(tmp_path, [secret("a", "1"), secret("b", "1"), secret("c", "1")])
    found = changes.against_folder([secret("a", "1"), secret("b", "2"), secret("d", "1")], tmp_path)
    assert found.against == f"the rendering at {tmp_path}"
    changed = [line for line in found.text.splitlines() if line.startswith(("+", "-"))]
    assert changed[:4] == ["--- before/Secret/b", "+++ after/Secret/b", "-  x: '1'", "+  x: '2'"]
    assert "-  name: c" in changed and "+  name: d" in changed and "-  name: a" not in changed
    one = tmp_path / "one.yaml"
    render.write_to(one, [secret("a", "1")])
    assert changes.against_folder([secret("a", "1")], one).text == ""


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, str, str]]:
    """Exit status, output and errors of kubectl, by its first word."""
    given = {"version": (0, json.dumps({"serverVersion": {"gitVersion": "v1.33"}}), ""), "config": (0, "here\n", "")}

    def run(words: list[str], stdin: str | None = None) -> kubectl.Answer:
        return subprocess.CompletedProcess(words, *given[words[0]])

    monkeypatch.setattr(kubectl, "run", run)
    return given


@pytest.mark.parametrize(("status", "fails"), [(0, False), (1, False), (2, True)])
def test_kubectl_diff_fails_above_status_one(answers: dict[str, tuple[int, str, str]], status: int, fails: bool) -> None:
    answers["diff"] = (status, "+ x\n", "no such kind")
    if fails:
        with pytest.raises(UserError, match="'kubectl diff' failed: no such kind"):
            changes.against_cluster([{"kind": "Secret", "metadata": {"name": "a"}}])
    else:
        found = changes.against_cluster([{"kind": "Secret", "metadata": {"name": "a"}}])
        assert (found.against, found.text) == ("the cluster 'here' (v1.33)", "+ x\n")


def test_everything_is_new_in_a_cluster_without_the_namespace(answers: dict[str, tuple[int, str, str]]) -> None:
    objects = [{"kind": "Namespace", "metadata": {"name": "n"}}, {"kind": "Secret", "metadata": {"name": "a"}}]
    answers["get"] = (0, "", "")
    found = changes.against_cluster(objects)
    assert found.text == "+ Namespace/n\n+ Secret/a\n"
    assert "no namespace n yet" in found.against
    answers["get"], answers["diff"] = (0, "namespace/n\n", ""), (0, "", "")
    assert changes.against_cluster(objects).text == ""


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ((0, '{"serverVersion": {"gitVersion": "v1.30.2"}}', ""), "v1.30.2"),
        ((1, '{"clientVersion": {}}', "refused"), None),
        ((1, "", "refused"), None),
    ],
)
def test_the_version_of_the_server(answers: dict[str, Any], answer: tuple[int, str, str], version: str | None) -> None:
    answers["version"] = answer
    assert kubectl.server_version() == version


@pytest.mark.parametrize(
    ("answer", "reason"),
    [((1, "out", "err"), "err"), ((1, "out", " "), "out"), ((3, "", ""), "exit status 3")],
)
def test_the_reason_of_a_failure(answers: dict[str, Any], answer: tuple[int, str, str], reason: str) -> None:
    answers["apply"] = answer
    with pytest.raises(UserError) as error:
        kubectl.run_checked(["apply", "-f"])
    assert error.value.cause == f"'kubectl apply' failed: {reason}"
    answers["apply"] = (0, "done", "a warning")
    assert kubectl.run_checked(["apply", "-f"]) == "done"


# Schemas


DEFINITION = """
spec:
  group: ray.io
  names: {kind: RayJob}
  versions:
  - name: v1
    served: true
    schema:
      openAPIV3Schema:
        properties:
          apiVersion: {type: string}
          kind: {type: string}
          metadata: {type: object}
          spec:
            type: object
            required: [name]
            properties:
              name: {type: string}
              note: {type: string, nullable: true}
              size: {x-kubernetes-int-or-string: true}
              narrow: {x-kubernetes-int-or-string: true, anyOf: [{type: integer}]}
              free: {type: object, properties: {a: {type: integer}}, x-kubernetes-preserve-unknown-fields: true}
              map: {type: object, additionalProperties: {type: object, properties: {a: {type: integer}}}}
              bare: {type: array, x-kubernetes-list-map-keys: [name], items: {x-kubernetes-preserve-unknown-fields: true}}
              list:
                type: array
                x-kubernetes-list-map-keys: [port, protocol]
                items:
                  type: object
                  properties: {port: {type: integer}, protocol: {type: string, default: TCP}, x: {type: integer}}
  - name: v1alpha1
    served: false
    schema: {openAPIV3Schema: {properties: {}}}
"""


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({}, None),
        ({"nam": 1}, "spec"),
        ({"name": None}, "spec.name"),
        ({"note": None}, None),
        ({"note": 1}, "spec.note"),
        ({"size": 1}, None),
        ({"size": "1"}, None),
        ({"size": 1.5}, "spec.size"),
        ({"narrow": 1}, None),
        ({"narrow": "1"}, "spec.narrow"),
        ({"free": {"b": 1}}, None),
        ({"free": {"a": "1"}}, "spec.free.a"),
        ({"map": {"x": {"a": 1}}}, None),
        ({"map": {"x": {"b": 1}}}, "spec.map.x"),
        ({"list": [{"port": 1}, {"port": 2}]}, None),
        ({"list": [{"port": 1}, {"port": 1, "protocol": "UDP"}]}, None),
        ({"list": [{"port": 1, "x": 1}, {"port": 1, "protocol": "TCP", "x": 2}]}, "spec.list[1]"),
        ({"list": [{"prt": 1}]}, "spec.list[0]"),
        ({"list": "x"}, "spec.list"),
        ({"bare": [{"name": "a"}, {"name": "b"}, {}, 1]}, None),
        ({"bare": [{"name": "a"}, {"name": "a"}]}, "spec.bare[1]"),
    ],
)
def test_schemas_forbid_unknown_fields_and_repeated_keys(tmp_path: Path, spec: dict[str, Any], path: str | None) -> None:
    (tmp_path / "crd.yaml").write_text(DEFINITION)
    document = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "a"}, "spec": {"name": "x", **spec}}
    assert [finding.path for finding in schemas.of_kuberay(document, tmp_path)] == ([path] if path else [])


def test_only_served_versions_have_a_schema(tmp_path: Path) -> None:
    (tmp_path / "crd.yaml").write_text(DEFINITION)
    document = {"apiVersion": "ray.io/v1alpha1", "kind": "RayJob", "metadata": {"name": "a"}}
    [finding] = schemas.of_kuberay(document, tmp_path)
    assert (finding.path, "is not defined" in finding.message) == ("kind", True)


def test_labels_are_strings(tmp_path: Path) -> None:
    (tmp_path / "crd.yaml").write_text(DEFINITION)
    metadata = {"name": "a", "labels": {"a": 1}, "annotations": {"b": "c"}}
    document = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": {"name": "x"}}
    assert [finding.path for finding in schemas.of_kuberay(document, tmp_path)] == ["metadata.labels.a"]


@pytest.mark.parametrize(
    ("document", "paths"),
    [
        ({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}}, []),
        ({"kind": "Secret", "metadata": {"name": "a"}}, ["apiVersion"]),
        ({"apiVersion": 1, "metadata": {"name": "a"}}, ["apiVersion", "kind"]),
        ({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": 1}}, ["metadata.name"]),
        ({"apiVersion": "v1", "kind": "Secret", "metadata": "a"}, ["metadata.name"]),
        ({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}, "dat": {}}, [""]),
    ],
)
def test_required_fields_are_checked_before_the_schema(document: dict[str, Any], paths: list[str]) -> None:
    assert [problem.path for problem in validate.problems([document], None)] == paths


def test_rules_and_references_are_checked_only_if_the_schemas_are_met() -> None:
    """A RayJob without a cluster breaks a rule of the operator; the Secret breaks its schema."""
    job = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "a"}, "spec": {}}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}}
    assert [str(each) for each in validate.problems([job, secret], None)] == [
        "RayJob/a: spec.rayClusterSpec: must be set, or clusterSelector"
    ]
    assert [each.object for each in validate.problems([job, {**secret, "dat": {}}], None)] == ["Secret/a"]
    assert [str(each) for each in validate.problems([secret, secret], None)] == ["Secret/a: metadata.name: Secret/a occurs twice"]


def test_kinds_with_a_schema() -> None:
    ray, other = {"apiVersion": "ray.io/v1", "kind": "RayJob"}, {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor"}
    assert validate.has_schema(ray, Path("/crds"))
    assert not validate.has_schema(ray, None)
    assert not validate.has_schema(other, Path("/crds"))
    assert validate.has_schema({"apiVersion": "v1", "kind": "Secret"}, None)
