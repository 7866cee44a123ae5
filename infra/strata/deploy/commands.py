"""`strata deploy render | check | diff | apply`. Light imports only: the command line loads this module to print its help."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax

from strata.platform import recipe_file
from strata.platform.errors import UserError
from strata.platform.recipe_file import Overrides

if TYPE_CHECKING:
    from strata.deploy.changes import Changes
    from strata.deploy.documents import Document
    from strata.deploy.problem import Problem

CRDS = "STRATA_KUBERAY_CRDS"

Target = Annotated[str, typer.Option(help="gke, ack or kind.")]
RecipeName = Annotated[str, typer.Option("--recipe", help="Name or path of a recipe.")]
RunName = Annotated[str | None, typer.Option("--run", help="Name of the run to train or serve. Default: the recipe's name.")]
Only = Annotated[str | None, typer.Option(help="Render only train, serve or lab, with the common objects.")]
With = Annotated[str, typer.Option("--with", help="Components to add, such as volcano,spot.")]
Image = Annotated[str | None, typer.Option(help="Container image. Overrides deploy.image.")]
Crds = Annotated[
    Path | None,
    typer.Option(help=f"Folder with CRDs ('make crds'). Default: the environment variable {CRDS}, or .strata/crds."),
]


def render(
    target: Target,
    overrides: Overrides = None,
    recipe: RecipeName = recipe_file.DEFAULT,
    run: RunName = None,
    only: Only = None,
    with_: With = "",
    image: Image = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .yaml file, or a folder for one file per object.")
    ] = None,
) -> None:
    """Print or write a recipe's manifests for a target."""
    from strata.deploy import documents
    from strata.deploy.render import write_to

    rendered = _rendered(target, recipe, overrides, run, only, with_, image)
    if output is None:
        print(documents.write(rendered), end="")
    else:
        files = write_to(output, rendered)
        print(f"{len(rendered)} objects in {output}" + (f", {len(files)} files" if len(files) > 1 else ""))


def check(
    target: Annotated[str | None, typer.Option(help="gke, ack or kind.")] = None,
    overrides: Overrides = None,
    recipe: RecipeName = recipe_file.DEFAULT,
    run: RunName = None,
    only: Only = None,
    with_: With = "",
    image: Image = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="File or folder of rendered manifests, instead of a target and a recipe."),
    ] = None,
    crds: Crds = None,
) -> None:
    """Validate manifests without a cluster: schemas, KubeRay's own rules, texts inside objects, and references between them."""
    if (target is None) == (file is None):
        raise UserError("check needs either --target or --file.", "Set --target and --recipe, or --file, but not both.")
    documents = _read(file) if file else _rendered(str(target), recipe, overrides, run, only, with_, image)
    found = _checked(documents, crds, Console(soft_wrap=True, highlight=False))
    if found:
        raise typer.Exit(1)


def diff(
    target: Target,
    overrides: Overrides = None,
    recipe: RecipeName = recipe_file.DEFAULT,
    run: RunName = None,
    only: Only = None,
    with_: With = "",
    image: Image = None,
    against: Annotated[Path | None, typer.Option(help="Previous rendering to compare with, instead of the cluster.")] = None,
) -> None:
    """Show what would change on kubectl's current cluster, or relative to a previous rendering."""
    from strata.deploy import changes

    rendered = _rendered(target, recipe, overrides, run, only, with_, image)
    _print(changes.against_folder(rendered, against) if against else changes.against_cluster(rendered))


def apply(
    target: Target,
    overrides: Overrides = None,
    recipe: RecipeName = recipe_file.DEFAULT,
    run: RunName = None,
    only: Only = None,
    with_: With = "",
    image: Image = None,
    yes: Annotated[bool, typer.Option("--yes", help="Apply without confirmation.")] = False,
    crds: Crds = None,
) -> None:
    """Validate the manifests, show what would change on the cluster, confirm, and apply."""
    from strata.deploy import changes, documents, kubectl

    rendered = _rendered(target, recipe, overrides, run, only, with_, image, to_apply=True)
    if _checked(rendered, crds, Console(soft_wrap=True, highlight=False)):
        raise typer.Exit(1)
    found = changes.against_cluster(rendered)
    _print(found)
    if not found.text:
        return
    if not yes and not typer.confirm(f"Apply this to '{kubectl.context()}'?"):
        raise typer.Exit(1)
    words = ["apply", "--server-side", f"--field-manager={changes.FIELD_MANAGER}", "--filename=-"]
    # The autoscaler owns the `replicas` fields that it has changed, so server-side apply reports a conflict for them.
    fix = (
        "Fix the reported error. To override a conflict: "
        "'strata deploy render | kubectl apply --server-side --force-conflicts -f -'."
    )
    print(kubectl.run_checked(words, documents.write(rendered), fix), end="")


def _rendered(
    target: str,
    recipe: str,
    overrides: list[str] | None,
    run: str | None,
    only: str | None,
    with_: str,
    image: str | None,
    to_apply: bool = False,
) -> "list[Document]":
    from strata.deploy.render import Order, unset
    from strata.deploy.render import render as rendered

    components = tuple(dict.fromkeys(name.strip() for name in with_.split(",") if name.strip()))
    order = Order(target, recipe_file.load(recipe, overrides or ()), run or Path(recipe).stem, components, only, image)
    documents = rendered(order)
    if missing := unset(order):
        if to_apply:
            raise UserError(f"The manifests cannot be applied: {'; '.join(missing)}.", "Set it in the recipe or as an option.")
        print(f"note: {'; '.join(missing)}. The manifests contain a placeholder.", file=sys.stderr)
    return documents


def _read(place: Path) -> "list[Document]":
    import yaml

    from strata.deploy.documents import read

    files = sorted(place.glob("*.yaml")) if place.is_dir() else [place]
    try:
        documents = [document for file in files for document in read(file.read_text())]
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror}.", "Set --file to a YAML file or a folder of them.") from None
    except yaml.YAMLError as error:
        raise UserError(f"{place} is not valid YAML: {' '.join(str(error).split())}", "Fix the file.") from None
    if not documents or not all(isinstance(document, dict) for document in documents):
        raise UserError(f"{place} contains no Kubernetes objects.", "Write them with 'strata deploy render -o'.")
    return documents


def _checked(documents: "list[Document]", crds: Path | None, console: Console) -> "list[Problem]":
    from strata.deploy.documents import title
    from strata.deploy.validate import evaluates_rules, has_schema, notes, problems

    folder = crds or _crds()
    found = problems(documents, folder)
    wrong = {problem.object for problem in found}
    unchecked = 0
    for document in documents:
        if title(document) in wrong:
            continue
        if has_schema(document, folder):
            console.print(f"[green]ok[/]     {title(document)}")
        else:
            unchecked += 1
            kind = f"{document['apiVersion']} {document['kind']}"
            console.print(f"[yellow]not checked[/]  {title(document)}  there is no schema of {escape(kind)}")
    for problem in found:
        console.print(f"[bold red]wrong[/]  {problem.object}  {escape(f'{problem.path}: {problem.message}')}")
    for note in [] if found else notes(documents, folder):
        console.print(f"note   {note.object}  {escape(f'{note.path}: {note.message}'.removeprefix(': '))}")
    if unchecked:
        console.print(
            f"{unchecked} objects were checked by KubeRay's rules and references, not by schemas. 'make crds' fetches schemas; "
            f"set --crds or {CRDS} for another folder."
        )
    if folder is not None and not evaluates_rules():
        console.print("CEL rules of CRDs were not evaluated: the package cel-expr-python is not installed.")
    counts = [f"{len(documents)} objects", *([f"{unchecked} not checked"] if unchecked else [])]
    console.print(", ".join([*counts, f"{len(found)} wrong" if found else "nothing wrong"]))
    return found


def _crds() -> Path | None:
    """Folder of CRDs: the environment's, or the one that 'make crds' writes, if it exists."""
    from strata.platform.files import cache_dir

    if os.environ.get(CRDS):
        return Path(os.environ[CRDS])
    fetched = cache_dir() / "crds"
    return fetched if fetched.is_dir() else None


def _print(changes: "Changes") -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"Against {changes.against}:", markup=False)
    if not changes.text:
        console.print("nothing would change")
    elif console.is_terminal:
        console.print(Syntax(changes.text, "diff", background_color="default", word_wrap=True))
    else:
        print(changes.text, end="")
