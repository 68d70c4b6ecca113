"""Servers on loopback that data is read from: S3 (moto's server) and a web server, with faults on demand.

`faults` is what the next answers do, one word for each request for an object's bytes: `503`, `drop` (half
of the bytes, then the connection ends) or `` (nothing special). When it is used up, nothing special.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from werkzeug.serving import WSGIRequestHandler, make_server

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAEXAMPLEKEYID",
    "AWS_SECRET_ACCESS_KEY": "example-secret-of-these-tests",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass
class Server:
    """`asked`: (method, path, range, bytes sent) of each request."""

    url: str = ""
    faults: list[str] = field(default_factory=list)
    asked: list[tuple[str, str, str, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def sent(self, path: str) -> int:
        return sum(size for _, asked, _, size in self.asked if asked == path)

    def fault(self) -> str:
        with self.lock:
            return self.faults.pop(0) if self.faults else ""


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None: ...


class _Faulty:
    """In front of an application."""

    def __init__(self, app: Any, server: Server, counts: Callable[[dict[str, Any]], bool]) -> None:
        self.app, self.server, self.counts = app, server, counts

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        fault = self.server.fault() if self.counts(environ) else ""
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        asked = (method, path, environ.get("HTTP_RANGE", ""))
        if fault == "503":
            self.server.asked.append((*asked, 0))
            start_response("503 Slow Down", [("Content-Length", "0"), ("Retry-After", "0")])
            return [b""]
        body = b"".join(self.app(environ, start_response))
        whole = len(body)
        if fault == "drop":
            body = body[: whole // 2]
        self.server.asked.append((*asked, len(body)))
        return _then_break(body) if fault == "drop" else [body]


def _then_break(body: bytes) -> Iterator[bytes]:
    yield body
    raise ConnectionAbortedError


@contextmanager
def serving(app: Any, counts: Callable[[dict[str, Any]], bool]) -> Iterator[Server]:
    server = Server()
    listening = make_server(
        "127.0.0.1", 0, _Faulty(app, server, counts), threaded=True, request_handler=_Quiet
    )
    server.url = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


@contextmanager
def s3() -> Iterator[Server]:
    """A whole S3, empty, and the variables with which programs find it."""
    from moto.server import create_backend_app

    def is_object(environ: dict[str, Any]) -> bool:
        parts = environ["PATH_INFO"].strip("/").split("/")
        return environ["REQUEST_METHOD"] == "GET" and len(parts) > 1

    with (
        serving(create_backend_app("s3"), is_object) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in environment(server).items():
            patch.setenv(name, value)
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
            patch.delenv(name, raising=False)
        yield server


def environment(server: Server) -> dict[str, str]:
    """For other processes."""
    return {**KEYS, "AWS_ENDPOINT_URL": server.url}


def upload(server: Server, bucket: str, files: dict[str, bytes | Path]) -> None:
    from pyarrow.fs import S3FileSystem

    host = server.url.removeprefix("http://")
    options = {"scheme": "http", "endpoint_override": host, "region": "us-east-1"}
    store = S3FileSystem(allow_bucket_creation=True, **options)
    store.create_dir(bucket)
    for name, content in files.items():
        with store.open_output_stream(f"{bucket}/{name}") as stream:
            stream.write(content if isinstance(content, bytes) else content.read_bytes())


class _Files:
    """Files by path, with ETags and ranges."""

    def __init__(self, files: dict[str, bytes], ranges: bool) -> None:
        self.files, self.ranges = files, ranges

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = self.files.get(environ["PATH_INFO"])
        if body is None:
            start_response("404 Not Found", [("Content-Length", "0")])
            return [b""]
        headers = [("ETag", f'"{hash(body):x}"')]
        wanted, status = environ.get("HTTP_RANGE", ""), "200 OK"
        if wanted and self.ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(body)), len(body) - 1)
            headers.append(("Content-Range", f"bytes {begin}-{end}/{len(body)}"))
            body, status = body[begin : end + 1], "206 Partial Content"
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body]


@contextmanager
def web(files: dict[str, bytes], *, ranges: bool = True) -> Iterator[Server]:
    """A web server with these files by path."""

    def is_content(environ: dict[str, Any]) -> bool:
        return environ.get("HTTP_RANGE") != "bytes=0-0"

    with serving(_Files(files, ranges), is_content) as server:
        yield server
