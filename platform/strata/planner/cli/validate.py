"""`strata plan validate`. Light imports only: the command line loads this module to print its help."""

import typer

from strata.planner.cli.options import Json, answer
from strata.planner.cli.output import jsonable
from strata.platform import benchmark_record


def plan_validate(json: Json = None) -> None:
    """Compare the planner with published measurements, row by row. Fails where an error exceeds its limit."""
    from strata.planner.cli import comparison

    found = comparison.checks()
    checks = [{**jsonable(one), "passed": one.passed} for one in found]
    answer(lambda _: comparison.tables(found), lambda: {**benchmark_record.header("plan-validate"), "checks": checks}, json)
    if not all(one.passed for one in found):
        raise typer.Exit(1)
