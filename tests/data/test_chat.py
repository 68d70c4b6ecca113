"""Chat rows: read in every spelling, rendered as transformers renders them, learned where replies are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chats import CHATML, conversation, replies, write_rows, write_tokenizer
from muster.data.loader import IGNORE
from muster.data.overlap import PIECE_BYTES
from muster.data.problems import Problems
from muster.data.text.chat import ChatSource, encode, pack_rows
from muster.data.text.chat_template import ChatTemplate, find_template
from muster.data.text.conversations import are_chat, read_conversations
from muster.data.text.tokenizers import Bytes, HuggingFace
from muster.errors import DataError, RecipeError

MARKED = CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
)
# Thoughts of earlier turns are not shown again, as Qwen3's template has it.
FORGETFUL = CHATML.replace(
    "message['content'] ",
    "(message['content'] if loop.last or message['role'] != 'assistant' "
    "else message['content'].split('</think>')[-1]) ",
)
BUSY = (
    "{%- set state = namespace(count=0) %}{{ bos_token }}"
    "{%- if tools %}{{ tools | tojson(indent=1) }}{% endif %}\n"
    "{%- for message in messages %}{% if message.role == 'skip' %}{% continue %}{% endif %}\n"
    "  {%- set state.count = state.count + 1 %}[{{ state.count }}] {{ message.content | trim }}\n"
    "{% endfor %}{{ dict(a=1)['a'] }}{{ eos_token }}"
)
ASKED = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "two\n\nand two"},
    {"role": "assistant", "content": "four"},
]
SPELLINGS = {
    "messages": {"messages": ASKED},
    "parts": {"messages": [m | {"content": [{"type": "text", "text": m["content"]}]} for m in ASKED]},
    "sharegpt": {
        "conversations": [
            {"from": "system", "value": "Be kind."},
            {"from": "human", "value": "two\n\nand two"},
            {"from": "gpt", "value": "four"},
        ]
    },
    "prompt": {"prompt": "two\n\nand two", "completion": "four", "system": "Be kind."},
    "prompt of messages": {"prompt": ASKED[:2], "completion": ASKED[2:]},
    "alpaca": {"instruction": "two", "input": "and two", "output": "four", "system": "Be kind."},
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer(tmp_path) -> HuggingFace:
    return HuggingFace.read(write_tokenizer(tmp_path / "tokenizer"), "k")


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"})


def write(path: Path, rows: list) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> tuple[list, Problems]:
    bad = Problems()
    return [found.messages for found in read_conversations([path], bad)], bad


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_a_conversation_is_the_same_conversation(tmp_path, name, ending):
    path = write(tmp_path / f"rows.{ending}", [SPELLINGS[name]] * 2)
    assert are_chat("auto", None, [path])
    found, bad = read(path)
    assert found == [ASKED, ASKED]
    assert bad.count == 0


def test_earlier_turns_and_a_role_of_sharegpt_are_kept(tmp_path):
    row = {"instruction": "c", "output": "d", "history": [["a", "b"]]}
    called = {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]}
    found, _ = read(write(tmp_path / "rows.jsonl", [row, called]))
    assert [m["content"] for m in found[0]] == ["a", "b", "c", "d"]
    assert [m["role"] for m in found[0]] == ["user", "assistant"] * 2
    assert found[1] == [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]


def test_rows_that_are_no_conversation_are_named(tmp_path):
    rows = [
        {"text": "hello"},
        {"messages": []},
        {"messages": ["hello"]},
        {"messages": [{"content": "hello"}]},
        {"messages": [{"role": "user", "content": 4}]},
        {"messages": ASKED[:2]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"prompt": "a", "completion": None},
        {"messages": ASKED},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    bad, named = Problems(), []
    bad.add = lambda where, why, file: named.append(f"{where}: {why}")
    assert len(list(read_conversations([path], bad))) == 1
    expected = [
        "no conversation: it needs messages or conversations or prompt + completion or",
        "messages holds no list of messages",
        "messages[0] is no object with role and content",
        "messages[0] has no role",
        "messages[0].content is no text",
        "no reply: none of its 2 messages is of the assistant",
        "messages[0].content has parts of type image",
        "no conversation",
    ]
    for number, (line, words) in enumerate(zip(named, expected, strict=True)):
        assert line.startswith(f"{path} row {number}: {words}")


def test_text_is_no_chat(tmp_path):
    text = write(tmp_path / "text.jsonl", [{"text": "hello", "prompt": "a", "completion": "b"}])
    chat = write(tmp_path / "chat.jsonl", [{"prompt": "a", "completion": "b"}])
    (tmp_path / "broken.jsonl").write_text("{")
    assert not are_chat("auto", None, [text])
    assert not are_chat("auto", "prompt", [chat])
    assert not are_chat("auto", None, [tmp_path / "broken.jsonl"])
    assert are_chat("chat", None, [text])
    assert not are_chat("text", None, [chat])


@pytest.mark.parametrize("source", [CHATML, MARKED, FORGETFUL, BUSY])
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_transformers_renders_them(source, prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    tools = [{"type": "function", "function": {"name": "<weather> & 天気"}}]
    messages = [*conversation(2), {"role": "user", "content": "  spaced  "}]
    messages[2]["content"] = "<think>hm</think>yes"
    made = template(source)
    expected = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=prompt, **made.tokens
    )[0][0]
    assert made.render(messages, tools, prompt=prompt) == expected


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_tokens_and_replies_are_those_of_transformers(tokenizer, tmp_path, source):
    """Its mask needs {% generation %}; without, the replies are found and must be the same."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for number in range(4):
        messages = conversation(1 + number % 3, number)
        expected = theirs.apply_chat_template(
            messages,
            chat_template=MARKED,
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        ((ids, mask),) = encode(tokenizer, template(source), messages)
        assert ids.tolist() == expected["input_ids"]
        assert mask.tolist() == [bool(m) for m in expected["assistant_masks"]]
        assert tokenizer.decode(ids[mask].tolist()) == "".join(replies(messages))


def test_a_template_that_shows_earlier_turns_otherwise_makes_a_row_of_each_reply(tokenizer):
    messages = conversation(3)
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = f"<think>hm</think>{message['content']}"
    made = template(FORGETFUL)
    found = list(encode(tokenizer, made, messages))
    assert len(found) == 3
    for (ids, mask), end in zip(found, (3, 5, 7), strict=True):
        text = made.render(messages[:end])
        assert ids.tolist() == tokenizer.encode_marked(text)[0].tolist()
        assert tokenizer.decode(ids[mask].tolist()) == messages[end - 1]["content"]
    assert len(list(encode(tokenizer, template(CHATML), messages))) == 1


def test_a_row_within_a_longer_training_row_is_found(tokenizer, tmp_path):
    """Of fewer tokens than a piece of text has bytes."""
    turns = conversation(3)
    turns[2]["content"] = "hello world, what is a world? " * 9
    sources = [
        ChatSource([write(tmp_path / name, [{"messages": rows}])], tokenizer, template(CHATML), 999)
        for name, rows in (("train.jsonl", turns), ("test.jsonl", turns[:3]))
    ]
    train, test = sources
    (found,) = test.overlap(train)
    length = int(test.rows.lengths[0])
    assert length < PIECE_BYTES
    assert found.total == length
    assert found.seen > length // 2
    assert train.overlap(train)[0].seen == train.rows.lengths[0]


def test_a_reply_is_ended_where_the_template_does_not_end_it():
    source = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = Bytes()
    ((ids, mask),) = encode(tokenizer, template(source), conversation(1))
    assert ids[-1] == tokenizer.end
    assert tokenizer.decode(ids[mask].tolist()) == "world 0 of 0 \n"
    basic = find_template("basic", None, tokenizer.end_text)
    ((ids, mask),) = encode(tokenizer, basic, conversation(2))
    assert (ids[mask] == tokenizer.end).sum() == 2
    assert tokenizer.decode(ids[mask].tolist()) == "".join(replies(conversation(2)))


def test_what_a_template_refuses_is_a_row_that_cannot_be_read(tokenizer, tmp_path):
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML  # fmt: skip
    rows = write(tmp_path / "rows.jsonl", [{"messages": conversation(1, i)} for i in range(4)])
    made = template(source)
    source = ChatSource([rows], tokenizer, made, 128, max_bad_fraction=0.5)
    assert len(source.rows.lengths) == 2
    (file,) = source.account()
    assert file.left_out == {"the chat template refuses it (no system)": 2}
    assert (file.file, file.count) == (str(rows), 2)
    expected = r"2 of 4 chat rows .*the chat template refuses it \(no system\): .* row 0, row 3"
    with pytest.raises(DataError, match=expected):
        ChatSource([rows], tokenizer, made, 128)
    stolen = template("{{ ''.__class__.__mro__ }}" + CHATML)
    with pytest.raises(ValueError, match="the chat template refuses it"):
        stolen.render(conversation(1))


def test_a_template_comes_from_a_file_a_folder_or_the_tokenizer(tmp_path):
    folder = write_tokenizer(tmp_path / "with")
    bare = write_tokenizer(tmp_path / "without", None)
    (tmp_path / "own.jinja").write_text(MARKED)
    (bare / "several.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "x"}]})
    )
    assert find_template(None, folder, "</s>").source == CHATML
    assert find_template(None, folder, "</s>").tokens["eos_token"] == "<|im_end|>"
    assert find_template(str(tmp_path / "own.jinja"), bare, "</s>").source == MARKED
    assert find_template(str(folder), bare, "</s>").source == CHATML
    assert find_template(str(bare / "several.json"), bare, "</s>").source == "x"
    (folder / "chat_template.jinja").write_text(MARKED)
    assert find_template(None, folder, "</s>").source == MARKED
    for asked, where, words in (
        (None, bare, f"{bare} has no chat template, .* `basic`"),
        (None, None, "a tokenizer of bytes has no chat template"),
        ("there.jinja", None, "there.jinja does not exist"),
        (str(bare), None, "without holds no chat template"),
    ):
        with pytest.raises(RecipeError, match=rf"data\.chat_template: .*{words}"):
            find_template(asked, where, "</s>")
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(RecipeError, match=r"broken\.jinja is no Jinja template"):
        find_template(str(tmp_path / "broken.jinja"), None, "</s>")


def rows_of(source: ChatSource, sample) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of each row in a sequence."""
    found = []
    for document in range(sample.documents.max() + 1):
        mine = sample.documents == document
        assert sample.positions[mine].tolist() == list(range(mine.sum()))
        found.append((sample.inputs[mine].tolist(), sample.targets[mine].tolist()))
    return found


def test_packed_rows_are_the_rows_alone(tokenizer, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 40)
    alone, packed = (
        ChatSource([path], tokenizer, template(CHATML), 256, pack=pack) for pack in (False, True)
    )
    assert len(alone) == 40
    assert alone.left_out == packed.left_out == {}
    rows = [rows_of(alone, alone.load(i)) for i in range(40)]
    assert all(len(row) == 1 for row in rows)
    sequences = [packed.load(i) for i in range(len(packed))]
    found = [row for sample in sequences for row in rows_of(packed, sample)]
    assert sorted(found) == sorted(row[0] for row in rows)
    assert all(len(sample.inputs) <= 256 for sample in sequences)
    total = sum(len(sample.inputs) for sample in sequences)
    assert len(packed) <= 11 / 9 * total / 256 + 1
    assert packed.fingerprint() != alone.fingerprint()
    assert packed.name(0).startswith(f"{path} row ")


def test_packing_fills_each_sequence_and_loses_no_row():
    rng = np.random.default_rng(0)
    for length in (7, 64, 1000):
        places = rng.integers(1, length + 1, 500)
        sequences = pack_rows(places, list(range(500)), length)
        assert sorted(row for rows in sequences for row in rows) == list(range(500))
        sums = [sum(places[row] for row in rows) for rows in sequences]
        assert max(sums) <= length
        fewest = -(-places.sum() // length)
        assert len(sequences) <= 11 / 9 * max(fewest, (2 * places > length).sum()) + 1


@pytest.mark.parametrize("how", ["skip", "cut"])
def test_long_rows_are_counted(tokenizer, tmp_path, how, caplog):
    late = [{"role": "user", "content": "z" * 300}, {"role": "assistant", "content": "late"}]
    long = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "z" * 300}]
    rows = [{"messages": late}, {"messages": long}, {"messages": conversation(1)}]
    path = write(tmp_path / "rows.jsonl", rows)
    source = ChatSource([path], tokenizer, template(CHATML), 128, pack=False, long_rows=how)
    if how == "skip":
        assert source.left_out == {"longer than data.sequence_length=128": 2}
        assert (len(source), source.cut) == (1, {})
    else:
        assert source.left_out == {"without a reply in the first 128 tokens": 1}
        assert source.cut == {"longer than data.sequence_length=128": 1}
        cut, whole = (
            source.load(0),
            ChatSource([path], tokenizer, template(CHATML), 999, pack=False),
        )
        assert len(cut.inputs) == 128
        assert cut.targets.tolist() == whole.load(1).targets[:128].tolist()
        assert (cut.targets != IGNORE).any()
    (file,) = source.account()
    assert file.left_out == source.left_out
    assert file.amounts["rows"] == file.count == len(source)
    assert file.amounts["tokens of replies"] < file.amounts["tokens"]
    assert f"left out {sum(source.left_out.values())} of 3 chat rows" in caplog.text
    assert f"{path} row 0" in caplog.text
    with pytest.raises(DataError, match=re.escape("raise data.sequence_length, or set")):
        ChatSource([path], tokenizer, template(CHATML), 4)


def test_rows_are_tokenized_once(tokenizer, tmp_path, monkeypatch):
    from muster.data.text import chat

    path = write_rows(tmp_path / "rows.jsonl", 3)
    first = ChatSource([path], tokenizer, template(CHATML), 128)
    monkeypatch.setattr(chat, "encode", None)
    again = ChatSource([path], tokenizer, template(CHATML), 128)
    assert again.fingerprint() == first.fingerprint()
    with pytest.raises(TypeError):  # another template is other rows
        ChatSource([path], tokenizer, template(MARKED), 128)
