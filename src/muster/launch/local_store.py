"""The store of ranks that are all on this machine: a file that only this user can open, and no port.

It lies in the folder for temporary files, since storage of a cluster may have no locks. Not in /dev/shm: systemd
empties that for a user who logs out, also under a run that goes on. Its lock keeps systemd-tmpfiles away too.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from muster.launch.cluster import RankInfo

VARIABLE = "MUSTER_STORE"  # the folder, in the environment of the ranks
PREFIX = "muster-store-"
NEW_S = 60.0  # a folder so young may not be locked yet


@contextmanager
def folder() -> Iterator[Path]:
    """A private folder, removed at the end, or by whoever makes the next one after a kill."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    made = Path(tempfile.mkdtemp(prefix=PREFIX))
    with _opened(made) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield held
    finally:
        os.close(held)


def of_rank(rank_info: RankInfo, timeout_s: float) -> Any:
    """The store of this attempt's ranks; None where they have none of this kind."""
    if VARIABLE not in os.environ or rank_info.world > rank_info.local_world:
        return None
    # A file for each attempt: a rank that is killed while it writes leaves half an entry.
    attempt = hashlib.sha256(rank_info.store_prefix.encode()).hexdigest()[:16]
    store = dist.FileStore(str(Path(os.environ[VARIABLE], attempt)), rank_info.world)  # type: ignore[attr-defined]
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def _remove_abandoned(root: Path) -> None:
    for left in root.glob(f"{PREFIX}*"):
        with suppress(OSError):
            facts = left.lstat()
            if facts.st_uid != os.geteuid() or time.time() - facts.st_mtime < NEW_S:
                continue
            with _opened(left) as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
