"""The secret of a run, in a file that only its owner can read."""

from __future__ import annotations

import os
import re

import pytest

from muster.errors import LaunchError
from muster.launch import secret


@pytest.fixture(autouse=True)
def no_secret_of_the_user(monkeypatch):
    monkeypatch.delenv(secret.VARIABLE, raising=False)


def test_other_nodes_read_what_node_0_made_and_no_other_user_can(tmp_path):
    made = secret.make(tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert secret.read(tmp_path) == made
    assert secret.make(tmp_path) != made
    secret.remove(tmp_path, made)
    assert secret.read(tmp_path), "another start's stays"
    secret.remove(tmp_path, secret.read(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    secret.make(tmp_path)
    (tmp_path / secret.FILE).chmod(0o640)
    with pytest.raises(LaunchError, match=r"can be read by others \(mode 0640\).*MUSTER_SECRET"):
        secret.read(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
def test_a_secret_of_another_user_is_refused(tmp_path):
    secret.make(tmp_path)
    os.chown(tmp_path / secret.FILE, 65534, 65534)
    with pytest.raises(LaunchError, match="belongs to user 65534, and this node runs as user 0"):
        secret.read(tmp_path)


def test_a_link_a_folder_a_pipe_or_another_file_is_no_secret(tmp_path):
    path = tmp_path / secret.FILE
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(bytes(secret.BYTES))
    elsewhere.chmod(0o600)
    for make, words in (
        (lambda: None, "cannot be read (No such file"),
        (lambda: path.symlink_to(elsewhere), "cannot be read (Too many levels of symbolic links)"),
        (lambda: os.mkfifo(path, 0o600), "is no secret of muster's"),
        (lambda: path.write_bytes(b"short"), "is no secret of muster's"),
        (lambda: path.write_bytes(bytes(secret.BYTES + 1)), "is no secret of muster's"),
    ):
        make()
        if path.is_file() and not path.is_symlink():
            path.chmod(0o600)
        with pytest.raises(LaunchError, match=re.escape(words)):
            secret.read(tmp_path)
        path.unlink(missing_ok=True)


def test_the_users_own_secret_is_part_of_it_and_then_the_file_may_be_read_by_others(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(secret.VARIABLE, "the same on every node")
    made = secret.make(tmp_path)
    (tmp_path / secret.FILE).chmod(0o644)
    assert secret.read(tmp_path) == made
    monkeypatch.setenv(secret.VARIABLE, "another one, by mistake")
    assert secret.read(tmp_path) != made


def test_a_secret_that_can_be_guessed_is_refused(monkeypatch):
    monkeypatch.setenv(secret.VARIABLE, "hunter2")
    with pytest.raises(LaunchError, match="MUSTER_SECRET has 7 characters, which can be guessed"):
        secret.from_environment()
