"""Request ids from the client, with the bounds of length and letters."""

import re

import pytest

from strata.serving.api.headers import request_id, speculates
from strata.serving.api.requests import ApiError


def sent(value: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"x-request-id", value), (b"x-request-id", b"second")]


@pytest.mark.parametrize("value", [b"a", b"my-id 1", b" ~", b"\x20\x7e", b"x" * 511, b"x" * 512])
def test_printable_ids_of_bounded_length_are_returned(value: bytes) -> None:
    assert request_id(sent(value)) == (value.decode(), False)


@pytest.mark.parametrize("value", [b"x" * 513, b"\x1f", b"\x7f", b"ok\x80", b"a\nb", b"\xc3\xa9", b"\x00"])
def test_other_ids_are_invalid_and_replaced(value: bytes) -> None:
    name, invalid = request_id(sent(value))
    assert invalid and re.fullmatch("[0-9a-f]{32}", name)


@pytest.mark.parametrize("headers", [[], [(b"host", b"x")], [(b"x-request-id", b"")]])
def test_without_an_id_one_is_generated(headers: list[tuple[bytes, bytes]]) -> None:
    (first, invalid), (second, _) = request_id(headers), request_id(headers)
    assert not invalid and re.fullmatch("[0-9a-f]{32}", first) and first != second


def test_speculation_is_on_unless_it_is_switched_off() -> None:
    assert speculates([]) and speculates([(b"x-strata-speculation", b"on")])
    assert not speculates([(b"host", b"x"), (b"x-strata-speculation", b"off")])
    with pytest.raises(ApiError, match="must be on or off"):
        speculates([(b"x-strata-speculation", b"no")])
