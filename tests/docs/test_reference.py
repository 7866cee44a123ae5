"""Generated references: fresh, complete, and independent of the terminal."""

import pytest
from docgen import reference
from pydantic import BaseModel

from strata.platform.recipe import Recipe


@pytest.mark.parametrize("path", reference.pages(), ids=lambda path: path.name)
def test_pages_are_fresh(path: object) -> None:
    page = next(page for page in reference.pages() if page == path)
    assert page.read_text() == reference.pages()[page], "run 'make docs'"


def test_every_recipe_key_is_described() -> None:
    models: list[type[BaseModel]] = [Recipe, *(model for _, model in reference._sections())]
    for model in models:
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
        assert model.__doc__


def test_the_recipe_reference_has_types_defaults_and_subsections() -> None:
    text = reference.recipe()
    assert "### `serve.prefill` and `serve.decode`" in text and "### `model.moe`" in text
    assert "| `zero` | integer, ≥ 0, ≤ 3 | `1` |" in text
    assert "| `precision` | `fp32`, `bf16` | `fp32` |" in text
    assert "| `steps` | integer, ≥ 0 | required |" in text
    assert "| `step_tokens` | integer, > 0 | unset |" in text


def test_the_text_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = reference.commands()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")
    assert reference.commands() == wide


def test_every_command_is_there() -> None:
    text = reference.commands()
    for command in ("strata train", "strata bench serve", "strata plan", "strata plan search", "strata deploy apply"):
        assert f"\n## `{command}`\n" in text
    assert "| `--ray`, `--no-ray` | flag | on |" in text
    assert "| `--recompute` | `none`, `selective`, `full` | unset |" in text
