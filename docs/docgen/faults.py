"""Tables of `strata chaos` and of the hostile-request test."""

import statistics
from collections.abc import Callable
from itertools import groupby

from docgen.markdown import bold, number, table
from docgen.record import Run


def chaos(run: Run) -> str:
    numbers, disturbed = run["numbers"], run["passes"]["disturbed"]
    same = numbers["sent"] - numbers["lost"] - numbers["different"]
    rows = [
        ("processes killed", str(numbers["kills"])),
        ("requests sent", f"{numbers['sent']:,}"),
        ("answers equal to the undisturbed ones", bold(f"{same:,}", same < numbers["sent"])),
        ("answers lost", bold(str(numbers["lost"]), numbers["lost"] > 0)),
        ("answers different", bold(str(numbers["different"]), numbers["different"] > 0)),
        ("processes that did not come back", bold(str(numbers["not back"]), numbers["not back"] > 0)),
        ("replicas that ended without a kill", _unless_zero(numbers.get("ended though not killed"))),
        ("all replicas up at the end", "yes" if numbers["whole in the end"] else "**no**"),
        ("longest pause in a stream", number(disturbed["longest_gap_s"], ".1f", " s")),
    ]
    if adapters := run.get("adapters"):
        rows += [
            ("adapters loaded during the load", str(adapters["loads"])),
            ("an adapter's load, median, without kills", number(adapters["load_p50_s"], ".2f", " s")),
            ("an adapter's load, most, without kills", number(adapters["load_max_s"], ".2f", " s")),
            ("requests to adapters that failed", bold(str(len(adapters["failures"])), bool(adapters["failures"]))),
        ]
    found = table(("measure", "result"), rows, numeric=1)
    kills = sorted((kill for kill in run["kills"]), key=lambda kill: str(kill["kind"]))
    back = [
        (kind, str(len(times)), _seconds(times, statistics.median), _seconds(times, max))
        for kind, group in groupby(kills, key=lambda kill: str(kill["kind"]))
        for times in [[kill["back_after_s"] for kill in group]]
    ]
    return f"{found}\n\n{table(('killed', 'kills', 'back after, median', 'most'), back, numeric=1)}" if back else found


def _unless_zero(count: int | None) -> str:
    return "-" if count is None else bold(str(count), count > 0)


def _seconds(times: list[float | None], of: Callable[[list[float]], float]) -> str:
    known = [time for time in times if time is not None]
    return f"{of(known):.1f} s" if known else "**never**"


def chaos_edges(run: Run) -> str:
    rows = [(" + ".join(one["killed"]), bold(one["outcome"], not one["holds"])) for one in run["endings"]]
    return table((f"killed while the endpoint {run['during']}s", "outcome"), rows)


def hostile(run: Run) -> str:
    statuses = ", ".join(f"{count:,} x {status}" for status, count in run["by_status"].items()) or "-"
    server_errors = sum(count for status, count in run["by_status"].items() if status.startswith("5"))
    rows = [
        ("requests", f"{run['requests']:,}"),
        ("answers by status", statuses),
        ("5xx", bold(str(server_errors), server_errors > 0)),
        ("answers outside the API's error format", bold(str(run["wrong_answers"]), run["wrong_answers"] > 0)),
        ("plain streams broken", bold(str(run["broken_streams"]), run["broken_streams"] > 0)),
        ("longest pause in a plain stream", number(run["longest_pause_s"], ".2f", " s")),
        ("largest growth of a process", number(run["largest_growth_mib"], ".0f", " MiB")),
    ]
    return table(("measure", "result"), rows, numeric=1)
