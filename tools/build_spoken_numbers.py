"""Build `spoken-numbers`, the small speech corpus that ships inside the package.

    pip install py-nanotts hibari-tts soundfile pyarrow numpy     # and espeak-ng on the PATH
    python tools/build_spoken_numbers.py --seed 20 --out src/muster/corpora/spoken-numbers

Every clip is synthetic: numbers, times of day and dates, read by three speech engines. They are
tools of the build; nothing of theirs is shipped.

    espeak-ng    1.51   formant synthesis, eight English accents, many speakers    GPL-3.0
    py-nanotts   0.1.1  SVOX Pico, one speaker each for en-GB and en-US            Apache-2.0
    hibari-tts   0.2.1  neural, one speaker, American and British pronunciation    Apache-2.0

Split rules, asserted before anything is written:
  * no sentence and no voice is in two splits;
  * an espeak-ng variant belongs to one split, whatever the accent. py-nanotts and hibari-tts have
    few speakers, so their voices are made by resampling, which moves pitch and vocal tract alike:
    a split's factors are 4 % or more away from those of any other split, while the draw for a clip
    moves them by less than 2 %;
  * every word of validation and test occurs at least `MIN_TRAIN_COUNT` times in train.

The same seed gives the same corpus. All draws of an utterance come from (seed, its number). Each
utterance of espeak-ng and py-nanotts runs in a process of its own, for within one process repeats
differ. The random serial number that the encoder gives an Ogg stream is replaced.
"""

import argparse
import io
import json
import multiprocessing
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile as sf

RATE = 16_000  # Hz
EDGE = 0.08  # seconds of silence kept before and after the speech
MAX_SECONDS = 4.5
MAX_WORDS = 6
OPUS_LEVEL = 0.98  # soundfile's compression_level; about 14 kbit/s
SPLITS = {"train": 1900, "validation": 120, "test": 300}  # utterances asked for
TRAIN_SHARDS = 6
ROW_GROUP = 64
MIN_TRAIN_COUNT = 5  # of each word
ENGINE_SHARE = {"espeak": 0.5, "nano": 0.2, "hibari": 0.3}

MIRROR = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))  # bits in reverse

Rng = np.random.Generator
Row = dict[str, Any]


# ---- voices
@dataclass(frozen=True)
class Voice:
    """One speaker: an engine, its base voice, and a factor by which resampling raises the pitch."""

    engine: str
    base: str
    factor: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.base}" + (f"@{self.factor}" if self.engine != "espeak" else "")


ACCENTS = "en-us en-gb en-gb-scotland en-gb-x-rp en-us-nyc"
# The variants left out whisper, croak, sing, or imitate robots.
VARIANTS = {
    "train": "m1 m2 m3 m5 m6 m8 f1 f2 f3 f5 Alex Andrea Annie Denis Gene Henrique Lee Marco Michael "
    "anika belinda benjamin caleb david edward linda max paul quincy rob steph2 zac",
    "validation": "m4 Alicia robert",
    "test": "m7 f4 Mike Hugo steph john",
}
FACTORS = {  # of py-nanotts and hibari-tts
    "train": (0.86, 0.94, 1.02, 1.11),
    "validation": (0.9,),
    "test": (0.98, 1.065),
}


def voices_of(split: str) -> dict[str, list[Voice]]:
    """The voices of a split by engine. Each espeak-ng variant gets one accent, in rotation."""
    accents, offset = ACCENTS.split(), list(VARIANTS).index(split)
    rotated = accents[offset:] + accents[:offset]
    espeak = [f"{a}+{v}" for a, v in zip(cycle(rotated), VARIANTS[split].split(), strict=False)]
    return {
        "espeak": [Voice("espeak", base) for base in espeak],
        "nano": [Voice("nano", b, f) for b in ("en-GB", "en-US") for f in FACTORS[split]],
        "hibari": [Voice("hibari", b, f) for b in ("us", "gb") for f in FACTORS[split]],
    }


# ---- sentences
# fmt: off
UNITS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
IRREGULAR = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth",
    "nine": "ninth", "twelve": "twelfth",
}
MONTHS = {
    "january": 31, "february": 29, "march": 31, "april": 30, "may": 31, "june": 30, "july": 31,
    "august": 31, "september": 30, "october": 31, "november": 30, "december": 31,
}
PARTS_OF_DAY = ["in the morning", "in the afternoon", "in the evening", "at night"]
TIMES = [
    "half past {hour}", "quarter {side} {hour}", "a quarter {side} {hour}", "{five} {side} {hour}",
    "{minute} minutes {side} {hour}", "{hour} o'clock", "{hour} oh {digit}", "{hour} {rest}",
    "{minute} minutes {side} {twelve}", "at {hour} o'clock", "at half past {hour}", "at {twelve}",
]
DATES = [
    "the {day} of {month}", "{month} {day}", "{month} the {day}", "{weekday} {month} {day}",
    "{weekday} the {day} of {month}", "{month} {day} {year}", "the {day} of {month} {year}",
    "{month} {year}", "in {month} {year}",
]
# fmt: on


def cardinal(n: int, joiner: str = "and ") -> str:
    """`joiner` stands between the hundreds and the rest: "and " or nothing."""
    if n < 20:
        return UNITS[n]
    if n < 100:
        return TENS[n // 10] + (f" {UNITS[n % 10]}" if n % 10 else "")
    scales = ((1_000_000, "million"), (1000, "thousand"), (100, "hundred"))
    size, name = next(scale for scale in scales if n >= scale[0])
    head, rest = f"{cardinal(n // size, joiner)} {name}", n % size
    link = joiner if rest < 100 else ""
    return f"{head} {link}{cardinal(rest, joiner)}" if rest else head


def ordinal(n: int) -> str:
    *head, last = cardinal(n).split()
    last = IRREGULAR.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return " ".join([*head, last])


def year(rng: Rng) -> str:
    """nineteen ninety eight, nineteen oh five, nineteen hundred, two thousand and seven."""
    century, rest = int(rng.integers(15, 21)), int(rng.integers(100))
    if century == 20 and rest < 10:
        return cardinal(2000 + rest)
    if rest < 10:
        return f"{UNITS[century]} oh {UNITS[rest]}" if rest else f"{UNITS[century]} hundred"
    return f"{cardinal(century)} {cardinal(rest)}"


def number(rng: Rng) -> str:
    joiner = "and " if rng.random() < 0.6 else ""
    small, large = int(rng.integers(1, 100)), int(rng.integers(100, 1000))
    either = int(rng.choice([small, large]))
    digits = [UNITS[d] for d in rng.integers(0, 10, rng.integers(3, 7))]
    ordered = either + (either % 10 == 0 and either % 100 not in (10, 20, 30))  # no "fortieth"
    forms = [
        cardinal(large, joiner),
        cardinal(small * 1000),
        f"minus {cardinal(either, joiner)}",
        f"{cardinal(small % 40)} point {' '.join(digits[3:] or digits[:1])}",
        " ".join(digits),
        " ".join(digits).replace("zero", "oh"),
        ordinal(ordered),
        f"the {ordinal(ordered % 100)}",
    ]
    return forms[rng.choice(len(forms), p=[0.25, 0.15, 0.1, 0.15, 0.1, 0.1, 0.1, 0.05])]


def time(rng: Rng) -> str:
    phrase = str(rng.choice(TIMES)).format(
        hour=UNITS[rng.integers(1, 13)],
        side=rng.choice(["past", "to"]),
        five=cardinal(5 * int(rng.integers(1, 6))),
        minute=cardinal(int(rng.integers(2, 30))),
        digit=UNITS[rng.integers(1, 10)],
        rest=cardinal(int(rng.integers(10, 60))),
        twelve=rng.choice(["noon", "midnight"]),
    )
    if rng.random() < 0.6 or phrase.endswith(("noon", "midnight")):
        return phrase
    return f"{phrase} {rng.choice(PARTS_OF_DAY)}"


def date(rng: Rng) -> str:
    month = str(rng.choice(list(MONTHS)))
    return str(rng.choice(DATES)).format(
        day=ordinal(int(rng.integers(1, MONTHS[month] + 1))),
        month=month,
        weekday=rng.choice(DAYS),
        year=year(rng),
    )


KINDS: dict[str, Callable[[Rng], str]] = {"number": number, "time": time, "date": date}


@dataclass(frozen=True)
class Utterance:
    number: int
    split: str
    kind: str
    text: str
    voice: Voice


def plan(seed: int) -> list[Utterance]:
    """Choose the sentence and the voice of every utterance; of sixteen sentences keep the one whose
    words its split has heard least, so that no word stays rare."""
    utterances: list[Utterance] = []
    used: set[str] = set()
    for split, size in SPLITS.items():
        heard: Counter[str] = Counter()
        voices = voices_of(split)
        for _ in range(size):
            rng = np.random.default_rng([seed, len(utterances)])
            kind = str(rng.choice(list(KINDS), p=[0.5, 0.25, 0.25]))
            drawn = (KINDS[kind](rng) for _ in range(16))
            fresh = [t for t in drawn if t not in used and len(t.split()) <= MAX_WORDS]
            news = [sum(1 / (1 + heard[w]) for w in t.split()) / len(t) ** 0.75 for t in fresh]
            text = fresh[int(np.argmax(news))]
            engine = str(rng.choice(list(ENGINE_SHARE), p=list(ENGINE_SHARE.values())))
            voice = voices[engine][rng.integers(len(voices[engine]))]
            used.add(text)
            heard.update(text.split())
            utterances.append(Utterance(len(utterances), split, kind, text, voice))
    return utterances


# ---- sound
def resample(wave: np.ndarray, ratio: float) -> np.ndarray:
    """Band-limited change of length by `ratio`, through the spectrum of the padded clip."""
    n = round(len(wave) * ratio)
    return np.fft.irfft(np.fft.rfft(wave)[: n // 2 + 1], n) * (n / len(wave))


@lru_cache(maxsize=2)
def hibari(base: str) -> Any:
    """The engine's one packaged speaker with American or British spelling-to-sound rules."""
    from hibari import Hibari  # type: ignore
    from hibari.g2p import G2P  # type: ignore

    return Hibari(g2p=G2P(british=base == "gb"))


NANO = (
    "import sys, py_nanotts; text, voice, *numbers = sys.argv[1:]; "
    "pcm = py_nanotts.NanoTTS().speak(text, voice, *map(float, numbers)); "
    "sys.stdout.buffer.write(pcm)"
)  # arguments: text, voice, speed, pitch


def run(command: list[str]) -> bytes:
    return subprocess.run(command, capture_output=True, check=True).stdout


def speak(voice: Voice, text: str, rng: Rng) -> np.ndarray:
    """One reading at 16 kHz, with speed and pitch drawn for this clip."""
    tempo = rng.uniform(0.82, 0.98)
    shift = rng.uniform(0.981, 1.019) * voice.factor
    pitch, noise = rng.uniform(-1, 1), int(rng.integers(2**31))
    if voice.engine == "espeak":
        speed, height, shift = str(round(165 * tempo)), str(round(50 + 10 * pitch)), 1.0
        options = ["-v", voice.base, "-s", speed, "-p", height, "--stdout", text]
        wave, rate = sf.read(io.BytesIO(run(["espeak-ng", *options])))
    elif voice.engine == "nano":
        # Resampling also changes the tempo: ask the engine for the opposite change.
        options = [text + ".", voice.base, str(tempo / shift), str(1 + 0.05 * pitch)]
        wave = np.frombuffer(run([sys.executable, "-c", NANO, *options]), "<i2") / 32768
        rate = RATE
    else:
        wave, rate = hibari(voice.base)(text + ".", speed=tempo / shift, seed=noise), 24_000
    wave = np.concatenate([np.zeros(rate // 20), wave, np.zeros(rate // 20)])
    return resample(wave, RATE / rate / shift)


def trim(wave: np.ndarray) -> np.ndarray:
    """Cut to the speech (10 ms frames within 42 dB of the loudest) plus `EDGE` on both sides."""
    frame, edge = RATE // 100, int(EDGE * RATE)
    power = (wave[: len(wave) // frame * frame].reshape(-1, frame) ** 2).mean(axis=1)
    loud = np.flatnonzero(power > power.max() * 10**-4.2)
    return np.pad(wave, edge)[loud[0] * frame : (loud[-1] + 1) * frame + 2 * edge]


def with_serial(stream: bytes, serial: int) -> bytes:
    """The same Ogg stream under another serial number. Each page carries a checksum: zlib's CRC
    with the bits of every byte in the other order, and no inversion."""
    pages = []
    while stream:
        segments = stream[26]
        size = 27 + segments + sum(stream[27 : 27 + segments])
        page, stream = bytearray(stream[:size]), stream[size:]
        page[14:18], page[22:26] = serial.to_bytes(4, "little"), bytes(4)
        crc = zlib.crc32(page.translate(MIRROR), 0xFFFFFFFF) ^ 0xFFFFFFFF
        page[22:26] = crc.to_bytes(4, "big").translate(MIRROR)
        pages.append(bytes(page))
    return b"".join(pages)


def make(job: tuple[int, Utterance]) -> Row | str:
    """The parquet row of one utterance, or why it was dropped."""
    seed, u = job
    rng = np.random.default_rng([seed, u.number, 1])
    wave = trim(speak(u.voice, u.text, rng))
    rms, seconds = float(np.sqrt((wave**2).mean())), len(wave) / RATE
    speech, peak = seconds - 2 * EDGE, float(np.abs(wave).max())
    per_letter, per_word = speech / len(u.text.replace(" ", "")), speech / len(u.text.split())
    sane = 0.042 < per_letter < 0.15 and per_word > 0.17 and rms > 0.03 * peak
    if not sane or seconds > MAX_SECONDS:
        return f"{u.voice.name}: {u.text!r}, {seconds:.2f} s, rms {rms:.4f}, peak {peak:.4f}"
    wave *= np.exp(rng.uniform(np.log(0.25), np.log(0.95))) / peak
    buffer = io.BytesIO()
    sf.write(buffer, wave, RATE, format="OGG", subtype="OPUS", compression_level=OPUS_LEVEL)
    encoded = with_serial(buffer.getvalue(), u.number)
    decoded, rate = sf.read(io.BytesIO(encoded))
    assert (rate, len(decoded)) == (RATE, len(wave)), f"{u} came back from the codec changed"
    audio = {"bytes": encoded, "path": f"{u.split}-{u.number:05d}.ogg"}
    row = {"audio": audio, "text": u.text, "speaker": u.voice.name, "duration": seconds}
    return row | {"kind": u.kind, "split": u.split}


# ---- files
def check(rows: dict[str, list[Row]]) -> None:
    variants = [v for names in VARIANTS.values() for v in names.split()]
    assert len(variants) == len(set(variants)), "an espeak-ng variant is in two splits"
    pairs = [(a, b) for s, t in combinations(FACTORS, 2) for a in FACTORS[s] for b in FACTORS[t]]
    assert all(max(a, b) >= 1.039 * min(a, b) for a, b in pairs), "pitch factors too close"
    for key in ("text", "speaker"):
        sets = [{row[key] for row in rows[split]} for split in SPLITS]
        assert sum(map(len, sets)) == len(set.union(*sets)), f"a {key} is in two splits"
    everything = [row["text"] for split in SPLITS for row in rows[split]]
    assert all(re.fullmatch(r"[a-z']+( [a-z']+)*", text) for text in everything)
    heard = Counter(w for row in rows["train"] for w in row["text"].split())
    rare = {w for text in everything for w in text.split() if heard[w] < MIN_TRAIN_COUNT}
    assert not rare, f"too rare in train: {sorted(rare)}"
    print(f"{len(heard)} words; rarest in train: {heard.most_common()[-6:]}")


def write(path: Path, rows: list[Row]) -> None:
    audio = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features: dict[str, Any] = {"audio": {"sampling_rate": RATE, "_type": "Audio"}}
    columns = {"text": "string", "speaker": "string", "duration": "float64", "kind": "string"}
    features |= {name: {"dtype": dtype, "_type": "Value"} for name, dtype in columns.items()}
    fields = [("audio", audio), *((n, pa.type_for_alias(t)) for n, t in columns.items())]
    note = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    kept = [{name: row[name] for name, _ in fields} for row in rows]
    table = pa.Table.from_pylist(kept, pa.schema(fields, metadata=note))
    pq.write_table(
        table, path, row_group_size=ROW_GROUP, compression="none",
        use_dictionary=["speaker", "kind"], write_statistics=False,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the spoken-numbers corpus.")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("src/muster/corpora/spoken-numbers"))
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    with multiprocessing.Pool(args.jobs) as pool:
        made = pool.map(make, [(args.seed, u) for u in plan(args.seed)], chunksize=16)
    print(*(f"dropped {reason}" for reason in made if isinstance(reason, str)), sep="\n")
    kept = [row for row in made if not isinstance(row, str)]
    rows = {split: [row for row in kept if row["split"] == split] for split in SPLITS}
    check(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        shards = TRAIN_SHARDS if split == "train" else 1
        for k in range(shards):
            name = f"{split}-{k:05d}-of-{shards:05d}" if shards > 1 else split
            write(args.out / f"{name}.parquet", rows[split][k::shards])  # dealt: shards are alike
        seconds = np.array([row["duration"] for row in rows[split]])
        voices = len({row["speaker"] for row in rows[split]})
        print(
            f"{split}: {len(seconds)} clips, {seconds.sum() / 60:.1f} min, {voices} voices, "
            f"mean {seconds.mean():.2f} s, max {seconds.max():.2f} s"
        )
    print(f"{sum(f.stat().st_size for f in args.out.glob('*.parquet')) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
