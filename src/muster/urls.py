"""Addresses of data and checkpoints that are not files of this machine: `s3://bucket/folder` and the like.

Credentials come from the environment of the process. They are refused inside an address, since a recipe is
written into run directories, checkpoints and logs.
"""

from __future__ import annotations

import difflib
import re
from urllib.parse import parse_qsl, urlsplit

SCHEMES = ("s3", "gs", "hf", "https", "http")
WRITABLE = ("s3", "gs")
FROM = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or what `gcloud auth application-default login` wrote",
    "hf": "HF_TOKEN, or what `hf auth login` wrote",
    "https": "~/.netrc, or the file that NETRC names",
    "http": "~/.netrc, or the file that NETRC names",
}
_SECRET = re.compile(
    r"x-(amz|goog|ms)-|sig|token|secret|passw|credential|auth|key|policy|expires|jwt", re.IGNORECASE
)


def scheme(spec: str) -> str | None:
    """`s3` of `s3://bucket`; None for a path, a glob, or `embedded:NAME`."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", spec)
    return found[1].lower() if found else None


def is_remote(spec: str) -> bool:
    return scheme(spec) is not None


def refuse_secrets(spec: str) -> None:
    """A ValueError, which does not repeat them."""
    kind = scheme(spec)
    if kind is None:
        return
    parts = urlsplit(spec)
    where = FROM.get(kind, "the environment")
    if "@" in parts.netloc:
        raise ValueError(
            f"the {kind}:// address has a user or a password in it, which would be written into the run's files; "
            f"leave them out: credentials are read from {where}"
        )
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    if secret := next((name for name in names if _SECRET.search(name)), None):
        raise ValueError(
            f"the {kind}:// address is signed (its query has {secret!r}), and would be written into the run's "
            f"files; leave the query out: credentials are read from {where}"
        )


def refuse_unknown(spec: str) -> None:
    """A ValueError where nothing reads such addresses."""
    kind = scheme(spec)
    if kind is None or kind in SCHEMES:
        return
    shown = f"{kind}://"
    if kind == "file":
        raise ValueError("leave out file://: a file of this machine is named by its path")
    near = difflib.get_close_matches(kind, SCHEMES, n=1, cutoff=0.4)
    hint = f"; nearest is {near[0]}://" if near else ""
    known = ", ".join(f"{name}://" for name in SCHEMES)
    raise ValueError(f"nothing reads {shown} addresses{hint}; there are {known} and paths")
