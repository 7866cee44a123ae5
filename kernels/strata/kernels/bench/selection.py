"""Selection of benchmark cases."""

from collections.abc import Sequence

from strata.kernels import catalog
from strata.kernels.bench.case import Case


def select(ops: Sequence[str], quick: bool) -> list[Case]:
    """All cases of the operations. With `quick`, only cases with targets, or the first case of an operation without any."""
    found: list[Case] = []
    for op in catalog.chosen(ops):
        cases: list[Case] = op.benchmark().cases()
        with_bars = [case for case in cases if case.bars]
        found += (with_bars or cases[:1]) if quick else cases
    return found
