"""The `strata` command, built from the entry-point group `strata.commands`.

A name with a dot is a subcommand: `bench.startup` is `strata bench startup`. A group may be a command as well: `plan` beside
`plan.search`. The modules named there import nothing heavy, and a command line imports only those that it needs, so `strata`
starts fast.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from strata.platform import file_errors
from strata.platform.errors import UserError

GROUP = "strata.commands"


def build(words: Sequence[str] | None = None) -> typer.Typer:
    """All commands, or those that a command line of these words can reach or show."""
    app = _group(None)
    app.callback(help="Plan, train, serve and watch a language model, from one recipe.")(_options)
    entries = sorted(entry_points(group=GROUP), key=lambda e: e.name)
    groups = {_top(entry): _group(None) for entry in entries if "." in entry.name}
    named = next((word for word in words or () if not word.startswith("-")), None)
    if any(_top(entry) == named for entry in entries):
        entries = [entry for entry in entries if _top(entry) == named]
        groups = {name: group for name, group in groups.items() if name == named}
    elif words is not None:  # the help, or a word that is no command
        entries = [entry for entry in entries if "." not in entry.name]
    for entry in entries:
        *parents, name = entry.name.split(".")
        if parents:
            [parent] = parents
            groups[parent].command(name)(entry.load())
        elif name in groups:
            command = entry.load()
            groups[name].callback(cls=CommandGroup, invoke_without_command=True, help=command.__doc__)(command)
        else:
            app.command(name)(entry.load())
    for name, group in groups.items():
        if group.registered_callback:
            app.add_typer(group, name=name)
        else:
            app.add_typer(group, name=name, help=f"See 'strata {name} --help'.")
    return app


def _top(entry: EntryPoint) -> str:
    return entry.name.split(".")[0]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"strata {version('strata')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `strata` itself. The callback prints the version before the command is parsed."""


class CommandGroup(TyperGroup):
    """A group that is also a command. Words that name no subcommand are its own arguments, in `ctx.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        alone = not any(word in self.commands for word in args)
        ctx.allow_interspersed_args = alone
        super().parse_args(ctx, args)
        if alone:
            ctx.args, ctx._protected_args = [*ctx._protected_args, *ctx.args], []
        return list(ctx.args)


def _group(text: str | None) -> typer.Typer:
    return typer.Typer(
        help=text, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
    )


def main() -> None:
    try:
        build(sys.argv[1:])()
    except UserError as error:
        _fail(error)
    except OSError as error:
        explained = file_errors.explain(error)
        if explained is None:
            raise
        _fail(explained)


def _fail(error: UserError) -> NoReturn:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    # As Text: the messages quote user input, in which brackets are not markup.
    console.print(Text.assemble(("error:", "bold red"), " ", error.cause))
    console.print(Text.assemble("  ", ("fix:", "bold"), " ", error.fix))
    sys.exit(1)


if __name__ == "__main__":
    main()
