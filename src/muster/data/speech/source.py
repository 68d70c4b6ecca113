"""Speech samples: clips with their text, filtered, decoded, cached."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from muster.data.account import FileAccount
from muster.data.overlap import Overlap
from muster.data.problems import Problems
from muster.data.progress import Progress
from muster.data.speech import audio
from muster.data.speech.files import AudioFiles, Rows, Texts
from muster.data.speech.folder import FolderClips
from muster.data.speech.overlap import clip_overlap
from muster.data.speech.vocabulary import Vocabulary, normalise
from muster.data.speech.windows import LONGEST
from muster.errors import DataError

log = logging.getLogger(__name__)

NAMED_PROBLEMS = 5
BROKEN = "broken while training"
COUNTED = {10**n for n in range(1, 9)}  # of one kind, told at these numbers
FAIR_SAMPLE = 1000  # minimum number of loaded clips for the fraction of broken ones


@dataclass(frozen=True)
class SpeechSample:
    id: int
    samples: audio.Samples  # [time] float32 at the recipe's rate
    text: str
    broken: bool = False  # the samples are silence, and it does not count in the loss


@dataclass(frozen=True)
class SpeechLimits:
    """Which rows are used for training, and how much of them is cached."""

    sample_rate: int = audio.SAMPLE_RATE
    min_seconds: float = 0.1
    max_seconds: float = LONGEST
    max_bad_fraction: float = 0.01
    lowercase: bool = True
    cache_bytes: int = 1 << 30
    long_clips: Literal["skip", "cut"] = "skip"
    shuffle: Literal["auto", "full", "groups"] = "auto"


class SpeechSource:
    """Indexed clips. `lengths[i]` is the duration of clip `i` in seconds; `load(i)` decodes it.

    `groups[i]` is its row group, where an epoch reads row groups one after the other; None where
    all clips are shuffled. `cut` counts truncated clips, by reason. A clip that cannot be decoded
    during training is added to `broken` and replaced by silence; it stays in the plan, which must not
    change for a resumed run.
    """

    def __init__(
        self,
        paths: list[Path],
        limits: SpeechLimits,
        audio_column: str | None = None,
        text_column: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.limits = limits
        self._left_out: dict[str, Counter[int]] = {}  # reason → clips by file
        self.cut: Counter[str] = Counter()
        self.broken: dict[int, str] = {}
        self.files = AudioFiles(paths, audio_column, text_column)
        rows = self.files.read_rows(lambda text: normalise(text, limits.lowercase), progress)
        self._set_rows(self._usable(rows))
        self._cache: dict[int, audio.Samples] = {}
        self._cached_bytes = 0
        self._problems = Problems()  # of broken clips, by kind
        self._loaded = np.zeros(len(self.rows), bool)
        self.file_counts: list[int] | None = None  # of each corpus, where they are mixed by weight
        self._lock = threading.Lock()
        streams = limits.shuffle == "groups"
        if limits.shuffle == "auto":
            streams = self._decoded_bytes > limits.cache_bytes
        self.groups = self.files.groups(self.rows) if streams else None

    def _set_rows(self, rows: Rows) -> None:
        self.rows = rows
        self.lengths = np.minimum(rows.seconds, self.limits.max_seconds)

    @property
    def left_out(self) -> dict[str, int]:
        """How many clips are not used, by reason."""
        found = {why: files.total() for why, files in self._left_out.items()}
        return {**found, **({BROKEN: len(self.broken)} if self.broken else {})}

    def account(self) -> list[FileAccount]:
        count = len(self.files.paths)
        clips = np.bincount(self.rows.file, minlength=count)
        hours = np.bincount(self.rows.file, self.lengths, count) / 3600
        accounts = []
        for i, path in enumerate(self.files.paths):
            left_out = {why: files[i] for why, files in self._left_out.items() if files[i]}
            amounts = {"hours": float(hours[i])}
            account = FileAccount(str(path), int(clips[i]), "clips", amounts, left_out)
            accounts.append(account)
        return accounts

    def unnamed(self) -> list[Path]:
        """Audio files that lie beside metadata and are not in it."""
        tables = self.files.tables
        return [p for table in tables if isinstance(table, FolderClips) for p in table.unnamed()]

    @property
    def parts(self) -> NDArray[np.int64] | None:
        """Which of several corpora each clip is of."""
        if self.file_counts is None:
            return None
        return np.searchsorted(np.cumsum(self.file_counts), self.rows.file, side="right")

    @property
    def texts(self) -> Texts:
        return self.rows.texts

    @property
    def _decoded_bytes(self) -> float:
        return 4 * self.limits.sample_rate * float(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        """`train-00003.parquet row 17`, for messages."""
        return self.files.name(self.rows[index])

    def load(self, index: int) -> SpeechSample:
        samples = self._cache.get(index)
        self._loaded[index] = True
        if index in self.broken:
            return self._silence(index)
        if samples is None:
            try:
                samples = self._decode(index)
            except DataError as error:
                self._add_broken(index, str(error))
                return self._silence(index)
            with self._lock:
                fits = self._cached_bytes + samples.nbytes <= self.limits.cache_bytes
                if fits and index not in self._cache:  # another thread may have been faster
                    self._cache[index] = samples
                    self._cached_bytes += samples.nbytes
        return SpeechSample(index, samples, self.texts[index])

    def peek(self, index: int) -> audio.Samples:
        """The samples, without an effect on what is cached or counted."""
        samples = self._cache.get(index)
        return self._decode(index) if samples is None else samples

    def overlap(self, train: SpeechSource) -> list[Overlap]:
        return clip_overlap(self, train)

    def _decode(self, index: int) -> audio.Samples:
        row, most = self.rows[index], self.limits.max_seconds
        limit = most if row.seconds > most else None
        return audio.read(self.files.clip(row), self.limits.sample_rate, row.seconds, limit)

    def _silence(self, index: int) -> SpeechSample:
        samples = round(self.lengths[index] * self.limits.sample_rate)
        return SpeechSample(index, np.zeros(samples, np.float32), self.texts[index], broken=True)

    def _add_broken(self, index: int, why: str) -> None:
        with self._lock:
            if index in self.broken:
                return
            self.broken[index] = why
            alike, found = self._problems.add(self.name(index), why), len(self.broken)
            loaded = min(len(self), max(FAIR_SAMPLE, int(self._loaded.sum())))
        if alike <= NAMED_PROBLEMS:
            log.warning("%s: %s; it is ignored in this run", self.name(index), why)
        elif alike in COUNTED:
            log.warning("%d clips are ignored in this run by now: %s", found, str(self._problems))
        if found > self.limits.max_bad_fraction * loaded:
            raise DataError(
                f"{found} of {loaded} clips broke while training ({self._problems}); fix them, or raise "
                f"data.max_bad_fraction above {found / loaded:.3f}; for a new run, "
                "`muster data inspect DATA --decode` finds all such clips beforehand"
            )

    def preload(self, threads: int) -> None:
        """Decode everything now, if the cache can hold it, instead of during the first epoch."""
        if self._decoded_bytes <= self.limits.cache_bytes:
            with ThreadPoolExecutor(threads) as pool:
                deque(pool.map(self.load, range(len(self))), maxlen=0)

    def reserve(self, samples: int) -> None:
        """Cache the row groups of `samples` clips, the plan's `reserve_size`, or each batch would read
        them again."""
        if self.groups is not None:
            self.files.reserve(samples)

    def fingerprint(self) -> bytes:
        """Hash of what determines the order of an epoch, for a resumed run."""
        return b"" if self.groups is None else hashlib.sha256(self.groups.tobytes()).digest()

    def keep(self, wanted: Sequence[bool], why: str) -> None:
        """Leave out the clips that are not wanted, and count them under `why`."""
        mask = np.array(wanted, bool)
        dropped = np.flatnonzero(~mask)
        if not len(dropped):
            return
        self._count_left_out(why, self.rows.file[dropped])
        log.warning("left out %d clips: %s (%s …)", len(dropped), why, self._some(dropped.tolist()))
        if len(dropped) == len(mask):
            raise DataError(f"no clip is left: {why}; first was {self.name(0)}")
        self._set_rows(self.rows.without_problems(mask))
        self.groups = None if self.groups is None else self.groups[mask]
        self._cache.clear()
        self._cached_bytes = 0
        self.broken.clear()  # indices have changed
        self._problems = Problems()
        self._loaded = np.zeros(len(self.rows), bool)

    def note(self, indices: Sequence[int], why: str) -> None:
        """Count clips that are used in part only."""
        if indices:
            self.cut[why] += len(indices)
            log.warning("%d clips: %s (%s …)", len(indices), why, self._some(indices))

    def _some(self, indices: Sequence[int]) -> str:
        return ", ".join(self.name(i) for i in indices[:NAMED_PROBLEMS])

    def _usable(self, rows: Rows) -> Rows:
        self._check_bad_rows(rows)
        limits, seconds = self.limits, rows.seconds
        readable = np.ones(len(rows), bool)
        readable[list(rows.problems)] = False
        long = seconds > limits.max_seconds
        faults = {
            "unreadable": ~readable,
            f"shorter than {limits.min_seconds} s": seconds < limits.min_seconds,
            f"longer than {limits.max_seconds} s": long & (limits.long_clips == "skip"),
            "without text": np.array([not text for text in rows.texts]),
        }
        usable = np.ones(len(rows), bool)
        for why, faulty in faults.items():
            self._count_left_out(why, rows.file[usable & faulty])
            usable &= ~faulty
        if not usable.any():
            named = ", ".join(path.name for path in self.files.paths[:NAMED_PROBLEMS])
            raise DataError(
                f"no usable clip among {len(rows)} rows of {named}: "
                f"{', '.join(f'{count} {why}' for why, count in self.left_out.items())}; "
                "see data.min_seconds, data.max_seconds and data.text_column"
            )
        for why, count in self.left_out.items():
            log.warning("left out %d of %d clips: %s", count, len(rows), why)
        if count := int((usable & long).sum()):
            self.cut[f"longer than {limits.max_seconds} s"] = count
            log.warning("cut %d of %d clips at %g s", count, len(rows), limits.max_seconds)
        return rows.without_problems(usable)

    def _check_bad_rows(self, rows: Rows) -> None:
        bad = Problems()
        for row, why in rows.problems.items():
            bad.add(self.files.name(rows[row]), why)
        columns = "data.audio_column and data.text_column"
        if words := bad.check(len(rows), self.limits.max_bad_fraction, "rows", columns):
            log.warning("%s", words)

    def _count_left_out(self, why: str, files: NDArray[np.int32]) -> None:
        if len(files):
            self._left_out.setdefault(why, Counter()).update(files.tolist())


def check_characters(source: SpeechSource, vocabulary: Vocabulary, drop: bool) -> None:
    """Check all transcripts before training starts."""
    unknown = vocabulary.find_unknown(source.texts)
    if not unknown:
        return
    listed = ", ".join(
        f"{char!r} ({count}×, first in {source.name(row)})"
        for char, (count, row) in unknown.items()
    )
    if not drop:
        raise DataError(
            f"transcripts hold characters outside the vocabulary: {listed}. {vocabulary.remedies(unknown)}"
        )
    log.warning("characters outside the vocabulary are dropped from transcripts: %s", listed)
