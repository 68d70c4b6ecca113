"""Datasets of the Hugging Face Hub: `hf://datasets/OWNER/NAME[@REVISION][/folder, file or glob]`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from muster.data.remote import web
from muster.data.remote.retry import TemporaryError
from muster.data.remote.store import Kind, RemoteFile, matches, split_glob, visible
from muster.errors import DataError
from muster.urls import FROM

FORM = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")


class Hub:
    def find(self, spec: str) -> tuple[list[RemoteFile], Kind]:
        """At one commit, which the revision (`main` unless it is given) points to now."""
        repo, revision, path = parse(spec)
        folder, pattern = split_glob(path)
        commit, entries = _tree(spec, repo, revision)
        listed = (self._file(repo, commit, entry, folder) for entry in entries)
        found = [file for file in listed if file is not None]
        exact = [file for file in found if file.url == f"{_base(repo)}/{folder}"]
        if pattern is None and exact:
            return exact, "file"
        if pattern is None:
            return [file for file in found if visible(file.relative)], "folder"
        return [file for file in found if matches(file.relative, pattern)], "glob"

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        from huggingface_hub.utils import build_hf_headers

        login = {name: text for name, text in build_hf_headers().items() if name == "authorization"}
        yield from web.read_from(file, offset, login)

    def _file(self, repo: str, commit: str, entry: object, folder: str) -> RemoteFile | None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.hf_api import RepoFile

        if not isinstance(entry, RepoFile):
            return None
        inside = entry.path == folder or not folder or entry.path.startswith(f"{folder}/")
        if not inside:
            return None
        name = entry.path.rpartition("/")[2]
        relative = name if entry.path == folder else entry.path[len(folder) :].lstrip("/")
        digest = f"sha256:{entry.lfs.sha256}" if entry.lfs else f"git:{entry.blob_id}"
        address = hf_hub_url(
            repo, entry.path, repo_type="dataset", revision=commit, endpoint=_endpoint()
        )
        url = f"{_base(repo)}/{entry.path}"
        return RemoteFile(url, relative, entry.size, digest, digest, address)


def parse(spec: str) -> tuple[str, str | None, str]:
    """Repository, revision and path."""
    found = FORM.fullmatch(spec)
    if found is None:
        raise DataError(
            f"{spec}: expected hf://datasets/OWNER/NAME, and where needed @REVISION and /a/folder after it"
        )
    return found[1], found[2], found[3] or ""


def _endpoint() -> str | None:
    """Of another Hub than huggingface.co, if the environment names one."""
    return os.environ.get("HF_ENDPOINT")


def _base(repo: str) -> str:
    return f"hf://datasets/{repo}"


def _tree(spec: str, repo: str, revision: str | None) -> tuple[str, list[object]]:
    from huggingface_hub import HfApi, errors

    try:
        api = HfApi(endpoint=_endpoint())
        commit = str(api.dataset_info(repo, revision=revision).sha)
        tree = api.list_repo_tree(repo, repo_type="dataset", revision=commit, recursive=True)
        return commit, list(tree)
    except errors.OfflineModeIsEnabled:
        raise DataError(
            f"{spec}: HF_HUB_OFFLINE is set; unset it, or name a copy on disk"
        ) from None
    except errors.RevisionNotFoundError:
        raise DataError(f"{spec}: the dataset {repo} has no revision {revision}") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in web.BUSY:
            raise TemporaryError(f"HTTP {status} of the Hub") from None
        raise DataError(
            f"{spec}: the dataset {repo} does not exist or may not be read (HTTP {status}); credentials are read "
            f"from {FROM['hf']}"
        ) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in (
            "httpx",
            "httpcore",
            "httpx2",
            "httpcore2",
        ):
            raise
        raise TemporaryError(f"no connection to the Hub ({error})") from None
