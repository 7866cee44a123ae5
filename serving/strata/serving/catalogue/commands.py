"""Commands `strata models`. Light imports only: `strata --help` loads this module."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.platform.errors import UserError, shown
from strata.platform.recipe_file import Overrides

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 60.0
LOOK_S = 1.0

Name = Annotated[str, typer.Argument(help="Name of the model in the API.")]
Run = Annotated[str | None, typer.Option(help="Serve this run's export.")]
Source = Annotated[str | None, typer.Option(help="Serve this instead of a run: a model folder, or an id on Hugging Face.")]
Url = Annotated[str, typer.Option(help="Address of the endpoint.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it serves, or when the change is accepted.")]
LOCAL = "http://127.0.0.1:8000"


def models_list(url: Url = LOCAL) -> None:
    """List the models of an endpoint, their states, and its aliases."""
    import time

    from rich.console import Console
    from rich.table import Table

    found = _send(url, "GET", "/-/models")
    table = Table("model", "state", "since", "weights", "", box=None, header_style="bold")
    for model in found["data"]:
        for number, revision in enumerate(reversed(model["revisions"])):
            since = time.strftime("%H:%M:%S", time.localtime(revision["since"])) if revision["since"] else ""
            name = model["name"] + (" (main)" if model["main"] else "") if not number else ""
            state = model["state"] if len(model["revisions"]) == 1 else revision["state"]
            table.add_row(name, state, since, revision["model"], shown(revision["reason"], 300))
    for alias, weights in found["aliases"].items():
        total = sum(weights.values())
        parts = ", ".join(f"{model} {weight / total:.4g}" for model, weight in weights.items())
        table.add_row(alias, "alias", "", "", parts)
    Console(highlight=False, soft_wrap=True).print(table, markup=False)


def models_add(
    name: Name,
    overrides: Overrides = None,
    run: Run = None,
    model: Source = None,
    adapter: Annotated[Path | None, typer.Option(help="Folder of a LoRA adapter on a model that serves.")] = None,
    on: Annotated[str | None, typer.Option(help="Model of the adapter. Default: the main one.")] = None,
    url: Url = LOCAL,
    wait: Wait = True,
) -> None:
    """Add a model to a running endpoint. Overrides, such as serve.decode.replicas=2, replace the main model's settings."""
    if on is not None and adapter is None:
        raise UserError("--on names the model of an adapter.", "Set --adapter to its folder.")
    if adapter is not None:
        if run or model or overrides:
            raise UserError("--adapter excludes --run, --model and overrides.", "Use one of them.")
        base = {"model": on} if on is not None else {}
        _send(url, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(adapter.resolve())} | base)
        typer.echo(f"{name} serves.")
        return
    _send(url, "POST", "/-/models", {"name": name} | _weights(run, model, overrides))
    _report(url, name, "ready", wait)


def models_update(
    name: Name, overrides: Overrides = None, run: Run = None, model: Source = None, url: Url = LOCAL, wait: Wait = True
) -> None:
    """Replace a model's weights. The present ones serve until the new ones are warmed up; no request fails."""
    _send(url, "POST", f"/-/models/{name}", _weights(run, model, overrides))
    _report(url, name, "ready", wait)


def models_remove(name: Name, url: Url = LOCAL, wait: Wait = True) -> None:
    """Remove a model, an alias or an adapter. Requests in progress are answered; new ones get a 404."""
    found = _send(url, "GET", "/-/models")
    if name in found["aliases"]:
        _send(url, "DELETE", f"/-/aliases/{name}")
        typer.echo(f"The alias {name} is removed.")
    elif any(model["name"] == name for model in found["data"]) or not _is_adapter(url, name):
        _send(url, "DELETE", f"/-/models/{name}")
        _report(url, name, "removed", wait)
    else:
        _send(url, "POST", "/v1/unload_lora_adapter", {"lora_name": name})
        typer.echo(f"The adapter {name} is removed.")


def models_alias(
    name: Annotated[str, typer.Argument(help="Name of the alias in the API.")],
    models: Annotated[list[str], typer.Argument(metavar="MODEL[=WEIGHT]...", help="Models, such as small=95 small-v2=5.")],
    url: Url = LOCAL,
) -> None:
    """Give a model another name, or spread a name's requests over models by weight. Requests of one `user` stay on one."""
    weights: dict[str, float] = {}
    for word in models:
        model, _, weight = word.partition("=")
        try:
            weights[model] = float(weight or 1)
        except ValueError:
            raise UserError(f"{shown(word)} has no number as weight.", "Write MODEL=WEIGHT, such as small=95.") from None
    _send(url, "POST", f"/-/aliases/{name}", {"models": weights})
    typer.echo(f"{name} is an alias of {', '.join(weights)}.")


def _weights(run: str | None, model: str | None, overrides: list[str] | None) -> dict[str, Any]:
    from strata.platform import recipe_file, runs
    from strata.platform.model_families import source

    if (run is None) == (model is None):
        raise UserError("Either --run or --model names the weights.", "Use one of them.")
    if run is not None:
        chosen = runs.find(run)
        if not (chosen.export / "config.json").is_file():
            raise UserError(f"Run '{chosen.name}' has no export to serve.", f"Write one: strata export {chosen.name}")
        folder = chosen.export
    else:
        folder = source.snapshot(str(model)) if source.is_remote(str(model)) else Path(str(model))
    return {"model": str(folder.resolve()), "serve": recipe_file.changes(overrides or [], "serve")}


def _is_adapter(url: str, name: str) -> bool:
    return any(card["id"] == name and "parent" in card for card in _send(url, "GET", "/v1/models")["data"])


def _report(url: str, name: str, wanted: str, wait: bool) -> None:
    """Prints the progress of a change until it is made. Raises UserError if it fails; Ctrl-C leaves it to the endpoint."""
    import time

    from rich.console import Console

    if not wait:
        typer.echo(f"Accepted. 'strata models list --url {url}' has the progress.")
        return
    console = Console(highlight=False)
    with console.status(f"{name} …") as status:
        while True:
            found = next((each for each in _send(url, "GET", "/-/models")["data"] if each["name"] == name), None)
            if found is None and wanted == "removed":
                break
            if found is None:
                raise UserError(f"The model '{name}' was removed.", "Add it again.")
            latest = found["revisions"][-1]
            if wanted == "ready" and latest["state"] == "ready":
                break
            if latest["state"] == "failed":
                raise UserError(f"'{name}' does not start: {latest['reason']}", "Correct it; what served before still does.")
            status.update(f"{name}: {found['state']} {latest['reason']}")
            time.sleep(LOOK_S)
    console.print(f"{name} {'serves' if wanted == 'ready' else 'is removed'}.", markup=False)


def _send(url: str, method: str, path: str, tree: dict[str, Any] | None = None) -> dict[str, Any]:
    import httpx

    from strata.serving import access

    try:
        response = httpx.request(method, f"{url}{path}", json=tree, headers=access.headers_for(url), timeout=TIMEOUT_S)
    except httpx.TransportError as error:
        raise UserError(f"Nothing answers at {url}: {error}", "Start the endpoint, or name its address (--url).") from None
    if response.is_success:
        answer: dict[str, Any] = response.json() if response.content.startswith(b"{") else {}
        return answer
    raise UserError(f"{_message(response)} (HTTP {response.status_code})", _fix(response.status_code))


def _message(response: "httpx.Response") -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:300]


def _fix(status: int) -> str:
    if status in (401, 403):
        return "Set STRATA_API_KEY to a key with admin rights: strata keys new TENANT --admin."
    return "See 'strata models list'." if status in (404, 409) else "Correct the request."
