"""Mistakes word by word, and the recordings that are kept of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from pyarrow import ArrowInvalid

from muster.errors import DataError
from muster.page.build import read_document
from muster.page.examples import differences, open_audio
from muster.tasks.base import Example
from muster.worker.recordings import keep_recordings
from page import synthetic

RATE = 16_000


class Clips:
    """Clip i lasts i tenths of a second."""

    def peek(self, index: int) -> Any:
        if index == 7:
            raise DataError("clip 7 cannot be decoded")
        if index == 8:
            raise ArrowInvalid("the parquet file of clip 8 is cut short")
        return np.full(index * RATE // 10, 0.25, np.float32)


def mistakes(*ids: int) -> list[Example]:
    return [Example(i, "one two", "one", 1) for i in ids]


def test_the_worst_recordings_are_kept_and_can_be_played(tmp_path: Path) -> None:
    assert keep_recordings(tmp_path, Clips(), mistakes(5, 3, 4), 2, RATE) == {"5": 0.5, "3": 0.3}
    samples, rate = soundfile.read(tmp_path / "mistakes" / "5.flac")
    assert (len(samples), rate) == (8000, RATE)
    assert np.allclose(samples, 0.25, atol=1e-4)


def test_those_of_an_earlier_end_are_removed(tmp_path: Path) -> None:
    keep_recordings(tmp_path, Clips(), mistakes(5), 10, RATE)
    keep_recordings(tmp_path, Clips(), mistakes(6), 10, RATE)
    assert [path.name for path in (tmp_path / "mistakes").iterdir()] == ["6.flac"]


def test_a_clip_that_cannot_be_read_ends_it_without_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert keep_recordings(tmp_path, Clips(), mistakes(2, 7, 3), 10, RATE) == {"2": 0.2}
    assert "clip 7 cannot be decoded" in caplog.text
    assert keep_recordings(tmp_path, Clips(), mistakes(3, 8), 10, RATE) == {"3": 0.3}
    assert "clip 8 is cut short" in caplog.text


def test_data_without_audio_keeps_none(tmp_path: Path) -> None:
    assert keep_recordings(tmp_path, object(), mistakes(1), 10, RATE) == {}
    assert not (tmp_path / "mistakes").exists()


def test_a_recording_is_found_by_its_number_alone(tmp_path: Path) -> None:
    keep_recordings(tmp_path, Clips(), mistakes(5), 10, RATE)
    with open_audio(tmp_path, "5") as file:
        assert file.read() == (tmp_path / "mistakes" / "5.flac").read_bytes()
    for name in ("../mistakes/5", "6", "²", "5" * 5000):
        assert open_audio(tmp_path, name) is None


def test_a_recording_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    for run in (tmp_path / "file", tmp_path / "folder"):
        run.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "0.flac").write_bytes(b"secret")
    (tmp_path / "file" / "mistakes").mkdir()
    (tmp_path / "file" / "mistakes" / "0.flac").symlink_to(outside / "0.flac")
    (tmp_path / "folder" / "mistakes").symlink_to(outside)
    assert open_audio(tmp_path / "file", "0") is None
    assert open_audio(tmp_path / "folder", "0") is None


def test_differences_are_runs_of_words() -> None:
    assert differences("five past ten in the morning", "nine past ten the the morning") == [
        {"op": "sub", "ref": "five", "hyp": "nine"},
        {"op": "same", "ref": "past ten", "hyp": "past ten"},
        {"op": "sub", "ref": "in", "hyp": "the"},
        {"op": "same", "ref": "the morning", "hyp": "the morning"},
    ]
    assert differences("a b", "") == [{"op": "del", "ref": "a b", "hyp": ""}]
    assert differences("", "a b") == [{"op": "ins", "ref": "", "hyp": "a b"}]
    assert differences("", " ") == []


def test_a_finished_run_shows_its_mistakes_with_their_recordings(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=1, steps=5, state="finished")
    results = path / "training_results.json"
    keep_recordings(path, Clips(), mistakes(17), 10, RATE)
    results.write_text(json.dumps(json.loads(results.read_text()) | {"recordings": {"17": 1.7}}))
    first, second = read_document(path)["examples"]["mistakes"]
    assert (first["id"], first["audio"], first["seconds"]) == ("17", True, 1.7)
    assert (second["id"], second["audio"], second["seconds"]) == ("40", False, None)
    assert first["words"] == 6
