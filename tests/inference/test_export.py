"""Checkpoints handed to transformers and peft."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.distributed.checkpoint as dcp
import typer
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

from muster.cli import use
from muster.cli.export import export as export_command
from muster.errors import MusterError
from muster.inference.export import export_checkpoint
from muster.inference.generate import generate
from muster.inference.load import load_trained
from muster.recipe.load import load
from muster.tasks import build_task
from muster.training.manifest import FORMAT, digest

TOKENS = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(1))
LORA = ["+model.lora={rank: 2, alpha: 6.0, targets: [q, v, up]}"]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        eos_token_id=[60, 61],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {word: i for i, word in enumerate([*(chr(97 + i) for i in range(20)), "</s>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
    return folder


def checkpoint(
    folder: Path, recipe: str, overrides: list[str], *, step: int = 1, noise: float = 0.0
) -> tuple[Path, nn.Module]:
    """A complete checkpoint of random weights, and the model that has them. `noise` is as if what
    learns had learnt something by `step`."""
    loaded = load(recipe, overrides)
    task = build_task(loaded)
    model = task.build_model().eval()
    if (weights := task.weights()) is not None:
        for name, p in model.named_parameters():
            everything = (slice(None),) * p.ndim
            p.data = weights.read(name, tuple(p.shape), everything, torch.device("cpu"))
            if "lora_B" in name:
                p.data.normal_(0, 0.5)
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        if noise and p.requires_grad:
            p.data += noise * torch.randn(p.shape, generator=generator)
    saved = folder / "checkpoints" / f"step-{step}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save({"model": model.state_dict()}, checkpoint_id=saved, no_dist=True)
    (saved / "recipe.json").write_text(json.dumps(loaded.as_dict()))
    (saved / "assets.json").write_text(json.dumps(task.assets))
    files = {p.name: {"bytes": p.stat().st_size, "sha256": digest(p)} for p in saved.iterdir()}
    manifest: dict[str, Any] = {"format": FORMAT, "trainer": {"step": step}, "files": files}
    (saved / "manifest.json").write_text(json.dumps(manifest))
    return folder, model


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("recipe", ["gpt-micro", "llama-micro"])
@torch.no_grad()
def test_a_fresh_model_becomes_a_folder(recipe: str, tmp_path: Path):
    run, model = checkpoint(tmp_path / "run", recipe, [])
    export_checkpoint(run, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_same(theirs(TOKENS).logits, model(TOKENS))
    assert theirs.config.eos_token_id == 256  # the end of a document, for tokens that are bytes


@torch.no_grad()
def test_a_pretrained_model_keeps_its_family_tokenizer_and_special_tokens(
    pretrained: Path, tmp_path: Path
):
    run, model = checkpoint(
        tmp_path / "run",
        "llama-micro",
        [f"model.pretrained={pretrained}", "data.sequence_length=32"],
    )
    export_checkpoint(run / "checkpoints" / "step-1", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_same(theirs(TOKENS).logits, model(TOKENS))
    assert theirs.config.eos_token_id == [60, 61]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("c b a")["input_ids"] == [2, 1, 0]


@torch.no_grad()
def test_what_ends_a_text_and_how_it_is_sampled_goes_along(pretrained: Path, tmp_path: Path):
    """generation_config.json, which transformers believes rather than config.json, comes from the
    checkpoint: the pretrained folder may be gone."""
    folder, length = tmp_path / "model", ["data.sequence_length=32"]
    shutil.copytree(pretrained, folder)
    settings = {"eos_token_id": [7, 62], "do_sample": True, "temperature": 0.6, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    recipe = ("llama-micro", [f"model.pretrained={folder}", *length])
    run, _ = checkpoint(tmp_path / "run", *recipe)
    adapted, _ = checkpoint(tmp_path / "adapted", recipe[0], [*recipe[1], *LORA])
    trained = load_trained(run)
    shutil.rmtree(folder)
    for number, one in enumerate((run, adapted)):
        export_checkpoint(one, tmp_path / f"out-{number}")
        found = GenerationConfig.from_pretrained(tmp_path / f"out-{number}").to_dict()
        # and 20, with which the documents that it was trained on end
        assert {name: found[name] for name in settings} == settings | {"eos_token_id": [7, 62, 20]}
    assert trained.task.ends == load_trained(run).task.ends == {7, 62, 20}
    with torch.no_grad():
        trained.model.head.weight.zero_()
    text = "".join(next(generate(trained, "c b a", temperature=1.0, max_tokens=60, seed=3)))
    assert 0 < len(text.split()) < 60
    assert "h" not in text  # token 7


def test_without_the_original_folder_the_checkpoint_brings_its_own_tokenizer(
    pretrained: Path, tmp_path: Path
):
    moved = tmp_path / "pretrained"
    moved.mkdir()
    for path in pretrained.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    run, model = checkpoint(
        tmp_path / "run", "llama-micro", [f"model.pretrained={moved}", "data.sequence_length=32"]
    )
    moved.rename(tmp_path / "elsewhere")
    export_checkpoint(run, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_same(theirs(TOKENS).logits, model(TOKENS))
    assert theirs.config.eos_token_id == 20
    found = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert found.encode("c b a").ids == [2, 1, 0]


@torch.no_grad()
def test_adapters_are_merged_or_exported_alone(pretrained: Path, tmp_path: Path):
    overrides = [f"model.pretrained={pretrained}", "data.sequence_length=32", *LORA]
    run, model = checkpoint(tmp_path / "run", "llama-micro", overrides)
    base = AutoModelForCausalLM.from_pretrained(pretrained).eval()
    ours = model(TOKENS)
    assert (base(TOKENS).logits - ours).abs().max() > 0.1
    export_checkpoint(run, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert_same(merged(TOKENS).logits, ours)
    export_checkpoint(run, tmp_path / "adapter", adapter=True)
    assert_same(PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(TOKENS).logits, ours)
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(pretrained)


def test_what_cannot_be_exported_says_why(pretrained: Path, tmp_path: Path):
    out = tmp_path / "out"
    with pytest.raises(MusterError, match="no checkpoint at"):
        export_checkpoint(tmp_path / "nowhere", out)
    greedy = ["evaluation.decoder=greedy", "evaluation.ngram=null", "evaluation.known_words=false"]
    run, _ = checkpoint(tmp_path / "speech", "speech", greedy)
    with pytest.raises(MusterError, match=r"task speech-ctc; only language models \(causal-lm\)"):
        export_checkpoint(run, out)
    run, _ = checkpoint(tmp_path / "plain", "gpt-micro", [])
    with pytest.raises(MusterError, match=r"without model\.lora"):
        export_checkpoint(run, out, adapter=True)
    run, _ = checkpoint(tmp_path / "fresh", "gpt-micro", LORA)
    with pytest.raises(MusterError, match="not pretrained"):
        export_checkpoint(run, out, adapter=True)
    assert not out.exists()


def test_the_command_exports(tmp_path: Path):
    run, _ = checkpoint(tmp_path / "run", "gpt-micro", [])
    app = typer.Typer()
    app.command()(export_command)
    result = CliRunner().invoke(app, [str(run), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "written to" in result.output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.n_layer == 4
    with pytest.raises(
        MusterError, match=r"out is a model's folder in transformers' form.*pretrained=.*out"
    ):
        use.generate(tmp_path / "out", "x")


WHISPER = [
    "data.max_parquet_files=1",
    "data.spec_augment=null",
    "evaluation.max_tokens=12",
    "seed=11",
]


@pytest.fixture(scope="module")
def heard() -> list[Any]:
    """Features of two clips, in whole windows."""
    task = build_task(load("whisper-micro", [*WHISPER, "data.window=30"]))
    source = task.source("test")
    assert source is not None
    return [source.load(i) for i in range(2)]


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(False, id="whole"),
        pytest.param(True, id="adapters merged", marks=pytest.mark.guides),
    ],
)
def test_a_whisper_is_what_transformers_loads(tmp_path, heard, lora):
    """Model, processor and pipeline as they are, from a tokenizer that was learnt here."""
    from transformers import WhisperForConditionalGeneration, WhisperProcessor, pipeline

    overrides = [*WHISPER, "data.window=30", *(LORA if lora else [])]
    run, model = checkpoint(tmp_path / "run", "whisper-micro", overrides)
    export_checkpoint(run, tmp_path / "out")
    theirs = WhisperForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    processor = WhisperProcessor.from_pretrained(tmp_path / "out")
    task = build_task(load("whisper-micro", overrides))
    batch = task.prepare(task.collate(heard, None))
    features = processor(
        [clip.samples for clip in heard], sampling_rate=16000, return_tensors="pt"
    ).input_features
    torch.testing.assert_close(features, batch["features"].transpose(1, 2), rtol=0, atol=1e-4)
    with torch.no_grad():
        logits = model(batch["features"], batch["tokens"])
        expected = theirs(input_features=features, decoder_input_ids=batch["tokens"]).logits
        assert_same(logits[..., : expected.shape[-1]], expected)
        said = task.decode(model(*task.eval_inputs(batch, bool).args))
    assert processor.tokenizer("seven past nine").input_ids == [
        *task.prompt,
        *task.tokens.encode("seven past nine"),
        task.tokens.end,
    ]
    found = pipeline("automatic-speech-recognition", str(tmp_path / "out"))
    options = {"max_new_tokens": 12, "num_beams": 1}  # its own default is five
    texts = [one["text"] for one in found([c.samples for c in heard], generate_kwargs=options)]
    if not lora:  # with noise for adapters it writes bytes that are no text, and marks of time
        assert [text.strip() for text in texts] == said


def test_the_head_of_a_ctc_loss_stays_out_of_the_folder(tmp_path):
    """Nothing in it tells with what loss it was trained."""
    from safetensors.torch import load_file

    folders = []
    for weight in (0, 0.3):
        run, model = checkpoint(
            tmp_path / f"run-{weight}", "whisper-micro", [*WHISPER, f"training.ctc_weight={weight}"]
        )
        assert any("ctc_head" in name for name, _ in model.named_parameters()) == bool(weight)
        folders.append(tmp_path / f"out-{weight}")
        export_checkpoint(run, folders[-1])
    plain, joint = folders
    assert {p.name for p in plain.iterdir()} == {p.name for p in joint.iterdir()}
    assert (plain / "config.json").read_text() == (joint / "config.json").read_text()
    one, other = (load_file(f / "model.safetensors") for f in folders)
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.guides
def test_whisper_adapters_are_what_peft_loads(tmp_path, heard):
    from transformers import WhisperForConditionalGeneration

    base, _ = checkpoint(tmp_path / "base", "whisper-micro", WHISPER)
    export_checkpoint(base, tmp_path / "pretrained")
    overrides = [*WHISPER, f"model.pretrained={tmp_path / 'pretrained'}", *LORA]
    run, model = checkpoint(tmp_path / "run", "whisper-micro", overrides)
    export_checkpoint(run, tmp_path / "adapter", adapter=True)
    bare = WhisperForConditionalGeneration.from_pretrained(tmp_path / "pretrained")
    theirs = PeftModel.from_pretrained(bare, tmp_path / "adapter").eval()
    task = build_task(load("whisper-micro", [*overrides, "data.window=30"]))
    batch = task.prepare(task.collate(heard, None))
    with torch.no_grad():
        ours = model(batch["features"], batch["tokens"])
        inputs = batch["features"].transpose(1, 2)
        expected = theirs(input_features=inputs, decoder_input_ids=batch["tokens"]).logits
    assert_same(ours[..., : expected.shape[-1]], expected)


@pytest.mark.guides
def test_a_whisper_folder_is_scored_on_data_that_is_named(tmp_path):
    from data.clips import encode, tone, write_parquet
    from muster.cli.use import evaluate

    run, _ = checkpoint(tmp_path / "run", "whisper-micro", WHISPER)
    export_checkpoint(run, tmp_path / "out")
    clips = [encode(tone(1.0, 300)), encode(tone(1.4, 500)), encode(tone(40.0, 500))]
    texts = ["one two three", "four", "five"]
    data = write_parquet(tmp_path / "mine.parquet", clips, texts)
    app = typer.Typer()
    app.command()(evaluate)
    found = CliRunner().invoke(app, [str(tmp_path / "out"), "--data", str(data)])
    assert found.exit_code == 0, found.output
    assert "2 clips" in found.output
    assert "2 words:" in found.output  # normalised: 123 and 4
    assert "not scored: 1 longer than 30.0 s" in found.output
    with pytest.raises(MusterError, match="name some with --data"):
        CliRunner().invoke(app, [str(tmp_path / "out")], catch_exceptions=False)
