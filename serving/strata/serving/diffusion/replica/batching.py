"""Batches of pictures that have one shape: same size, steps and kind of guidance. Pure; the caller has the clock.

The oldest waiting picture decides the shape of the next batch, and others of that shape join it in the order of their arrival.
So a picture waits for older ones only, whatever arrives later and however popular another shape is. A batch that is not full
waits `wait_s` for others after its oldest picture arrived; under load the running batch is that wait.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


@dataclass(frozen=True)
class Shape:
    width: int
    height: int
    steps: int
    guided: bool  # the model runs with and without the prompt in each step
    alone: int | None = None  # a number of its own for a picture that shares no batch


class Shaped(Protocol):
    @property
    def shape(self) -> Shape: ...


T = TypeVar("T", bound=Shaped)


def limit(shape: Shape, max_batch: int, own_pixels: int) -> int:
    """Pictures of this shape in a batch: `max_batch` of the model's own size or smaller, else as many as have its area."""
    return max(1, min(max_batch, max_batch * own_pixels // (shape.width * shape.height)))


class Queue(Generic[T]):
    def __init__(self, limit_of: Callable[[Shape], int], wait_s: float) -> None:
        self._limit_of, self._wait_s = limit_of, wait_s
        self._waiting: dict[T, float] = {}  # time of arrival, in the order of service

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._waiting))

    def add(self, picture: T, now: float) -> None:
        self._waiting[picture] = now

    def put_back(self, pictures: list[T], now: float) -> None:
        """Puts the pictures of a batch that was lost before those that wait."""
        self._waiting = dict.fromkeys(pictures, now - self._wait_s) | self._waiting

    def remove(self, picture: T) -> bool:
        """Removes a picture. Returns False if it does not wait."""
        return self._waiting.pop(picture, None) is not None

    def delay(self, now: float) -> float | None:
        """Seconds until the next batch should begin, 0.0 for now; None if nothing waits."""
        if not self._waiting:
            return None
        batch = self._next()
        if len(batch) == self._limit_of(batch[0].shape):
            return 0.0
        return max(0.0, self._waiting[batch[0]] + self._wait_s - now)

    def take(self) -> list[T]:
        """Removes and returns the next batch."""
        batch = self._next()
        for picture in batch:
            del self._waiting[picture]
        return batch

    def _next(self) -> list[T]:
        shape = next(iter(self._waiting)).shape
        most = self._limit_of(shape)
        batch: list[T] = []
        for picture in self._waiting:
            if picture.shape == shape:
                batch.append(picture)
                if len(batch) == most:
                    break
        return batch
