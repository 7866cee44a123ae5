"""Questions of `strata serve --ask` for a model fine-tuned on conversations: held-out ones beside its data, with their answers.

`strata data make` writes them to `held-out.jsonl`. Their subjects are not in the training data.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.platform.recipe import DataSection

FILE = "held-out.jsonl"
QUESTIONS = 8
MAX_TOKENS = 48


@dataclass(frozen=True)
class Question:
    messages: tuple[dict[str, Any], ...]
    answer: str

    @property
    def text(self) -> str:
        return str(self.messages[-1]["content"])

    def is_right(self, answer: str) -> bool:
        return answer.strip() == self.answer.strip()


def find(data: DataSection) -> Path | None:
    """File of held-out conversations beside the data of a run."""
    if len(data.all_sets) != 1 or data.all_sets[0].kind != "chat" or data.all_sets[0].path is None:
        return None
    file = data.all_sets[0].path.parent / FILE
    return file if file.is_file() else None


def read(file: Path) -> list[Question]:
    """The first questions without tools, one of each task if rows name their tasks."""
    found: dict[str, Question] = {}
    for number, line in enumerate(file.read_text().splitlines()):
        row = json.loads(line)
        *messages, last = row["messages"]
        if last.get("content") and "tools" not in row:
            found.setdefault(row.get("task", str(number)), Question(tuple(messages), last["content"]))
    return list(found.values())[:QUESTIONS]
