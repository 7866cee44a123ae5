"""Prompts of `strata serve --ask`: beginnings of Python lines, each with the continuations that are right.

The default corpus is the source of Python's standard library, so a model trained on it for a minute knows how such lines go on.
"""

import re
from dataclasses import dataclass

MAX_TOKENS = 6
STOP = "\n"


@dataclass(frozen=True)
class Prompt:
    text: str
    right: str  # pattern at the beginning of the answer

    def is_right(self, answer: str) -> bool:
        return re.match(self.right, answer) is not None


PROMPTS = (
    Prompt("class Stack:\n    def __init__(", r"self\b"),
    Prompt("    def __repr__(", r"self\b"),
    Prompt("        if value is", r" (not )?None\b"),
    Prompt("        if not isinst", r"ance\("),
    Prompt("            raise Value", r"Error\b"),
    Prompt("        except Key", r"Error\b"),
    Prompt("        except OS", r"Error\b"),
    Prompt("        else", r":"),
)
