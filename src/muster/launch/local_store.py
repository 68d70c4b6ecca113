"""The store of ranks that are all on this machine: a file that only this user can open, and no port.

It lies in memory where there is a /dev/shm: storage of a cluster may have no locks.
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
PREFIX, LOCK = "muster-store-", "lock"
NEW_S = 60.0  # a folder so young may not be locked yet
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def folder() -> Iterator[Path]:
    """A private folder, removed at the end, or by whoever makes the next one after a kill."""
    root = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    _remove_abandoned(root)
    made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    with (made / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


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
            with (left / LOCK).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
