"""Tables of `strata bench monitoring`."""

from docgen.markdown import bold, milliseconds, table
from docgen.record import Run


def monitoring(run: Run) -> str:
    facts = [
        ("GPUs, nodes", f"{run['gpus']:,}, {run['nodes']:,}"),
        ("series in Prometheus", f"{run['series']:,}"),
        ("of these scraped", f"{run['scraped_series']:,}"),
        ("of these for remote write", f"{run['remote_write_series']:,}"),
        ("series per GPU", f"{run['series'] / run['gpus']:.0f}"),
        ("samples per second", f"{run['samples_per_second']:,.0f}"),
        ("bytes per sample on disk", f"{run['bytes_per_sample']:.2f}"),
        ("memory of Prometheus", f"{run['memory_bytes'] / 2**30:.1f} GiB"),
        ("one evaluation of all rules and alerts", f"{sum(run['rule_seconds'].values()):.1f} s"),
        ("slowest rule group", _slowest_group(run["rule_seconds"])),
        ("load of the machine before the queries", f"{run['load_before_queries']:.1f}"),
    ]
    boards = [
        (
            board["board"].removeprefix("strata-"),
            str(board["queries"]),
            milliseconds(board["median_s"]),
            bold(milliseconds(board["slowest_s"]), board["slowest_s"] > run["bar_s"]),
            board["slowest"],
            milliseconds(board["most_cpu_s"]),
            str(board["most_series"]),
            f"{board['most_samples']:,}",
        )
        for board in run["boards"]
    ]
    columns = (
        "board",
        "queries",
        "median",
        "slowest",
        "its panel",
        "most CPU time",
        "most series in an answer",
        "most samples read",
    )
    method = (
        f"Prometheus has {run['prometheus_cores']} cores. Every query ran three times with the default time range of its board; "
        f"the time is the slowest. Aim: under {run['bar_s']:.0f} s."
    )
    return "\n\n".join((table(("measure", "result"), facts, numeric=1), table(columns, boards, numeric=1), method))


def _slowest_group(seconds: dict[str, float]) -> str:
    name = max(seconds, key=lambda group: seconds[group])
    return f"{name}, {seconds[name]:.1f} s"
