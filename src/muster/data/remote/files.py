"""Remote files as files of this machine: found now, copied when they are needed, once per machine.

A copy lies in the user's cache, in a folder named after the file's address and its version: a changed
object gets another folder, and is never taken for the old one. One process copies while the others
of the machine wait. What is being copied has another name until it is whole; when a copy breaks off,
the next try goes on from its last byte.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

from muster.data import cache
from muster.data.remote.retry import Patience, TemporaryError, retried
from muster.data.remote.store import RemoteFile, Store
from muster.errors import DataError
from muster.urls import refuse_secrets, refuse_unknown, scheme

log = logging.getLogger(__name__)

AT_A_TIME = 8  # files
ORIGIN = ".origin.json"
_found: dict[Path, RemoteFile] = {}  # by their places on this machine


def store_of(spec: str, key: str) -> Store:
    """What reads this address. `key`: the recipe key that it came from."""
    try:
        refuse_unknown(spec)
        refuse_secrets(spec)
    except ValueError as error:
        raise DataError(f"{key}: {error}") from None
    kind = scheme(spec)
    if kind == "hf":
        from muster.data.remote.hub import Hub

        return Hub()
    if kind in ("http", "https"):
        from muster.data.remote.web import Web

        return Web()
    from muster.data.remote.bucket import Bucket

    assert kind is not None
    bucket = spec.partition("://")[2].partition("/")[0]
    if not bucket:
        raise DataError(f"{key}: {spec} names no bucket; expected {kind}://BUCKET/FOLDER")
    return Bucket(kind, bucket)


def find(spec: str, key: str, endings: tuple[str, ...]) -> tuple[list[Path], dict[Path, str]]:
    """Where the files of `spec` that end so lie on this machine once they are fetched, in the order that
    the same folder has on a disk; and, where `spec` is a place to pick them from, their paths below it."""
    store = store_of(spec, key)
    try:
        files, kind = retried(spec, lambda: store.find(spec))
    except DataError as error:
        raise DataError(f"{key}: {error}") from None
    if kind != "file":
        files = [file for file in files if f"/{file.relative}".endswith(endings)]
    if not files:
        what = " or ".join(ending.lstrip("/") for ending in endings)
        raise DataError(f"{key}: {spec} does not exist, or has no {what} file")
    files.sort(key=lambda file: file.relative.split("/"))
    places = {place(file): file for file in files}
    _found.update(places)
    return list(places), {
        path: file.relative for path, file in places.items()
    } if kind == "folder" else {}


def place(file: RemoteFile) -> Path:
    """`…/muster/remote/s3/bucket/folder/<version>/train.parquet`"""
    kind, _, path = file.url.partition("://")
    *folders, name = (_part(part) for part in path.partition("?")[0].split("/") if part)
    identity = json.dumps([file.url, file.size, file.version])
    version = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return cache.cache_folder().joinpath("remote", kind, *folders, version, name)


def fetch(paths: Sequence[Path]) -> None:
    """Copy those of `paths` that `find` named and that are not on this machine yet."""
    missing = [path for path in paths if path in _found and not _whole(path)]
    if not missing:
        return
    total = sum(_found[path].size for path in missing)
    log.info("copying %d remote file(s), %.1f MiB, to %s", len(missing), total / 2**20, missing[0])
    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="fetch") as pool:
        futures = [pool.submit(_fetch, path, _found[path]) for path in missing]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def url_of(path: Path) -> str:
    """The address that `path` was copied from; else the path itself."""
    return _found[path].url if path in _found else str(path)


def size_of(path: Path) -> int:
    """In bytes, whether it is on this machine yet or not."""
    return _found[path].size if path in _found else path.stat().st_size


def _fetch(path: Path, file: RemoteFile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with cache.exclusive_lock(path.parent) as alone:
            if not _whole(path):  # else another process of this machine was faster
                _copy(file, path, alone)
    except OSError as error:
        raise DataError(
            f"cannot copy {file.url} to {path.parent} ({error.strerror or error}); free some space, or set "
            "XDG_CACHE_HOME to a folder that has it"
        ) from None


def _whole(path: Path) -> bool:
    try:
        return path.stat().st_size == _found[path].size
    except OSError:
        return False


def _copy(file: RemoteFile, path: Path, alone: bool) -> None:
    """`alone`: no other process of this machine copies it too."""
    store = store_of(file.url, "data")
    writer = os.uname().nodename  # a cache may be shared by machines
    partial = path.with_name(f".{writer if alone else f'{writer}-{os.getpid()}'}.partial")
    have = partial.stat().st_size if partial.exists() else 0
    if file.size - have > (free := shutil.disk_usage(path.parent).free):
        raise DataError(
            f"{file.url} has {file.size / 2**20:.1f} MiB, and {free / 2**20:.1f} MiB are free in {path.parent}; free "
            "some space, or set XDG_CACHE_HOME to a folder that has it"
        )
    origin = {"url": file.url, "bytes": file.size, "version": file.version}
    path.with_name(ORIGIN).write_text(json.dumps(origin))
    download(store, file, path, partial)


def download(store: Store, file: RemoteFile, path: Path, partial: Path | None = None) -> None:
    """To `path`, which is there only when the copy is whole."""
    partial = partial or path.with_name(f".{path.name}.partial")
    patience, checks = Patience(file.url), Patience(file.url)
    while True:
        try:
            _append(store, file, partial, patience)
        except TemporaryError as error:
            patience.wait(error)
            continue
        if _matches_checksum(file, partial):
            break
        partial.unlink()
        checks.wait(TemporaryError("what was received does not match its checksum"))
    os.replace(partial, path)


def _append(store: Store, file: RemoteFile, partial: Path, patience: Patience) -> None:
    with partial.open("ab") as out:
        if out.tell() > file.size:
            out.truncate(0)
        have = out.tell() if out.tell() <= file.size else 0
        if have < file.size:
            for piece in store.read(file, have):
                out.write(piece)
                have += len(piece)
                patience.progress()
        out.flush()
        os.fsync(out.fileno())
    if have != file.size:
        raise TemporaryError(f"the connection ended after {have} of {file.size} bytes")


def _matches_checksum(file: RemoteFile, partial: Path) -> bool:
    """The store's own; true where it gives none."""
    kind, _, expected = file.digest.partition(":")
    if not expected:
        return True
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % file.size)
    with partial.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == expected


def _part(text: str) -> str:
    """A folder's or file's name that cannot lead out of the cache."""
    return quote(text, safe=" !#$&'()+,;=@[]^_`{}~%") if text not in (".", "..") else f"%{text}"
