"""Transcripts with times: their files, and two that overlap."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from muster.errors import MusterError
from muster.inference.subtitles import Segment, Transcript, join, render, targets, write

TALK = Transcript(
    Path("a/talk.wav"),
    7384.25,
    [
        Segment(0.0, 2.5, "Good morning."),
        Segment(59.9996, 3599.9994, "Q&A: is 1 < 2\n\n--> or not?"),
        Segment(7383.0, 7384.25, "Schön"),
    ],
)


def test_subrip_numbers_its_cues_and_writes_commas():
    assert render(TALK, "srt") == (
        "1\n00:00:00,000 --> 00:00:02,500\nGood morning.\n\n"
        "2\n00:01:00,000 --> 00:59:59,999\nQ&A: is 1 < 2 -> or not?\n\n"
        "3\n02:03:03,000 --> 02:03:04,250\nSchön\n"
    )


def test_webvtt_has_a_header_points_and_escapes():
    assert render(TALK, "vtt") == (
        "WEBVTT\n\n"
        "00:00:00.000 --> 00:00:02.500\nGood morning.\n\n"
        "00:01:00.000 --> 00:59:59.999\nQ&amp;A: is 1 &lt; 2 --&gt; or not?\n\n"
        "02:03:03.000 --> 02:03:04.250\nSchön\n"
    )


def test_json_holds_everything_and_text_only_the_words():
    document = json.loads(render(TALK, "json"))
    assert list(document) == ["file", "duration", "text", "segments"]
    assert document["file"] == "a/talk.wav"
    assert document["duration"] == 7384.25
    assert document["segments"][0] == {"start": 0.0, "end": 2.5, "text": "Good morning."}
    assert document["segments"][1]["start"] == 60.0
    assert render(TALK, "text") == document["text"] + "\n"
    assert document["text"].startswith("Good morning. Q&A")


def test_nothing_said_is_still_a_file_of_its_format():
    silent = Transcript(Path("s.wav"), 1.0, [])
    assert [render(silent, form) for form in ("text", "srt", "vtt")] == ["\n", "", "WEBVTT\n"]
    assert json.loads(render(silent, "json"))["segments"] == []


def test_no_file_is_written_over_or_shared_by_two(tmp_path):
    files = [Path("a/x.wav"), Path("b/y.flac")]
    assert targets(files, tmp_path, "text", False) == [tmp_path / "x.txt", tmp_path / "y.txt"]
    (tmp_path / "y.srt").write_text("mine")
    with pytest.raises(MusterError, match=r"y\.srt exists; --force"):
        targets(files, tmp_path, "srt", False)
    assert targets(files, tmp_path, "srt", True)[1] == tmp_path / "y.srt"
    with pytest.raises(MusterError, match=r"a/x\.wav and b/x\.mp3 .*x\.vtt"):
        targets([Path("a/x.wav"), Path("b/x.mp3")], tmp_path, "vtt", True)


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    write(tmp_path / "new" / "x.txt", "héllo\n")
    assert (tmp_path / "new" / "x.txt").read_text("utf-8") == "héllo\n"
    with pytest.raises(MusterError, match=r"x\.txt cannot be written"):
        write(tmp_path / "new" / "x.txt" / "x.txt", "beneath a file")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.txt"]
    assert (tmp_path / "new" / "x.txt").read_text("utf-8") == "héllo\n"


def speech(seed: int, count: int = 120) -> list[tuple[float, str]]:
    """Words and when they are said, some of them again and again, at an uneven pace."""
    rng = random.Random(seed)
    known = ["the", "the", "of", "very", "no", *(f"word{n}" for n in range(60))]
    time, found = 0.0, []
    for _ in range(count):
        found.append((time, rng.choice(known)))
        time += rng.uniform(0.2, 0.6)
    return found


def reading(words: list[tuple[float, str]], begin: float, end: float) -> list[Segment]:
    """What a model hears from `begin` to `end`: segments of seven words, with case and commas of
    their own, and at the edges words that nobody said."""
    heard = [(time, word) for time, word in words if begin <= time and time + 0.2 < end]
    parts = [heard[i : i + 7] for i in range(0, len(heard), 7)]
    texts = [" ".join(word for _, word in part).capitalize() + "," for part in parts]
    if begin:
        texts[0] = "Uh " + texts[0]
    if end < words[-1][0]:
        texts[-1] += " thank"
    return [
        Segment(part[0][0], part[-1][0] + 0.2, text)
        for part, text in zip(parts, texts, strict=True)
    ]


def plain(segments: list[Segment]) -> list[str]:
    return " ".join(segment.text for segment in segments).lower().replace(",", "").split()


@pytest.mark.parametrize("untimed", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_no_word_is_lost_or_doubled_where_two_readings_meet(seed, untimed):
    words = speech(seed)
    left, right = reading(words, 0.0, 30.0), reading(words, 25.0, 60.0)
    if untimed:
        left, right = (
            [Segment(s[0].start, s[-1].end, " ".join(part.text for part in s))]
            for s in (left, right)
        )
    joined = join(left, right, 25.0, 30.0)
    assert plain(joined) == [word for _, word in words]
    assert all(a.end <= b.start + 1e-9 for a, b in pairwise(joined))
    assert all(segment.start <= segment.end for segment in joined)


def test_readings_that_share_no_word_meet_in_the_middle():
    left = [Segment(0.0, 10.0, "a b c d e f g h i j")]
    right = [Segment(6.0, 16.0, "k l m n o p q r s t")]
    assert plain(join(left, right, 6.0, 10.0)) == list("abcdefgh") + list("mnopqrst")
    assert join(left, [], 6.0, 10.0) == [Segment(0.0, 8.0, "a b c d e f g h")]


def test_scripts_without_spaces_meet_in_characters():
    left, right = [Segment(0.0, 8.0, "今天天气很好我们")], [Segment(5.0, 12.0, "很好我们去公园")]
    (first, second) = join(left, right, 5.0, 8.0, "")
    assert first.text + second.text == "今天天气很好我们去公园"
