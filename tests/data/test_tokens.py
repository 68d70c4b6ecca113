"""Tokenizers of language models: ids, text, and the bytes each token stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lm_tokenizers import byte_level, word_level, write
from muster.data.text.tokenizers import (
    Bytes,
    HuggingFace,
    Tokenizer,
    _sizes,
    check_rows,
    choose,
    pieces,
)
from muster.errors import DataError, RecipeError

TEXTS = ["hello world", "", "  naïve\n漢字 😀😀 ", "<|endoftext|>", "a" * 700, "\u0301e\ufffd"]


@pytest.fixture
def gpt_like(tmp_path) -> HuggingFace:
    return HuggingFace.read(write(byte_level(), tmp_path / "gpt"), "data.tokenizer.path")


def test_bytes_are_bytes():
    tokenizer = Bytes()
    assert (tokenizer.size, tokenizer.end) == (257, 256)
    for text in TEXTS:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([104, 256, 105]) == "hi"


def test_a_hugging_face_tokenizer_gives_the_ids_of_transformers(tmp_path, gpt_like):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "gpt" / "tokenizer.json"))
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert gpt_like.encode(text) == expected
        assert gpt_like.decode(gpt_like.encode(text)) == text
    assert gpt_like.end == theirs.convert_tokens_to_ids("<|endoftext|>")
    assert gpt_like.size == len(theirs)
    assert gpt_like.end not in gpt_like.encode("<|endoftext|>")


@pytest.mark.parametrize("kind", ["bytes", "byte-level", "words"])
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(tmp_path, kind):
    """The word-level one drops spaces and has one unknown token for long stretches."""
    made = {"byte-level": byte_level, "words": word_level}
    tokenizer: Tokenizer = Bytes()
    if kind != "bytes":
        tokenizer = HuggingFace.read(write(made[kind](), tmp_path / "t"), "data.tokenizer.path")
    texts = [*TEXTS, "   ", "hello   world  "]
    for text, (ids, sizes) in zip(texts, tokenizer.encode_all(texts), strict=True):
        assert sizes.sum() == len(text.encode())
        assert sizes.min(initial=0) >= 0
        assert len(sizes) == len(ids) or (len(ids) == 0 and len(sizes) == 1)


def test_each_token_counts_the_text_it_adds(gpt_like):
    ((ids, sizes),) = gpt_like.encode_all(["hello 漢!"])
    tokens = [gpt_like.decode([int(i)]) for i in ids]
    assert dict(zip(tokens, sizes.tolist(), strict=True))["!"] == 1
    assert sizes[tokens.index("hello")] == 5
    assert sizes.tolist()[-4:] == [3, 0, 0, 1]  # three tokens share one character


def test_spans_that_go_back_count_nothing_twice():
    assert _sizes("añb", [(0, 2), (0, 1), (2, 3)]).tolist() == [3, 0, 1]


def test_truncation_and_templates_of_the_file_are_not_applied(tmp_path):
    from tokenizers.processors import TemplateProcessing

    cut = byte_level()
    cut.enable_truncation(2)
    cut.enable_padding(length=8)
    cut.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer = HuggingFace.read(write(cut, tmp_path / "cut"), "data.tokenizer.path")
    assert tokenizer.decode(tokenizer.encode("hello world, hello")) == "hello world, hello"
    assert tokenizer.encode("") == []


def test_the_end_is_what_the_folder_says_else_a_common_name(tmp_path, gpt_like):
    folder = write(byte_level(["<|endoftext|>", "<halt>", "<stop>"]), tmp_path / "named")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<stop>"}')
    assert HuggingFace.read(folder, "k").end == 2
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<halt>"}}')
    assert HuggingFace.read(folder / "tokenizer.json", "k").end == 1
    (folder / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert HuggingFace.read(folder, "k").end == 2
    nameless = write(byte_level(["<fin>"]), tmp_path / "nameless")
    with pytest.raises(RecipeError, match=r"k: .*no end-of-text token.*tokenizer_config\.json"):
        HuggingFace.read(nameless, "k")


def test_a_tokenizer_comes_back_from_a_checkpoint(gpt_like):
    for tokenizer in (Bytes(), gpt_like):
        again = Tokenizer.from_json(json.loads(json.dumps(tokenizer.to_json())))
        assert (again.size, again.end) == (tokenizer.size, tokenizer.end)
        assert [again.encode(t) for t in TEXTS] == [tokenizer.encode(t) for t in TEXTS]
        assert again.fingerprint() == tokenizer.fingerprint()
    assert Bytes().fingerprint() != gpt_like.fingerprint()
    with pytest.raises(DataError, match="kind 'runes'; expected bytes or huggingface"):
        Tokenizer.from_json({"kind": "runes"})


def test_the_recipe_chooses(tmp_path):
    folder = write(byte_level(), tmp_path / "t")
    assert isinstance(choose("auto", None, None), Bytes)
    assert isinstance(choose("bytes", None, folder), Bytes)
    assert isinstance(choose("auto", None, folder), HuggingFace)
    assert isinstance(choose("auto", str(folder), None), HuggingFace)
    assert isinstance(choose("huggingface", None, folder), HuggingFace)


@pytest.mark.parametrize(
    ("kind", "path", "pretrained", "words"),
    [
        ("subwords", None, None, "data.tokenizer.kind: subwords is for speech"),
        ("bytes", "t.json", None, "data.tokenizer.path: bytes need no file"),
        ("huggingface", None, None, "data.tokenizer.path: needed"),
        ("auto", "gone", None, "data.tokenizer.path: gone does not exist"),
        ("auto", None, Path("gone"), "model.pretrained: gone does not exist.*kind=bytes"),
    ],
)
def test_what_cannot_be_chosen_names_the_key(kind, path, pretrained, words):
    with pytest.raises(RecipeError, match=words):
        choose(kind, path, pretrained)


def test_a_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"k: .*tokenizer\.json is no tokenizer"):
        HuggingFace.read(tmp_path, "k")


def test_more_ids_than_rows_are_refused_with_both_numbers():
    check_rows(Bytes(), 257)
    with pytest.raises(RecipeError, match=r"257 ids.*only 256 rows.*model\.vocab_size to 257"):
        check_rows(Bytes(), 256)


@pytest.mark.parametrize("kind", ["bytes", "huggingface"])
@pytest.mark.parametrize("text", ["naïve 漢字 😀 end", "😀", "a\ufffdb"])
def test_pieces_are_whole_characters_and_add_up(gpt_like, kind, text):
    tokenizer = Bytes() if kind == "bytes" else gpt_like
    before, ids = tokenizer.encode("prompt 漢"), tokenizer.encode(text)
    found = list(pieces(tokenizer, before, iter(ids)))
    assert "".join(found) == text
    if kind == "bytes" and "\ufffd" not in text:
        assert found == list(text)
    within = "".join(pieces(tokenizer, before, iter(ids[:-1])))  # may end inside a character
    assert "prompt 漢" + within == tokenizer.decode(before + ids[:-1])


def test_pieces_keep_the_spaces_that_only_a_first_word_loses(tmp_path):
    from tokenizers import decoders, normalizers

    spaced = byte_level()
    spaced.normalizer = normalizers.Prepend(" ")
    spaced.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer = HuggingFace.read(write(spaced, tmp_path / "t"), "k")
    ids = tokenizer.encode("hello world hello")
    assert tokenizer.decode(ids) == "hello world hello"
    for cut in range(len(ids)):
        shown = tokenizer.decode(ids[:cut])
        assert shown + "".join(pieces(tokenizer, ids[:cut], iter(ids[cut:]))) == "hello world hello"


def test_pieces_come_as_soon_as_they_are_whole():
    asked = []

    def slow():
        for byte in "é!".encode():
            asked.append(byte)
            yield byte

    stream = pieces(Bytes(), [], slow())
    assert (next(stream), len(asked)) == ("é", 2)
    assert (next(stream), len(asked)) == ("!", 3)
