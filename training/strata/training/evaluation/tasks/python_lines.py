"""Dataset of the task `python_lines`, which is next to this file."""

import json
from pathlib import Path
from typing import Any


def load(**_: Any) -> dict[str, Any]:
    """Splits of the dataset. The harness passes the task's metadata, which the dataset does not depend on."""
    from datasets import Dataset

    path = Path(__file__).with_suffix(".jsonl")
    return {"test": Dataset.from_list([json.loads(line) for line in path.read_text().splitlines()])}
