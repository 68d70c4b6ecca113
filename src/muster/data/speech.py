"""Speech samples: rows of parquet with audio and text, filtered, decoded, kept while memory lasts."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from muster.data import audio
from muster.data.parquet import AudioFiles, Row
from muster.data.text import Vocabulary, normalise
from muster.errors import DataError

log = logging.getLogger(__name__)

NAMED_PROBLEMS = 5


@dataclass(frozen=True)
class SpeechSample:
    id: int
    samples: audio.Samples  # [time] float32 at the recipe's rate
    text: str


@dataclass(frozen=True)
class SpeechLimits:
    """Which rows are fit to train on."""

    sample_rate: int = 16000
    min_seconds: float = 0.1
    max_seconds: float = 30.0
    max_bad_fraction: float = 0.01
    lowercase: bool = True
    cache_bytes: int = 1 << 30


class SpeechSource:
    """Indexed clips. `lengths[i]` is the duration of clip `i` in seconds; `load(i)` decodes it."""

    def __init__(
        self,
        paths: list[Path],
        limits: SpeechLimits,
        audio_column: str | None = None,
        text_column: str | None = None,
    ) -> None:
        self.limits = limits
        self.files = AudioFiles(paths, audio_column, text_column)
        self.left_out: Counter[str] = Counter()
        self.rows = self._usable(self.files.rows)
        self.lengths = np.array([row.seconds for row in self.rows])
        self.texts = [normalise(row.text, limits.lowercase) for row in self.rows]
        self._cache: dict[int, audio.Samples] = {}
        self._cached_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        """`train-00003.parquet row 17`, for messages."""
        row = self.rows[index]
        return f"{self.files.paths[row.file].name} row {row.number}"

    def load(self, index: int) -> SpeechSample:
        samples = self._cache.get(index)
        if samples is None:
            try:
                samples = self._decode(self.rows[index])
            except DataError as error:
                raise DataError(f"{self.name(index)}: {error}") from None
            with self._lock:
                fits = self._cached_bytes + samples.nbytes <= self.limits.cache_bytes
                if fits and index not in self._cache:  # another thread may have been faster
                    self._cache[index] = samples
                    self._cached_bytes += samples.nbytes
        return SpeechSample(index, samples, self.texts[index])

    def _decode(self, row: Row) -> audio.Samples:
        rate = self.limits.sample_rate
        samples = audio.decode(self.files.clip(row), rate)
        if len(samples) < 0.9 * row.seconds * rate:  # an MP3 cut short decodes without complaint
            held = len(samples) / rate
            raise DataError(f"the header promises {row.seconds:.2f} s, the clip holds {held:.2f} s")
        return samples

    def preload(self, threads: int) -> None:
        """Decode everything now, if the cache can hold it, rather than beside the first epoch."""
        needed = 4 * self.limits.sample_rate * float(self.lengths.sum())
        if needed <= self.limits.cache_bytes:
            with ThreadPoolExecutor(threads) as pool:
                deque(pool.map(self.load, range(len(self))), maxlen=0)

    def keep(self, wanted: list[bool], why: str) -> None:
        """Leave out the clips that are not wanted, and count them under `why`."""
        dropped = wanted.count(False)
        if not dropped:
            return
        self.left_out[why] += dropped
        names = [self.name(i) for i, ok in enumerate(wanted) if not ok][:NAMED_PROBLEMS]
        log.warning("left out %d clips: %s (%s …)", dropped, why, ", ".join(names))
        if dropped == len(wanted):
            raise DataError(f"no clip is left: {why}; first was {names[0]}")
        self.rows = [row for row, ok in zip(self.rows, wanted, strict=True) if ok]
        self.texts = [text for text, ok in zip(self.texts, wanted, strict=True) if ok]
        self.lengths = self.lengths[np.array(wanted)]
        self._cache.clear()
        self._cached_bytes = 0

    def _usable(self, rows: list[Row]) -> list[Row]:
        bad = [row for row in rows if row.problem]
        self._judge(bad, len(rows))
        usable = []
        for row in rows:
            if row.problem:
                self.left_out["unreadable"] += 1
            elif row.seconds < self.limits.min_seconds:
                self.left_out[f"shorter than {self.limits.min_seconds} s"] += 1
            elif row.seconds > self.limits.max_seconds:
                self.left_out[f"longer than {self.limits.max_seconds} s"] += 1
            elif not row.text.strip():
                self.left_out["without text"] += 1
            else:
                usable.append(row)
        if not usable:
            raise DataError(
                f"no usable clip among {len(rows)} rows of {', '.join(p.name for p in self.files.paths[:NAMED_PROBLEMS])}: "
                f"{', '.join(f'{count} {why}' for why, count in self.left_out.items())}; "
                "see data.min_seconds, data.max_seconds and data.text_column"
            )
        for why, count in self.left_out.items():
            log.warning("left out %d of %d clips: %s", count, len(rows), why)
        return usable

    def _judge(self, bad: list[Row], total: int) -> None:
        if not bad:
            return
        named = "; ".join(
            f"{self.files.paths[row.file].name} row {row.number}: {row.problem}"
            for row in bad[:NAMED_PROBLEMS]
        )
        if len(bad) > self.limits.max_bad_fraction * total:
            share = len(bad) / total
            cure = f"raise data.max_bad_fraction above {share:.3f} to train without them"
            if len(bad) == total:
                cure = "see data.audio_column and data.text_column"
            raise DataError(
                f"{len(bad)} of {total} rows cannot be read ({named}{' …' if len(bad) > NAMED_PROBLEMS else ''}); "
                f"mend them, or {cure}"
            )
        log.warning("%d of %d rows cannot be read and are left out: %s", len(bad), total, named)


def check_characters(source: SpeechSource, vocabulary: Vocabulary, drop: bool) -> None:
    """Transcripts must be spellable, before training starts and not in the middle of an epoch."""
    unknown = vocabulary.find_unknown(source.texts)
    if not unknown:
        return
    listed = ", ".join(
        f"{char!r} ({count}×, first in {source.name(row)})"
        for char, (count, row) in unknown.items()
    )
    if not drop:
        raise DataError(
            f"transcripts hold characters outside the vocabulary: {listed}. {vocabulary.cures(unknown)}"
        )
    log.warning("characters outside the vocabulary are dropped from transcripts: %s", listed)
