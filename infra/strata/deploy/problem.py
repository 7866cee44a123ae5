"""Validation errors: object, path of the field, and message."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Validation error of an object. `path` is the path of the field, such as spec.workerGroupSpecs[0].minReplicas."""

    object: str
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.object}: {self.path}: {self.message}"


@dataclass(frozen=True)
class Finding:
    """Validation error without the object's name, as yielded by rules about a single object."""

    path: str
    message: str

    def below(self, path: str) -> "Finding":
        return Finding(f"{path}.{self.path}" if self.path else path, self.message)


def dotted(steps: Iterable[str | int]) -> str:
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path
