"""Bodies of requests for files and batches, received in bounded memory and time."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from strata.serving.api.requests import ApiError
from strata.serving.batches.store import PARTIAL
from strata.serving.gateway.journey import ClientGone

IDLE_S = 30.0  # without a byte from the client
UPLOAD_S = 3600.0
FIELD_BYTES = 1024  # of a form field, and of the header of a part
FIELDS = 16
NAME_CHARACTERS = 255

Receive = Callable[[], Awaitable[dict[str, Any]]]
Headers = list[tuple[bytes, bytes]]


async def chunks(receive: Receive) -> AsyncIterator[bytes]:
    try:
        async with asyncio.timeout(UPLOAD_S):
            more = True
            while more:
                async with asyncio.timeout(IDLE_S):
                    message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                more = message.get("more_body", False)
                yield message.get("body", b"")
    except TimeoutError:
        raise ApiError(408, f"Nothing of the request arrived for {IDLE_S:.0f} s.") from None


async def small(receive: Receive, most: int) -> bytes:
    body = b""
    async for chunk in chunks(receive):
        body += chunk
        if len(body) > most:
            raise ApiError(413, f"The request is larger than {most} bytes.")
    return body


@dataclass
class Form:
    """Form fields, and the file, of which `unwritten` is still in memory."""

    most: int  # bytes of the file
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    size: int = 0
    unwritten: bytearray = field(default_factory=bytearray)
    ended: bool = False

    _header: bytearray = field(default_factory=bytearray)
    _disposition: bytes = b""
    _name: str = ""
    _value: bytearray = field(default_factory=bytearray)
    _in_file: bool = False

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._name, self._in_file, self._disposition = "", False, b""
        self._value.clear()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._grow(self._header, data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition += data[start:end]
        if len(self._disposition) > FIELD_BYTES:
            raise _large_field()

    def _header_end(self) -> None:
        self._header.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._in_file = self._name == "file"
        if self._in_file:
            if self.filename is not None:
                raise ApiError(400, "The form has more than one 'file'.", param="file")
            self.filename = options.get(b"filename", b"").decode(errors="replace")[:NAME_CHARACTERS] or "file"

    def _data(self, data: bytes, start: int, end: int) -> None:
        if not self._in_file:
            self._grow(self._value, data[start:end])
            return
        self.size += end - start
        if self.size > self.most:
            raise ApiError(413, f"The file is larger than {self.most // 2**20} MiB.", param="file")
        self.unwritten += data[start:end]

    def _end(self) -> None:
        if not self._in_file:
            self.fields[self._name] = self._value.decode(errors="replace")
            if len(self.fields) > FIELDS:
                raise ApiError(400, f"The form has more than {FIELDS} fields.")

    def _finish(self) -> None:
        self.ended = True

    def _grow(self, value: bytearray, data: bytes) -> None:
        value += data
        if len(value) > FIELD_BYTES:
            raise _large_field()


def _large_field() -> ApiError:
    return ApiError(400, f"A form field is larger than {FIELD_BYTES} bytes.")


async def form(headers: Headers, receive: Receive, folder: Path, most: int) -> tuple[Form, Path]:
    """Receives a form. Its file lies at the returned path, which is not visible to clients. The caller renames or deletes it."""
    kind, options = parse_options_header(next((value for name, value in headers if name == b"content-type"), b""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError(400, "A file is uploaded as multipart/form-data with the fields 'file' and 'purpose'.")
    handle, path = await asyncio.to_thread(tempfile.mkstemp, dir=folder, prefix=PARTIAL)
    try:
        with os.fdopen(handle, "wb") as target:
            found = Form(most)
            parser = MultipartParser(options[b"boundary"], found.callbacks())
            try:
                async for chunk in chunks(receive):
                    parser.write(chunk)
                    await _flush(found, target)
                parser.finalize()
            except MultipartParseError as error:
                raise ApiError(400, f"The form is not valid multipart/form-data: {error}") from None
            await asyncio.to_thread(_sync, target)
        if not found.ended or found.filename is None:
            raise ApiError(400, "The form is incomplete: it needs the fields 'file' and 'purpose'.", param="file")
        return found, Path(path)
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise


async def _flush(found: Form, target: BinaryIO) -> None:
    if found.unwritten:
        await asyncio.to_thread(target.write, bytes(found.unwritten))
        found.unwritten.clear()


def _sync(target: BinaryIO) -> None:
    target.flush()
    os.fsync(target.fileno())
