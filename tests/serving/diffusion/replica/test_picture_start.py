"""Checks before a picture endpoint starts, its settings, and the choice between text and pictures."""

import json
from pathlib import Path

import pytest

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe import ServeSection
from strata.serving import terminal
from strata.serving.diffusion.replica.spec import PicturesSpec, gateway
from strata.serving.models import choice, model_dir
from strata.serving.runtime import pictures
from strata.serving.spec import Network

NETWORK = Network("127.0.0.1", bytes(32))


def section(*overrides: str) -> ServeSection:
    return recipe_file.load("laptop", overrides).serve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that passes the checks of files: a model of six heads."""
    made = tmp_path / "model"
    (made / "transformer").mkdir(parents=True)
    (made / "model_index.json").write_text(json.dumps({"_class_name": "StrataPicturePipeline"}))
    (made / "transformer" / "config.json").write_text(json.dumps({"num_attention_heads": 6}))
    header = b"{}"
    (made / "transformer" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return made


def test_folder_decides_between_text_and_pictures(folder: Path) -> None:
    chosen = choice.choose([], None, folder, None)
    assert chosen.makes_pictures and chosen.model_id == "model"
    (folder / "model_index.json").unlink()
    assert not choice.choose([], None, folder, None).makes_pictures


def test_run_with_an_export_of_pictures_is_served(folder: Path, own_home: Path) -> None:
    run = own_home / "runs" / "painter"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("extends: laptop\nserve: {pictures: {steps: 9}}\n")
    (run / "run.json").write_text('{"id": "a"}')
    with pytest.raises(UserError, match="no export to serve"):
        choice.choose([], "painter", None, None)
    folder.rename(run / "export")
    chosen = choice.choose([], "painter", None, None)
    assert chosen.makes_pictures and chosen.section.pictures.steps == 9


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        (["ulysses=4"], "ulysses=4 does not divide the 6 heads"),
        (["pipefusion=2", "ulysses=2"], "pipefusion is combined with cfg only"),
        (["patches=3"], "needs pipefusion above 1"),
    ],
)
def test_layouts_that_do_not_work_are_refused_before_a_process_starts(folder: Path, overrides: list[str], cause: str) -> None:
    with pytest.raises(UserError, match=cause):
        pictures.check(section(*(f"serve.pictures.{word}" for word in overrides)), folder)


def test_sound_layouts_pass(folder: Path) -> None:
    for words in (["ulysses=6"], ["ring=5"], ["cfg=2", "pipefusion=3"], ["cfg=2", "ulysses=3", "ring=2"]):
        found = section(*(f"serve.pictures.{word}" for word in words))
        pictures._check_layout(found, folder)


@pytest.mark.parametrize("override", ["cfg=3", "ulysses=0", "step_cache=1", "batch_wait_ms=-1", "steps=0"])
def test_recipe_refuses_values(override: str) -> None:
    with pytest.raises(UserError):
        section(f"serve.pictures.{override}")


def test_step_cache_needs_all_blocks() -> None:
    with pytest.raises(UserError, match="needs all blocks on one worker"):
        section("serve.pictures.step_cache=0.1", "serve.pictures.pipefusion=2")


def test_picture_model_is_no_model_of_text(folder: Path) -> None:
    with pytest.raises(UserError, match="model of pictures, not of text"):
        model_dir.check(folder)


@pytest.mark.parametrize("damage", ["index", "no weights", "cut"])
def test_damaged_folders_are_refused(folder: Path, damage: str) -> None:
    weights = folder / "transformer" / "model.safetensors"
    if damage == "index":
        (folder / "model_index.json").write_text("{}")
    elif damage == "no weights":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError):
        pictures.check(section(), folder)


def test_settings_of_replicas_and_gateways(folder: Path) -> None:
    serve = section(
        "serve.pictures.cfg=2", "serve.pictures.ulysses=3", "serve.pictures.replicas=2", "serve.pictures.max_batch=3",
        "serve.pictures.max_queue=5", "serve.gateways=2",
    )  # fmt: skip
    spec = PicturesSpec.of(serve, folder, "m", NETWORK)
    assert spec.layout.workers == 6 and spec.resources() == {"num_cpus": 6} and spec.dtype == "float32" and not spec.compiled
    front = gateway(serve, "m", NETWORK, "/keys")
    assert front.role == "pictures" and front.gateways == 2 and front.keys_file == "/keys" and front.capacity(0) == 2 * 3 + 5
    on_gpus = recipe_file.load("h200", ["serve.pictures.cfg=2"]).serve
    spec = PicturesSpec.of(on_gpus, folder, "m", NETWORK)
    assert spec.resources() == {"num_cpus": 2, "num_gpus": 2} and spec.dtype == "bfloat16"


def test_prompts_of_ask_are_words_that_are_no_overrides() -> None:
    assert terminal.OVERRIDE.match("serve.port=8001") and terminal.OVERRIDE.match("serve.pictures.cfg=2")
    assert not terminal.OVERRIDE.match("a red circle") and not terminal.OVERRIDE.match("x=1 is true")


def test_prompts_are_refused_for_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not an override"):
        terminal.serve(["a red circle"], None, str(tmp_path), None, ask=True)
