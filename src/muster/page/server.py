"""The page's server: read only, on this machine's loopback address, for whoever knows the token.

    /TOKEN/                            the page; /TOKEN/assets/…
    /TOKEN/api/runs                    the list
    /TOKEN/api/runs/NAME               a run's document and its version
    /TOKEN/api/runs/NAME/audio/ID      a clip of the worst mistakes
    /TOKEN/api/compare?a=NAME&b=NAME
    /TOKEN/api/stream?run=NAME&seen=VERSION   server-sent events: `update` with the parts that changed since
                                       that version, `gone` when the directory vanished; without run, the list

Any program of this machine, and any web page in its browser, can connect to a loopback address. So the
token must be right, and the Host header must be a loopback name: a foreign page whose name resolves to
127.0.0.1 has another.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from muster.errors import LaunchError, MusterError
from muster.page.examples import open_audio
from muster.page.live import LiveRuns, Sections, join, to_json
from muster.page.read import Vanished
from muster.reading.names import number

ASSETS = Path(__file__).parent / "assets"
LOOPBACK = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "[::1]")  # whatever the port: ssh -L may use another one
EVERY_S = 1.0
KEEP_ALIVE_S = 15.0
# A part is sent again after the time that it takes at this rate, over a slow line: curves and heat maps of
# 64 ranks every few seconds, what a person reads every second.
BYTES_PER_S = 100_000
WITHOUT_TOKEN = ("", "api", "assets", "favicon.ico")  # how paths begin where the token is left out
RIGHT_TOKEN = (
    "The right address is in the terminal where muster page runs; each start has another token."
)
HEADERS = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' data:; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}


def make_app(runs: LiveRuns, token: str) -> Guard:
    routes = [
        Route("/", _page),
        Mount("/assets", StaticFiles(directory=ASSETS)),
        Route("/api/runs", _list),
        Route("/api/runs/{name}", _run),
        Route("/api/runs/{name}/audio/{clip}", _audio),
        Route("/api/compare", _compare),
        Route("/api/stream", _stream),
    ]
    app = Starlette(routes=routes, exception_handlers={MusterError: _not_found})
    app.state.runs, app.state.ending = runs, asyncio.Event()
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=4)
    return Guard(app, token, app.state.ending)


class Guard:
    """Refuses what does not name a loopback host or lacks the token, and adds headers that keep a browser from
    sending anything elsewhere. Routes take GET and HEAD alone."""

    def __init__(self, app: ASGIApp, token: str, ending: asyncio.Event) -> None:
        self.app, self.token, self.ending = app, token.encode(), ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS.items()]
            await send(message)

        app = self._refusal(scope) or self.app
        rest = scope["path"].lstrip("/").partition("/")[2]
        inner = {**scope, "path": f"/{rest}", "raw_path": None, "root_path": ""}
        return await app(inner, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or _without_port(hosts[0]) not in HOSTS:
            return PlainTextResponse("This server answers to 127.0.0.1 and localhost only.\n", 403)
        first, slash, _ = scope["path"].lstrip("/").partition("/")
        if not secrets.compare_digest(first.encode(), self.token):
            what = "lacks the token" if first in WITHOUT_TOKEN else "has a wrong token"
            return PlainTextResponse(f"The address {what}. {RIGHT_TOKEN}\n", 403)
        if not slash:
            return PlainTextResponse("", 308, {"location": f"/{first}/"})
        return None


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


async def _page(request: Request) -> Response:
    return FileResponse(ASSETS / "page.html")


async def _list(request: Request) -> Response:
    return _json((await run_sync(_runs(request).list)).whole())


async def _run(request: Request) -> Response:
    def read() -> str:
        return _runs(request).run(request.path_params["name"]).refresh().whole()

    return _json(await run_sync(read))


async def _compare(request: Request) -> Response:
    a, b = (request.query_params.get(key, "") for key in ("a", "b"))
    return _json(await run_sync(lambda: _runs(request).compare(a, b)))


async def _audio(request: Request) -> Response:
    path = await run_sync(_runs(request).path, request.path_params["name"])
    found = open_audio(path, request.path_params["clip"])
    if found is None:
        raise HTTPException(404)
    # Of what is open, not of its name: it may have become a link meanwhile. Parts of it can be asked for.
    opened = f"/proc/self/fd/{found.fileno()}"
    return FileResponse(opened, media_type="audio/flac", background=BackgroundTask(found.close))


async def _stream(request: Request) -> Response:
    runs, name = _runs(request), request.query_params.get("run")
    seen = request.query_params.get("seen", "0")
    read = runs.list if name is None else (await run_sync(runs.run, name)).refresh
    events = _events(read, number(seen, digits=15) or 0, request.app.state.ending)
    return StreamingResponse(events, media_type="text/event-stream")


async def _events(
    read: Callable[[], Sections], seen: int, ending: asyncio.Event
) -> AsyncIterator[str]:
    """Until the server ends, or the reader is gone, which cancels this."""
    sent: dict[str, int] = {}
    due: dict[str, float] = {}
    spoke = float("-inf")
    while not ending.is_set():
        try:
            sections = await run_sync(read)
        except Vanished as error:
            yield f"event: gone\ndata: {to_json({'error': str(error)})}\n\n"
            return
        now = time.monotonic()
        changed = {
            name: text
            for name, text in sections.texts.items()
            if sections.versions[name] > sent.get(name, seen) and now >= due.get(name, 0.0)
        }
        if changed:
            sent |= {name: sections.versions[name] for name in changed}
            due |= {name: now + len(text) / BYTES_PER_S for name, text in changed.items()}
            yield f'event: update\ndata: {{"sections":{join(changed)}}}\n\n'
        elif now - spoke >= KEEP_ALIVE_S:
            yield ": nothing new\n\n"
        if changed or now - spoke >= KEEP_ALIVE_S:
            spoke = now
        with anyio.move_on_after(EVERY_S):
            await ending.wait()


def _runs(request: Request) -> LiveRuns:
    runs: LiveRuns = request.app.state.runs
    return runs


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


async def _not_found(request: Request, error: Exception) -> Response:
    return Response(to_json({"error": str(error)}), 404, media_type="application/json")


def listen(port: int | None) -> socket.socket:
    """On the loopback address: at `port`, or one that is free."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((LOOPBACK, port or 0))
    except OSError as error:
        found.close()
        raise LaunchError(
            f"--port {port}: {LOOPBACK}:{port} cannot be used ({error.strerror}); take another one, or leave "
            "--port out for one that is free"
        ) from None
    return found


def serve(
    root: Path,
    given: Iterable[Path] | None,
    port: int | None,
    ready: Callable[[str, int], Any],
) -> None:
    """Until a signal ends it. `ready` is called with the address and its port."""
    listening, token = listen(port), secrets.token_urlsafe(24)
    port = listening.getsockname()[1]
    listening.listen()
    runs = LiveRuns(root, given)
    threading.Thread(target=runs.read_newest, daemon=True, name="first reading").start()
    ready(f"http://{LOOPBACK}:{port}/{token}/", port)
    make_server(make_app(runs, token)).run(sockets=[listening])


class Server(uvicorn.Server):
    """Ends the streams, then waits for what is being answered."""

    def __init__(self, config: uvicorn.Config, ending: asyncio.Event) -> None:
        super().__init__(config)
        self.ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.ending.set()
        await super().shutdown(sockets)


def make_server(app: Guard) -> Server:
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,  # the first reading of a long run takes seconds
    )
    return Server(config, app.ending)
