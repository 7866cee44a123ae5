"""The commands of this room: `dashboards build` and `dashboards push`."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from strata.platform.errors import UserError

if TYPE_CHECKING:
    from strata.dashboards.push import Step


def dashboards_build() -> None:
    """Write the boards' JSON (dashboards/generated) and ConfigMaps (infra/components/grafana) anew from the code."""
    from strata.dashboards import generate

    if not (generate.ROOT / generate.JSON).is_dir():
        raise UserError("An installed package has no files to write boards to.", "Run it in a checkout of the repository.")
    changed = generate.write()
    for path in changed:
        print(f"wrote {path}" if (generate.ROOT / path).exists() else f"removed {path}")
    if not changed:
        print("Every file is up to date.")


def dashboards_push(
    url: Annotated[str, typer.Option(help="Where Grafana is: http://127.0.0.1:3000, https://host/grafana.")],
    token: Annotated[str, typer.Option(envvar="GRAFANA_TOKEN", help="Of a service account with the role Admin.")] = "",
    folder: Annotated[str, typer.Option(help="Title of the folder for boards and alerts.")] = "Strata",
    prometheus_url: Annotated[str | None, typer.Option(help="Where Grafana reaches Prometheus; once is enough.")] = None,
    alerts: Annotated[bool, typer.Option(help="Push the alert rules too; leave out where Prometheus has them.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Undo what was changed in Grafana by hand.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and stop.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Bring boards, data source and alert rules into a running Grafana, after showing what would change."""
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
        print("Nothing to do: Grafana has all of this already.")
        return
    if not overwrite:
        refuse_losses(steps)
    if dry_run:
        print(f"{len(changes)} of {len(steps)} would change; nothing was.")
        return
    if not yes:
        _ask(len(changes))
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


def _ask(changes: int) -> None:
    if _nobody_there():
        raise UserError("Nobody is here to ask whether to push.", "Say --yes, or look first with --dry-run.")
    typer.confirm(f"Push {changes} changes?", abort=True)


def _nobody_there() -> bool:
    return not sys.stdin.isatty()
