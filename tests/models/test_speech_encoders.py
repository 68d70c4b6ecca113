"""Speech encoders of transformers: its own logits, from any folder, and back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import few_clips
from muster.data.speech.source import SpeechSample
from muster.errors import CheckpointError, RecipeError
from muster.models.huggingface.speech import SpeechEncoderCTC
from muster.models.huggingface.speech_folder import export
from muster.parallel.materialise import materialise
from muster.recipe.schema import Recipe
from muster.tasks import build_task
from muster.tasks.speech_encoder import SpeechEncoder
from speech_encoders import KINDS, TOKENS, extractor, make, waves, write

CPU = torch.device("cpu")


def open_task(folder: Path, **keys: Any) -> SpeechEncoder:
    document = {"task": "speech-ctc", "training": {"steps": 1}} | keys
    document["model"] = {"pretrained": str(folder)} | keys.get("model", {})
    task = build_task(Recipe.model_validate(document))
    assert isinstance(task, SpeechEncoder)
    return task


def open_model(task: SpeechEncoder) -> SpeechEncoderCTC:
    with torch.device("meta"):
        model = task.build_model()
    materialise(model, task.weights(), CPU)
    return model.eval()


def samples(*lengths: int) -> list[SpeechSample]:
    return [SpeechSample(i, wave, "one two") for i, wave in enumerate(waves(*lengths))]


def run(task: SpeechEncoder, model: SpeechEncoderCTC, *lengths: int) -> tuple[Any, Any]:
    with torch.no_grad():
        return model(*task.inputs(task.prepare(task.collate(samples(*lengths), None))).args)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_has_transformers_own_logits(tmp_path: Path, kind: str):
    theirs = make(kind)
    task = open_task(write(theirs, tmp_path))
    model = open_model(task)
    batch = task.prepare(task.collate(samples(9000, 16000), None))
    given = waves(9000, 16000)
    if kind == "wav2vec2-group":  # their extractor would count padding in the mean
        each = [extractor(theirs)(w, sampling_rate=16000).input_values[0] for w in given]
        size = batch["features"].shape[1]
        rows = [torch.nn.functional.pad(torch.tensor(w), (0, size - len(w))) for w in each]
        expected = {"input_values": torch.stack(rows)}
    else:
        expected = extractor(theirs)(given, sampling_rate=16000, padding=True, return_tensors="pt")
    reference = theirs(**expected).logits
    logits, lengths = model(*task.inputs(batch).args)
    assert lengths.tolist() == model.output_lengths(batch["frames"]).tolist()
    for row, expected_row, length in zip(logits, reference, lengths, strict=True):
        torch.testing.assert_close(row[:length], expected_row[:length], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["wav2vec2-layer", "wavlm", "wav2vec2-bert"])
def test_a_masked_model_does_not_read_padding(tmp_path: Path, kind: str):
    task = open_task(write(make(kind), tmp_path))
    model = open_model(task)
    assert task.windows(torch.ones(2).double().numpy(), training=True) is None
    alone, frames = run(task, model, 9000)
    together, _ = run(task, model, 9000, 16000)
    torch.testing.assert_close(together[:1, : frames[0]], alone, rtol=0, atol=2e-5)


def test_an_unmasked_model_is_padded_as_far_as_the_global_batch(tmp_path: Path):
    task = open_task(write(make("wav2vec2-group"), tmp_path))
    batches = [task.collate(part, 0, longest=1.0) for part in (samples(9000), samples(9000, 16000))]
    assert [b["samples"].shape[1] for b in batches] == [20480, 20480]
    padded = task.windows(torch.tensor([0.1, 0.32, 1.0]).double().numpy(), training=False)
    assert padded is not None
    assert padded.tolist() == pytest.approx([0.32, 0.32, 1.28])


def test_a_clip_shorter_than_one_frame_has_one(tmp_path: Path):
    for kind in ("wav2vec2-layer", "wav2vec2-bert"):
        task = open_task(write(make(kind), tmp_path / kind))
        logits, lengths = run(task, open_model(task), 50)
        assert lengths.tolist() == [1]
        assert logits.isfinite().all()


def rename(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = {change(name): value for name, value in load_file(path).items()}
    save_file({n: t for n, t in tensors.items() if n}, path, metadata={"format": "pt"})


def older(name: str) -> str:
    name = name.replace("parametrizations.weight.original0", "weight_g")
    return name.replace("parametrizations.weight.original1", "weight_v")


@pytest.mark.parametrize("bare", [False, True])
def test_older_names_of_the_weight_norm_and_the_bare_model_are_read(tmp_path: Path, bare: bool):
    theirs = make("hubert")
    folder = write(theirs, tmp_path)
    expected = open_model(open_task(folder)).state_dict()
    assert any("original0" in name for name in expected)
    rename(folder, lambda name: older(name).removeprefix("hubert." if bare else ""))
    found = open_model(open_task(folder)).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_folder_without_a_head_gets_one_that_depends_on_the_seed_alone(tmp_path: Path):
    folder = write(make("wavlm"), tmp_path)
    rename(folder, lambda name: "" if name.startswith("lm_head") or "masked" in name else name)
    task = open_task(folder)
    assert task.vocabulary.pieces[:3] == ("", "a", "b")
    first, again = (open_model(open_task(folder)).state_dict() for _ in range(2))
    other = open_model(open_task(folder, seed=1)).state_dict()
    for name in ("lm_head.weight", "wavlm.masked_spec_embed"):
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
    assert first["lm_head.weight"].shape[0] == task.vocabulary.size
    assert first["lm_head.weight"].std() == pytest.approx(0.1, rel=0.2)  # initializer_range
    assert not first["lm_head.bias"].any()
    part = task.weights().read("lm_head.weight", (29, 24), (slice(3, 9), slice(0, 24)), CPU)
    assert torch.equal(part, first["lm_head.weight"][3:9])


def test_the_blank_may_be_any_id(tmp_path: Path):
    """The loss and both decoders of a vocabulary whose padding token is the last."""
    turned = {token: (i - 1) % len(TOKENS) for token, i in TOKENS.items()}
    assert turned["<pad>"] == len(TOKENS) - 1
    task = open_task(write(make("wav2vec2-layer"), tmp_path / "0"))
    moved = open_task(write(make("wav2vec2-layer", tokens=turned), tmp_path / "1", tokens=turned))
    assert moved.vocabulary.blank == len(TOKENS) - 1
    logits = 3 * torch.randn(2, 60, len(TOKENS), generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([60, 40])
    other = torch.roll(logits, -1, dims=2)
    given, moved_given = (t.collate(samples(9000, 16000), None) for t in (task, moved))
    assert given["targets"].tolist() != moved_given["targets"].tolist()
    loss = task.loss((logits, lengths), given)
    torch.testing.assert_close(moved.loss((other, lengths), moved_given), loss)
    assert moved.decode(other, lengths) == task.decode(logits, lengths)
    for each in (task, moved):
        each.recipe = each.recipe.model_copy(
            update={"evaluation": each.recipe.evaluation.model_copy(update={"decoder": "beam"})}
        )
    assert moved.decode(other, lengths) == task.decode(logits, lengths)


@torch.no_grad()
@pytest.mark.parametrize("positions", ["rotary", "relative"])
def test_constants_survive_the_meta_device(tmp_path: Path, positions: str):
    theirs = make("wav2vec2-bert", position_embeddings_type=positions, max_source_positions=70)
    task = open_task(write(theirs, tmp_path))
    features = torch.randn(1, 50, 160)
    mask = torch.ones(1, 50, dtype=torch.int)
    expected = theirs(features, attention_mask=mask).logits
    found, _ = open_model(task)(features, torch.tensor([50]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["wavlm", "wav2vec2-bert"])
def test_an_export_gives_transformers_our_logits_and_letters(tmp_path: Path, kind: str):
    from transformers import AutoModelForCTC, AutoTokenizer

    task = open_task(write(make(kind), tmp_path / "in"))
    model = open_model(task)
    export(tmp_path / "out", task.document, model.state_dict(), task.exported_files())
    theirs, info = AutoModelForCTC.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    logits, lengths = run(task, model, 9000)
    made = type(extractor(theirs)).from_pretrained(tmp_path / "out")
    inputs = made(waves(9000), sampling_rate=16000, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = theirs.eval()(**inputs).logits[:, : lengths[0]]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    (said,) = tokenizer.batch_decode(expected.argmax(-1))
    said = re.sub("<s>|</s>|<unk>", "", said).lower()  # ours gives text alone
    assert task.decode(logits, lengths) == [" ".join(said.split())]


def test_an_alphabet_of_the_recipes_own_is_exported_too(tmp_path: Path):
    from transformers import AutoModelForCTC, AutoTokenizer

    keys = {"data": {"tokenizer": {"kind": "characters", "characters": "abc' "}}}
    task = open_task(write(make("hubert"), tmp_path / "in"), **keys)
    model = open_model(task)
    export(tmp_path / "out", task.document, model.state_dict(), task.exported_files())
    theirs = AutoModelForCTC.from_pretrained(tmp_path / "out")
    assert (theirs.config.vocab_size, theirs.config.pad_token_id) == (6, 0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = task.vocabulary.encode("a cab")
    assert tokenizer("a cab").input_ids == ids
    assert tokenizer.decode(ids) == "a cab"


def test_only_what_the_recipe_says_is_trained(tmp_path: Path):
    folder = write(make("wav2vec2-layer"), tmp_path)

    def frozen(**model: Any) -> set[str]:
        built = open_task(folder, model=model).build_model()
        return {n.split(".")[1] for n, p in built.named_parameters() if not p.requires_grad}

    assert frozen() == {"feature_extractor"}
    assert frozen(freeze_feature_encoder=False) == set()
    assert "encoder" in frozen(freeze_encoder=True)
    whole = open_task(folder, data={"spec_augment": None}).build_model()
    assert not whole.base.masked_spec_embed.requires_grad  # nothing would give it a gradient


def test_training_draws_nothing_by_the_batch(tmp_path: Path):
    """Dropout, LayerDrop and SpecAugment of the folder's config are off: the recipe's are keyed by clip."""
    changes = {"layerdrop": 0.9, "mask_feature_prob": 0.5, "mask_time_prob": 0.5}
    task = open_task(write(make("wav2vec2-layer", **changes), tmp_path))
    model = open_model(task).train()
    plain = task.prepare(task.collate(samples(16000), None))
    masked = task.prepare(task.collate(samples(16000), 0))
    (first, _), (again, _), (third, _) = (
        model(*task.inputs(batch).args) for batch in (plain, plain, masked)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, third)
    assert torch.equal(third, model(*task.inputs(masked).args)[0])


def edit(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    ("file", "keys", "words"),
    [
        ("config.json", {"model_type": "whisper"}, "for this task muster reads wav2vec2, hubert"),
        ("config.json", {"adapter_attn_dim": 16}, "adapter_attn_dim = 16"),
        ("preprocessor_config.json", {"sampling_rate": 8000}, "data.sample_rate: .* 8000 Hz"),
        ("preprocessor_config.json", {"padding_side": "left"}, "on the left"),
        ("vocab.json", {"eng": {"a": 1}}, "a multilingual model"),
        ("tokenizer_config.json", {"pad_token": "<gone>"}, "has no <gone>"),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "Wav2Vec2PhonemeCTCTokenizer"},
            "Wav2Vec2PhonemeCTCTokenizer",
        ),
        ("vocab.json", {"ü": 70}, "ids up to 70, but the model's head only 32"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(tmp_path: Path, file, keys, words):
    folder = write(make("hubert"), tmp_path)
    edit(folder / file, **keys)
    with pytest.raises(RecipeError, match=words):
        open_task(folder)


def test_lora_and_a_damaged_folder_are_refused(tmp_path: Path):
    folder = write(make("hubert"), tmp_path)
    with pytest.raises(RecipeError, match=r"model\.lora"):
        open_task(folder, model={"lora": {}})
    rename(folder, lambda name: "" if "layers.1.attention" in name else name)
    with pytest.raises(CheckpointError, match=r"lacks hubert\.encoder\.layers\.1\.attention"):
        open_task(folder).weights()


def test_upper_case_letters_of_a_folder_read_and_give_lower_case(tmp_path: Path):
    task = open_task(write(make("hubert"), tmp_path), data={"train": few_clips.folder()})
    ids = task.vocabulary.encode("it's nine")
    assert ids == [TOKENS[c] for c in "IT'S|NINE"]
    assert task.vocabulary.decode(ids) == "it's nine"
    source = task.source("train")
    assert source is not None
    assert source.texts[0] == source.texts[0].lower()
