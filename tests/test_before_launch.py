"""What is refused before a run directory exists, and without torch."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import processes
from lm_tokenizers import byte_level, write
from muster.data.text.packing import PackedSource
from muster.data.text.tokenizers import Bytes
from muster.entrypoints.open_run import check_before_launch
from muster.errors import MusterError
from muster.recipe.load import load


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("x" * 999)
    for name, config in {
        "bert": '{"model_type": "bert"}',
        "unknown": '{"model_type": "unknown"}',
        "vit": '{"model_type": "vit"}',
        "broken": "{",
        "whisper": '{"model_type": "whisper"}',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "empty").mkdir()
    clips = [{"audio": b"", "text": "a"}] * 5
    pq.write_table(pa.Table.from_pylist(clips), tmp_path / "clips.parquet")
    pq.write_table(pa.Table.from_pylist(clips).slice(0, 0), tmp_path / "none.parquet")
    (tmp_path / "spoken").mkdir()
    (tmp_path / "spoken" / "metadata.csv").write_text("file_name,text\na.wav,one\nb.wav,two\n")
    (tmp_path / "idx").mkdir()
    with gzip.open(tmp_path / "idx" / "train-images-idx3-ubyte.gz", "wb") as images:
        images.write(b"\0\0\x08\x03" + (7).to_bytes(4, "big") + bytes(8))
    return tmp_path


def check(recipe: str, *overrides: str, ranks: int = 1, resumed: bool = False) -> None:
    check_before_launch(load(recipe, overrides), ranks, ranks, resumed)


TEXT = ["gpt-micro", "data.train=text.txt"]


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        (["gpt-micro", "model.preset=gpt9"], 1, "model.preset: 'gpt9' is no language model"),
        (["gpt-micro", "model.shape.heads=3"], 1, "model.shape.heads: 3 does not divide"),
        (["gpt-micro", "model.shape.positions=100"], 1, "or model.shape.positions to 256"),
        (
            ["gpt-micro", "model.shape={heads: 2}", "distributed.strategy=tensor"],
            4,
            r"4 does not divide the 2 heads of gpt2-micro \(heads=2\); use 1 or 2",
        ),
        (["whisper-micro", "model.shape.heads=2", "distributed.strategy=tensor"], 4, "the 2 heads"),
        (["gpt-micro", "model.pretrained=unknown"], 1, "has model_type 'unknown'"),
        (["gpt-micro", "model.config=vit"], 1, "'vit', which is not a causal language model"),
        (["speech", "model.pretrained=bert", "data.train=clips.parquet"], 1, "model_type 'bert'"),
        (
            ["gpt-micro", "training.optimizer=muon", "distributed.strategy=zero1"],
            2,
            "training.optimizer: muon needs matrices",
        ),
        (
            ["gpt-micro", "+model.lora={targets: [q, gate]}"],
            1,
            "targets: gate; this model's layers",
        ),
        (["whisper-micro", "+model.lora={targets: [q_proj, gate]}"], 1, "targets: gate; this"),
        (["gpt-micro", "+model.lora={}", "distributed.strategy=tensor"], 2, "ddp, fsdp and hsdp"),
        (["gpt-micro", "model.pretrained=broken"], 1, "config.json cannot be read"),
        (["gpt-micro", "model.pretrained=empty"], 1, "empty has no config.json"),
        (["gpt-micro", "model.pretrained=./gone"], 1, "there is no folder ./gone"),
        (["whisper", "model.pretrained=bert", "data.train=clips.parquet"], 1, "'bert'"),
        (
            ["whisper", "model.pretrained=whisper", "data.train=clips.parquet"],
            1,
            "model.pretrained: .*tokenizer",
        ),
        (["gpt-micro", "data.tokenizer.path=empty"], 1, "data.tokenizer.path: .* does not exist"),
        (["gpt-micro", "data.tokenizer.kind=characters"], 1, "characters is for speech"),
        (["speech", "data.tokenizer.kind=bytes"], 1, "bytes is for language models"),
        (["whisper-micro", "data.tokenizer.kind=characters"], 1, "characters is for speech-ctc"),
        (["whisper-micro", "data.tokenizer.kind=huggingface"], 1, "data.tokenizer.path: needed"),
        (["speech", "data.train=clips.parquet"], 1, "32 is more than the 5 samples of clips.parq"),
        (["speech", "data.train=none.parquet"], 1, "data.train: none.parquet does not have a row"),
        (["speech", "data.train=spoken"], 1, "32 is more than the 2 samples of spoken"),
        (["mnist", "data.train=idx"], 1, "128 is more than the 7 samples of idx; set it to 7"),
        ([*TEXT], 1, "16 is more than the 3 samples of text.txt"),
        ([*TEXT, "data.sequence_length=1024"], 1, "does not have one sequence of 1024 tokens"),
        (
            [
                *TEXT,
                "training.per_device_batch_size=2",
                "~training.global_batch_size",
                "training.gradient_accumulation_steps=1",
            ],
            2,
            "4 is more than the 3 samples",
        ),
    ],
)
def test_it_is_refused_before_a_run_exists(folder, words, ranks, message):
    with pytest.raises(MusterError, match=message):
        check(*words, ranks=ranks)


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(folder):
    path = write(byte_level(), folder / "tokenizer")
    ids = [f"data.tokenizer.path={path}", "training.global_batch_size=1"]
    with pytest.raises(MusterError, match="the model's embedding only 9 rows"):
        check("gpt-micro", *ids, "model.vocab_size=9")
    check("gpt-micro", *ids)


def test_what_can_be_trained_or_cannot_be_known_is_let_through(folder):
    batch = "training.global_batch_size="
    check(*TEXT, f"{batch}3")
    check("speech", "data.train=clips.parquet", f"{batch}5")
    check("speech", "data.train=spoken", f"{batch}2")
    check("mnist", "data.train=idx", f"{batch}7")
    check("digits")
    check("gpt-micro", "model.pretrained=an-org/a-model-that-is-not-here")
    (folder / "llama").mkdir()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 8, "max_position_embeddings": 256, "vocab_size": 257}
    (folder / "llama" / "model.safetensors").touch()  # only its name is looked at
    (folder / "llama" / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    bytes_ = "data.tokenizer.kind=bytes"
    check(*TEXT, f"{batch}3", "model.pretrained=llama", bytes_)
    with pytest.raises(MusterError, match=r"sequence_length: \d+ is more than the \d+ positions"):
        check(*TEXT, "model.pretrained=llama", bytes_, "data.sequence_length=100000")
    names = ["q_proj", "v", "gate_proj"]
    check(*TEXT, f"{batch}3", "model.pretrained=llama", bytes_, f"+model.lora={{targets: {names}}}")
    with pytest.raises(
        MusterError, match="targets: qkv_proj; this model's layers are q, k, v, o, gate"
    ):
        check("gpt-micro", "model.pretrained=llama", "+model.lora={targets: [qkv_proj]}")


def test_tokens_that_are_cached_are_counted_exactly(folder):
    """Words that a tokenizer merges make fewer sequences than bytes would."""
    rows = [{"text": "x" * 40}] * 10
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["gpt-micro", "data.train=rows.jsonl", "data.sequence_length=20"]
    check(*words, "training.global_batch_size=21")  # 540 bytes of JSON: at most 27
    source = PackedSource([folder / "rows.jsonl"], Bytes(), 20, whole=True)
    assert len(source) == 20
    with pytest.raises(MusterError, match="21 is more than the 20 samples"):
        check(*words, "training.global_batch_size=21")


def test_few_chat_rows_are_tokenized_and_counted_as_the_ranks_would(folder):
    """Six rows, of which two fit into a sequence and one is too long."""
    short = [{"prompt": "ab?", "completion": "x" * 20}] * 5
    rows = [*short, {"prompt": "ab?", "completion": "x" * 500}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["gpt-micro", "data.train=rows.jsonl", "data.chat_template=plain.jinja"]
    (folder / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    words += ["data.sequence_length=64", "model.shape={positions: 64}"]
    check(*words, "training.global_batch_size=3")
    with pytest.raises(MusterError, match=r"4 is more than the 3 samples of rows\.jsonl"):
        check(*words, "training.global_batch_size=4")
    with pytest.raises(MusterError, match=r"no usable chat row among 6 of .*rows\.jsonl"):
        check(*words, "data.sequence_length=2")


def test_a_run_that_goes_on_needs_neither_folder_nor_tokenizer(folder):
    gone = ["model.pretrained=./gone", "data.tokenizer.path=gone"]
    check("gpt-micro", *gone, resumed=True)
    with pytest.raises(MusterError, match="gone"):
        check("gpt-micro", *gone)


@pytest.mark.guides
def test_none_of_it_imports_torch_or_leaves_a_run(folder):
    code = """
import sys
from muster.entrypoints.open_run import check_before_launch
from muster.recipe.load import load
for words in (["speech"], ["whisper-micro"], ["gpt-micro"], ["digits"]):
    check_before_launch(load(words[0], words[1:]), 2, 2)
sys.exit("torch" in sys.modules)
"""
    done = processes.run([sys.executable, "-c", code], cwd=folder, real=True)
    assert done.returncode == 0, done.stderr
    assert not (folder / "runs").exists()
