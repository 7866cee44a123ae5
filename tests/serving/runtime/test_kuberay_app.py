"""The application that Ray Serve builds on a cluster, from a recipe and a model folder. No process is started."""

import json
import shutil
from pathlib import Path

import pytest
from ray.serve.schema import ServeDeploySchema

from strata.deploy import names
from strata.platform.errors import UserError
from strata.platform.model_families import copies
from strata.serving.runtime import deployments, kuberay_app
from strata.serving.runtime.kuberay_app import SECRET, Arguments


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine" / "export"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "tokenizer.json").write_text("{}")
    header = b"{}"
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def test_engines_have_dedicated_nodes_and_gateways_run_on_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "long and random")
    built = kuberay_app.application(Arguments(recipe="h200", model=str(model)))
    gateway = built._bound_deployment
    assert gateway.ray_actor_options["resources"] == {"strata-gateway": 0.25}, "four gateways share a node's resource"
    assert gateway._deployment_config.autoscaling_config.max_replicas == 8
    spec, *engines = gateway.init_args
    assert spec.model_id == "mine" and spec.network.host is None
    found = {one._bound_deployment.name: one._bound_deployment.ray_actor_options for one in engines}
    assert {name: (options["num_gpus"], options["resources"]) for name, options in found.items()} == {
        "decode": (0.5, {"strata-decode": 1}),
        "prefill": (0.5, {"strata-prefill": 1}),
    }


def test_replicas_request_the_resources_of_the_manifests() -> None:
    """The two packages do not import each other."""
    assert deployments.GATEWAY_RESOURCE == names.GATEWAY_RESOURCE
    assert names.ENGINE_RESOURCE.format(group="decode") == "strata-decode"


def test_secret_is_the_same_after_an_update(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def secret() -> bytes:
        built = kuberay_app.application(Arguments(recipe="laptop", model=str(model)))._bound_deployment
        return bytes(built.init_args[0].network.secret)

    monkeypatch.setenv(SECRET, "one")
    first = secret()
    assert first == secret() and len(first) == 32
    monkeypatch.setenv(SECRET, "another")
    assert first != secret()
    monkeypatch.delenv(SECRET)
    with pytest.raises(UserError, match="STRATA_LINK_SECRET is not set"):
        secret()


def test_missing_model_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no model folder"):
        kuberay_app.application(Arguments(recipe="laptop", model=str(tmp_path / "nowhere")))


def test_models_that_pods_copy_are_served_from_their_volume(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The head, where the application is built, has config.json only."""
    monkeypatch.setenv(SECRET, "long and random")
    monkeypatch.setenv("STRATA_MODELS", "/var/cache/strata/models")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: str(config))
    arguments = Arguments(recipe="h200", model="Org/Some-Model")
    spec, *engines = kuberay_app.application(arguments)._bound_deployment.init_args
    assert spec.model_id == "Some-Model"
    folders = {one._bound_deployment.init_args[0].model_dir for one in engines}
    assert folders == {str(copies.place("Org/Some-Model"))}
    config.write_text(json.dumps({"architectures": ["Gemma2ForCausalLM"]}))
    with pytest.raises(UserError, match="several kinds of KV cache"):
        kuberay_app.application(arguments)


def test_a_copy_on_the_shared_storage_is_checked_and_served(model: Path, monkeypatch: pytest.MonkeyPatch, own_home: Path) -> None:
    monkeypatch.setenv(SECRET, "long and random")
    shared = own_home / "models" / copies.place("Org/Some-Model").name
    shutil.copytree(model, shared)
    (shared / copies.COMPLETE).touch()
    arguments = Arguments(recipe="h200", model="Org/Some-Model")
    _, *engines = kuberay_app.application(arguments)._bound_deployment.init_args
    assert {one._bound_deployment.init_args[0].model_dir for one in engines} == {str(shared)}
    (shared / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        kuberay_app.application(arguments)


def test_serve_accepts_the_configuration_of_the_manifests(root: Path) -> None:
    import yaml

    manifest = yaml.safe_load((root / "infra/base/serve/rayservice.yaml").read_text())
    config = ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    [application] = config.applications
    assert application.import_path == f"{kuberay_app.__name__}:{kuberay_app.application.__name__}"
    Arguments.model_validate(application.args)
