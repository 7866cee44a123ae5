"""Checks of further models before their start, and those of a recipe."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import ServeSection
from strata.serving.catalogue.document import Revision
from strata.serving.runtime import kuberay_app
from strata.serving.runtime.models import checks, controller, from_recipe
from strata.serving.spec import GatewaySpec, Network, directory_of

NETWORK = Network("127.0.0.1", b"s" * 32)


def section(*overrides: str) -> ServeSection:
    return recipe_file.load("laptop", [f"serve.{word}" for word in overrides]).serve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that passes the checks."""
    made = tmp_path / "weights"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (made / "tokenizer.json").write_text("{}")
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (made / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    return made


def test_a_cluster_without_free_resources_is_refused_with_the_missing_ones() -> None:
    spec = GatewaySpec.of(section(), "main", NETWORK)
    changed = section().further({"decode": {"replicas": 3}, "device": "gpu"})
    revision = Revision("1", "/weights", changed.model_dump(mode="json"))
    specs = controller.engine_specs(spec, "small", revision)
    checks.check_resources(specs, {"CPU": 8, "GPU": 4})
    with pytest.raises(UserError, match=r"needs 8 CPU \(7 free\), 4 GPU \(0 free\)"):
        checks.check_resources(specs, {"CPU": 7})
    apart = controller.engine_specs(replace(spec, on_every_node=True), "small", revision)
    with pytest.raises(UserError, match=r"3 strata-decode \(1 free\)"):
        checks.check_resources(apart, {"CPU": 99, "GPU": 9, "strata-prefill": 9, "strata-decode": 1})


def test_revisions_never_share_a_directory() -> None:
    spec = GatewaySpec.of(section(), "main", NETWORK)
    dumped = section().model_dump(mode="json")
    first, second = (controller.engine_specs(spec, "small", Revision(id, "/w", dumped))[1] for id in ("a", "b"))
    assert len({first.directory, second.directory, directory_of("main", ""), "small"}) == 4
    assert directory_of("main", "") == "main"  # of the endpoint itself


def test_models_of_a_recipe(folder: Path) -> None:
    chosen = from_recipe.chosen(section(f"models.small.model={folder}", "models.small.max_sequences=3"), "main")
    assert [(model.name, model.folder, model.section["max_sequences"]) for model in chosen] == [("small", str(folder), 3)]
    assert from_recipe.cpus(chosen) == 2
    with pytest.raises(UserError, match="name of the main model"):
        from_recipe.chosen(section(f"models.main.model={folder}"), "main")
    with pytest.raises(UserError, match="no model folder"):
        from_recipe.chosen(section("models.small.model=/nowhere"), "main")
    with pytest.raises(UserError, match="GiB"):
        from_recipe.chosen(section(f"models.small.model={folder}", "models.small.kv_cache_gib=100000"), "main")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["models.small.max_sequences=2"], "either 'run' or 'model'"),
        (["models.small.model=/a", "models.small.run=b"], "either 'run' or 'model'"),
        (["models.small.model=/a", "models.small.port=9"], "port is of the whole endpoint"),
        (["models.small.model=/a", "models.small.decode.replicas=0"], "leaves no engine"),
        (["models.small.model=/a", "models.small.nothing=1"], "nothing"),
        (["models.a/b.model=/a"], "pattern"),
    ],
)
def test_wrong_models_of_a_recipe_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        section(*words)


def test_runs_of_a_recipe_are_refused_on_kuberay(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kuberay_app.SECRET, "secret")
    recipe = tmp_path / "recipe.yaml"

    def build(model: str) -> tuple[str, ...]:
        recipe.write_text(f"extends: laptop\nserve: {{models: {{small: {{{model}}}}}}}\n")
        bound = kuberay_app.application(kuberay_app.Arguments(recipe=str(recipe), model=str(folder)))._bound_deployment
        return tuple(each.name for each in bound.init_args[0].models)

    assert build(f"model: {folder}") == ("small",)
    with pytest.raises(UserError, match="is a run"):
        build("run: mine")
