"""S3 server in memory, with the operations that pyarrow's S3 file system uses.

A larger S3 server (moto) would be one more dependency of the tests.
"""

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

ISO = "%Y-%m-%dT%H:%M:%S.000Z"
KEY, SECRET = "key", "secret"


@dataclass
class Store:
    port: int = 0
    buckets: dict[str, dict[str, tuple[bytes, float]]] = field(default_factory=dict)  # content and time of each object
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)
    requests: list[str] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        """Variables with which pyarrow connects to this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


class Failure(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


@contextmanager
def running(*buckets: str) -> Iterator[Store]:
    store = Store(buckets={name: {} for name in buckets})
    handler = type("Handler", (_Handler,), {"store": store})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        store.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield store
        server.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    store: Store
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one write per answer

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def handle_expect_100(self) -> bool:
        done = super().handle_expect_100()
        self.wfile.flush()
        return done

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).removeprefix("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body = self._body()
        self.store.requests.append(f"{self.command} {bucket}/{key}")
        try:
            if f"Credential={KEY}/" not in self.headers.get("authorization", ""):
                raise Failure(403, "InvalidAccessKeyId")
            if bucket not in self.store.buckets:
                raise Failure(404, "NoSuchBucket")
            status, data, headers = self._object(bucket, key, query, body) if key else self._bucket(bucket, query, body)
        except Failure as failure:
            status, headers = failure.status, {}
            data = f"<Error><Code>{failure.code}</Code><Message>{failure.code}</Message></Error>".encode()
        self.send_response(status)
        for name, value in ({"content-length": str(len(data)), "content-type": "application/xml"} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():  # trailers
                pass
            data = b"".join(chunks)
        else:
            data = self.rfile.read(int(self.headers.get("content-length", 0)))
        return _unchunked(data) if "aws-chunked" in self.headers.get("content-encoding", "") else data

    def _bucket(self, bucket: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        objects = self.store.buckets[bucket]
        if "delete" in query:
            for key in ElementTree.fromstring(body).iterfind("{*}Object/{*}Key"):
                objects.pop(key.text or "", None)
            return 200, b"<DeleteResult></DeleteResult>", {}
        if "list-type" in query:
            return 200, _listing(objects, query), {}
        return 200, b"", {}

    def _object(self, bucket: str, key: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        objects, uploads = self.store.buckets[bucket], self.store.uploads
        if self.command == "POST" and "uploads" in query:
            number = str(next(self.store.numbers))
            uploads[number] = {}
            return 200, f"<R><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{number}</UploadId></R>".encode(), {}
        if self.command == "PUT" and "uploadId" in query:
            uploads[query["uploadId"]][int(query["partNumber"])] = body
            return 200, b"", {"etag": _etag(body)}
        if self.command == "POST":
            parts = uploads.pop(query["uploadId"])
            objects[key] = (b"".join(parts[number] for number in sorted(parts)), time.time())
            return 200, f"<CompleteMultipartUploadResult><Key>{escape(key)}</Key></CompleteMultipartUploadResult>".encode(), {}
        if self.command == "DELETE":
            objects.pop(key, None)
            uploads.pop(query.get("uploadId", ""), None)
            return 204, b"", {}
        if self.command == "PUT" and (source := self.headers.get("x-amz-copy-source")):
            other, _, name = unquote(source).removeprefix("/").partition("/")
            if name not in self.store.buckets.get(other, {}):
                raise Failure(404, "NoSuchKey")
            objects[key] = (self.store.buckets[other][name][0], time.time())
            return 200, f"<CopyObjectResult><ETag>{_etag(objects[key][0])}</ETag></CopyObjectResult>".encode(), {}
        if self.command == "PUT":
            objects[key] = (body, time.time())
            return 200, b"", {"etag": _etag(body)}
        if key not in objects:
            raise Failure(404, "NoSuchKey")
        return self._content(*objects[key])

    def _content(self, data: bytes, at: float) -> tuple[int, bytes, dict[str, str]]:
        headers = {"etag": _etag(data), "last-modified": formatdate(at, usegmt=True), "content-type": "application/octet-stream"}
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", "")):
            first, last = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
            return 206, data[first : last + 1], headers | {"content-range": f"bytes {first}-{last}/{len(data)}"}
        return 200, data, headers


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _unchunked(data: bytes) -> bytes:
    """Content of a body in the encoding `aws-chunked`."""
    found, at = [], 0
    while size := int(data[at : (end := data.index(b"\r\n", at))].split(b";")[0], 16):
        found.append(data[end + 2 : end + 2 + size])
        at = end + 4 + size
    return b"".join(found)


def _listing(objects: dict[str, tuple[bytes, float]], query: dict[str, str]) -> bytes:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    entries: dict[str, Any] = {}
    for key in sorted(objects):
        if key.startswith(prefix):
            inner, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key[len(prefix) :], "", "")
            entries[prefix + inner + found] = None if found else objects[key]
    names = [name for name in entries if name > query.get("continuation-token", "")]
    shown = names[: int(query.get("max-keys", 1000))]
    cut = len(shown) < len(names)
    xml = [f"<ListBucketResult><IsTruncated>{str(cut).lower()}</IsTruncated><KeyCount>{len(shown)}</KeyCount>"]
    if cut:
        xml.append(f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>")
    for name in shown:
        if entries[name] is None:
            xml.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
        else:
            data, at = entries[name]
            when = time.strftime(ISO, time.gmtime(at))
            xml.append(
                f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size><LastModified>{when}</LastModified></Contents>"
            )
    return "".join([*xml, "</ListBucketResult>"]).encode()
