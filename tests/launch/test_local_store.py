"""The folder of the store of ranks that are all on this machine."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from pathlib import Path

import pytest

from muster.launch import local_store


def aged(path: Path) -> Path:
    """As if its maker had not touched it for longer than a new one may be unlocked."""
    then = time.time() - 2 * local_store.NEW_S
    os.utime(path, (then, then), follow_symlinks=False)
    return path


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_this_users_alone_and_is_removed_at_the_end(root: Path) -> None:
    with local_store.folder() as made:
        assert made.parent == root
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        (made / "attempt").write_text("x")
    assert list(root.iterdir()) == []


def test_what_a_killed_run_left_is_removed_and_what_one_holds_is_not(root: Path) -> None:
    left = root / f"{local_store.PREFIX}left"
    left.mkdir()
    (left / "attempt").write_text("x")
    aged(left)
    fresh = root / f"{local_store.PREFIX}fresh"
    fresh.mkdir()
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    link = root / f"{local_store.PREFIX}link"
    link.symlink_to(elsewhere)
    aged(link)
    with local_store.folder() as held:
        aged(held)
        with local_store.folder():
            assert held.is_dir()
    assert sorted(p.name for p in root.iterdir()) == sorted([fresh.name, "elsewhere", link.name])
