"""Routes of OpenAI's files and batches."""

import asyncio
import errno
import json
import re
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from strata.serving.api import requests
from strata.serving.api.dialects.batches import ENDPOINTS
from strata.serving.api.requests import ApiError
from strata.serving.batches import upload
from strata.serving.batches.records import ENDED, Batch, StoredFile, new_id
from strata.serving.batches.store import COMMON, Space
from strata.serving.batches.upload import Headers, Receive
from strata.serving.tenants.tenant import Caller

FILES, BATCHES = "/v1/files", "/v1/batches"
# Methods of each route: of all files or batches, of one, and of an action on one.
METHODS = {
    ("files", False, ""): "GET, POST",
    ("files", True, ""): "GET, DELETE",
    ("files", True, "content"): "GET",
    ("batches", False, ""): "GET, POST",
    ("batches", True, ""): "GET",
    ("batches", True, "cancel"): "POST",
}
WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
MOST_HOURS = 168
MAX_PENDING = 100  # batches of one tenant that have not ended
MAX_FILES = 10_000  # of one tenant
MAX_REQUEST_BYTES = 64 * 2**10
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512  # of metadata, as in OpenAI's API
MOST_LISTED = 100  # batches, and 10,000 files, as in OpenAI's API
READ_BYTES = 256 * 2**10
FULL = (errno.ENOSPC, errno.EDQUOT)

Send = Callable[[dict[str, Any]], Awaitable[None]]
Stored = TypeVar("Stored", StoredFile, Batch)


@dataclass(frozen=True)
class Limits:
    file_bytes: int
    tenant_bytes: int


class Api:
    def __init__(self, root: Path | None, limits: Limits) -> None:
        """`root`: None refuses every request, since the gateways share no folder."""
        self._root, self._limits = root, limits

    def owns(self, path: str) -> bool:
        return any(path == base or path.startswith(f"{base}/") for base in (FILES, BATCHES))

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send, caller: Caller | None) -> None:
        if self._root is None:
            message = "This endpoint stores no files: its recipe must set serve.files.folder to a folder that all gateways share."
            raise ApiError(501, message)
        space = Space(self._root, caller.tenant.name if caller is not None else COMMON)
        path, method, query = scope["path"], scope["method"], _query(scope["query_string"])
        base, name, action = _parts(path)
        try:
            match (method, base, bool(name), action):
                case ("POST", "files", False, ""):
                    tree = await self._upload(space, scope["headers"], receive)
                case ("GET", "files", False, ""):
                    tree = await asyncio.to_thread(_files, space, query)
                case ("GET", "files", True, ""):
                    tree = (await asyncio.to_thread(_file, space, name)).answer()
                case ("GET", "files", True, "content"):
                    await _content(space, name, send)
                    return
                case ("DELETE", "files", True, ""):
                    tree = await asyncio.to_thread(_delete, space, name)
                case ("POST", "batches", False, ""):
                    tree = await asyncio.to_thread(_create, space, await upload.small(receive, MAX_REQUEST_BYTES))
                case ("GET", "batches", False, ""):
                    tree = await asyncio.to_thread(_batches, space, query)
                case ("GET", "batches", True, ""):
                    tree = await asyncio.to_thread(_retrieve, space, name)
                case ("POST", "batches", True, "cancel"):
                    tree = await asyncio.to_thread(_cancel, space, name)
                case _ if allowed := METHODS.get((base, bool(name), action)):
                    raise ApiError(405, f"{method} {path}: only {allowed} is allowed.", headers={"allow": allowed})
                case _:
                    raise ApiError(404, f"{method} {path}: there is no such route.")
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise ApiError(507, "The storage of this endpoint is full.") from None
        body = json.dumps(tree).encode()
        await _start(send, "application/json", len(body))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _upload(self, space: Space, headers: Headers, receive: Receive) -> dict[str, Any]:
        stated = next((int(value) for name, value in headers if name == b"content-length"), 0)
        most = self._limits.file_bytes
        if stated > most + requests.MAX_BODY_BYTES:  # the form adds a few hundred bytes
            raise ApiError(413, f"The file is larger than {most // 2**20} MiB.", param="file")
        await asyncio.to_thread(space.create)
        await asyncio.to_thread(self._check_quota, space, stated)
        form, partial = await upload.form(headers, receive, space.files, most)
        try:
            purpose = form.fields.pop("purpose", None)
            if purpose != "batch":
                raise ApiError(400, f"'purpose' must be batch, not {str(purpose)[:50]!r}.", param="purpose")
            if form.fields:
                name = min(form.fields)[:50]
                raise ApiError(400, f"There is no parameter '{name}'; files stay until they are deleted.", param=name)
            await asyncio.to_thread(self._check_quota, space, 0)
            record = StoredFile(new_id("file-"), form.filename or "file", form.size, int(time.time()), "batch")
            await asyncio.to_thread(_publish, space, partial, record)
            return record.answer()
        finally:
            partial.unlink(missing_ok=True)

    def _check_quota(self, space: Space, more: int) -> None:
        if space.used_bytes() + more > self._limits.tenant_bytes:
            limit = self._limits.tenant_bytes / 2**30
            raise ApiError(403, f"Your files may have {limit:g} GiB in all. Delete some first.", param="file")
        if len(space.file_ids()) >= MAX_FILES:
            raise ApiError(403, f"You may have {MAX_FILES} files. Delete some first.", param="file")


def _publish(space: Space, partial: Path, record: StoredFile) -> None:
    partial.rename(space.content(record.id))
    space.add_file(record)


def _parts(path: str) -> tuple[str, str, str]:
    """Kind, id and action of a path."""
    parts = path.removeprefix("/v1/").split("/")
    return (parts[0], parts[1] if len(parts) > 1 else "", "/".join(parts[2:]))


def _query(raw: bytes) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(raw.decode("latin-1")[:4096]))


def _file(space: Space, name: str) -> StoredFile:
    if (found := space.file(name)) is None:
        raise ApiError(404, f"No such file: '{name[:100]}'.", param="id")
    return found


def _batch(space: Space, name: str) -> Batch:
    if (found := space.batch(name)) is None:
        raise ApiError(404, f"No such batch: '{name[:100]}'.", param="id")
    if found.status not in ENDED and found.status != "finalizing" and (at := space.cancelled_at(name)) is not None:
        return replace(found, status="cancelling", times=found.times | {"cancelling_at": at})
    return found


def _files(space: Space, query: Mapping[str, str]) -> dict[str, Any]:
    ids = space.file_ids()
    if query.get("order") == "asc":
        ids.reverse()
    purpose = query.get("purpose")
    return _page(ids, space.file, query, 10_000, lambda found: purpose is None or found.purpose == purpose)


def _batches(space: Space, query: Mapping[str, str]) -> dict[str, Any]:
    return _page(space.batch_ids(), lambda name: _batch(space, name), query, MOST_LISTED, lambda found: True)


def _page(
    ids: Sequence[str],
    load: Callable[[str], Stored | None],
    query: Mapping[str, str],
    most: int,
    wanted: Callable[[Stored], bool],
) -> dict[str, Any]:
    """One page of a list, which begins behind the id `after`."""
    limit = query.get("limit", "20" if most == MOST_LISTED else str(most))
    if not limit.isdecimal() or not 1 <= int(limit) <= most:
        raise ApiError(400, f"'limit' must be 1 to {most}.", param="limit")
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise ApiError(400, f"No such id: '{after[:100]}'.", param="after")
        ids = ids[ids.index(after) + 1 :]
    page: list[Stored] = []
    more = False
    for name in ids:
        found = load(name)
        if found is None or not wanted(found):
            continue
        if len(page) == int(limit):
            more = True
            break
        page.append(found)
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    data = [found.answer() for found in page]
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}


async def _content(space: Space, name: str, send: Send) -> None:
    record = await asyncio.to_thread(_file, space, name)
    with await asyncio.to_thread(space.content(name).open, "rb") as source:
        await _start(send, "application/octet-stream", record.size)
        left = record.size
        while left:
            data = await asyncio.to_thread(source.read, min(READ_BYTES, left))
            if not data:
                raise OSError(f"{source.name} is shorter than its record")  # cuts the answer, as its length is known
            left -= len(data)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _delete(space: Space, name: str) -> dict[str, Any]:
    _file(space, name)
    for batch in space.pending_ids():
        if (found := space.batch(batch)) is not None and found.input_file_id == name:
            raise ApiError(409, f"The batch {batch} reads this file. Cancel it, or wait for its end.", param="id")
    space.remove_file(name)
    return {"id": name, "object": "file", "deleted": True}


def _create(space: Space, body: bytes) -> dict[str, Any]:
    tree = requests.parse(body)
    if unknown := tree.keys() - {"input_file_id", "endpoint", "completion_window", "metadata"}:
        raise ApiError(400, f"There is no parameter '{min(unknown)[:50]}'.", param=min(unknown))
    source, endpoint = tree.get("input_file_id"), tree.get("endpoint")
    if endpoint not in ENDPOINTS:
        raise ApiError(400, f"'endpoint' must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
    window = WINDOW.fullmatch(tree["completion_window"]) if isinstance(tree.get("completion_window"), str) else None
    if window is None or int(window[1]) > MOST_HOURS:
        raise ApiError(400, f"'completion_window' must be 1h to {MOST_HOURS}h, such as 24h.", param="completion_window")
    metadata = _metadata(tree.get("metadata"))
    if not isinstance(source, str) or (found := space.file(source)) is None:
        raise ApiError(400, f"No such file: '{str(source)[:100]}'.", param="input_file_id")
    if found.purpose != "batch":
        raise ApiError(400, f"The file '{source}' has the purpose {found.purpose}, not batch.", param="input_file_id")
    if len(space.pending_ids()) >= MAX_PENDING:
        message = f"You have {MAX_PENDING} batches that have not ended."
        raise ApiError(429, message, headers={"retry-after": "60"})
    now = int(time.time())
    expires = now + int(window[1]) * 3600
    batch = Batch(new_id("batch_"), endpoint, source, window[0], now, expires, metadata=metadata)
    space.add_batch(batch)
    return batch.answer()


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    pairs = isinstance(given, dict) and all(isinstance(value, str) for value in given.values())
    if not pairs or len(given) > MAX_PAIRS or any(len(k) > MAX_KEY or len(v) > MAX_VALUE for k, v in given.items()):
        limits = f"{MAX_PAIRS} pairs of text, keys up to {MAX_KEY} and values up to {MAX_VALUE} characters"
        raise ApiError(400, f"'metadata' may have {limits}.", param="metadata")
    return dict(given)


def _retrieve(space: Space, name: str) -> dict[str, Any]:
    return _batch(space, name).answer()


def _cancel(space: Space, name: str) -> dict[str, Any]:
    found = _batch(space, name)
    if found.status in ENDED or found.status == "finalizing":
        raise ApiError(409, f"The batch is {found.status} and cannot be cancelled.", param="id")
    space.cancel(name)
    return _batch(space, name).answer()


async def _start(send: Send, media: str, length: int) -> None:
    headers = [(b"content-type", media.encode()), (b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
