"""Commands that change a file of tenants: new, list, rotate and revoke."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from strata.platform.errors import UserError
from strata.serving.api.requests import ApiError
from strata.serving.gateway.keys import Keys
from strata.serving.tenants import commands

APP = typer.Typer()
for name, command in {
    "new": commands.keys_new,
    "list": commands.keys_list,
    "rotate": commands.keys_rotate,
    "revoke": commands.keys_revoke,
}.items():
    APP.command(name)(command)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "tenants"


def run(file: Path, *words: str) -> str:
    done = CliRunner().invoke(APP, [words[0], "--file", str(file), *words[1:]], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


def refused(file: Path, *words: str) -> UserError:
    with pytest.raises(UserError) as caught:
        run(file, *words)
    return caught.value


def tenant_of(file: Path, key: str, later_s: float = 0.0) -> str | None:
    keys = Keys(file, wall=lambda: datetime.now(UTC).timestamp() + later_s)
    try:
        caller = keys.check([(b"authorization", b"Bearer " + key.encode())])
    except ApiError:
        return None
    assert caller is not None
    return caller.tenant.name


def test_a_new_key_is_printed_once_and_stored_as_a_hash(file: Path) -> None:
    first, second, other = run(file, "new", "a"), run(file, "new", "a"), run(file, "new", "b")
    assert len({first, second, other}) == 3 and all(re.fullmatch(r"sk-strata-[\w-]{43}", key) for key in (first, second, other))
    assert [tenant_of(file, key) for key in (first, second, other)] == ["a", "a", "b"]
    assert not any(key in file.read_text() for key in (first, second, other))
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_file_keeps_its_limits_and_mode(file: Path) -> None:
    run(file, "new", "a")
    tree = yaml.safe_load(file.read_text())
    tree["tenants"]["a"] |= {"weight": 2.5, "models": ["m"], "tokens_per_day": 5}
    tree["lend_idle"] = True
    file.write_text(yaml.safe_dump(tree))
    file.chmod(0o640)
    run(file, "new", "b")
    after = yaml.safe_load(file.read_text())
    assert after["tenants"]["a"] == tree["tenants"]["a"] and after["lend_idle"] is True
    assert file.stat().st_mode & 0o777 == 0o640
    listed = run(file, "list")
    assert "weight 2.5" in listed and tree["tenants"]["a"]["keys"][0]["sha256"][:12] in listed and "priority" not in listed


def test_rotation_leaves_old_keys_valid_until_the_stated_time(file: Path) -> None:
    old = run(file, "new", "a")
    new = run(file, "rotate", "a", "--overlap", "2")
    assert tenant_of(file, old) == tenant_of(file, new) == "a"
    assert tenant_of(file, old, later_s=2 * 3600 + 5) is None and tenant_of(file, new, later_s=10**8) == "a"
    assert tenant_of(file, old, later_s=2 * 3600 - 60) == "a"
    newest = run(file, "rotate", "a", "--overlap", "100")
    assert tenant_of(file, old, later_s=3 * 3600) is None, "an earlier end stays"
    assert tenant_of(file, new, later_s=99 * 3600) == "a" == tenant_of(file, newest, later_s=10**8)
    last = run(file, "rotate", "a", "--overlap", "0")
    assert [tenant_of(file, key) for key in (old, new, newest, last)] == [None, None, None, "a"]
    assert "expired" in run(file, "list")


def test_expiry_is_written_in_utc(file: Path) -> None:
    run(file, "new", "a")
    run(file, "rotate", "a", "--overlap", "24")
    entry = yaml.safe_load(file.read_text())["tenants"]["a"]["keys"][0]
    assert entry["expires"].utcoffset() == timedelta(0)
    assert abs(entry["expires"] - datetime.now(UTC) - timedelta(hours=24)) < timedelta(minutes=1)


def test_a_revoked_key_is_refused(file: Path) -> None:
    first, second = run(file, "new", "a"), run(file, "new", "a")
    keys = yaml.safe_load(file.read_text())["tenants"]["a"]["keys"]
    run(file, "revoke", "a", keys[0]["sha256"][:12])
    assert tenant_of(file, first) is None and tenant_of(file, second) == "a"
    run(file, "revoke", "a", "all")
    assert tenant_of(file, second) is None


@pytest.mark.parametrize("key", ["", "0", "abc", "zzzzzz", "0000000000000", "--"])
def test_a_wrong_id_revokes_nothing(file: Path, key: str) -> None:
    made = run(file, "new", "a")
    digits = yaml.safe_load(file.read_text())["tenants"]["a"]["keys"][0]["sha256"]
    if digits.startswith("0000"):
        return
    error = refused(file, "revoke", "a", *(("--", key) if key.startswith("-") else (key,)))
    assert digits[:12] in error.fix and tenant_of(file, made) == "a"


@pytest.mark.parametrize("name", ["A", "a b", "", "ä", "a\n", "../x", "-" * 3, "a" * 64, "key:"])
def test_a_tenant_has_a_plain_name(file: Path, name: str) -> None:
    assert "no name of a tenant" in refused(file, "new", "--", name).cause and not file.exists()


def test_unknown_tenants_are_named(file: Path) -> None:
    run(file, "new", "a")
    for words in (("rotate", "b"), ("revoke", "b", "all")):
        error = refused(file, *words)
        assert "no tenant b" in error.cause and "a" in error.fix


def test_wrong_files_are_not_touched(file: Path) -> None:
    file.parent.mkdir()
    for text, reason in (("tenants:\n  a: 5\n", "line 2"), ("one-key\n", "one key per line")):
        file.write_text(text)
        assert reason in refused(file, "new", "a").cause and file.read_text() == text
    with pytest.raises(UserError):
        run(file.parent, "new", "a")


def test_a_link_to_the_file_stays(file: Path, tmp_path: Path) -> None:
    run(file, "new", "a")
    link = tmp_path / "link"
    link.symlink_to(file)
    key = run(link, "new", "b")
    assert link.is_symlink() and tenant_of(file, key) == "b"
