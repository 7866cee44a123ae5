"""API keys of clients and commands on this machine, and the rule for serving without keys."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from strata.platform import ports
from strata.platform.errors import UserError
from strata.platform.recipe import ServeSection
from strata.serving.gateway import keys
from strata.serving.tenants.file import WrongContent

KEY = "STRATA_API_KEY"  # a client's key; the server's keys are in the file that keys.FILE names


def keys_file() -> Path | None:
    """The file of keys that the endpoint will read, None if it needs no key. Raises UserError for a file without keys."""
    given = os.environ.get(keys.FILE)
    if given is None:
        return None
    fix = f"Create a key with 'strata keys new TENANT --file {given}', or unset {keys.FILE} to serve without keys."
    if not given:
        raise UserError(f"{keys.FILE} is set to nothing.", f"Set it to a file of API keys, or unset {keys.FILE}.")
    file = Path(given).resolve()
    try:
        found = keys.parse(file.read_bytes(), file)
    except OSError as error:
        raise UserError(f"{keys.FILE}={given} cannot be read: {error.strerror}.", fix) from None
    except WrongContent as error:
        raise UserError(f"{keys.FILE}={given} is wrong in {error}.", "Correct that line.") from None
    if not found.keys:
        raise UserError(f"{keys.FILE}={given} has no key in it.", fix)
    return file


def require_safe(section: ServeSection) -> None:
    """Raises UserError if other machines could use the model without a key and the recipe does not allow it."""
    if keys_file() is None and not section.allow_unauthenticated and not ports.is_loopback(section.host):
        raise UserError(
            f"serve.host={section.host} would let other machines use the model without an API key.",
            f"Set {keys.FILE} to a file of keys ('strata keys new'); or serve on this machine alone, serve.host=127.0.0.1; "
            "or accept it: serve.allow_unauthenticated=true.",
        )


def key_for(url: str) -> str | None:
    """The client's key: STRATA_API_KEY; else, for an endpoint on this machine, the first key of the endpoint's file. None if
    there is none: a file of tenants has only hashes."""
    if given := os.environ.get(KEY):
        return given
    if os.environ.get(keys.FILE) and ports.is_loopback(urlsplit(url).hostname or ""):
        file = keys_file()
        found = keys.read(file) if file else []
        return found[0].decode(errors="replace") if found else None
    return None


def starter_headers(secret: bytes) -> dict[str, str]:
    """Headers with which the starter of an endpoint reaches it, whatever keys its file has."""
    return {"authorization": f"Bearer {keys.own_key(secret)}"} if os.environ.get(keys.FILE) else {}


def headers_for(url: str) -> dict[str, str]:
    key = key_for(url)
    return {"authorization": f"Bearer {key}"} if key else {}
