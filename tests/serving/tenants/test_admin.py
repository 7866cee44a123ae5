"""Access to the admin API: by the key's tenant, or from this machine where there are no keys."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from strata.serving.api.requests import ApiError
from strata.serving.gateway.keys import Keys
from strata.serving.tenants import admin, commands
from strata.serving.tenants.tenant import Caller, Limits, Tenant

JSON = (b"content-type", b"application/json; charset=utf-8")
LOCAL = (b"host", b"127.0.0.1:8000")


def scope(
    *headers: tuple[bytes, bytes], client: tuple[str, int] | None = ("127.0.0.1", 9), method: str = "POST"
) -> dict[str, Any]:
    return {"method": method, "client": client, "headers": list(headers)}


def status(*given: Any) -> int:
    try:
        admin.require(*given)
    except ApiError as error:
        return error.status
    return 200


def test_a_tenant_needs_the_right() -> None:
    anybody, of_admin = Caller(Tenant("a"), "1"), Caller(Tenant("b", Limits(admin=True)), "2")
    assert status(scope(JSON), anybody, True) == 403
    assert status(scope(JSON, client=("10.0.0.7", 9)), of_admin, True) == 200
    assert status(scope(JSON), None, True) == 200  # the starter
    assert status(scope(), of_admin, True) == 415 and status(scope(method="GET"), of_admin, True) == 200


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (scope(JSON, LOCAL), 200),
        (scope(JSON, (b"host", b"localhost:8000")), 200),
        (scope(JSON, (b"host", b"[::1]:8000"), client=("::1", 9)), 200),
        (scope(JSON, LOCAL, client=("10.0.0.7", 9)), 403),
        (scope(JSON, LOCAL, client=None), 403),
        (scope(JSON, (b"host", b"evil.example:8000")), 403),  # a name that was pointed at this machine
        (scope(JSON), 403),
        (scope(LOCAL), 415),
        (scope((b"content-type", b"text/plain"), LOCAL), 415),  # a form of another origin
    ],
)
def test_without_keys_only_programs_of_this_machine_are_admitted(given: dict[str, Any], expected: int) -> None:
    assert status(given, None, False) == expected


def test_the_command_gives_the_right(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(commands.keys_new)
    for words in (["ops", "--admin"], ["ops"], ["team"]):
        done = CliRunner().invoke(app, [*words, "--file", str(tmp_path / "tenants")])
        caller = Keys(tmp_path / "tenants").check([(b"authorization", b"Bearer " + done.stdout.strip().encode())])
        assert caller is not None and caller.tenant.limits.admin == (words[0] == "ops")
