"""Answers by the chat template: as transformers gives them, once and in a conversation."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch

import muster
from chats import write_model, write_rows
from inference.test_generation import save, trained
from muster.cli import use
from muster.data.text.chat import reply_ends
from muster.data.text.chat_template import find_template
from muster.data.text.tokenizers import Bytes
from muster.errors import MusterError
from muster.inference.export import export_checkpoint
from muster.inference.generate import answer
from muster.inference.load import Trained, load_trained
from muster.models.huggingface.generation import Generation
from muster.training.manifest import Saved

ASKED = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model of large weights, so that its choices are clear."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("chat")
    write_model(folder / "model")
    theirs = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    torch.manual_seed(6)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0, 0.3)
    theirs.save_pretrained(folder / "model")
    write_rows(folder / "rows" / "train.jsonl", 12)
    return folder


@pytest.fixture(scope="module")
def model(folder) -> Trained:
    from tasks.test_causal_lm import fill
    from tasks.test_chat_lm import task_of

    task = task_of(folder)
    return Trained(
        task, fill(task, task.build_model()), torch.device("cpu"), Saved(Path("here"), {})
    )


def only(model: Trained, messages: list, **options) -> str:
    return "".join(answer(model, messages, **options))


def test_greedy_answers_are_those_of_transformers(folder, model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = []
    for question in ("hello", "what is a world?", "naïve 漢字?"):
        messages = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = theirs.generate(
            **asked, do_sample=False, max_new_tokens=24, eos_token_id=2, pad_token_id=2
        )
        new = made[0, asked["input_ids"].shape[1] :]
        expected = tokenizer.decode(new, skip_special_tokens=True)
        texts.append(only(model, messages, temperature=0, max_tokens=24))
        assert texts[-1].rstrip("\ufffd") == expected.rstrip("\ufffd")
    assert len(set(texts)) > 1


def test_a_reply_ends_with_its_turn(model):
    tokenizer = model.task.tokenizer
    assert reply_ends(tokenizer, model.task.template) == {tokenizer.end} == {2}
    ended = model.task.template.source.replace("<|im_end|>", "<|endoftext|>")
    other = type(model.task.template)(ended, {})
    assert reply_ends(tokenizer, other) == {0, 2}
    task = copy.copy(model.task)
    task.template, task.generation = other, Generation({}, (2, 9))
    assert task.ends == {0, 2, 9}
    assert task.generation.document(task.ends) == {"eos_token_id": [2, 9, 0]}  # for the export
    assert task.generation.document({2}) is None  # config.json says it
    basic = find_template("basic", None, Bytes().end_text)
    assert reply_ends(Bytes(), basic) == {256}


def test_a_seed_repeats_an_answer(model):
    options = {"temperature": 1.0, "max_tokens": 20}
    first = only(model, ASKED, seed=3, **options)
    assert first == only(model, ASKED, seed=3, **options)
    assert first != only(model, ASKED, seed=3, sample=1, **options)
    long = [{"role": "user", "content": "x" * 600}]
    with pytest.raises(
        MusterError, match=r"the conversation has .* 512 positions; start a new one"
    ):
        answer(model, long)


@pytest.fixture
def run(model, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return save(model, tmp_path)


def test_a_question_on_the_command_line_is_answered(run, model, capsys):
    use.generate(
        Path("latest"), "hello", chat=True, system="Be kind.", max_tokens=9, temperature=0.0
    )
    asked = [{"role": "system", "content": "Be kind."}, *ASKED]
    expected = only(model, asked, max_tokens=9, temperature=0)
    assert capsys.readouterr().out == f"{expected}\n"
    loaded = muster.load(run)
    assert loaded.answer(asked, max_tokens=9, temperature=0) == expected
    assert loaded.answer("hello", max_tokens=9, temperature=0) != expected


def test_a_conversation_remembers_until_it_is_new(run, model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nand a world?\n/new\nhello\n"))
    use.generate(Path("latest"), chat=True, max_tokens=6, temperature=0.0)
    first = only(model, ASKED, max_tokens=6, temperature=0)
    both = [*ASKED, {"role": "assistant", "content": first}]
    both.append({"role": "user", "content": "and a world?"})
    second = only(model, both, max_tokens=6, temperature=0)
    assert second != only(model, both[2:], max_tokens=6, temperature=0)
    assert capsys.readouterr().out == f"{first}\n{second}\n{first}\n\n"


def test_what_cannot_be_asked_is_said(run, folder, monkeypatch, tmp_path):
    for words, options in (
        ("name a PROMPT to continue", {}),
        ("--system needs --chat", {"prompt": "x", "system": "y"}),
        ("--samples needs a PROMPT", {"chat": True, "samples": 2}),
    ):
        with pytest.raises(MusterError, match=words):
            use.generate(Path("latest"), **options)
    plain = trained("gpt2-micro")
    with pytest.raises(
        MusterError, match=r"was trained on text, not on chat rows, and data\.chat_t"
    ):
        answer(plain, ASKED)
    assert load_trained(run).task.template  # which a chat checkpoint holds itself


@pytest.mark.parametrize("asked", [None, "basic"])
def test_an_exported_folder_asks_as_the_model_was_trained(folder, tmp_path, monkeypatch, asked):
    from transformers import AutoTokenizer

    from tasks.test_causal_lm import fill
    from tasks.test_chat_lm import task_of

    monkeypatch.chdir(tmp_path)
    task = task_of(folder, f"data.chat_template={asked}" if asked else "data.format=chat")
    made = Trained(
        task, fill(task, task.build_model()), torch.device("cpu"), Saved(Path("here"), {})
    )
    export_checkpoint(save(made, tmp_path), tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [*ASKED, {"role": "assistant", "content": "world"}, *ASKED]
    expected = task.template.render(messages, prompt=True)
    found = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert found == expected
    assert ("<|assistant|>" in expected) == (asked == "basic")
