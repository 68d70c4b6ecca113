"""Folders of models from anybody: sizes, indexes, tokenizers and templates that ask for too much."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from muster.data.speech.waveforms import RAW, read_extractor
from muster.data.text.chat_template import ChatTemplate
from muster.data.text.tokenizers import HuggingFace
from muster.errors import CheckpointError, MusterError, RecipeError
from muster.models.huggingface.config import ConfigFile, read_config
from muster.models.huggingface.folder import read_any
from muster.models.huggingface.generation import read_generation
from muster.models.huggingface.tensors import TensorFolder, TensorLocation

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
