"""Transcripts with times: joining two that overlap, and writing text, SubRip, WebVTT or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby, pairwise, product
from pathlib import Path
from typing import Literal, get_args

from muster import writing
from muster.errors import MusterError

Format = Literal["text", "srt", "vtt", "json"]
SUFFIXES = {form: "txt" if form == "text" else form for form in get_args(Format)}


@dataclass(frozen=True)
class Segment:
    """Text with its start and end, in seconds of the file."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Transcript:
    file: Path
    duration: float  # seconds
    segments: list[Segment]
    gap: str = " "  # between segments; nothing in scripts without spaces

    @property
    def text(self) -> str:
        return self.gap.join(segment.text for segment in self.segments)


@dataclass(frozen=True)
class _Word:
    """Times are interpolated within its segment."""

    text: str
    start: float
    end: float
    segment: int

    @property
    def time(self) -> float:
        return (self.start + self.end) / 2


def join(
    left: Sequence[Segment], right: Sequence[Segment], begin: float, end: float, gap: str = " "
) -> list[Segment]:
    """Join the transcripts of two windows that overlap from `begin` to `end`.

    They are joined in the middle of the longest run of words that both have there, since words at the
    edge of a window may be wrong; without one, in the middle of the overlap.
    """
    found = [segment for segment in left if segment.end < begin - (end - begin)]
    before, after = _words(left[len(found) :], gap), _words(right, gap)
    i, j = _seam(before, after, begin, end)
    found += _segments(before[:i], gap)
    for segment in _segments(after[j:], gap):
        start = max(segment.start, found[-1].end if found else 0.0)
        found.append(Segment(start, max(segment.end, start), segment.text))
    return found


def _words(segments: Sequence[Segment], gap: str) -> list[_Word]:
    found = []
    for number, segment in enumerate(segments):
        words = segment.text.split() if gap else list(segment.text)
        ends = list(accumulate(map(len, words), initial=0))
        times = [segment.start + n / ends[-1] * (segment.end - segment.start) for n in ends]
        for word, (start, end) in zip(words, pairwise(times), strict=True):
            found.append(_Word(word, start, end, number))
    return found


def _seam(
    before: Sequence[_Word], after: Sequence[_Word], begin: float, end: float
) -> tuple[int, int]:
    """How many words of `before` to keep, and how many of `after` to leave out.

    Times are estimates: a run may lie up to an overlap apart in the two, a lone word half as far.
    """
    length = end - begin
    middle, reach = (begin + end) / 2, length / 2
    runs: dict[tuple[int, int], int] = {}
    best, seam = (0, 0.0), None
    for i, j in product(range(len(before)), range(len(after))):
        apart = abs(before[i].time - after[j].time)
        if before[i].time < begin - reach or after[j].time > end + reach or apart > length:
            continue
        word = _plain(before[i].text)
        if not word or word != _plain(after[j].text):
            continue
        size = runs[i, j] = runs.get((i - 1, j - 1), 0) + 1
        if (size, -apart) > best and (size > 1 or apart <= reach):
            best, seam = (size, -apart), (i - size // 2, j - size // 2)
    if seam is not None:
        return seam
    return sum(word.time < middle for word in before), sum(word.time < middle for word in after)


def _plain(word: str) -> str:
    return "".join(filter(str.isalnum, word)).casefold()


def _segments(words: Sequence[_Word], gap: str) -> list[Segment]:
    found = []
    for _, group in groupby(words, key=lambda word: word.segment):
        kept = list(group)
        text = gap.join(word.text for word in kept)
        found.append(Segment(kept[0].start, kept[-1].end, text))
    return found


def render(transcript: Transcript, form: Format) -> str:
    """The whole file, line end included."""
    match form:
        case "text":
            return transcript.text + "\n"
        case "srt":
            cues = [
                f"{number}\n{_span(s, ',')}\n{_one_line(s.text)}\n"
                for number, s in enumerate(transcript.segments, 1)
            ]
            return "\n".join(cues)
        case "vtt":
            cues = [f"{_span(s, '.')}\n{_escaped(s.text)}\n" for s in transcript.segments]
            return "\n".join(["WEBVTT\n", *cues])
        case "json":
            document = {
                "file": str(transcript.file),
                "duration": round(transcript.duration, 3),
                "text": transcript.text,
                "segments": [
                    asdict(s) | {"start": round(s.start, 3), "end": round(s.end, 3)}
                    for s in transcript.segments
                ],
            }
            return json.dumps(document, ensure_ascii=False) + "\n"


def targets(files: Sequence[Path], folder: Path, form: Format, force: bool) -> list[Path]:
    """Where each file's transcript goes. Refuses to write over anything unless `force`."""
    found: dict[Path, Path] = {}
    for file in files:
        target = folder / f"{file.stem}.{SUFFIXES[form]}"
        if target in found:
            raise MusterError(
                f"{found[target]} and {file} would both be written to {target}; give them one after "
                "the other, with an --output each"
            )
        if target.exists() and not force:
            raise MusterError(f"{target} exists; --force writes over it")
        found[target] = file
    return list(found)


def write(target: Path, text: str) -> None:
    """Whole or not at all; its folder is made where it is missing."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        writing.write(target, text)
    except OSError as error:
        raise MusterError(f"{target} cannot be written ({error.strerror})") from None


def _span(segment: Segment, point: str) -> str:
    return f"{_clock(segment.start, point)} --> {_clock(segment.end, point)}"


def _clock(seconds: float, point: str) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02d}:{minute:02d}:{second:02d}{point}{milliseconds:03d}"


def _one_line(text: str) -> str:
    """An empty line would end the cue, an arrow make it look like its times."""
    return " ".join(text.split()).replace("-->", "->")


def _escaped(text: str) -> str:
    return _one_line(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
