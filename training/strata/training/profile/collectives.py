"""Ranges around torch's collectives while a profile runs. torch records when a collective is submitted, but not how long its
caller waits for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from strata.training.profile.ranges import Ranges

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "barrier",
    "send",
    "recv",
    "all_gather_object",
    "broadcast_object_list",
)


@contextmanager
def named(ranges: Ranges) -> Iterator[None]:
    """Wraps the functions of torch.distributed, through which DeepSpeed communicates too."""
    before = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, run in before.items():
        setattr(dist, name, _ranged(run, name, ranges))
    try:
        yield
    finally:
        for name, run in before.items():
            setattr(dist, name, run)


class Pending:
    """An asynchronous collective whose wait is a range. Everything else is torch's work."""

    def __init__(self, work: Any, name: str, ranges: Ranges) -> None:
        self._work, self._name, self._ranges = work, name, ranges

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._ranges.range(f"wait {self._name}"):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _ranged(run: Callable[..., Any], kind: str, ranges: Ranges) -> Callable[..., Any]:
    def ranged(*args: Any, **kwargs: Any) -> Any:
        where = _peer(kind, args, kwargs) or _group(kwargs.get("group"))
        name = f"{kind} {where} {_bytes(args, kwargs)} B"
        asynchronous = bool(kwargs.get("async_op"))
        with ranges.range(f"{'submit' if asynchronous else 'collective'} {name}"):
            result = run(*args, **kwargs)
        return Pending(result, name, ranges) if asynchronous and result is not None else result

    return ranged


def _peer(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Rank at the other end of a transfer between two."""
    if kind not in ("send", "recv"):
        return None
    key = "dst" if kind == "send" else "src"
    return f"{'to' if kind == 'send' else 'from'} {args[1] if len(args) > 1 else kwargs.get(key)}"


def _group(group: Any) -> str:
    """Ranks of the group, such as `0-3` or `0+2`."""
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return "+".join(map(str, ranks))


def _bytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Size of the largest argument: the whole of what the group exchanges for most collectives."""
    values = [*args, *kwargs.values()]
    sizes = [each.nbytes for each in values if isinstance(each, Tensor)]
    sizes += [sum(part.nbytes for part in each if isinstance(part, Tensor)) for each in values if isinstance(each, list)]
    return max(sizes, default=0)
