"""The `strata` command. It knows no room: commands come through the entry-point group `strata.commands`.

A name with a dot nests (`bench.startup` is `strata bench startup`). Modules named there import nothing heavy, so that
`strata --help` answers at once.
"""

import sys
from importlib.metadata import entry_points

import typer
from rich.console import Console

from strata.platform.errors import UserError

GROUP = "strata.commands"


def build() -> typer.Typer:
    app = _group("Plan, train, serve and watch a language model, from one recipe.")
    groups: dict[str, typer.Typer] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        *parents, name = entry.name.split(".")
        target = app
        if parents:
            [parent] = parents
            if parent not in groups:
                groups[parent] = _group(None)
                app.add_typer(groups[parent], name=parent, help=f"See 'strata {parent} --help'.")
            target = groups[parent]
        target.command(name)(entry.load())
    return app


def _group(text: str | None) -> typer.Typer:
    return typer.Typer(
        help=text, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
    )


def main() -> None:
    try:
        build()()
    except UserError as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print("[bold red]error:[/]", error.cause, markup=True)
        console.print("  [bold]fix:[/]", error.fix)
        sys.exit(1)


if __name__ == "__main__":
    main()
