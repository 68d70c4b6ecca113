"""Numbers in names that anybody may have chosen."""

from pathlib import Path

import pytest

from muster.errors import UnreadableError
from muster.reading.files import open_no_link
from muster.reading.names import number


@pytest.mark.parametrize("text", ["²", "٣", "", "-1", "+1", "1_0", " 1", "1\n", "9" * 5000, "x"])
def test_what_is_no_number_is_none(text: str) -> None:
    assert number(text) is None


def test_a_number_has_as_many_digits_as_are_asked_for() -> None:
    assert (number("017"), number("1" * 10), number("1" * 10, digits=15)) == (17, None, 1111111111)


def test_a_file_is_opened_through_no_link_below_its_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "ranks").mkdir(parents=True)
    (run / "ranks" / "0.jsonl").write_text("x")
    (tmp_path / "latest").symlink_to(run)  # the folder itself may be one
    (run / "link").symlink_to(run / "ranks" / "0.jsonl")
    (run / "moved").symlink_to(run / "ranks")
    for start in (run, tmp_path / "latest"):
        with open_no_link(start / "ranks" / "0.jsonl", folders=1) as file:
            assert file.read() == b"x"
        for refused, folders in (("link", 0), ("moved/0.jsonl", 1), ("none", 0)):
            with pytest.raises(OSError, match="Errno"):
                open_no_link(start / refused, folders)
        with pytest.raises((OSError, UnreadableError)):
            open_no_link(start / "ranks")
