"""Amazon S3 and what speaks its protocol, and Google Cloud Storage: pyarrow's file systems.

Endpoint, region and credentials are those of the environment, as for every other tool of these stores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from muster.data.remote.retry import TemporaryError
from muster.data.remote.store import Kind, RemoteFile, matches, split_glob, visible
from muster.errors import DataError
from muster.urls import FROM

PIECE = 8 << 20
CLASSES = {"s3": "S3FileSystem", "gs": "GcsFileSystem"}
# No further try makes these succeed.
REFUSED = ("ACCESS_DENIED", "AccessDenied", "INVALID_ACCESS_KEY", "InvalidAccessKey", "SIGNATURE", "SignatureDoesNot",
    "TOKEN", "Token", "HTTP status 401", "HTTP status 403", "UNAUTHENTICATED", "PERMISSION_DENIED",
    "Could not create a OAuth2", "credentials")  # fmt: skip
MISSING = ("NO_SUCH_BUCKET", "NoSuchBucket", "NO_SUCH_KEY", "NOT_FOUND", "NotFound")


def require(kind: str) -> None:
    """pyarrow can be built without them."""
    try:
        import pyarrow.fs

        getattr(pyarrow.fs, CLASSES[kind])
    except ImportError as error:
        raise DataError(
            f"{kind}:// needs pyarrow with {CLASSES[kind]}, and this one is without ({error}); take the wheel of "
            "PyPI: pip install --force-reinstall pyarrow"
        ) from None


@cache
def file_system(
    kind: str, bucket: str, quick: bool, process: int, variables: tuple[tuple[str, str], ...]
) -> Any:
    """One per process, since connections must not be shared after a fork, and environment. `quick`: its library
    tries once, and does not wait for long."""
    import pyarrow.fs

    if kind == "gs":
        return pyarrow.fs.GcsFileSystem(**_gcs_options())
    options = _s3_options(bucket)
    if quick:
        once = pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=1)
        options |= {"connect_timeout": 4, "request_timeout": 8, "retry_strategy": once}
    return pyarrow.fs.S3FileSystem(**options)


def _gcs_options() -> dict[str, Any]:
    from datetime import timedelta

    options: dict[str, Any] = {"retry_time_limit": timedelta(seconds=5)}
    if endpoint := os.environ.get("STORAGE_EMULATOR_HOST"):
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        options |= {"scheme": parts.scheme, "endpoint_override": parts.netloc, "anonymous": True}
    return options


def _s3_options(bucket: str) -> dict[str, Any]:
    from pyarrow.fs import resolve_s3_region

    environ = os.environ
    options: dict[str, Any] = {"connect_timeout": 10, "request_timeout": 60}
    if environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "yes", "true"):
        options["anonymous"] = True
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        parts = urlsplit(endpoint)
        options |= {"scheme": parts.scheme, "endpoint_override": parts.netloc}
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    if region is None and endpoint is None:
        try:
            region = resolve_s3_region(bucket)
        except OSError:
            region = None  # of the profile, or the SDK's own; a missing bucket is found soon
    return options | ({"region": region} if region else {})


def _version(info: Any) -> str:
    """In seconds: asked for one object, S3 says no more."""
    return str(info.mtime_ns // 10**9)


class Bucket:
    """One bucket of either store."""

    def __init__(self, kind: str, bucket: str, *, quick: bool = False) -> None:
        require(kind)
        self.kind, self.name, self.quick = kind, bucket, quick

    @property
    def files(self) -> Any:
        names = [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "STORAGE_"))]
        variables = tuple((name, os.environ[name]) for name in sorted(names))
        return file_system(self.kind, self.name, self.quick, os.getpid(), variables)

    def find(self, spec: str) -> tuple[list[RemoteFile], Kind]:
        key = spec.partition("://")[2].partition("/")[2]
        folder, pattern = split_glob(key)
        if pattern is None and folder:
            exact = self._info(folder)
            if exact is not None:
                return [self._file(exact, folder.rpartition("/")[0])], "file"
        found = self.objects(folder)
        if pattern is None:
            return [file for file in found if visible(file.relative)], "folder"
        return [file for file in found if matches(file.relative, pattern)], "glob"

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        path = self._path(file.url.partition("://")[2].partition("/")[2])
        try:
            with self.files.open_input_file(path) as stream:
                self._refuse_changed(file, path)
                while offset < file.size:
                    piece = stream.read_at(min(PIECE, file.size - offset), offset)
                    if not piece:
                        raise TemporaryError("it ended early")
                    offset += len(piece)
                    yield piece
                self._refuse_changed(file, path)
        except OSError as error:
            raise explained(error, file.url, self.kind) from None

    def _refuse_changed(self, file: RemoteFile, path: str) -> None:
        """Its pieces are requests of their own: another object may have been written between two."""
        info = self.files.get_file_info(path)
        if (info.size, _version(info)) != (file.size, file.version):
            raise DataError(
                f"{file.url} has {info.size} bytes written at {info.mtime}, other than when it was listed: it has "
                "changed; start again when nothing writes to it"
            )

    def objects(self, folder: str) -> list[RemoteFile]:
        """Everything below a folder, hidden or not."""
        return [self._file(info, folder) for info in self._list(folder)]

    def write(self, path: Path, key: str) -> Iterator[int]:
        """Copy a file; yields the bytes of each piece."""
        url = f"{self.kind}://{self.name}/{key}"
        with (
            path.open("rb") as file,
            _explaining(url, self.kind, "written"),
            self.files.open_output_stream(self._path(key)) as out,
        ):
            while piece := file.read(PIECE):
                out.write(piece)
                yield len(piece)

    def delete(self, key: str) -> None:
        with _explaining(f"{self.kind}://{self.name}/{key}", self.kind, "removed"):
            self.files.delete_file(self._path(key))

    def _info(self, key: str) -> Any | None:
        from pyarrow.fs import FileType

        with _explaining(f"{self.kind}://{self.name}/{key}", self.kind):
            info = self.files.get_file_info(self._path(key))
        return info if info.type == FileType.File else None

    def _list(self, folder: str) -> list[Any]:
        from pyarrow.fs import FileSelector

        selector = FileSelector(self._path(folder), recursive=True, allow_not_found=True)
        with _explaining(f"{self.kind}://{self.name}/{folder}", self.kind):
            return [info for info in self.files.get_file_info(selector) if info.is_file]

    def _file(self, info: Any, folder: str) -> RemoteFile:
        key = info.path.partition("/")[2]
        relative = key[len(folder) :].lstrip("/") if folder else key
        return RemoteFile(f"{self.kind}://{self.name}/{key}", relative, info.size, _version(info))

    def _path(self, key: str) -> str:
        return f"{self.name}/{key}".rstrip("/")


class _explaining:
    def __init__(self, url: str, kind: str, verb: str = "read") -> None:
        self.url, self.kind, self.verb = url, kind, verb

    def __enter__(self) -> None: ...

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, OSError):
            raise explained(error, self.url, self.kind, self.verb) from None


def explained(error: OSError, url: str, kind: str, verb: str = "read") -> Exception:
    """Arrow's error as ours: temporary, unless its words say that another try is no use."""
    words = " ".join(str(error).split())
    if isinstance(error, FileNotFoundError) or any(word in words for word in MISSING):
        return DataError(f"{url} does not exist ({words})")
    if isinstance(error, PermissionError) or any(word in words for word in REFUSED):
        return DataError(
            f"{url} may not be {verb} ({words}); credentials are read from {FROM[kind]}"
        )
    return TemporaryError(words)
