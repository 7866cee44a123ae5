"""`model.from` in recipes, files that extend others, and overrides; folders and ids as sources."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import errors
from tiny_models import COMMON, ROWS

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe_file import RecipeError


def folder(path: Path, name: str = "llama", **values: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    row = ROWS[name]
    (path / "config.json").write_text(json.dumps({"architectures": [row.architecture]} | row.config | values))
    return path


def recipe(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_the_folder_decides_the_model(tmp_path: Path) -> None:
    model = recipe_file.load("laptop-moe", [f"model.from={folder(tmp_path / 'm')}", "model.context=32"]).model
    assert (model.family, model.source, model.vocab, model.layers, model.hidden) == ("llama", str(tmp_path / "m"), 96, 3, 32)
    assert model.moe is None and model.norm_eps == 1e-3 and not model.tie_embeddings


def test_recipes_in_files(tmp_path: Path) -> None:
    folder(tmp_path / "m", "mixtral")
    text = f"extends: laptop\nmodel: {{from: {tmp_path / 'm'}, context: 40, moe: {{balance: 0.5}}}}\n"
    path = recipe(tmp_path / "r.yaml", text)
    model = recipe_file.load(path).model
    assert model.context == 40 and model.moe and (model.moe.balance, model.moe.experts) == (0.5, 5)
    child = recipe(tmp_path / "child.yaml", "extends: ./r.yaml\nmodel: {context: 20}\n")
    model = recipe_file.load(child, ["model.moe.balance=0.25"]).model
    assert model.context == 20 and model.moe and model.moe.balance == 0.25


@pytest.mark.parametrize(("longest", "context"), [(64, 64), (4096, 4096), (4097, 4096), (131072, 4096)])
def test_default_context(longest: int, context: int, tmp_path: Path) -> None:
    folder(tmp_path / "m", max_position_embeddings=longest)
    train = "train: {steps: 3, batch: 4, micro_batch: 1, lr: 0.001}\n"
    assert recipe_file.load(recipe(tmp_path / "r.yaml", f"{train}model: {{from: {tmp_path / 'm'}}}")).model.context == context


def test_the_context_fits_the_model(tmp_path: Path) -> None:
    folder(tmp_path / "m")
    assert recipe_file.load("laptop", [f"model.from={tmp_path / 'm'}", "model.context=64"]).model.context == 64
    with pytest.raises(UserError, match=r"model\.context=65 exceeds max_position_embeddings=64") as error:
        recipe_file.load("laptop", [f"model.from={tmp_path / 'm'}", "model.context=65"])
    assert "64" in error.value.fix
    with pytest.raises(RecipeError, match=r"model\.context"):
        recipe_file.load("laptop", [f"model.from={tmp_path / 'm'}", "model.context=15"])
    with pytest.raises(RecipeError, match=r"model\.context='long'"):
        recipe_file.load("laptop", [f"model.from={tmp_path / 'm'}", "model.context=long"])


@pytest.mark.parametrize(
    "override",
    ["model.layers=3", "model.architecture.qk_norm=head", "model.moe=null", "model.moe.experts=8", "model.family=llama"],
)
def test_overrides_beside_an_import_are_refused(override: str, tmp_path: Path) -> None:
    key = override.partition("=")[0]
    folder(tmp_path / "m")
    imported = recipe_file.load("laptop", [f"model.from={tmp_path / 'm'}", "model.context=32"])
    stored = recipe(tmp_path / "stored.yaml", recipe_file.dump(imported))
    with pytest.raises(RecipeError, match=key):
        recipe_file.load("laptop", [override, f"model.from={tmp_path / 'm'}"])
    with pytest.raises(RecipeError, match=key):
        recipe_file.load(stored, [override])
    with pytest.raises(RecipeError, match=key) as error:
        recipe_file.change(imported, [override])
    assert f"Remove {key}, or model.from" in error.value.fix


@pytest.mark.parametrize("keys", ["layers: 3", "moe: {top_k: 1}", "architecture: {sinks: true}"])
def test_files_that_set_a_model_beside_an_import_are_refused(keys: str, tmp_path: Path) -> None:
    folder(tmp_path / "m")
    both = recipe(tmp_path / "both.yaml", f"extends: laptop\nmodel: {{from: {tmp_path / 'm'}, {keys}}}\n")
    recipe(tmp_path / "parent.yaml", f"extends: laptop\nmodel: {{from: {tmp_path / 'm'}}}\n")
    child = recipe(tmp_path / "child.yaml", f"extends: ./parent.yaml\nmodel: {{{keys}}}\n")
    for path in (both, child):
        with pytest.raises(RecipeError, match=r"cannot be set beside model\.from") as error:
            recipe_file.load(path)
        assert Path(path).name in error.value.cause


def test_a_stored_recipe_needs_no_folder(tmp_path: Path) -> None:
    for name in ROWS:
        made = folder(tmp_path / name, name)
        imported = recipe_file.load("laptop", [f"model.from={made}", "model.context=32"])
        stored = recipe(tmp_path / "stored.yaml", recipe_file.dump(imported))
        (made / "config.json").unlink()
        made.rmdir()
        assert recipe_file.load(stored, ["train.steps=70"]).model == imported.model
        assert recipe_file.change(imported, ["train.steps=70"]).model == imported.model
        with pytest.raises(UserError, match="is neither a folder nor a run"):  # the context depends on the model
            recipe_file.load(stored, ["model.context=16"])


def test_another_model_replaces_an_imported_one(tmp_path: Path) -> None:
    folder(tmp_path / "a"), folder(tmp_path / "b", "gemma3")
    first = recipe_file.load("laptop", [f"model.from={tmp_path / 'a'}", "model.context=32"])
    second = recipe_file.change(first, [f"model.from={tmp_path / 'b'}"]).model
    assert (second.family, second.context, second.source) == ("gemma3", 32, str(tmp_path / "b"))
    with pytest.raises(RecipeError, match="family=llama is set by an import"):
        recipe_file.change(first, ["model.from=null"])


def test_relative_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "models" / "m")
    monkeypatch.chdir(tmp_path)
    for given in ("models/m", "./models/m", "models/../models/m/"):
        assert recipe_file.load("laptop", [f"model.from={given}", "model.context=32"]).model.source == str(tmp_path / "models/m")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert recipe_file.load("laptop", ["model.from=~/models/m", "model.context=32"]).model.source == str(tmp_path / "models/m")


def test_small_vocabularies_are_for_imported_models(tmp_path: Path) -> None:
    folder(tmp_path / "m", vocab_size=3)
    assert recipe_file.load("laptop", [f"model.from={tmp_path / 'm'}", "model.context=32"]).model.vocab == 3
    with pytest.raises(RecipeError, match=r"model\.vocab: vocab=511 must be at least 512"):
        recipe_file.load("laptop", ["model.vocab=511"])


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "has no config.json"),
        ("{", "is not valid JSON"),
        ("[1]", "holds a list"),
        ("\xff", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"architectures": ["Odd"]}', "has the architecture Odd"),
    ],
)
def test_damaged_configurations(content: str | None, cause: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError) as error:
        recipe_file.load("laptop", [f"model.from={tmp_path}"])
    assert cause in error.value.cause and str(tmp_path) in error.value.cause and error.value.fix


@pytest.mark.parametrize("given", ["/no/such/folder", "./nowhere", "a/b/c", "name", "''", "-x/y", "x" * 5000])
def test_sources_that_are_neither_folder_nor_id(given: str) -> None:
    with pytest.raises(UserError, match="is neither a folder nor a run") as error:
        recipe_file.load("laptop", [f"model.from={given}"])
    assert "Hugging Face" in error.value.fix


def test_sources_that_are_not_text() -> None:
    with pytest.raises(UserError, match=r"model\.from=3 is not text"):
        recipe_file.load("laptop", ["model.from=3"])


def test_values_that_no_section_admits_name_the_key(tmp_path: Path) -> None:
    folder(tmp_path / "m", num_key_value_heads=3)
    with pytest.raises(RecipeError, match=r"heads=4 must be a multiple of kv_heads=3"):
        recipe_file.load("laptop", [f"model.from={tmp_path / 'm'}", "model.context=32"])


def test_an_id_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder(tmp_path / "m", "qwen3")
    asked = []

    def hf_hub_download(repository: str, file: str) -> str:
        asked.append((repository, file))
        return str(made / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    model = recipe_file.load("laptop", ["model.from=Org-1/Some.Model_2", "model.context=32"]).model
    assert asked == [("Org-1/Some.Model_2", "config.json")]
    assert (model.source, model.family, model.vocab) == ("Org-1/Some.Model_2", "qwen3", COMMON["vocab_size"])


class Response:
    """The part of an HTTP response that errors of huggingface_hub read."""

    headers: dict[str, str] = {}  # noqa: RUF012
    request = None
    status_code = 404


@pytest.mark.parametrize(
    ("error", "cause", "fix"),
    [
        (errors.GatedRepoError("no", response=Response()), "needs your consent", "hf auth login"),  # type: ignore[arg-type]
        (errors.RepositoryNotFoundError("no", response=Response()), "no such model on Hugging Face", "hf auth login"),  # type: ignore[arg-type]
        (errors.RemoteEntryNotFoundError("no", response=Response()), "has no config.json", "another model"),  # type: ignore[arg-type]
        (errors.LocalEntryNotFoundError("no network"), "cannot be downloaded: no network", "hf download org/name"),
        (errors.OfflineModeIsEnabled("offline"), "cannot be downloaded: offline", "hf download org/name"),
        (errors.HFValidationError("bad id"), "cannot be downloaded: bad id", "hf download org/name"),
        (TimeoutError("late"), "cannot be downloaded: late", "hf download org/name"),
    ],
)
def test_ids_without_network_or_access(error: Exception, cause: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def hf_hub_download(repository: str, file: str) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    with pytest.raises(UserError) as found:
        recipe_file.load("laptop", ["model.from=org/name"])
    assert cause in found.value.cause and "org/name" in found.value.cause and fix in found.value.fix


def test_the_section_survives_its_dump(tmp_path: Path) -> None:
    imported = recipe_file.load("laptop", [f"model.from={folder(tmp_path / 'm', 'gpt_oss')}", "model.context=32"])
    tree = yaml.safe_load(recipe_file.dump(imported))
    assert tree["model"]["from"] == str(tmp_path / "m") and "source" not in tree["model"]
    assert recipe_file.check(tree, "dump") == imported
