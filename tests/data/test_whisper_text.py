"""Whisper's tokens are those of transformers, whether read from a folder or learned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    WhisperFeatureExtractor,
    WhisperProcessor,
    WhisperTokenizer,
    WhisperTokenizerFast,
)

from muster.data.speech import whisper_tokenizer
from muster.data.speech.whisper_features import preprocessor_config
from muster.data.speech.whisper_languages import LANGUAGES, language_code
from muster.data.speech.whisper_text import WhisperTokens, drop_timestamps
from muster.data.speech.whisper_tokenizer import TIMESTAMPS, add_special, byte_level
from muster.errors import DataError, RecipeError
from real import LIBRISPEECH, WHISPER, needs_speech, needs_whisper

TEXTS = [
    "hello world",
    " Hello, World!  It's 5 o'clock\n",
    "naïve 漢字 😀😀",
    "",
    "a" * 300,
    "< | 1.20 | > <|x|>",
]
MARKED = "<|0.00|> Hello there.<|1.20|><|1.40|> I'm<|30.00|>"
TRAINING = ["one two three two", "two three", "three one naïve", "one one two"] * 3


def put(tokens: WhisperTokens, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in tokens.files().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def tiny() -> WhisperTokens:
    return WhisperTokens.read(WHISPER, "model.pretrained")


@pytest.fixture(scope="module")
def theirs() -> WhisperTokenizer:
    return WhisperTokenizer.from_pretrained(WHISPER)


@pytest.fixture(scope="module")
def learned() -> WhisperTokens:
    return WhisperTokens.learn(TRAINING, 12)


@pytest.fixture
def multilingual(tmp_path, learned) -> WhisperTokens:
    """In the order of OpenAI's multilingual models, with a few text tokens."""
    model = json.loads(learned.files()["tokenizer.json"])["model"]
    tokenizer = byte_level(model["vocab"], [tuple(pair) for pair in model["merges"]])
    add_special(tokenizer, list(LANGUAGES)[:99])
    folder = tmp_path / "multilingual"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return WhisperTokens.read(folder, "model.pretrained")


@needs_whisper
def test_ids_of_a_pretrained_folder_are_those_of_transformers(tiny, theirs):
    assert tiny.size == len(theirs) == 51864
    assert (tiny.end, tiny.start, tiny.no_timestamps) == (50256, 50257, 50362)
    assert tiny.first_timestamp == 50363
    assert tiny.prompt(None, "transcribe", timestamps=False) == theirs.prefix_tokens
    assert tiny.prompt("English", "transcribe", timestamps=True) == [50257]
    for text in TEXTS:
        labels = theirs(text).input_ids
        assert [*theirs.prefix_tokens, *tiny.encode(text), tiny.end] == labels
        assert tiny.decode(labels) == text == theirs.decode(labels, skip_special_tokens=True)


@needs_whisper
@needs_speech
def test_real_transcripts_encode_as_in_transformers_one_by_one_and_together(tiny, theirs):
    texts = pq.read_table(LIBRISPEECH / "test.parquet", columns=["text"])["text"].to_pylist()
    expected = theirs(texts, add_special_tokens=False).input_ids
    assert tiny.encode_all(texts) == expected
    assert [tiny.encode(text) for text in texts[:5]] == expected[:5]


@needs_whisper
def test_marks_of_time_are_tokens_or_are_dropped(tiny, theirs):
    kept = tiny.encode(MARKED, timestamps=True)
    assert kept == theirs(MARKED, add_special_tokens=False).input_ids
    assert tiny.encode(MARKED) == tiny.encode("Hello there. I'm")
    assert tiny.decode(kept) == " Hello there. I'm"
    assert tiny.encode_all([MARKED, "a", MARKED], True) == [kept, tiny.encode("a"), kept]
    assert tiny.encode("<|1.21|>", True) == tiny.encode("<|1.20|>", True)
    with pytest.raises(DataError, match=r"<\|30\.02\|>.*data\.timestamps=false"):
        tiny.encode("ok <|30.02|>", timestamps=True)


def test_a_transcript_without_its_marks_has_its_words_apart():
    assert drop_timestamps("<|0.00|>one<|1.00|><|1.00|>two<|2.00|>") == "one two"
    assert drop_timestamps(" as it was ") == " as it was "


@needs_whisper
def test_segments_are_those_of_transformers(tiny, theirs):
    ids = tiny.encode(MARKED, timestamps=True)
    offsets = theirs.decode(ids, output_offsets=True)["offsets"]
    expected = [(*(round(t, 2) for t in o["timestamp"]), o["text"]) for o in offsets]
    assert expected == [(0.0, 1.2, " Hello there."), (1.4, 30.0, " I'm")]
    assert tiny.segments([tiny.start, *ids, tiny.end]) == expected


def test_segments_that_are_open_or_unmarked_or_empty(learned):
    encode = learned.encode
    assert learned.segments(encode("one two")) == [(0.0, None, "one two")]
    assert learned.segments(encode("<|1.00|>one<|2.00|>two", True)) == [
        (1.0, 2.0, "one"),
        (2.0, None, "two"),
    ]
    assert learned.segments(encode("<|1.00|> <|2.00|><|2.00|>", True)) == []
    assert learned.segments([]) == []


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|startoftranscript|>", "<|en|>"])
def test_special_tokens_spelt_out_are_text(learned, multilingual, name):
    for tokens in (learned, multilingual):
        ids = tokens.encode(f"one {name} two", timestamps=True)
        assert max(ids) < tokens.end
        assert tokens.decode(ids) == f"one {name} two"


def test_a_learned_tokenizer_has_the_special_tokens_in_whisper_s_order(learned):
    names = "endoftext startoftranscript translate transcribe startoflm startofprev nospeech"
    order = [f"<|{name}|>" for name in [*names.split(), "notimestamps"]] + list(TIMESTAMPS)
    document = json.loads(learned.files()["tokenizer.json"])
    added = {token["content"]: token["id"] for token in document["added_tokens"]}
    assert added == {name: learned.end + i for i, name in enumerate(order)}
    assert learned.end == 256 + 12
    assert learned.size == learned.end + len(order) == learned.first_timestamp + 1501
    assert not learned.multilingual
    assert not learned.languages


def test_common_words_become_units_and_any_text_still_encodes(learned):
    assert len(learned.encode("three")) < 5
    for text in TEXTS:
        assert learned.decode(learned.encode(text)) == text
    plain = WhisperTokens.plain_bytes()
    assert plain.end == 256
    assert [len(ids) for ids in plain.encode_all(TEXTS)] == [len(text.encode()) for text in TEXTS]
    assert WhisperTokens.learn(["ab", "cd"], 9).end == 256, "no pair occurs twice"
    assert WhisperTokens.learn([MARKED] * 9, 50).to_json() == (
        WhisperTokens.learn([drop_timestamps(MARKED)] * 9, 50).to_json()
    )


def test_learning_depends_neither_on_threads_nor_on_the_hash_seed(learned):
    code = (
        "import hashlib, json; from muster.data.speech.whisper_text import WhisperTokens as W;"
        f"print(hashlib.sha256(json.dumps(W.learn({TRAINING}, 12).to_json()).encode()).hexdigest())"
    )
    found = set()
    for seed, threads in (("1", "1"), ("2", "4")):
        env = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1


def test_a_tokenizer_survives_a_checkpoint(learned, multilingual):
    for tokens in (learned, multilingual):
        again = WhisperTokens.from_json(json.loads(json.dumps(tokens.to_json())))
        assert again.to_json() == tokens.to_json()
        assert again.encode_all(TEXTS) == tokens.encode_all(TEXTS)
        assert (again.size, again.multilingual) == (tokens.size, tokens.multilingual)
    with pytest.raises(DataError, match="kind 'bytes'; expected whisper"):
        WhisperTokens.from_json({"kind": "bytes"})


@pytest.mark.parametrize("kind", [WhisperTokenizer, WhisperTokenizerFast, AutoTokenizer])
def test_an_exported_folder_loads_in_transformers(tmp_path, learned, multilingual, kind):
    for tokens in (learned, multilingual, WhisperTokens.plain_bytes()):
        loaded = kind.from_pretrained(put(tokens, tmp_path / str(tokens.size)))
        assert len(loaded) == tokens.size
        assert (loaded.pad_token_id, loaded.eos_token_id) == (tokens.end, tokens.end)
        for text in TEXTS:
            labels = loaded(text).input_ids
            assert labels == [tokens.start, tokens.no_timestamps, *tokens.encode(text), tokens.end]
            assert loaded.decode(labels, skip_special_tokens=True) == text
        marked = tokens.encode(MARKED, timestamps=True)
        assert loaded(MARKED, add_special_tokens=False).input_ids == marked
        assert loaded.decode(marked, decode_with_timestamps=True) == MARKED


def test_an_exported_folder_reads_back(tmp_path, learned, multilingual):
    for tokens in (learned, multilingual):
        folder = put(tokens, tmp_path / str(tokens.size))
        again = WhisperTokens.read(folder / "tokenizer.json", "data.tokenizer.path")
        assert again.to_json() == tokens.to_json()


def test_a_processor_loads_with_the_features(tmp_path, learned):
    folder = put(learned, tmp_path)
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor_config(128)))
    assert WhisperFeatureExtractor.from_pretrained(folder).feature_size == 128
    processor = WhisperProcessor.from_pretrained(folder)
    assert processor.tokenizer("two").input_ids[2:-1] == learned.encode("two")
    features = processor.feature_extractor([0.0] * 16000, sampling_rate=16000)["input_features"]
    assert features.shape == (1, 128, 3000)


@needs_whisper
def test_a_generation_config_says_what_the_pretrained_one_says(tiny):
    expected = json.loads((WHISPER / "generation_config.json").read_text())
    assert tiny.suppress_first == (220, 50256)
    config = tiny.generation_config(suppress_first=tiny.suppress_first)
    for key in config.keys() & expected.keys():
        assert config[key] == expected[key], key
    assert set(tiny.suppress) == {50257, *range(50357, 50362)}


def test_a_multilingual_generation_config_loads_in_transformers(tmp_path, multilingual):
    config = multilingual.generation_config(multilingual.suppress, language="German")
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert (loaded.is_multilingual, loaded.language, loaded.task) == (True, "de", "transcribe")
    assert loaded.lang_to_id["<|de|>"] == multilingual.languages["de"] == multilingual.start + 3
    assert set(loaded.task_to_id) == {"transcribe", "translate"}
    assert loaded.suppress_tokens == list(multilingual.suppress)
    assert loaded.begin_suppress_tokens is None


@pytest.mark.parametrize("task", ["transcribe", "translate"])
@pytest.mark.parametrize("language", ["en", "haitian creole", "Burmese", "HAW", "sundanese"])
@pytest.mark.parametrize("timestamps", [False, True])
def test_a_multilingual_prompt_is_that_of_transformers(
    tmp_path, multilingual, task, language, timestamps
):
    loaded = WhisperTokenizer.from_pretrained(put(multilingual, tmp_path / "put"))
    loaded.set_prefix_tokens(language=language, task=task, predict_timestamps=timestamps)
    assert multilingual.multilingual
    assert multilingual.prompt(language, task, timestamps) == loaded.prefix_tokens


def test_the_table_of_languages_is_that_of_transformers():
    from transformers.models.whisper import tokenization_whisper as whisper

    assert list(LANGUAGES.items()) == list(whisper.LANGUAGES.items())
    for name, code in whisper.TO_LANGUAGE_CODE.items():
        assert language_code(name) == code == language_code(code.upper())
    assert language_code("klingon") is None


def test_a_missing_or_unknown_language_is_named_with_those_near_it(multilingual):
    with pytest.raises(RecipeError, match=r"data\.language=en.*en, zh, de"):
        multilingual.prompt(None, "transcribe", False)
    with pytest.raises(RecipeError, match=r"data\.language: germn .*did you mean german"):
        multilingual.prompt("germn", "transcribe", False)
    with pytest.raises(RecipeError, match=r"data\.language: yue is no language of this model"):
        multilingual.prompt("yue", "transcribe", False)


@needs_whisper
def test_an_english_model_refuses_other_languages_and_translation(tiny):
    with pytest.raises(RecipeError, match=r"data\.language: de .*English-only"):
        tiny.prompt("de", "transcribe", False)
    with pytest.raises(RecipeError, match=r"data\.speech_task: translate"):
        tiny.prompt(None, "translate", False)


def test_a_learned_tokenizer_takes_any_language(learned):
    assert learned.prompt("de", "transcribe", False) == [learned.start, learned.no_timestamps]


@needs_whisper
def test_a_folder_of_vocab_and_merges_alone_gives_the_same_tokens(tmp_path, tiny):
    for name in ("vocab.json", "merges.txt", "config.json"):
        (tmp_path / name).symlink_to(WHISPER / name)
    parts = WhisperTokens.read(tmp_path, "model.pretrained")
    assert parts.encode_all([*TEXTS, MARKED], True) == tiny.encode_all([*TEXTS, MARKED], True)
    assert (parts.size, parts.first_timestamp) == (tiny.size, tiny.first_timestamp)
    assert (parts.languages, parts.multilingual) == (tiny.languages, False)


def test_a_folder_that_leaves_the_marks_of_time_out_gets_them(tmp_path, multilingual):
    document = json.loads(multilingual.to_json()["tokenizer"])
    document["added_tokens"] = document["added_tokens"][: -len(TIMESTAMPS)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    read = WhisperTokens.read(tmp_path, "model.pretrained")
    assert read.first_timestamp == multilingual.first_timestamp
    assert read.size == multilingual.size


def test_the_generation_config_says_whether_a_model_is_multilingual(
    tmp_path, multilingual, learned
):
    (tmp_path / "generation_config.json").write_text('{"is_multilingual": false}')
    assert not WhisperTokens.read(put(multilingual, tmp_path), "model.pretrained").multilingual
    (tmp_path / "generation_config.json").write_text('{"is_multilingual": true}')
    assert WhisperTokens.read(put(multilingual, tmp_path), "model.pretrained").multilingual
    assert not WhisperTokens.read(put(learned, tmp_path), "model.pretrained").multilingual


def test_what_is_no_whisper_tokenizer_is_refused(tmp_path, learned):
    with pytest.raises(RecipeError, match=r"model\.pretrained: .*tokenizer\.json does not exist"):
        WhisperTokens.read(tmp_path, "model.pretrained")
    file = tmp_path / "tokenizer.json"
    file.write_text("{")
    with pytest.raises(RecipeError, match="has no valid tokenizer"):
        WhisperTokens.read(tmp_path, "model.pretrained")
    document = json.loads(learned.to_json()["tokenizer"])
    document["added_tokens"] = []
    document["post_processor"] = None
    file.write_text(json.dumps(document))
    with pytest.raises(RecipeError, match=r"no Whisper tokenizer: it lacks <\|starto"):
        WhisperTokens.read(tmp_path, "model.pretrained")
    document = json.loads(learned.to_json()["tokenizer"])
    document["added_tokens"].pop()
    file.write_text(json.dumps(document))
    with pytest.raises(RecipeError, match="the 1501 ids after"):
        WhisperTokens.read(tmp_path, "model.pretrained")


def test_vocab_and_merges_are_read_as_the_library_reads_them(tmp_path, learned):
    from tokenizers import models

    put(learned, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    vocab, merges = models.BPE.read_file(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    theirs = byte_level(vocab, merges)
    ours = whisper_tokenizer._from_parts(tmp_path)
    assert merges
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids
