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
    Prompt("try:\n    import _thread\nexcept", r" ImportError\b"),
    Prompt("        if value is not", r" None\b"),
    Prompt("class Stack:\n    def __init__(", r"self\b"),
    Prompt("            raise Value", r"Error\b"),
    Prompt("    @class", r"method\b"),
    Prompt("        while True", r":"),
    Prompt("        if not isinst", r"ance\("),
    Prompt("    def __re", r"(pr__|duce__|duce_ex__|versed__)\(self\b"),
)
