"""The language-model task: its loss, its score, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lm_tokenizers import byte_level, write
from muster.errors import DataError, RecipeError
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh
from muster.recipe.load import load
from muster.tasks import build_task
from muster.tasks.causal_lm import CausalLM
from muster.training.evaluate import SingleProcess, evaluate

TEXTS = ["The quick brown fox. " * 4, "Zwölf Boxkämpfer", "jagen", "Viktor quer " * 30]


@pytest.fixture
def text(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for split in ("train", "validation"):
        lines = [json.dumps({"text": text}) for text in TEXTS]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


def task_on(text: Path, *overrides: str) -> CausalLM:
    small = ["data.sequence_length=32", f"data.train={text}", "training.global_batch_size=4"]
    task = build_task(load("gpt-micro", [*small, *overrides]))
    assert isinstance(task, CausalLM)
    return task


def fill(task: CausalLM, model: nn.Module) -> nn.Module:
    """The task's own initial weights, as the training code writes them."""
    weights = task.weights()
    with torch.no_grad():
        for name, p in model.named_parameters():
            whole = tuple(slice(0, n) for n in p.shape)
            p.copy_(weights.read(name, tuple(p.shape), whole, torch.device("cpu")))
    return model.eval()


def call(task: CausalLM, model: nn.Module, batch):
    inputs = task.inputs(task.prepare(batch))
    return model(*inputs.args, **inputs.shared)


def reference_nll(model: nn.Module, tokens: list[int]) -> torch.Tensor:
    """Of each token but the first, from float64 probabilities of the plain model."""
    logits = model(torch.tensor([tokens]))[0].double()
    chances = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return -chances[torch.arange(len(tokens) - 1), tokens[1:]].log()


@pytest.mark.parametrize("preset", ["gpt2-micro", "llama-micro"])
def test_the_loss_is_the_sum_over_targets_that_count(text, preset):
    task = task_on(text, f"model.preset={preset}")
    model, source = fill(task, task.build_model()), task.source("validation")
    samples = [source.load(0), source.load(len(source) - 1)]
    batch = task.collate(samples, None)
    assert batch["tokens"].shape == batch["targets"].shape == (2, 32)
    assert batch.units == sum(len(s.tokens) - 1 for s in samples) == (batch["targets"] >= 0).sum()
    assert batch.filled == batch.units < batch.cells == 64
    assert batch.amounts == {"tokens": batch.units}
    loss = task.loss(call(task, model, batch), batch)
    expected = sum(reference_nll(model, s.tokens.tolist()).sum() for s in samples)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_loss_of_half_precision_logits_is_taken_in_float32(text):
    task = task_on(text)
    batch = task.collate([task.source("train").load(0)], 0)
    logits = torch.randn(1, 32, 257).bfloat16()
    expected = task.loss(logits.float(), batch)
    assert torch.equal(task.loss(logits, batch), expected)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_perplexity_and_bits_per_byte_are_those_of_the_whole_text(text, batch_size):
    task = task_on(text)
    model = fill(task, task.build_model())
    mesh = Mesh(0, 0, Layout(), torch.device("cpu"), None)
    from contextlib import nullcontext

    scores = evaluate(
        task, SingleProcess(model), "validation", mesh, batch_size, nullcontext
    ).scores
    stream = [256] + [t for one in TEXTS for t in [*one.encode(), 256]]
    parts = [stream[i : i + 33] for i in range(0, len(stream) - 1, 32)]
    nll = sum(reference_nll(model, part).sum().item() for part in parts)
    total = sum(len(one.encode()) for one in TEXTS)
    assert scores["tokens"] == total + len(TEXTS)
    assert scores["bytes"] == total
    assert scores["loss"] == pytest.approx(nll / scores["tokens"], rel=1e-6)
    assert scores["perplexity"] == pytest.approx(math.exp(nll / scores["tokens"]), rel=1e-6)
    assert scores["bits_per_byte"] == pytest.approx(nll / math.log(2) / total, rel=1e-6)


def test_a_diverged_model_still_has_a_finite_perplexity(text):
    scores = task_on(text).summarise({"nll": 1e6, "tokens": 10.0, "bytes": 10.0})
    assert math.isfinite(scores["perplexity"])


@pytest.mark.parametrize("preset", ["gpt2-micro", "llama-micro"])
def test_isolated_documents_cost_what_they_cost_alone(text, preset):
    options = [f"model.preset={preset}", "data.sequence_length=128", "data.isolate_documents=true"]
    task = task_on(text, *options)
    model, source = fill(task, task.build_model()), task.source("validation")
    batch = task.collate([source.load(0)], None)
    nll = -call(task, model, batch)[0].double().log_softmax(-1)
    found = nll[torch.arange(128), batch["targets"][0]]
    documents = [[256, *one.encode(), 256] for one in TEXTS[:3]]
    expected = torch.cat([reference_nll(model, tokens) for tokens in documents])
    assert len(expected) < 128
    torch.testing.assert_close(found[: len(expected)], expected, rtol=1e-4, atol=1e-5)
    mixed = task_on(text, *options[:2]).inputs(batch)
    assert mixed.shared == {}
    other = -model(*mixed.args)[0].double().log_softmax(-1)[torch.arange(128), batch["targets"][0]]
    assert not torch.allclose(other, found, atol=1e-3)


def test_a_few_steps_of_training_learn(text):
    task = task_on(text, "data.sequence_length=64")
    torch.manual_seed(0)
    model, source = fill(task, task.build_model()).train(), task.source("train")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for step in range(12):
        batch = task.collate([source.load((4 * step + i) % len(source)) for i in range(4)], 0)
        loss = task.loss(call(task, model, batch), batch) / batch.units
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(257), abs=0.3)
    assert losses[-1] < 0.6 * losses[0]


def test_parts_have_the_parameters_of_the_whole(text):
    task = task_on(text)
    with torch.device("meta"):
        whole = dict(task.build_model().named_parameters())
        first, last = task.build_part(0, 1), task.build_part(1, 4)
    assert all(p.is_meta for p in whole.values())
    assert {n for part in (first, last) for n, _ in part.named_parameters()} == set(whole)
    assert not [n for n, _ in last.named_parameters() if n.startswith("blocks.0.")]
    assert not [n for n, _ in first.named_parameters() if n.startswith("blocks.1.")]


def test_a_corpus_without_validation_has_none(text):
    (text / "validation.jsonl").unlink()
    task = task_on(text)
    assert task.source("validation") is None
    assert task.source("test") is None
    assert len(task.source("train")) > 4


def test_named_validation_data_is_read_and_missing_text_refused(text, tmp_path):
    (tmp_path / "other.txt").write_text("abc")
    task = task_on(text, f"data.validation={tmp_path}/other.txt")
    assert task.source("validation").load(0).tokens.tolist() == [256, 97, 98, 99, 256]
    with pytest.raises(DataError, match=r"data\.test: .*gone does not exist"):
        task_on(text, f"data.test={tmp_path}/gone").source("test")


def test_assets_rebuild_the_task_without_its_data(text, tmp_path):
    tokenizer = write(byte_level(), tmp_path / "tokenizer")
    task = task_on(text, f"data.tokenizer.path={tokenizer}", "model.vocab_size=300")
    assets = json.loads(json.dumps(task.assets))
    moved = load("gpt-micro", ["data.train=gone", "data.tokenizer.path=gone"])
    again = build_task(moved, assets)
    assert again.config == task.config
    assert again.config.vocab == 300
    assert again.tokenizer.encode("hello") == task.tokenizer.encode("hello")
    assert again.family is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.preset=lmu-micro", "model.preset: 'lmu-micro' is no language model.*gpt2-micro"),
        ("model.preset=gtp2", "model.preset: 'gtp2' is no language model; nearest is gpt2;"),
        ("model.vocab_size=256", "it has 257 ids, the model's embedding only 256 rows"),
        ("data.sequence_length=2000", "data.sequence_length: 2000 .* 1024 positions of gpt2-micro"),
        ("data.tokenizer.kind=characters", "data.tokenizer.kind: characters is for speech"),
        ("model.pretrained=./gone", "model.pretrained: there is no folder"),
    ],
)
def test_what_does_not_fit_names_the_key(text, override, words):
    with pytest.raises(RecipeError, match=words):
        task_on(text, override)


@pytest.fixture
def pretrained(tmp_path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    folder = tmp_path / "llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


def test_a_pretrained_folder_brings_shape_weights_and_tokenizer(text, pretrained):
    from transformers import AutoModelForCausalLM

    task = task_on(text, f"model.pretrained={pretrained}")
    assert (task.family, task.config.vocab, task.tokenizer.size) == ("llama", 288, 267)
    model = fill(task, task.build_model())
    tokens = torch.tensor([task.tokenizer.encode("hello world, hello")])
    theirs = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    again = build_task(task.recipe, json.loads(json.dumps(task.assets)))
    assert (again.config, again.family) == (task.config, "llama")
    with pytest.raises(RecipeError, match=r"model\.vocab_size: 300, but .* 288 rows"):
        task_on(text, f"model.pretrained={pretrained}", "model.vocab_size=300")
    with pytest.raises(RecipeError, match=r"data\.sequence_length: 65 .* 64 positions"):
        task_on(text, f"model.pretrained={pretrained}", "data.sequence_length=65")


def test_adapters_start_as_the_pretrained_model_and_are_all_that_learns(text, pretrained):
    pytest.importorskip("peft")
    plain = task_on(text, f"model.pretrained={pretrained}")
    task = task_on(text, f"model.pretrained={pretrained}", "model.lora.rank=4")
    model = fill(task, task.build_model())
    learning = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(learning) == 2 * 2 * 2  # A and B, of q and v, in two layers
    assert all("lora_" in name for name in learning)
    batch = task.collate([task.source("train").load(0)], 0)
    expected = call(plain, fill(plain, plain.build_model()), batch)
    torch.testing.assert_close(call(task, model, batch), expected)
    part = task.build_part(0, 1)
    assert sum(p.requires_grad for p in part.parameters()) == 4
