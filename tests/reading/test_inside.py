"""A name that a file tells is a file of its own folder, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile import FEW, HOSTILE_TEXT
from muster.errors import UnreadableError
from muster.reading.inside import inside


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a link to a file outside, one to itself, and one to a file in there."""
    outer = tmp_path_factory.mktemp("outer")
    found = outer / "folder"
    (found / "part").mkdir(parents=True)
    (outer / "secret").write_text("")
    (found / "own").write_text("")
    (found / "part" / "away").symlink_to("../../secret")
    (found / "up").symlink_to("..")
    (found / "round").symlink_to("round")
    (found / "link").symlink_to("own")
    return found


@pytest.mark.parametrize("name", ["own", "part/new", "link", "a..b", "part/./x", " "])
def test_a_name_inside_is_taken(folder: Path, name: str) -> None:
    assert inside(folder, name, "index.json") == folder / name


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../secret", "part/../../secret", "part/away", "up/secret", "~/x", "", ".", "a\0b",
     None, 3, [], "round", "\ud800", "x" * 5000, "\x1b[31m/../.."],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(folder: Path, name: object) -> None:
    with pytest.raises(UnreadableError, match=r"^index.json: names the file ") as caught:
        inside(folder, name, "index.json")
    assert str(caught.value).isprintable()


@FEW
@given(
    st.lists(st.sampled_from(["..", ".", "/", "own", "part", "up", "away", "~", "\0"])),
    HOSTILE_TEXT,
)
def test_no_name_leads_outside(folder: Path, parts: list[str], end: str) -> None:
    try:
        found = inside(folder, "/".join([*parts, end]), "x")
    except UnreadableError:
        return
    assert found.resolve().is_relative_to(folder.resolve())


def test_the_blobs_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "hash").write_text("")
    (snapshot / "model.safetensors").symlink_to("../../blobs/hash")
    assert inside(snapshot, "model.safetensors", "x") == snapshot / "model.safetensors"


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="longer than 255 bytes"):
        inside(tmp_path, "x" * 256, "index.json")
