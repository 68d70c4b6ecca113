"""Every form in which audio lies in parquet gives the same clips."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from clips import AUDIO, encode, tone

from muster.data.speech.source import SpeechLimits, SpeechSource
from muster.errors import DataError

SPANS = [0.3, 0.4, 0.6]
RATE = 22050
WAVES = [tone(span, 300, RATE) for span in SPANS]
DECODED = pa.struct(
    [("path", pa.string()), ("array", pa.list_(pa.float64())), ("sampling_rate", pa.int64())]
)


def listed(kind: pa.DataType, scale: float = 1.0) -> pa.Array:
    dtype = kind.value_type.to_pandas_dtype()
    return pa.array([(wave * scale).astype(dtype) for wave in WAVES], kind)


def wavs(container: str = "WAV") -> list[bytes]:
    return [encode(wave, RATE, container) for wave in WAVES]


def cells(**extra) -> pa.Array:
    return pa.array([{"bytes": clip, "path": None, **extra} for clip in wavs()], AUDIO)


SCHEMAS = {
    "struct of bytes": lambda _: {"audio": cells()},
    "struct of bytes and a path that leads nowhere": lambda _: {"audio": cells(path="gone.wav")},
    "struct of a path": lambda paths: {
        "audio": pa.array([{"bytes": None, "path": path} for path in paths], AUDIO)
    },
    "struct of a path alone": lambda paths: {
        "audio": pa.array([{"path": path} for path in paths], pa.struct([("path", pa.string())]))
    },
    "path": lambda paths: {"audio": pa.array(paths)},
    "path in a column called file": lambda paths: {"file": pa.array(paths)},
    "bytes in a column called file": lambda _: {"file": pa.array(wavs())},
    "binary": lambda _: {"audio": pa.array(wavs(), pa.large_binary())},
    "FLAC": lambda _: {"audio": pa.array(wavs("FLAC"))},
    "OGG": lambda _: {"audio": pa.array(wavs("OGG"))},
    "MP3": lambda _: {"audio": pa.array(wavs("MP3"))},
    "struct of samples": lambda _: {
        "audio": pa.array(
            [{"path": "gone.wav", "array": wave, "sampling_rate": RATE} for wave in WAVES], DECODED
        )
    },
    "float32 and sampling_rate": lambda _: {
        "audio": listed(pa.list_(pa.float32())),
        "sampling_rate": pa.array([RATE] * 3),
    },
    "float64 and sample_rate, the file named beside": lambda _: {
        "file": pa.array(["gone.wav"] * 3),
        "speech": listed(pa.large_list(pa.float64())),
        "sample_rate": pa.array([RATE] * 3, pa.int32()),
    },
    "int16 and rate": lambda _: {
        "audio": listed(pa.list_(pa.int16()), 32767),
        "rate": pa.array([float(RATE)] * 3),
    },
}


@pytest.fixture
def source(tmp_path):
    def make(columns: dict[str, pa.Array], **limits) -> SpeechSource:
        path = tmp_path / "train.parquet"
        texts = pa.array([f"clip {i}" for i in range(len(next(iter(columns.values()))))])
        pq.write_table(pa.table({**columns, "sentence": texts}), path, row_group_size=2)
        return SpeechSource([path], SpeechLimits(**limits))

    return make


@pytest.mark.parametrize("name", SCHEMAS)
def test_audio_of_any_schema_is_the_same_speech(source, tmp_path, name):
    paths = []
    for i, clip in enumerate(wavs()):
        (tmp_path / f"{i}.wav").write_bytes(clip)
        paths.append(f"{i}.wav")
    made = source(SCHEMAS[name](paths))
    lossy = name in ("OGG", "MP3")
    assert made.lengths == pytest.approx(SPANS, abs=0.1 if lossy else 1e-9)
    assert list(made.texts) == ["clip 0", "clip 1", "clip 2"]
    for i, span in enumerate(SPANS):
        samples, wanted = made.load(i).samples, tone(span, 300)
        assert samples.dtype == np.float32
        if lossy:  # the frequency is what must survive
            peak = np.abs(np.fft.rfft(samples, 16000)).argmax()
            assert abs(peak - 300) <= 2
        else:
            assert len(samples) == len(wanted)
            assert np.abs(samples - wanted)[100:-100].max() < 1e-3


def test_samples_in_lists_of_one_size_are_read(source):
    clips = np.stack([tone(0.3, hertz) for hertz in (200, 300)]).astype(np.float32)
    kind = pa.list_(pa.float32(), clips.shape[1])
    made = source({"audio": pa.array(list(clips), kind), "sampling_rate": pa.array([16000] * 2)})
    assert np.array_equal(made.load(1).samples, clips[1])


def test_a_schema_may_differ_from_file_to_file(tmp_path):
    pq.write_table(pa.table({"audio": cells(), "text": ["a", "b", "c"]}), tmp_path / "0.parquet")
    table = {"speech": pa.array(wavs()), "sentence": pa.array(["d", "e", "f"], pa.large_string())}
    pq.write_table(pa.table(table), tmp_path / "1.parquet")
    made = SpeechSource([tmp_path / "0.parquet", tmp_path / "1.parquet"], SpeechLimits())
    assert list(made.texts) == list("abcdef")
    assert np.array_equal(made.load(4).samples, made.load(1).samples)


@pytest.mark.parametrize(
    "column",
    [
        listed(pa.list_(pa.float32())),
        pa.array([{"array": wave} for wave in WAVES], pa.struct([DECODED.field("array")])),
    ],
)
def test_samples_without_a_rate_name_file_and_the_column_to_add(source, column):
    words = r"train\.parquet: audio holds plain samples, .* add a column sampling_rate"
    with pytest.raises(DataError, match=words):
        source({"audio": column})


def test_rows_without_a_rate_or_a_number_are_bad_rows(source):
    audio = pa.array([[0.1] * 4000, [0.1] * 4000, [], None, [0.1] * 4000], pa.list_(pa.float32()))
    made = source(
        {"audio": audio, "rate": pa.array([16000, None, 16000, 16000, 0])}, max_bad_fraction=0.8
    )
    assert made.left_out == {"unreadable": 4}
    assert len(made) == 1


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -16000.0, 0.25])
def test_a_rate_that_is_none_is_a_problem_of_its_row(source, rate):
    waves = pa.array([[0.1] * 4000] * 3, pa.list_(pa.float32()))
    made = source(
        {"audio": waves, "rate": pa.array([16000.0, rate, 16000.0])}, max_bad_fraction=0.5
    )
    assert [row.number for row in made.rows] == [0, 2]
    with pytest.raises(DataError, match=rf"row 1: its sampling rate is {rate}"):
        source({"audio": waves, "rate": pa.array([16000.0, rate, 16000.0])})


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.list_(pa.list_(pa.float32()))])
def test_lists_of_other_things_are_no_audio(source, kind):
    with pytest.raises(DataError, match="no audio column muster knows"):
        source({"audio": pa.array([[]], kind)})


def test_rates_of_clips_may_differ(source):
    clips = [encode(tone(0.5, 300, rate), rate) for rate in (8000, 16000, 44100, 48000)]
    made = source({"audio": pa.array(clips)})
    for i in range(4):
        samples = made.load(i).samples
        assert len(samples) == 8000
        assert np.abs(samples - tone(0.5, 300))[200:-200].max() < 1e-3
    assert made.files.kinds == {f"WAV {rate} Hz": 1 for rate in (8000, 16000, 44100, 48000)}


def test_samples_that_soundfile_wrote_and_read_are_the_lists(source):
    """int16 samples mean what a WAV file of them means."""
    samples = (tone(0.2) * 32767).astype(np.int16)
    file = io.BytesIO()
    soundfile.write(file, samples, 16000, format="WAV", subtype="PCM_16")
    expected, _ = soundfile.read(io.BytesIO(file.getvalue()), dtype="float32")
    kind = pa.list_(pa.int16())
    made = source({"audio": pa.array([samples], kind), "rate": pa.array([16000])})
    assert np.array_equal(made.load(0).samples, expected)
