"""Static files of the page. They are read once, so a path is a key of a table and never names a file of the disk."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

MEDIA = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
INDEX = "index.html"
PREFIX = "/page/"
# Nothing but the endpoint's own files and routes. Pictures are blobs that the page makes from an answer. Trusted types make the
# browser itself refuse text as markup.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # A copy is used again only if the endpoint confirms it by its ETag: after an update no old file runs beside a new one.
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class File:
    body: bytes
    media: str
    etag: str


Answer = tuple[int, bytes, dict[str, str]]  # status, body, headers


@cache
def table() -> dict[str, File]:
    """Files by the path of their URL."""
    found = {}
    for entry in resources.files(__package__).joinpath("static").iterdir():
        body = entry.read_bytes()
        file = File(body, MEDIA[entry.name.rpartition(".")[2]], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
        found["/" if entry.name == INDEX else PREFIX + entry.name] = file
    return found


def answer(path: str, headers: list[tuple[bytes, bytes]]) -> Answer | None:
    """Answer to a GET or HEAD; None for a path that is not the page's."""
    file = table().get(path)
    if file is None:
        return None
    known = b",".join(value for name, value in headers if name == b"if-none-match").decode("latin-1")
    if any(tag.strip().removeprefix("W/") in (file.etag, "*") for tag in known.split(",")):
        return 304, b"", HEADERS | {"etag": file.etag}
    return 200, file.body, HEADERS | {"etag": file.etag, "content-type": file.media}
