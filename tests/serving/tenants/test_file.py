"""Files of tenants: errors with their lines, live reload, expiry, and content that must never become a key."""

import logging
import os
from pathlib import Path

import pytest

from strata.serving.api.requests import ApiError
from strata.serving.gateway.keys import Keys
from strata.serving.tenants.file import WrongContent, is_tenants, parse
from strata.serving.tenants.tenant import Caller, digest

ONE, TWO = (digest(key).hex() for key in (b"one", b"two"))
GOOD = f"""tenants:
  a:
    keys:
    - sha256: {ONE}
    weight: 2
    models: [m]
  b:
    keys: [{{sha256: {TWO}, expires: 2026-12-01T00:00:00Z}}]
"""
DECEMBER = 1_796_083_200.0  # 2026-12-01 in UTC


def test_tenants_with_their_limits() -> None:
    found = parse(GOOD.encode()).keys
    first, second = found[digest(b"one")], found[digest(b"two")]
    assert first.tenant.name == "a" and first.tenant.limits.weight == 2 and first.key == ONE[:12] and first.expires is None
    assert first.tenant.may_use("m") and not first.tenant.may_use("n") and second.tenant.may_use("n")
    assert second.expires == DECEMBER and second.tenant.limits.priority == 0 and not second.tenant.limits.share_cache


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("tenants:\n  a:\n    wieght: 2\n", 3, "tenants.a.wieght: Extra inputs"),
        ("tenants:\n  a: {}\n  b:\n    weight: 0\n", 4, "tenants.b.weight"),
        ("tenants:\n  a:\n    weight: .nan\n", 3, "tenants.a.weight"),
        ("tenants:\n  a:\n    weight: .inf\n", 3, "tenants.a.weight"),
        ("tenants:\n  a:\n    weight: true\n", 3, "tenants.a.weight"),
        ("tenants:\n  a:\n    tokens_per_day: -1\n", 3, "tokens_per_day"),
        ("tenants:\n  a:\n    tokens_per_day: 1000000000000000000000000\n", 3, "tokens_per_day"),
        ("tenants:\n  a:\n    tokens_per_minute: '5'\n", 3, "tokens_per_minute"),
        ("tenants:\n  a:\n    requests_per_minute: 1.5\n", 3, "requests_per_minute"),
        ("tenants:\n  a:\n    concurrency: 0\n", 3, "concurrency"),
        ("tenants:\n  a:\n    priority: high\n", 3, "priority"),
        ("tenants:\n  a:\n    share_cache: 1\n", 3, "share_cache"),
        ("tenants:\n  a:\n    models: m\n", 3, "models"),
        ("tenants:\n  a:\n    keys:\n    - sha256: xyz\n", 4, "sha256"),
        (f"tenants:\n  a:\n    keys:\n    - sha256: {ONE.upper()}\n", 4, "sha256"),
        (f"tenants:\n  a:\n    keys:\n    - sha256: {ONE}\n      expires: 2026-12-01\n", 5, "expires"),
        (f"tenants:\n  a:\n    keys:\n    - sha256: {ONE}\n      expires: 2026-12-01 10:00:00\n", 5, "expires"),
        (f"tenants:\n  a:\n    keys:\n    - sha256: {ONE}\n  b:\n    keys:\n    - sha256: {ONE}\n", 7, "tenant 'a' already"),
        (f"tenants:\n  a:\n    keys:\n    - sha256: {ONE}\n    - sha256: {ONE}\n", 5, "tenant 'a' already"),
        ("tenants:\n  a: {}\n  a: {}\n", 3, "'a' appears twice"),
        ("tenants:\n  a:\n    weight: 1\n    weight: 2\n", 4, "'weight' appears twice"),
        ("tenants:\n  A: {}\n", 2, "lower-case"),
        ("tenants:\n  'a b': {}\n", 2, "lower-case"),
        ('tenants:\n  "a\\r\\nx-admin: 1": {}\n', 2, "lower-case"),
        ('tenants:\n  "a\\n": {}\n', 2, "lower-case"),
        (f"tenants:\n  {64 * 'a'}: {{}}\n", 2, "63 at most"),
        ("tenants:\n  1: {}\n", 2, "tenants.1"),
        ("tenants:\n  a: &x {}\n  b: *x\n", 2, "aliases"),
        ("tenants:\n  a: {\n", 3, "expected"),
        ("tenants:\n\ta: {}\n", 2, "token"),
        ("tenants: []\n", 1, "tenants"),
        ("tenants:\n  a: {}\nlend_idle: maybe\n", 3, "lend_idle"),
        ("- sha256: x\n", 1, "must begin with 'tenants:'"),
        ("tenants: {}\n---\ntenants: {}\n", 2, "document"),
        ("tenants:\n  a: !!python/object/apply:os.system [true]\n", 2, "constructor"),
        ("tenants:\n  a: 2026-13-45T00:00:00Z\n", 1, "month"),
        ("tenants: " + 200 * "{a: " + 200 * "}" + "\n", 1, "nested"),
    ],
)
def test_wrong_content_is_refused_with_its_line(text: str, line: int, reason: str) -> None:
    with pytest.raises(WrongContent) as refused:
        parse(text.encode())
    assert reason in str(refused.value) and refused.value.line == line, refused.value


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(WrongContent, match="line 2: the text is not UTF-8"):
        parse(b"tenants:\n  \xff: {}\n")


@pytest.mark.parametrize(
    ("text", "name", "tenants"),
    [
        ("one\ntwo\n", "keys", False),
        ("one: two\n", "keys", False),
        ("tenants:\n", "keys", True),
        ("# tenants\ntenants:\n", "keys", True),
        ("{tenants: {}}", "keys", True),
        ('{\n "tenants": {}}', "keys", True),
        ("'tenants': {}", "keys", True),
        (f"tenant:\n  a:\n    keys:\n    - sha256: {ONE}\n", "keys", True),
        (f"tenant:\n  a:\n    keys: x\n    - {{sha256: {ONE}}}\n", "keys", True),
        ("one\n", "keys.yaml", True),
    ],
)
def test_what_looks_like_tenants_is_never_read_as_keys(text: str, name: str, tenants: bool) -> None:
    assert is_tenants(text.encode(), Path(name)) is tenants


def admitted(keys: Keys, key: str) -> Caller | None:
    try:
        return keys.check([(b"authorization", b"Bearer " + key.encode())])
    except ApiError as error:
        assert error.status == 401
        return None


def write(file: Path, text: str) -> None:
    before = file.stat().st_mtime_ns if file.exists() else 0
    file.write_text(text)
    os.utime(file, ns=(before + 10**9, before + 10**9))  # however coarse this file system's clock


def test_wrong_content_leaves_the_last_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    write(file, GOOD)
    keys = Keys(file, wall=lambda: 0.0)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        assert admitted(keys, "one") is not None
        write(file, GOOD.replace("weight: 2", "weight: none"))
        for _ in range(3):
            assert admitted(keys, "one") is not None and admitted(keys, "two") is not None and admitted(keys, "three") is None
        assert [record.getMessage() for record in caplog.records] == [
            f"The API key file {file} is wrong in line 5: tenants.a.weight: Input should be a valid number. "
            "Its last good content stays valid."
        ]
        write(file, "tenants:\n  b:\n    keys:\n    - sha256: " + TWO + "\n")
        assert admitted(keys, "one") is None and admitted(keys, "two") is not None
        file.unlink()
        assert admitted(keys, "two") is None, "a missing file admits nobody"
        assert len(caplog.records) == 2


def test_wrong_content_from_the_start_admits_nobody(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(file, f"tenant:\n  a:\n    keys:\n    - sha256: {ONE}\n")
    keys = Keys(file)
    assert admitted(keys, "one") is None and admitted(keys, f"- sha256: {ONE}") is None and admitted(keys, "tenant:") is None


def test_keys_expire_at_their_time(tmp_path: Path) -> None:
    file, now = tmp_path / "keys", [DECEMBER - 0.001]
    write(file, GOOD)
    keys = Keys(file, wall=lambda: now[0])
    assert admitted(keys, "two") is not None
    now[0] = DECEMBER
    assert admitted(keys, "two") is None and admitted(keys, "one") is not None
    now[0] = DECEMBER - 10
    assert admitted(keys, "two") is not None


def test_expiry_has_a_time_zone() -> None:
    text = f"tenants: {{a: {{keys: [{{sha256: {ONE}, expires: 2026-12-01T02:00:00+02:00}}]}}}}"
    assert parse(text.encode()).keys[digest(b"one")].expires == DECEMBER


@pytest.mark.parametrize("sent", [ONE, f"sha256:{ONE}", "", "one\x00", "one\r\nx: y", "\xff", "o" * 30_000])
def test_hashes_and_hostile_keys_are_no_keys(tmp_path: Path, sent: str) -> None:
    file = tmp_path / "keys"
    write(file, GOOD)
    assert admitted(Keys(file), sent) is None


def test_one_key_per_line_are_tenants_without_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(file, "one\ntwo\n")
    keys = Keys(file)
    first, second = admitted(keys, "one"), admitted(keys, "two")
    assert first is not None and second is not None
    assert first.tenant.name == f"key-{ONE[:12]}" != second.tenant.name and first.key == ONE[:12]
    assert first.tenant.limits.tokens_per_day is None and keys.lend_idle()
    write(file, GOOD)
    assert admitted(keys, "one") is not None and not keys.lend_idle()
