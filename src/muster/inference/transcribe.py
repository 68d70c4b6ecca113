"""Audio files of any length to text with times, in bounded memory.

A file is cut into windows where it is quiet: no word spans a pause, so the texts of two windows
simply follow each other. Where half a window has no clear pause (noise, music, haste), neighbours
overlap instead, and their texts meet in the longest run of words that both result. Windows are thus
known before any is decoded, so they are decoded in batches, whether or not the model tells times.
What a model that does tell them left unfinished is result again from there.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from muster.data.speech import audio
from muster.data.speech.audio import Samples
from muster.data.speech.source import SpeechSample
from muster.data.speech.whisper_languages import language_code
from muster.data.speech.whisper_text import WhisperTokens
from muster.data.speech.windows import TICKS_PER_SECOND
from muster.errors import DataError
from muster.inference.load import Recogniser
from muster.inference.subtitles import Segment, Transcript, join
from muster.tasks.speech_ctc import SpeechCTC

BLOCK_S = 10  # read at a time
BATCH = 16
POOL = 4 * BATCH  # windows in memory; of 30 s, 123 MB
HOP_S, PAUSE_S = 0.01, 0.3
CLEAR_DB = 15.0  # a pause is at least this much quieter than the loud parts before it
OVERLAP = 1 / 6  # of the longest window, where there is no pause
MIN_WINDOW_S = 1.0  # shortest remainder that becomes a window
MIN_PROGRESS_S = 0.2  # minimum progress of a window
SPEECH_DB = 35.0  # below the maximum: where a window's speech begins and ends
MIN_CHECKED_S = 5.0  # of speech with hardly any text; shorter windows are not checked
SLOW = 2.0  # characters per second, in any script
LOOP = 2.4  # compression ratio above which a text is repetitive, as in OpenAI's code
SILENCE_DB = -80.0  # of full scale; Whisper hallucinates on silence
UNSPACED = ("zh", "yue", "ja", "th", "lo", "my", "bo", "km")


@dataclass(frozen=True)
class Window:
    start: float  # seconds into the file
    samples: Samples
    rate: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate

    @property
    def end(self) -> float:
        return self.start + self.seconds

    @property
    def hop(self) -> int:
        return round(HOP_S * self.rate)

    def parts(self) -> list[Window]:
        """Two or three smaller ones."""
        found = cut(iter([self.samples]), self.rate, self.seconds * 2 / 3)
        return [replace(window, start=self.start + window.start) for window in found]

    def after(self, seconds: float) -> Window:
        rest = self.samples[round(seconds * self.rate) :]
        return replace(self, start=self.start + seconds, samples=rest)


@dataclass(frozen=True)
class WindowTranscript:
    """Segments between `start` and `end`, in seconds of the file."""

    start: float
    end: float
    segments: list[Segment]


@dataclass
class _File:
    path: Path
    result: list[WindowTranscript] = field(default_factory=list)
    duration: float = 0.0
    error: DataError | None = None


def transcribe(recogniser: Recogniser, paths: Sequence[Path]) -> Iterator[Transcript | DataError]:
    """In the order given. For an unreadable file, an error that names it.

    Memory is bounded by `POOL` windows, however long or many the files are.
    """
    gap = _gap(recogniser)
    ended: list[_File] = []
    pool: list[tuple[_File, Window]] = []

    def finish() -> Iterator[Transcript | DataError]:
        for file, result in _transcribe_windows(recogniser, pool):
            file.result.append(result)
        for file in ended:
            found = Transcript(file.path, file.duration, merge(file.result, gap), gap)
            yield file.error or found
        pool.clear()
        ended.clear()

    for path in paths:
        file = _File(path)
        try:
            for window in cut(blocks(path, recogniser.rate), recogniser.rate, recogniser.longest):
                pool.append((file, window))
                file.duration = window.end
                if len(pool) == POOL:
                    yield from finish()
            if not file.duration:
                raise DataError(f"{path}: the clip has zero length")
        except DataError as error:
            file.error = error
        ended.append(file)
    yield from finish()


def blocks(path: Path, rate: int) -> Iterator[Samples]:
    """What `audio.decode` gives, `BLOCK_S` seconds at a time."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        with soundfile.SoundFile(str(path)) as file:
            yield from _resampled(file, rate, path)
    except (soundfile.LibsndfileError, RuntimeError, TypeError) as error:
        reason = getattr(error, "error_string", str(error)).removeprefix("Error : ").strip(" .")
        raise DataError(f"{path}: not readable as audio ({reason})") from None


def _resampled(file: soundfile.SoundFile, rate: int, path: Path) -> Iterator[Samples]:
    """Blocks overlap by a second on either side, which is dropped after resampling: the filter is
    shorter, and whole seconds keep its phase."""
    own = file.samplerate
    buffer, past = np.zeros(0, np.float32), 0
    last = False
    while not last:
        block = file.read(BLOCK_S * own, dtype="float32", always_2d=True)
        last = len(block) < BLOCK_S * own
        mono = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1)
        if not np.isfinite(mono).all():
            raise DataError(f"{path}: some samples are not finite numbers")
        buffer = np.concatenate([buffer, mono])
        if not len(buffer):
            return
        seconds = len(buffer) // own - 1
        found = audio.resample(buffer, own, rate)
        yield found[past * rate :] if last else found[past * rate : seconds * rate]
        buffer, past = buffer[(seconds - 1) * own :], 1


def cut(chunks: Iterator[Samples], rate: int, longest: float) -> Iterator[Window]:
    """Windows of at most `longest` seconds. The sizes of `chunks` do not matter."""
    most, least = round(longest * rate), round(min(MIN_WINDOW_S, longest / 4) * rate)
    buffer, start = np.zeros(0, np.float32), 0
    for chunk in chunks:
        buffer = np.concatenate([buffer, chunk])
        while len(buffer) >= most + least:
            window, next_start = _first(buffer, most, rate)
            yield Window(start / rate, window, rate)
            buffer, start = buffer[next_start:], start + next_start
    if len(buffer) > most:
        window, next_start = _first(buffer[: len(buffer) - least], most, rate)
        yield Window(start / rate, window, rate)
        buffer, start = buffer[next_start:], start + next_start
    if len(buffer):
        yield Window(start / rate, buffer, rate)


def _first(buffer: Samples, most: int, rate: int) -> tuple[Samples, int]:
    """The first window of `buffer`, and where the next one begins."""
    hop, overlap = round(HOP_S * rate), round(OVERLAP * most)
    loudness = levels(buffer[: most + round(PAUSE_S * rate)], hop, PAUSE_S)
    first, last = most // 2 // hop, min(most, len(buffer)) // hop
    loud = np.percentile(loudness[:last], 90)
    quietest = first + int(loudness[first:last].argmin())
    if loudness[quietest] <= loud - CLEAR_DB:
        return buffer[: quietest * hop], quietest * hop
    last -= overlap // 2 // hop
    middle = (first + int(loudness[first:last].argmin())) * hop
    return buffer[: middle + overlap // 2], middle - overlap // 2


def levels(samples: Samples, hop: int, seconds: float = HOP_S) -> NDArray[np.float64]:
    """Decibels of full scale per hop, over `seconds` around it."""
    count = len(samples) // hop
    power = np.square(samples[: count * hop], dtype=np.float64).reshape(count, hop).mean(1)
    width = round(seconds / HOP_S)
    if width > 1 and count:
        padded = np.pad(power, (width // 2, width - 1 - width // 2), mode="edge")
        power = np.convolve(padded, np.full(width, 1 / width), "valid")
    return 10 * np.log10(power + 1e-12)


def _transcribe_windows(
    recogniser: Recogniser, windows: Sequence[tuple[_File, Window]]
) -> Iterator[tuple[_File, WindowTranscript]]:
    """Every window, in batches of similar length; then unfinished and unreliable ones again."""
    whisper = not isinstance(recogniser.task, SpeechCTC)
    while windows:
        again: list[tuple[_File, Window]] = []
        for batch in _batches(recogniser, windows):
            found = _transcribe_batch(recogniser, [window for _, window in batch])
            for (file, window), result in zip(batch, found, strict=True):
                if whisper and is_unreliable(window, result):
                    again += [(file, part) for part in window.parts()]
                    continue
                yield file, result
                if result.end < window.end:
                    again.append((file, window.after(result.end - window.start)))
        windows = again


def is_unreliable(window: Window, result: WindowTranscript) -> bool:
    """Whisper's two failure modes: hardly any text for long speech, or repetition.

    Smaller windows fix both, without randomness as with a higher temperature.
    """
    if window.seconds <= MIN_CHECKED_S:
        return False
    text = " ".join(segment.text for segment in result.segments).encode()
    if len(text) > LOOP * len(zlib.compress(text)):
        return True
    loudness = levels(window.samples, window.hop, PAUSE_S)
    loud = loudness > loudness.max() - SPEECH_DB / 2
    for segment in result.segments:
        first, last = (round((t - window.start) / HOP_S) for t in (segment.start, segment.end))
        spoken = loud[first:last].sum() * HOP_S
        if spoken > MIN_CHECKED_S and len(segment.text) < SLOW * spoken:
            return True
    return False


def _batches(
    recogniser: Recogniser, windows: Sequence[tuple[_File, Window]]
) -> Iterator[list[tuple[_File, Window]]]:
    """If the output depends on padding, a batch has only windows of one padded length, so that results do
    not depend on the other windows."""
    lengths = np.array([window.seconds for _, window in windows])
    padded = recogniser.task.windows(lengths, training=False)
    if padded is None:
        padded = np.zeros(len(windows))
    order = np.lexsort((lengths, padded))
    for same in np.split(order, np.flatnonzero(np.diff(padded[order])) + 1):
        for start in range(0, len(same), BATCH):
            yield [windows[i] for i in same[start : start + BATCH]]


@torch.no_grad()
def _transcribe_batch(recogniser: Recogniser, windows: Sequence[Window]) -> list[WindowTranscript]:
    task, model = recogniser.task, recogniser.model
    samples = [SpeechSample(i, window.samples, "") for i, window in enumerate(windows)]
    batch = task.prepare(task.collate(samples, None).to(recogniser.device))
    if isinstance(task, SpeechCTC):
        texts = task.decode(*model(batch["features"], batch["frames"]))
        return [_single_segment(window, text) for window, text in zip(windows, texts, strict=True)]
    output = model(
        *task.generation_inputs(batch["features"], timestamps=recogniser.timestamps).args
    )
    if recogniser.timestamps:
        found = [
            split_by_timestamps(task.tokens, w, ids)
            for w, ids in zip(windows, output.tolist(), strict=True)
        ]
    else:
        found = [
            _single_segment(w, text) for w, text in zip(windows, task.decode(output), strict=True)
        ]
    silent = [levels(w.samples, w.hop).max(initial=-np.inf) < SILENCE_DB for w in windows]
    return [
        replace(result, segments=[]) if quiet else result
        for result, quiet in zip(found, silent, strict=True)
    ]


def _single_segment(window: Window, text: str) -> WindowTranscript:
    """One segment, from the first to the last hop that is not quiet."""
    loudness = levels(window.samples, window.hop)
    loud = np.flatnonzero(loudness > loudness.max(initial=-np.inf) - SPEECH_DB)
    first, last = (loud[0], loud[-1] + 1) if len(loud) else (0, 0)
    start, end = (window.start + int(n) * window.hop / window.rate for n in (first, last))
    segment = Segment(start, end, text)
    return WindowTranscript(window.start, window.end, [segment] if text.strip() else [])


def split_by_timestamps(tokens: WhisperTokens, window: Window, ids: list[int]) -> WindowTranscript:
    """Segments by timestamps. Two at the end mean that the rest is unfinished; so does a missing end
    token."""
    generated = ids[: ids.index(tokens.end)] if tokens.end in ids else ids
    marked = tokens.segments(generated)
    rest: float | None = None
    if len(generated) > 1 and min(generated[-2:]) >= tokens.first_timestamp:
        rest = (generated[-1] - tokens.first_timestamp) / TICKS_PER_SECOND
    elif tokens.end not in ids and len(marked) > 1 and marked[-1][1] is None:
        rest = marked.pop()[0]
    if rest is None or not MIN_PROGRESS_S <= rest <= window.seconds - MIN_WINDOW_S:
        rest = window.seconds
    segments = []
    for start, end, text in marked:
        end = min(window.seconds if end is None else end, window.seconds)
        if start < window.seconds:  # else it is in the padding
            segments.append(Segment(window.start + start, window.start + end, text.strip()))
    return WindowTranscript(window.start, window.start + rest, segments)


def merge(parts: Sequence[WindowTranscript], gap: str = " ") -> list[Segment]:
    """The segments of a whole file."""
    found: list[Segment] = []
    end = 0.0
    for part in sorted(parts, key=lambda part: part.end):
        if part.start < end - HOP_S:
            found = join(found, part.segments, part.start, end, gap)
        else:
            found += part.segments
        end = part.end
    return found


def _gap(recogniser: Recogniser) -> str:
    data = recogniser.task.recipe.data
    spoken = language_code(data.language) if data.language else None
    return "" if spoken in UNSPACED and data.speech_task == "transcribe" else " "
