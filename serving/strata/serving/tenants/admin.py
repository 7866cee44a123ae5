"""Access to the admin API, which changes what an endpoint serves.

With a file of keys, the key's tenant needs `admin: true`; the endpoint's own starter is always admitted. Without one, only
programs on this machine are, and web pages are not: a browser sends JSON to another origin only after a preflight request, which
no route answers, and a name that resolves to this machine is in the header Host.
"""

import ipaddress
from typing import Any
from urllib.parse import urlsplit

from strata.platform import ports
from strata.serving.api.requests import ApiError
from strata.serving.tenants.tenant import Caller


def require(scope: dict[str, Any], caller: Caller | None, keyed: bool) -> None:
    """Raises a 403 or 415. `keyed`: the endpoint has a file of keys, in which `caller` was found; None is the starter."""
    if keyed:
        if caller is not None and not caller.tenant.limits.admin:
            message = f"The tenant '{caller.tenant.name}' may not use the admin API. 'strata keys new TENANT --admin' allows it."
            raise ApiError(403, message)
    elif not _is_local(scope):
        message = "Without a file of keys (STRATA_API_KEYS_FILE), only this machine may use the admin API."
        raise ApiError(403, message)
    if scope["method"] in ("POST", "PUT", "PATCH"):
        media = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
        if media.partition(b";")[0].strip().lower() != b"application/json":
            raise ApiError(415, "Send the header Content-Type: application/json.")


def _is_local(scope: dict[str, Any]) -> bool:
    client = scope.get("client")
    host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    return client is not None and ports.is_loopback(client[0]) and _names_this_machine(host)


def _names_this_machine(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname
    try:
        return name == "localhost" or ipaddress.ip_address(name or "").is_loopback
    except ValueError:
        return False
