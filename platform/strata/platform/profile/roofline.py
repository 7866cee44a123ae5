"""Products and attention on the roofline: their rate over FLOPs per byte, by shape."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from strata.platform.profile.work import ATTENTION_PASSES, Work

BYTES = {"float": 4, "double": 8}  # of an element; other types that products have take two


@dataclass(frozen=True)
class Point:
    name: str
    intensity: float  # FLOPs per byte, if each operand moves once
    rate: float  # FLOP/s
    seconds: float  # per step


def points(found: Sequence[Work], steps: int) -> list[Point]:
    """By class, phase and shape, most time first."""
    groups: dict[tuple[str, str, str, str], list[Work]] = defaultdict(list)
    for work in found:
        if work.shape and work.flops:
            groups[(work.kind, work.phase, work.shape, work.dtype)].append(work)
    result = []
    for (kind, phase, shape, dtype), members in groups.items():
        seconds, flops = sum(work.seconds for work in members), sum(work.flops for work in members)
        moved = len(members) * moved_bytes(kind, shape, dtype)
        if seconds > 0 and moved > 0:
            result.append(Point(f"{kind}, {phase}, {shape}", flops / moved, flops / seconds, seconds / steps))
    return sorted(result, key=lambda point: -point.seconds)


def moved_bytes(kind: str, shape: str, dtype: str) -> float:
    """Bytes of the operands and the result of a product, or of the queries, keys, values and outputs of attention."""
    sizes, size = [int(word) for word in shape.split(" x ")], BYTES.get(dtype, 2)
    if kind in ATTENTION_PASSES:
        batch, heads, queries, keys, width = sizes
        return batch * heads * 2.0 * (queries + keys) * width * size * (2 if kind == "attention backward" else 1)
    *batches, m, n, k = sizes
    count = 1.0
    for each in batches:
        count *= each
    return count * (m * k + k * n + m * n) * size
