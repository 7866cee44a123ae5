"""Number of workers, or a range of numbers such as 4..8."""

from collections.abc import Iterator
from typing import Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class WorkerCount(int):
    """Number of workers. For a range it is the largest number, for which a cluster is sized and a layout planned; `least` is the
    smallest with which a run continues."""

    elastic: ClassVar[bool] = False
    least: int

    def __new__(cls, most: int, least: int | None = None) -> Self:
        count = super().__new__(cls, most)
        count.least = most if least is None else least
        return count

    def __reduce__(self) -> tuple[type[Self], tuple[int, int]]:
        return type(self), (int(self), self.least)

    def sizes(self) -> Iterator[int]:
        """Every number of the range, the largest first."""
        return iter(range(int(self), self.least - 1, -1))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            _validated,
            core_schema.int_schema(gt=0),
            serialization=core_schema.plain_serializer_function_ser_schema(_plain, when_used="json"),
        )


class WorkerRange(WorkerCount):
    """Range of numbers, also one such as 8..8: its run waits for lost capacity."""

    elastic = True

    def __str__(self) -> str:
        return f"{self.least}..{int(self)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerRange) and (int(self), self.least) == (int(other), other.least)

    def __hash__(self) -> int:
        return hash((int(self), self.least))


def _validated(value: Any, handler: core_schema.ValidatorFunctionWrapHandler) -> WorkerCount:
    if isinstance(value, WorkerCount):
        return value
    if not isinstance(value, str) or ".." not in value:
        return WorkerCount(handler(value))
    least, _, most = value.partition("..")
    if not (least.strip().isdecimal() and most.strip().isdecimal()):
        raise ValueError(f"{value} is not a range of workers such as 4..8")
    if int(least) < 1:
        raise ValueError(f"the range {value} must begin at 1 worker or more")
    if int(least) > int(most):
        raise ValueError(f"the range {value} ends before it begins; write {int(most)}..{int(least)}")
    return WorkerRange(int(most), int(least))


def _plain(count: WorkerCount) -> int | str:
    return str(count) if isinstance(count, WorkerRange) else int(count)
