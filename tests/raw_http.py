"""Bytes that are nearly HTTP: requests put together from parts that are wrong, doubled, cut off or endless."""

import asyncio
import json
from dataclasses import dataclass

from hypothesis import strategies as st

ASKED = json.dumps({"prompt": "import os\n", "max_tokens": 2}).encode()
STREAMED = json.dumps({"prompt": "import os\n", "max_tokens": 8, "stream": True}).encode()

LINES = st.sampled_from(
    [
        b"POST /v1/completions HTTP/1.1",
        b"POST /v1/completions HTTP/1.0",
        b"POST /v1/completions HTTP/2.0",
        b"POST /v1/completions",
        b"post /v1/completions HTTP/1.1",
        b"POST http://x/v1/completions HTTP/1.1",
        b"POST /v1/completions?" + b"a=b&" * 500 + b" HTTP/1.1",
        b"POST /" + b"x" * 40_000 + b" HTTP/1.1",
        b"POST /v1/\xff\x00 HTTP/1.1",
        b"POST  /v1/completions  HTTP/1.1",
        b"GET /metrics HTTP/1.1",
        b"HEAD /v1/models HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"CONNECT x:443 HTTP/1.1",
        b"PRI * HTTP/2.0",
        b"TRACE /health HTTP/1.1",
        b"\r\n\r\nGET /health HTTP/1.1",
    ]
)
HEADERS = st.lists(
    st.sampled_from(
        [
            b"host: x",
            b"host:",
            b"host: x\r\nhost: y",
            b"connection: close",
            b"connection: keep-alive, upgrade\r\nupgrade: websocket",
            b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA",
            b"expect: 100-continue",
            b"expect: the impossible",
            b"content-length: 0",
            b"content-length: 5",
            b"content-length: -1",
            b"content-length: +5",
            b"content-length: 5, 5",
            b"content-length: 99999999999999999999",
            b"content-length: 1000000000",
            b"content-length : 5",
            b"transfer-encoding: chunked",
            b"transfer-encoding: gzip, chunked",
            b"transfer-encoding: chunked, identity",
            b"transfer-encoding:\x0bchunked",
            b"transfer-encoding: chunked\r\ncontent-length: 5",
            b"x-a: b\r\n c: folded",
            b"x-\xff: \xff",
            b"x-null: a\x00b",
            b"no colon here",
            b": no name",
            b"x-long: " + b"y" * 30_000,
            b"x-longer: " + b"y" * 70_000,
            b"\r\n".join(b"x-%d: y" % number for number in range(120)),
            b"\r\n".join(b"x-%d: y" % number for number in range(500)),
            b"authorization: Bearer " + b"k" * 5000,
            b"x-request-id: " + b"\xe2\x82\xac" * 50,
            b"accept-encoding: gzip, br\r\nrange: bytes=0-",
            b"cookie: " + b"a=b; " * 1000,
        ]
    ),
    max_size=5,
)


def _chunked(body: bytes, size: int) -> bytes:
    chunks = (body[start : start + size] for start in range(0, len(body), size))
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)


BODIES = st.one_of(
    st.sampled_from(
        [
            b"",
            ASKED,
            b"content-length: %d\r\n\r\n" % len(ASKED) + ASKED,
            b"content-length: %d\r\n\r\n" % len(STREAMED) + STREAMED,
            b"content-length: %d\r\n\r\n" % (len(ASKED) + 10) + ASKED,
            b"content-length: %d\r\n\r\n" % (len(ASKED) - 10) + ASKED,
            *(b"transfer-encoding: chunked\r\n\r\n" + _chunked(ASKED, size) + b"0\r\n\r\n" for size in (1, 7, 1000)),
            b"transfer-encoding: chunked\r\n\r\n" + _chunked(ASKED, 7) + b"0\r\nx-trailer: y\r\n\r\n",
            b"transfer-encoding: chunked\r\n\r\n" + _chunked(ASKED, 7) + b"0\r\n" + b"x-trailer: y\r\n" * 50_000,
            b"transfer-encoding: chunked\r\n\r\n5;" + b"ext=1;" * 60_000 + b"\r\n12345\r\n",
            b"transfer-encoding: chunked\r\n\r\n-5\r\n12345\r\n",
            b"transfer-encoding: chunked\r\n\r\nffffffffffffffffffff\r\n12345\r\n",
            b"transfer-encoding: chunked\r\n\r\nfffffffffffffff\r\n12345\r\n",
            b"transfer-encoding: chunked\r\n\r\n5\r\n1234567890\r\n",
            b"transfer-encoding: chunked\r\n\r\n5\n12345\n0\n\n",
            b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 60_000,
        ]
    ),
    st.binary(max_size=300),
)
BEHIND = st.sampled_from(
    [
        b"",
        b"",
        b"\x00" * 1000,
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 200,
        b"POST /v1/completions HTTP/1.1\r\nx-a: " + b"y" * 100_000,
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n" + b"z" * 100_000,
        b"garbage\r\n\r\n" * 5000,
    ]
)


@dataclass(frozen=True)
class Raw:
    data: bytes
    patience_s: float  # before it leaves


@st.composite
def nearly_http(draw: st.DrawFn) -> Raw:
    lines = [draw(LINES), *draw(HEADERS)]
    data = b"\r\n".join(lines) + b"\r\n" + draw(BODIES) + draw(BEHIND)
    if draw(st.booleans()):
        data = data[: draw(st.integers(0, len(data)))]
    return Raw(data, draw(st.sampled_from([0.0, 0.05, 0.5])))


async def throw(host: str, port: int, raw: Raw) -> tuple[int, bytes]:
    """Status and body of the first answer; status 1 if none came in time."""
    reader, writer = await asyncio.open_connection(host, port)
    answer = b""
    try:
        writer.write(raw.data)
        async with asyncio.timeout(raw.patience_s):
            await writer.drain()
            while len(answer) < 2**20 and (data := await reader.read(65536)):
                answer += data
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    while answer.startswith(b"HTTP/1.1 1"):  # 100 Continue
        answer = answer.partition(b"\r\n\r\n")[2]
    head, complete, body = answer.partition(b"\r\n\r\n")
    if not complete:
        return 1, answer
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None)
    return int(head.split()[1]), body[:length] if length is not None and len(body) >= length else b""
