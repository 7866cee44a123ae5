"""Commands `strata dashboards build` and `strata dashboards push`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strata.platform.errors import UserError

if TYPE_CHECKING:
    from strata.dashboards.push import Step


def dashboards_build(
    prices: Annotated[
        Path | None, typer.Option(help="Dollars per GPU-hour; by default infra/prometheus/prices.yaml.", show_default=False)
    ] = None,
) -> None:
    """Regenerate dashboards (dashboards/generated, infra/components/grafana) and price rules (infra/prometheus/rules)."""
    from strata.dashboards import generate
    from strata.dashboards.prices import FILE, RULES

    if not (generate.ROOT / generate.JSON).is_dir():
        raise UserError(
            "The folder dashboards/generated does not exist in an installed package.", "Run this command in a checkout."
        )
    changed = generate.write(price_file=prices or generate.ROOT / FILE)
    for path in changed:
        print(f"wrote {path}" if (generate.ROOT / path).exists() else f"removed {path}")
    if RULES in changed:
        print("For a cluster, also run: python -m strata.monitoring.prometheus.manifests")
    if not changed:
        print("Every file is up to date.")


def dashboards_push(
    url: Annotated[str, typer.Option(help="URL of Grafana, such as http://127.0.0.1:3000 or https://host/grafana.")],
    token: Annotated[str, typer.Option(envvar="GRAFANA_TOKEN", help="Token of a service account with the role Admin.")] = "",
    folder: Annotated[str, typer.Option(help="Title of the folder for dashboards and alerts.")] = "Strata",
    prometheus_url: Annotated[
        str | None, typer.Option(help="URL of Prometheus as seen from Grafana; needed for the first push.")
    ] = None,
    alerts: Annotated[bool, typer.Option(help="Also push the alert rules; not needed if Prometheus has them.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite manual changes in Grafana.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the changes without applying them.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Push dashboards, data source and alert rules to a running Grafana. Shows the changes first."""
    from strata.dashboards import alert_rules
    from strata.dashboards.grafana import Grafana
    from strata.dashboards.push import Wanted, plan, refuse_losses
    from strata.monitoring.prometheus.server import rules_dir

    groups = tuple(alert_rules.read(rules_dir())) if alerts else ()
    grafana = Grafana(url, token)
    steps = plan(grafana, Wanted(folder, prometheus_url, groups))
    _show(steps)
    changes = [step for step in steps if step.do is not None]
    if not changes:
        print("Nothing to do: Grafana is up to date.")
        return
    if not overwrite:
        refuse_losses(steps)
    if dry_run:
        print(f"{len(changes)} of {len(steps)} would change. Dry run: nothing was written.")
        return
    if not yes:
        _confirm(len(changes))
    for step in changes:
        assert step.do is not None
        step.do()
        print(f"done: {step.what}")
    print(f"Start at {grafana.url}/d/strata-oncall")


def _show(steps: "list[Step]") -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    styles = {"new": "green", "changed": "yellow", "same": "dim", "left": "cyan"}
    for step in steps:
        console.print(f"{step.state:8}{step.what}" + (f": {step.note}" if step.note else ""), style=styles[step.state])
        for line in step.diff.splitlines():
            console.print(f"        {line}", style={"+": "green", "-": "red"}.get(line[:1], "dim"))


def _confirm(changes: int) -> None:
    if not _is_interactive():
        raise UserError(
            "The push needs confirmation, and standard input is not a terminal.", "Add --yes, or show the changes with --dry-run."
        )
    typer.confirm(f"Push {changes} changes?", abort=True)


def _is_interactive() -> bool:
    return sys.stdin.isatty()
