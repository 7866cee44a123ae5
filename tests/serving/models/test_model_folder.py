"""Model folders and their selection: sizes of safetensors files byte by byte, and the choice between a run and a folder."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strata.platform import recipe_file, runs
from strata.platform.errors import UserError
from strata.platform.recipe import DataSection, ServeSection
from strata.serving import held_out_chat
from strata.serving.models import choice, hybrid_check, model_dir

HEADER = {
    "__metadata__": {"format": "pt", "data_offsets": [0, 99]},
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
}


def safetensors(header: Any, data: int, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(safetensors(HEADER, 12))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def refusal(folder: Path) -> str | None:
    try:
        model_dir.check(folder)
    except UserError as error:
        return error.cause
    return None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (safetensors(HEADER, 12), None),
        (safetensors(HEADER, 11), "its header requires"),
        (safetensors(HEADER, 13), "its header requires"),
        (safetensors({}, 0), None),  # two bytes of header are the fewest
        (safetensors({}, 1), "its header requires"),
        (safetensors(b"1", 0), "header is not readable"),
        (safetensors({}, 0, length=3), "header is not readable"),  # longer than the file
        (safetensors(b"{]", 0), "header is not readable"),
        (b"\x02\x00", "header is not readable"),
    ],
)
def test_truncated_and_grown_files_are_found(folder: Path, content: bytes, reason: str | None) -> None:
    (folder / "model.safetensors").write_bytes(content)
    found = refusal(folder)
    assert found is None if reason is None else found is not None and reason in found


def test_the_expected_size_is_named(folder: Path) -> None:
    whole = safetensors(HEADER, 12)
    (folder / "model.safetensors").write_bytes(whole[:-5])
    assert (
        refusal(folder)
        == f"{folder / 'model.safetensors'} is damaged: it has {len(whole) - 5} bytes, but its header requires {len(whole)}."
    )


def test_every_file_of_weights_is_checked(folder: Path) -> None:
    (folder / "model-2.safetensors").write_bytes(safetensors(HEADER, 3))
    assert "model-2.safetensors is damaged" in str(refusal(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_each_kind_of_tokenizer_is_enough(folder: Path, name: str) -> None:
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in str(refusal(folder))
    (folder / name).write_text("{}")
    assert refusal(folder) is None


@pytest.mark.parametrize(
    ("config", "reason"), [("[]", "is not a JSON object"), ("{", "is not valid JSON"), ("{}", "has no 'architectures'")]
)
def test_config_is_a_json_object_with_architectures(folder: Path, config: str, reason: str) -> None:
    (folder / "config.json").write_text(config)
    assert reason in str(refusal(folder))


def test_size_of_the_weights_in_gib(tmp_path: Path) -> None:
    for name, size in (("a.safetensors", 3 * 2**28), ("b.safetensors", 2**29), ("c.bin", 2**30)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    assert model_dir.weights_gib(tmp_path) == 1.25


# Several kinds of KV cache


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"layer_types": ["full", "full"]}, None),
        ({"layer_types": ["full", "sliding"]}, "full, sliding"),
        ({"layer_types": None, "layers_block_type": ["mamba", "attention"]}, "attention, mamba"),
        ({"layer_types": ["full"], "attn_layer_period": 8}, "attn_layer_period"),
        ({"attn_layer_period": 0}, None),
        ({"text_config": {}, "full_attention_interval": 4}, "full_attention_interval"),
        ({"text_config": {"layer_types": ["a"]}, "full_attention_interval": 4}, None),
        ({"architectures": ["Other", "Gemma2ForCausalLM"]}, "Gemma2ForCausalLM"),
    ],
)
def test_kinds_of_kv_cache(tmp_path: Path, config: dict[str, Any], kinds: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | config))
    if kinds is None:
        hybrid_check.check_folder(tmp_path)
    else:
        with pytest.raises(UserError, match=rf"several kinds of KV cache \({kinds}\)"):
            hybrid_check.check_folder(tmp_path)


@pytest.mark.parametrize(
    ("loaded", "is_hybrid", "kinds"),
    [
        ({}, False, None),
        ({"layer_types": ["full"]}, False, None),
        ({"layer_types": ["full", "sliding"]}, False, "full, sliding"),
        ({"layer_types": ["full", "sliding"]}, True, "full, sliding"),
        ({}, True, "attention and states"),
    ],
)
def test_loaded_configurations(loaded: dict[str, Any], is_hybrid: bool, kinds: str | None) -> None:
    if kinds is None:
        hybrid_check.check_loaded(SimpleNamespace(**loaded), is_hybrid)
    else:
        with pytest.raises(UserError, match=rf"\({kinds}\)"):
            hybrid_check.check_loaded(SimpleNamespace(**loaded), is_hybrid)


# Choice


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The only run, with an export. Recipes that are loaded are listed in `loaded`."""
    run = SimpleNamespace(name="mine", path=tmp_path, export=tmp_path / "export", loaded=[], data=DataSection())
    run.recipe = lambda: SimpleNamespace(data=run.data)
    run.export.mkdir()
    (run.export / "config.json").write_text("{}")
    monkeypatch.setattr(runs, "find", lambda name: run if name == "mine" else pytest.fail(name))
    monkeypatch.setattr(runs, "newest_with_export", lambda: run)

    def load(source: str, overrides: Any) -> Any:
        run.loaded.append((source, tuple(overrides)))
        return SimpleNamespace(serve=ServeSection())

    monkeypatch.setattr(recipe_file, "load", load)
    return run


def test_a_run_is_served_with_its_own_recipe(run: SimpleNamespace) -> None:
    for name in ("mine", None):
        chosen = choice.choose(["a=1"], name, None, None)
        assert (chosen.folder, chosen.model_id, chosen.words) == (run.export, "mine", ("--run", "mine", "a=1"))
    assert run.loaded == 2 * [(str(run.path / "recipe.yaml"), ("a=1",))]
    choice.choose([], "mine", None, "h200")
    assert run.loaded[-1] == ("h200", ())


@pytest.mark.parametrize(("path", "hf", "knows"), [(None, None, True), (Path("corpus"), None, False), (None, "dataset", False)])
def test_only_a_run_on_the_default_corpus_knows_python(
    run: SimpleNamespace, tmp_path: Path, path: Path | None, hf: str | None, knows: bool
) -> None:
    run.data = DataSection(path=path, hf=hf)
    assert choice.choose([], "mine", None, None).knows_python == knows
    assert not choice.choose([], None, tmp_path, None).knows_python


def test_held_out_conversations_beside_the_data_are_asked(run: SimpleNamespace, tmp_path: Path) -> None:
    run.data = DataSection(path=tmp_path / "chat" / "train", kind="chat")
    assert choice.choose([], "mine", None, None).questions is None
    rows = [
        {"messages": [{"role": "user", "content": "Say a."}, {"role": "assistant", "content": "a"}], "task": "repeat"},
        {"messages": [{"role": "user", "content": "Say b."}, {"role": "assistant", "content": "b"}], "task": "repeat"},
        {"messages": [{"role": "user", "content": "t"}, {"role": "assistant", "content": "x"}], "task": "tool", "tools": [{}]},
        {"messages": [{"role": "user", "content": "Spell ab."}, {"role": "assistant", "content": "a-b"}], "task": "spell"},
    ]
    file = tmp_path / "chat" / "held-out.jsonl"
    file.parent.mkdir()
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert choice.choose([], "mine", None, None).questions == file
    questions = held_out_chat.read(file)
    assert [question.text for question in questions] == ["Say a.", "Spell ab."]
    assert questions[1].is_right(" a-b\n") and not questions[1].is_right("a-b-c")
    run.data = DataSection(path=tmp_path / "chat" / "train", kind="completion")
    assert choice.choose([], "mine", None, None).questions is None


def test_a_folder_is_served_with_the_default_recipe(run: SimpleNamespace, tmp_path: Path) -> None:
    chosen = choice.choose(["a=1"], None, tmp_path / "x" / ".." / "model", None)
    assert chosen.model_id == "model" and chosen.folder == tmp_path / "x" / ".." / "model"
    assert chosen.words == ("--model", str(tmp_path / "x" / ".." / "model"), "a=1")
    choice.choose([], None, tmp_path, "h200")
    assert run.loaded == [(recipe_file.DEFAULT, ("a=1",)), ("h200", ())]


def test_an_id_or_a_uri_is_downloaded(run: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("strata.platform.model_families.source.snapshot", lambda given: tmp_path / given.rpartition("/")[2])
    for given in ("Org/Some-Model", "gs://bucket/Some-Model"):
        chosen = choice.choose(["a=1"], None, given, None)
        assert (chosen.folder, chosen.model_id) == (tmp_path / "Some-Model", "Some-Model")
        assert chosen.words == ("--model", given, "a=1")


def test_runs_without_an_export_and_two_models_are_refused(run: SimpleNamespace) -> None:
    with pytest.raises(UserError, match="exclude each other"):
        choice.choose([], "mine", Path("x"), None)
    (run.export / "config.json").unlink()
    with pytest.raises(UserError, match="Run 'mine' has no export"):
        choice.choose([], "mine", None, None)
