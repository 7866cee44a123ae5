"""Commands `strata keys new`, `list`, `rotate` and `revoke`. Light imports only: `strata --help` loads this module."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from strata.platform.errors import UserError, shown

if TYPE_CHECKING:
    from strata.serving.tenants.file import TenantEntry

PREFIX = "sk-strata-"
KEY_BYTES = 32

File = Annotated[
    Path, typer.Option(help="File of tenants. Default: the file that STRATA_API_KEYS_FILE names.", envvar="STRATA_API_KEYS_FILE")
]
Tenant = Annotated[str, typer.Argument(help="Name of the tenant.")]
Tenants = dict[str, "TenantEntry"]
Result = TypeVar("Result")


def keys_new(
    tenant: Tenant,
    file: File,
    admin: Annotated[bool, typer.Option("--admin", help="Let the tenant use the endpoint's admin API.")] = False,
) -> None:
    """Create a key for a tenant, and the tenant if it is new. The key is printed once; the file stores its hash."""
    with _changed(file) as tenants:
        key = _add(tenants, tenant)
        if admin:
            tenants[tenant] = tenants[tenant].model_copy(update={"admin": True})
    typer.echo(key)


def keys_rotate(
    tenant: Tenant,
    file: File,
    overlap: Annotated[float, typer.Option(help="Hours for which the present keys stay valid.", min=0, max=8760)] = 24.0,
) -> None:
    """Create a new key for a tenant. Its present keys expire after --overlap."""
    from datetime import UTC, timedelta

    until = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=overlap)
    with _changed(file) as tenants:
        entry = _require(tenants, tenant, file)
        old = tuple(
            key if key.expires is not None and key.expires <= until else key.model_copy(update={"expires": until})
            for key in entry.keys
        )
        tenants[tenant] = entry.model_copy(update={"keys": old})
        key = _add(tenants, tenant)
    typer.echo(key)
    typer.echo(f"Keys of '{tenant}' from before expire at {until.isoformat()}.", err=True)


def keys_revoke(
    tenant: Tenant,
    key: Annotated[str, typer.Argument(help="Id of the key as 'strata keys list' shows it, or its first digits; 'all' for all.")],
    file: File,
) -> None:
    """Remove a key of a tenant. It is refused from the next request on."""
    with _changed(file) as tenants:
        entry = _require(tenants, tenant, file)
        found = [each for each in entry.keys if key == "all" or (len(key) >= 4 and each.sha256.startswith(key.lower()))]
        if not found or (len(found) > 1 and key != "all"):
            ids = ", ".join(_id(each.sha256) for each in entry.keys) or "none"
            cause = f"{shown(key)} names {len(found) or 'no'} keys of '{tenant}'."
            raise UserError(cause, f"Write the id of one, with 4 digits at least. Its keys: {ids}.")
        tenants[tenant] = entry.model_copy(update={"keys": tuple(each for each in entry.keys if each not in found)})
    typer.echo(f"Removed {', '.join(_id(each.sha256) for each in found)}.")


def keys_list(file: File) -> None:
    """List tenants, the ids of their keys and their limits."""
    from datetime import UTC

    from rich.console import Console
    from rich.table import Table

    tenants = _read(file)
    table = Table("tenant", "keys", "limits", box=None, header_style="bold")
    now = datetime.now(UTC)
    for name, entry in tenants.items():
        keys = []
        for key in entry.keys:
            state = "" if key.expires is None else " expired" if key.expires <= now else f" until {key.expires.isoformat()}"
            keys.append(_id(key.sha256) + state)
        limits = entry.model_dump(exclude_unset=True, exclude={"keys"})
        table.add_row(name, "\n".join(keys) or "none", ", ".join(f"{limit} {value}" for limit, value in limits.items()))
    Console(highlight=False).print(table)


def _id(sha256: str) -> str:
    from strata.serving.tenants.tenant import SHORT

    return sha256[:SHORT]


def _add(tenants: Tenants, name: str) -> str:
    """Adds a new key to a tenant. Returns the key."""
    import re
    import secrets

    from strata.serving.tenants.file import TenantEntry
    from strata.serving.tenants.tenant import NAME, KeyEntry, digest

    if not re.fullmatch(NAME.strip("^$"), name):
        raise UserError(f"{shown(name)} is no name of a tenant.", "Use lower-case letters, digits, '.', '_' and '-', 63 at most.")
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    entry = tenants.get(name) or TenantEntry()
    tenants[name] = entry.model_copy(update={"keys": (*entry.keys, KeyEntry(sha256=digest(key.encode()).hex()))})
    return key


def _require(tenants: Mapping[str, "TenantEntry"], name: str, file: Path) -> "TenantEntry":
    if name in tenants:
        return tenants[name]
    known = ", ".join(tenants) or "none"
    raise UserError(f"{file} has no tenant {shown(name)}.", f"Its tenants: {known}. 'strata keys new' creates one.")


def _read(file: Path) -> Tenants:
    from strata.serving.tenants import file as tenants_file

    return _explained(file, lambda: tenants_file.read(file))


@contextmanager
def _changed(file: Path) -> Iterator[Tenants]:
    """Yields the tenants of a file, and writes them back. One command at a time changes a file."""
    import fcntl

    from strata.serving.tenants import file as tenants_file

    file.absolute().parent.mkdir(parents=True, exist_ok=True)
    with _explained(file, lambda: (file.absolute().parent / f".{file.name}.lock").open("w")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tenants = _read(file)
        yield tenants
        _explained(file, lambda: tenants_file.write(file, tenants))


def _explained(file: Path, work: Callable[[], Result]) -> Result:
    from strata.serving.tenants.file import WrongContent

    try:
        return work()
    except WrongContent as error:
        raise UserError(f"{file} is wrong in {error}.", "Correct that line, or use another --file.") from None
    except OSError as error:
        raise UserError(f"{file} cannot be used: {error.strerror}.", "Use another --file.") from None
