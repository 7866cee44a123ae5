"""Events between a replica and the gateway: flag, number of tokens, token ids, text."""

import pytest

from strata.serving.engine.request_context import RequestContext, unpack_event


@pytest.mark.parametrize(
    ("finished", "tokens", "event", "packed"),
    [
        (False, [], "", b"\x00\x00\x00"),
        (True, [], "data", b"\x01\x00\x00data"),
        (False, [258], "é", b"\x00\x00\x01" + b"\x00\x00\x01\x02" + b"\xc3\xa9"),
        (True, [1, 2**32 - 1], "\x00", b"\x01\x00\x02" + b"\x00\x00\x00\x01" + b"\xff\xff\xff\xff" + b"\x00"),
    ],
)
def test_an_event_is_packed_with_its_tokens(finished: bool, tokens: list[int], event: str, packed: bytes) -> None:
    context = RequestContext(finished=finished, unsent=tokens)
    assert context.pack_event(event) == packed
    assert unpack_event(packed) == (finished, tuple(tokens), event.encode())
    assert context.pack_event("") == bytes([finished]) + b"\x00\x00", "tokens are sent once"


def test_other_flags_are_ignored() -> None:
    assert unpack_event(b"\x06\x00\x00x") == (False, (), b"x")
    assert unpack_event(b"\x07\x00\x00x") == (True, (), b"x")


def test_contexts_are_fresh() -> None:
    one, two = RequestContext(), RequestContext()
    assert one.request != two.request and len(one.request) == 32
    one.generated.append(1)
    one.unsent.append(1)
    assert two.generated == two.unsent == []
    assert (two.resumed, two.strikes, two.decision, two.engine, two.failure) == ((), 0, None, "", None)
    assert (two.open, two.prompt_tokens, two.queued_s) == (0, 0, 0.0)
    assert not two.finished and not two.replaying
