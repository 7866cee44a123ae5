"""Prompts of `strata serve --ask` and their verdicts."""

import pytest

from strata.serving.code_completion import PROMPTS


@pytest.mark.parametrize(
    ("begins", "right", "wrong"),
    [
        ("class Stack", "self, name", "selfish"),
        ("    def __repr__", "self):", "cls):"),
        ("        if value is", " not None:", " Nonesense"),
        ("        if value is", " None:", " nothing"),
        ("        if not isinst", "ance(obj, ", "ance of"),
        ("            raise Value", "Error(", "Errors"),
        ("        except Key", "Error:", " error"),
        ("        except OS", "Error as", "Erro"),
        ("        else", ":", " if"),
    ],
)
def test_answers_are_judged_by_their_beginning(begins: str, right: str, wrong: str) -> None:
    [prompt] = [prompt for prompt in PROMPTS if prompt.text.startswith(begins)]
    assert prompt.is_right(right) and not prompt.is_right(wrong) and not prompt.is_right(f"x{right}")
