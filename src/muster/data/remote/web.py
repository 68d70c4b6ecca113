"""Files of web servers, read from any byte on where the server can do that."""

from __future__ import annotations

import base64
import http.client
import netrc
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from muster.data.remote.retry import TemporaryError
from muster.data.remote.store import Kind, RemoteFile
from muster.errors import DataError
from muster.reading.names import number
from muster.urls import FROM

PIECE = 1 << 20
TIMEOUT_S = 60.0  # without a byte
BUSY = (408, 425, 429, 500, 502, 503, 504)
REFUSED = (401, 403, 407)


class Web:
    """`https://` and `http://`. Nothing lists a web server's files, so each address is one file."""

    def find(self, spec: str) -> tuple[list[RemoteFile], Kind]:
        name = unquote(urlsplit(spec).path).rpartition("/")[2]
        if not name:
            raise DataError(
                f"{spec} names a folder, and a web server does not list its files; name one file, or several: "
                "data.train=[{path: https://…},{path: https://…}]"
            )
        with opened(spec, {"Range": "bytes=0-0"}, _login(spec)) as answer:
            size, version = _size(answer, spec), _version(answer)
        return [RemoteFile(spec, name, size, version)], "file"

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        yield from read_from(file, offset, _login(file.url))


def read_from(file: RemoteFile, offset: int, login: Mapping[str, str]) -> Iterator[bytes]:
    """A server without ranges sends the whole file, whose first bytes are skipped."""
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    with opened(file.address or file.url, headers, login) as answer:
        size, version = _size(answer, file.url), _version(answer)
        if size != file.size or (not file.digest and version != file.version):
            raise DataError(
                f"{file.url} has changed while it was read: {file.size} bytes ({file.version or 'no ETag'}), now "
                f"{size} ({version or 'no ETag'}); start again when nothing writes to it"
            )
        skip = offset if answer.status == 200 else 0
        while piece := answer.read(PIECE):
            if skip < len(piece):
                yield piece[skip:]
            skip = max(0, skip - len(piece))


@contextmanager
def opened(
    url: str, headers: Mapping[str, str], login: Mapping[str, str]
) -> Iterator[http.client.HTTPResponse]:
    """The answer; errors on the way are temporary, unless the server's answer says otherwise."""
    agent = {"User-Agent": "muster", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers={**agent, **headers})
    for name, value in login.items():
        request.add_unredirected_header(name, value)  # another host must not see them
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        error.close()
        raise _refusal(error, url) from None
    except urllib.error.URLError as error:
        raise TemporaryError(f"no connection ({error.reason})") from None
    except (OSError, http.client.HTTPException) as error:
        raise TemporaryError(f"the connection broke ({error or type(error).__name__})") from None


def _refusal(error: urllib.error.HTTPError, url: str) -> Exception:
    words = f"HTTP {error.code} {error.reason}"
    if error.code in BUSY:
        asked = error.headers.get("Retry-After", "")
        return TemporaryError(words, float(asked) if asked.isdecimal() else 0.0)
    if error.code in REFUSED:
        kind = urlsplit(url).scheme
        return DataError(f"{url} may not be read ({words}); credentials are read from {FROM[kind]}")
    if error.code in (404, 410):
        return DataError(f"{url} does not exist ({words})")
    return DataError(f"{url} cannot be read ({words})")


def _size(answer: http.client.HTTPResponse, url: str) -> int:
    """Of the whole file."""
    if answer.status == 206:
        found = re.fullmatch(
            r"bytes [0-9]+-[0-9]+/([0-9]{1,18})", answer.headers.get("Content-Range", "")
        )
        if found:
            return int(found[1])
    elif (length := number(answer.headers.get("Content-Length", ""), digits=18)) is not None:
        return length
    raise DataError(
        f"{url}: the server does not say how long the file is, so that a broken-off one could not be told from a "
        "whole one; copy it to a disk or a bucket"
    )


def _version(answer: http.client.HTTPResponse) -> str:
    tag = answer.headers.get("ETag", "").removeprefix("W/")
    return tag or answer.headers.get("Last-Modified", "")


def _login(url: str) -> dict[str, str]:
    """Of `~/.netrc`, or the file that NETRC names."""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    host: Any = urlsplit(url).hostname
    try:
        found = netrc.netrc(path).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return {}
    if found is None:
        return {}
    pair = f"{found[0]}:{found[2]}".encode()
    return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}
