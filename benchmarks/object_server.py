"""A server of objects on this machine that speaks what is needed of the APIs of GCS and of S3.

It throttles, fails, cuts answers short and hangs up, as often as a test says.
`python -m benchmarks.object_server` serves until Ctrl-C, and prints what a shell has to export.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import random
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.sax.saxutils import escape

PAGE = 3
"""Names in a page of a listing: few, so that every listing has several."""


class ObjectServer(ThreadingHTTPServer):
    """Buckets in the memory of this process.

    `objects` has (generation, contents) by "bucket/key"; `requests` what was asked, a line each;
    `before_change` is called with the name of an object before it is written or removed.
    """

    daemon_threads = True

    def __init__(self, faults: float = 0.0, seed: int = 0):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.requests: list[str] = []
        self.faults = faults
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.generation = 1000
        self.before_change: Callable[[str], None] = lambda name: None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that was killed."""

    def fault(self) -> str | None:
        """The fault of the next request, if it has one."""
        with self.lock:
            if self.random.random() >= self.faults:
                return None
            return self.random.choice(["throttle", "fail", "cut", "hang up", "deaf"])

    def env(self) -> dict[str, str]:
        """The environment in which a program finds this server behind both kinds of address."""
        url = f"http://127.0.0.1:{self.server_port}"
        return {
            "TENSORSTORE_GCS_HTTP_URL": url,
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def write(self, name: str, body: bytes, wanted: int | None) -> int | None:
        """Writes an object, or returns None where the one there is not the wanted one (0: none)."""
        with self.lock:
            there = self.objects.get(name, (0, b""))[0]
            if wanted is not None and wanted != there:
                return None
            self.before_change(name)
            self.generation += 1
            self.objects[name] = self.generation, body
            return self.generation

    def names(self, prefix: str = "") -> list[str]:
        """The objects there are, sorted."""
        return sorted(name for name in self.objects if name.startswith(prefix))


@contextlib.contextmanager
def serving(faults: float = 0.0, seed: int = 0) -> Iterator[ObjectServer]:
    """Serves objects until it closes."""
    server = ObjectServer(faults, seed)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server: ObjectServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", cut: bool = False, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def _do(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = dict(urllib.parse.parse_qsl(url.query))
        self.server.requests.append(f"{self.command} {urllib.parse.unquote(self.path)}")
        fault = self.server.fault()
        if fault == "throttle":
            return self._answer(429, b"slow down", Retry_After=0)
        if fault == "fail":
            return self._answer(503, b"try again")
        if fault == "forbid":
            return self._answer(403, b"no")
        if fault == "hang up":
            self.close_connection = True
            return None
        cut = fault in ("cut", "deaf")
        if fault == "deaf":
            # The request is served, but no reply is sent.
            self._answer = lambda *args, **kwargs: setattr(self, "close_connection", True)  # type: ignore[method-assign]
        try:
            parts = url.path.split("/")
            if "storage" in parts[1:3]:
                bucket = parts[parts.index("b") + 1]
                key = urllib.parse.unquote(parts[-1]) if parts[-2] == "o" else query.get("name")
                self._gcs(bucket, key, query, body, cut)
            else:
                key = urllib.parse.unquote("/".join(parts[2:]))
                self._s3(parts[1], key, query, body, cut)
        finally:
            self.__dict__.pop("_answer", None)
        return None

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do

    def _delete(self, name: str, wanted: int | None) -> int:
        with self.server.lock:
            there = self.server.objects.get(name)
            if there is None:
                return 404
            if wanted is not None and wanted != there[0]:
                return 412
            self.server.before_change(name)
            del self.server.objects[name]
            return 204

    def _read(self, name: str, known: bool, cut: bool, **headers: Any) -> None:
        found = self.server.objects.get(name)
        if found is None:
            return self._answer(404)
        if known:
            return self._answer(304, **headers)
        generation, body = found
        crc = base64.b64encode(binascii.crc32(body).to_bytes(4, "big")).decode()
        headers |= {"x_goog_generation": generation, "x_test_crc": crc}
        asked = self.headers.get("Range")
        if asked is None:
            return self._answer(200, body, cut, **headers)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start = int(first) if first else len(body) - int(last)
        stop = min(int(last) + 1, len(body)) if first and last else len(body)
        if start >= len(body):
            return self._answer(416, Content_Range=f"bytes */{len(body)}")
        told = f"bytes {start}-{stop - 1}/{len(body)}"
        return self._answer(206, body[start:stop], cut, Content_Range=told, **headers)

    def _page(self, bucket: str, after: str, first: str, prefix: str, end: str):
        names = [name.removeprefix(f"{bucket}/") for name in self.server.names(f"{bucket}/")]
        names = [n for n in names if n.startswith(prefix) and n >= first and n > after]
        names = [name for name in names if not end or name < end]
        return names[:PAGE], len(names) > PAGE

    def _gcs(self, bucket: str, key: str | None, query: dict, body: bytes, cut: bool) -> None:
        wanted = int(query["ifGenerationMatch"]) if "ifGenerationMatch" in query else None
        name = f"{bucket}/{key}"
        if self.command == "POST":
            made = self.server.write(name, body, wanted)
            if made is None:
                return self._answer(412)
            return self._answer(200, self._object(bucket, key or "", made, len(body)))
        if self.command == "DELETE":
            return self._answer(self._delete(name, wanted))
        if query.get("alt") == "media":
            there = self.server.objects.get(name, (0, b""))[0]
            known = query.get("ifGenerationNotMatch") == str(there)
            return self._read(name, known, cut)
        if key:
            there, size = self._described(name)
            told = self._object(bucket, key, there, size)
            return self._answer(200, told, cut) if there else self._answer(404)
        page, more = self._page(
            bucket,
            bytes.fromhex(query.get("pageToken", "")).decode(),
            query.get("startOffset", ""),
            query.get("prefix", ""),
            query.get("endOffset", ""),
        )
        items = [
            json.loads(self._object(bucket, one, *self._described(f"{bucket}/{one}")))
            for one in page
        ]
        found: dict[str, Any] = {"kind": "storage#objects", "items": items}
        if more:
            found["nextPageToken"] = page[-1].encode().hex()
        return self._answer(200, json.dumps(found).encode(), cut)

    def _described(self, name: str) -> tuple[int, int]:
        generation, body = self.server.objects.get(name, (0, b""))
        return generation, len(body)

    def _object(self, bucket: str, key: str, generation: int, size: int) -> bytes:
        now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        told = {"kind": "storage#object", "name": key, "bucket": bucket, "size": str(size)}
        told |= {"generation": str(generation), "metageneration": "1"}
        return json.dumps(told | {"timeCreated": now, "updated": now}).encode()

    def _s3(self, bucket: str, key: str, query: dict, body: bytes, cut: bool) -> None:
        name = f"{bucket}/{key}"
        generation, contents = self.server.objects.get(name, (0, b""))
        etag = f'"{hashlib.md5(f"{generation}".encode() + contents).hexdigest()}"'
        wanted = None
        if self.headers.get("If-None-Match") == "*":
            wanted = 0
        if "If-Match" in self.headers:
            wanted = generation if self.headers["If-Match"] == etag else -1
        if self.command == "PUT":
            if self.server.write(name, body, wanted) is None:
                return self._answer(412)
            generation, contents = self.server.objects[name]
            etag = hashlib.md5(f"{generation}".encode() + contents).hexdigest()
            return self._answer(200, ETag=f'"{etag}"')
        if self.command == "DELETE":
            status = self._delete(name, wanted)
            return self._answer(204 if status == 404 else status)
        if key:
            return self._read(name, self.headers.get("If-None-Match") == etag, cut, ETag=etag)
        if self.command == "HEAD":
            return self._answer(200, x_amz_bucket_region="us-east-1")
        after = bytes.fromhex(query.get("continuation-token", "")).decode()
        after = after or query.get("start-after", "")
        page, more = self._page(bucket, after, "", query.get("prefix", ""), "")
        items = "".join(
            f"<Contents><Key>{escape(one)}</Key><Size>{self._described(f'{bucket}/{one}')[1]}"
            "</Size></Contents>"
            for one in page
        )
        token = page[-1].encode().hex() if more else ""
        token = f"<NextContinuationToken>{token}</NextContinuationToken>" if more else ""
        text = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket}</Name><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{items}{token}"
            "</ListBucketResult>"
        )
        return self._answer(200, text.encode(), cut, Content_Type="application/xml")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt), serving() as server:
        print(*(f"export {name}={value}" for name, value in server.env().items()), sep="\n")
        print("# any bucket is there, in this memory: gs://any/name, s3://any/name", flush=True)
        threading.Event().wait()
