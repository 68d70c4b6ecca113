"""Folders of models from anybody: sizes, indexes, tokenizers and templates that ask for too much."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from muster.data.speech.vocabulary import Characters, Vocabulary
from muster.data.speech.waveforms import RAW, read_extractor
from muster.data.speech.whisper_text import WhisperTokens
from muster.data.speech.whisper_tokenizer import _from_parts
from muster.data.text.chat_template import ChatTemplate, find_template
from muster.data.text.tokenizers import HuggingFace, Tokenizer, choose
from muster.errors import CheckpointError, DataError, MusterError, RecipeError
from muster.models.huggingface import tensors
from muster.models.huggingface.config import ConfigFile, read_config
from muster.models.huggingface.folder import read_any
from muster.models.huggingface.generation import read_generation
from muster.models.huggingface.tensors import TensorFolder, TensorLocation
from muster.recipe.load import load

LLAMA = {
    **{"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64},
}
USER = [{"role": "user", "content": "hi"}]


def _folder(path: Path, **files: Any) -> Path:
    for name, document in files.items():
        text = document if isinstance(document, str) else json.dumps(document)
        (path / f"{name}.json").write_text(text)
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 2**40),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**30),
        ("max_position_embeddings", 1e12),
        ("num_local_experts", 10**6),
        ("layer_types", ["full_attention"] * 5000),
        ("text_config", {"num_hidden_layers": 10**9}),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_model_far_beyond_any_is_refused_before_memory_is_asked_for(tmp_path, key, value, family):
    folder = _folder(tmp_path, config={**LLAMA, "model_type": family, key: value})
    begin = time.process_time()
    with pytest.raises(RecipeError, match=r"config\.json has \w+ = .*, which is too large"):
        read_any(folder, "model.pretrained", 0.0)
    assert time.process_time() - begin < 1.0


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tie_word_embeddings", "no", "true or false"),
        ("rms_norm_eps", -1.0, "a positive number"),
        ("num_key_value_heads", "x", "a positive whole number"),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": "x"}, "a positive rope_theta"),
    ],
)
def test_a_value_of_another_kind_is_named_by_its_key(tmp_path, key, value, words):
    folder = _folder(tmp_path, config={**LLAMA, key: value})
    with pytest.raises(RecipeError, match=rf"{key} = .*{words}"):
        read_config(folder)


@pytest.mark.parametrize("damage", ["null", "[1]", "[" * 100_000, "\ufeff{", '{"a":1,"a":2}'])
def test_a_config_that_is_no_object_is_named(tmp_path, damage):
    folder = _folder(tmp_path, config=damage, generation_config=damage)
    for read in (ConfigFile, read_generation):
        with pytest.raises(RecipeError, match=r"config\.json.* cannot be read"):
            read(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "ABSOLUTE", "link.safetensors", 5, ""])
def test_an_index_that_points_out_of_its_folder_is_not_followed(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    secret = tmp_path / "secret.safetensors"
    save_file({"w": torch.zeros(2)}, secret)
    (folder / "link.safetensors").symlink_to(secret)
    name = str(secret) if name == "ABSOLUTE" else name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(
        CheckpointError, match=r"index\.json is damaged .* names the file .*copy it again"
    ):
        TensorFolder(folder, {}, TensorLocation)


@pytest.mark.parametrize("damage", ["null", "[]", "5", "[" * 100_000])
def test_a_tokenizer_config_that_is_no_object_counts_as_none(tmp_path, damage, gpt2_folder):
    folder = _folder(tmp_path, tokenizer_config=damage, special_tokens_map=damage)
    (folder / "tokenizer.json").write_bytes((gpt2_folder / "tokenizer.json").read_bytes())
    assert HuggingFace.read(folder, "model.pretrained").end_text == "<|endoftext|>"
    for text in ("{", damage, '{"model": null}'):
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(RecipeError, match=r"tokenizer\.json is no tokenizer"):
            HuggingFace.read(folder, "model.pretrained")


@pytest.mark.parametrize("rate", [10**12, -1, 0, "x", None, True])
def test_a_rate_that_no_audio_has_is_refused(tmp_path, rate):
    folder = _folder(tmp_path, preprocessor_config={"sampling_rate": rate})
    with pytest.raises(RecipeError, match=r"sampling_rate = .*, expected a whole number from 1 to"):
        read_extractor(folder, RAW, masks_padding=False)


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.BPE({"a": 0, "<|endoftext|>": 1}, []))
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**10 }}",
        "{{ 10 ** (10 ** 8) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ [1] * 99999999 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set x = namespace(a=2) %}{% for i in range(50000) %}{% set x.a = x.a * x.a %}{% endfor %}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ '%99999999d'|format(1) }}",
        "{{ '{:99999999d}'.format(1) }}",
        "{{ '{:{}d}'.format(1, 99999999) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ 'x'|center(10**9) }}",
        "{{ ['x']|map('center', 10**9)|list }}",
        "{{ '1'.zfill(10**9) }}",
        "{{ 'x'|indent(10**9, true) }}",
        "{{ [1]|tojson(indent=10**9) }}",
        "{{ [1]|batch(10**9, 0)|list }}",
        "{{ 1|round(10**8, 'ceil') }}",
        "{{ lipsum(n=10**8) }}",
        "{% set x = namespace(a='x' * 1000) %}{% for i in range(30) %}{% set x.a = x.a ~ x.a %}{% endfor %}",
        "{% set x = namespace(a='x' * 1000) %}{% for i in range(30) %}{% set x.a = x.a + x.a %}{% endfor %}",
        "{% set x = namespace(a='x' * 9) %}{% for i in range(9) %}{% set x.a = x.a.replace('x', 'x' * 9) %}{% endfor %}",
        "{% set x = namespace(a='x' * 9) %}{% for i in range(9) %}{% set x.a = x.a|replace('x', 'x' * 9) %}{% endfor %}",
        "{% set x = namespace(a=[1]) %}{% for i in range(60) %}{% set x.a = [x.a, x.a] %}{% endfor %}{{ x.a }}",
        "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
        "{% set t = 'x' * 9999 %}{% for a in t %}{% for b in t %}{% for c in t %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set t = 'x' * 99999 %}{% for a in range(99999) %}{{ t }}{% endfor %}",
        "{% for x in [[1]] recursive %}{{ loop(x) }}{% endfor %}",
        "{% for a in range(9) %}" * 25 + "{% endfor %}" * 25,
    ],
)
def test_a_template_that_would_take_hours_or_all_memory_is_refused(source):
    begin = time.process_time()
    with pytest.raises(MusterError, match=r"the chat template (refuses|fails on) it"):
        ChatTemplate(source, {}).render(USER)
    with suppress(RecipeError):
        ChatTemplate(source, {}).check("a.jinja")
    assert time.process_time() - begin < 1.0


def test_what_templates_do_with_texts_and_lists_is_still_done():
    source = (
        "{%- for m in messages[::-1] -%}{{ m.content.replace('h', 'H').strip() ~ '|' }}"
        "{{ m['content']|replace('i', 'o')|trim|upper }}{{ '{} {:>3}'.format('a', 1) }}{{ 'x'.center(5) }}"
        "{{ m.role.split('s')[0] + ','.join(['a', 'b']) }}{{ loop.last }}{{ m|tojson(indent=2)|length }}"
        "{%- endfor -%}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
        "{% for k, v in {'a': 1}.items() %}{{ '%s=%d'|format(k, v) }}{% endfor %}{{ 1000000|default(5) }}"
        "{% macro m(a) %}[{{ a }}]{% endmacro %}{{ m('x' * 3) }}{{ [1, 2]|join('-')|indent(4) }}{{ none }}"
    )
    assert ChatTemplate(source, {}).render(USER) == (
        "Hi|HOa   1  x  ua,bTrue391a=11000000[xxx]1-2None"
    )
    long = [{"role": "user", "content": "x" * 2**21}] * 3
    assert (
        len(
            ChatTemplate("{% for m in messages %}{{ m.content + '\\n' }}{% endfor %}", {}).render(
                long
            )
        )
        > 6e6
    )


def test_what_templates_do_is_still_done():
    source = "{% for i in range(3) %}{{ '-' * 2 }}{{ '%03d' % i }}{{ 2 ** i * i % 3 }}{% endfor %}"
    template = ChatTemplate(source, {})
    assert [template.render(USER) for _ in range(3)] == ["--0000--0012--0022"] * 3


@pytest.mark.parametrize("name", ["vocab.json", "tokenizer.json"])
def test_one_huge_id_does_not_cost_the_memory_of_all_below_it(tmp_path, gpt2_folder, name):
    """Kept small here: the time and memory of `to_str` grow with the largest id, 28 s at 2^28."""
    vocab = {"a": 0, "<|endoftext|>": 1, "b": 2**24}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    document = json.loads((gpt2_folder / "tokenizer.json").read_text())
    document["model"]["vocab"] = vocab
    if name == "tokenizer.json":
        (tmp_path / name).write_text(json.dumps(document))
        with pytest.raises(RecipeError, match=r"ids up to 16,777,216, which is too large"):
            HuggingFace.read(tmp_path, "model.pretrained")
    with pytest.raises(RecipeError, match=r"16,?777,?216"):
        WhisperTokens.read(tmp_path, "model.pretrained")
    for make in (
        lambda text: Tokenizer.from_json({"kind": "huggingface", "tokenizer": text, "end": 1}),
        lambda text: WhisperTokens.from_json(
            {"kind": "whisper", "tokenizer": text, "multilingual": False}
        ),
    ):
        with pytest.raises(DataError, match="ids up to 16,777,216"):
            make(json.dumps(document))
        with pytest.raises(DataError, match="the saved tokenizer cannot be read"):
            make("{")


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_a_pipe_in_place_of_a_tokenizers_part_does_not_hold_the_process(tmp_path, name):
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    begin = multiprocessing.get_context("fork").Process(target=_read_parts, args=(tmp_path,))
    begin.start()
    begin.join(30)
    ended = begin.exitcode
    begin.kill()
    assert ended == 0


def _read_parts(folder: Path) -> None:
    with pytest.raises((MusterError, OSError)):
        _from_parts(folder)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("vocab.json", '{"a": -1}'),
        ("vocab.json", '{"a": 1.5}'),
        ("vocab.json", '{"a": true}'),
        ("vocab.json", "[1]"),
        ("merges.txt", "a b c\n"),
        ("merges.txt", "a\n"),
        ("merges.txt", "a b\n"),
    ],
)
def test_a_tokenizers_part_of_another_kind_is_named(tmp_path, file, text):
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / file).write_text(text)
    with pytest.raises(MusterError, match=r"vocab\.json|merges\.txt|no valid tokenizer"):
        WhisperTokens.read(tmp_path, "model.pretrained")


@pytest.mark.parametrize("kind", ["normalizer", "decoder"])
def test_a_tokenizer_that_doubles_texts_again_and_again_is_refused(tmp_path, gpt2_folder, kind):
    document = json.loads((gpt2_folder / "tokenizer.json").read_text())
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    inner = "normalizers" if kind == "normalizer" else "decoders"
    for steps in ([step] * 8, [{**step, "content": "b"}] * 40, [{**step, "content": "a" * 99}]):
        document[kind] = {"type": "Sequence", inner: [{"type": "Sequence", inner: steps}]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
        with pytest.raises(RecipeError, match="chain of Sequence that makes text more than 64"):
            HuggingFace.read(tmp_path, "model.pretrained")


def test_usual_normalisers_are_taken(tmp_path, gpt2_folder):
    document = json.loads((gpt2_folder / "tokenizer.json").read_text())
    steps = [
        {"type": "Replace", "pattern": {"String": "``"}, "content": '"'},
        {"type": "NFKD"},
        {"type": "Lowercase"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "Prepend", "prepend": "▁"},
    ]
    document["normalizer"] = {"type": "Sequence", "normalizers": steps}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert HuggingFace.read(tmp_path, "model.pretrained").size == 2


@pytest.mark.parametrize(
    "saved",
    [
        {"kind": "characters", "characters": 5},
        {"kind": "subwords", "units": ["a"], "merges": [["x", "y"]]},
        {"kind": "folder", "tokens": [1], "size": 3, "settings": {"special": [], "pad": "a"}},
        {
            "kind": "folder",
            "tokens": {"a": 0},
            "size": 2**40,
            "settings": {"special": [], "pad": "a"},
        },
        {"kind": "folder", "tokens": {"a": 9}, "size": 3, "settings": {"special": [], "pad": "a"}},
    ],
)
def test_a_saved_vocabulary_that_is_none_is_named(saved):
    with pytest.raises(DataError, match=r"saved vocabulary of kind .* is damaged"):
        Vocabulary.from_json(saved)


def test_an_alphabet_is_looked_through_once():
    begin = time.process_time()
    with pytest.raises(DataError, match="twice"):
        Characters("".join(map(chr, range(0x4E00, 0x9000))) * 3)
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize("path", ["~nosuchuser/x", "x" * 5000, "a/" * 3000])
def test_a_path_that_no_file_has_is_one_sentence(path):
    for read in (
        lambda: find_template(path, None, "</s>"),
        lambda: choose("huggingface", path, None),
        lambda: load(path + ".yaml"),
    ):
        with pytest.raises(RecipeError):
            read()


def test_a_folder_that_somebody_else_made_is_not_removed(tmp_path, monkeypatch):
    guessed = tmp_path / f".out.{os.getpid()}.part"
    guessed.mkdir()
    (guessed / "theirs").write_text("x")
    monkeypatch.setattr(tensors.secrets, "token_hex", lambda n: "0" * 16)
    with tensors.new_folder(tmp_path / "out") as part:
        (part / "ours").write_text("x")
    assert (guessed / "theirs").exists()
    taken = tmp_path / f".other.{'0' * 16}.part"
    taken.mkdir()
    (taken / "theirs").write_text("x")
    with pytest.raises(CheckpointError, match="could not be written"):
        tensors.new_folder(tmp_path / "other").__enter__()
    assert (taken / "theirs").exists()
