"""Families that transformers builds, against transformers: forward pass, weights in and out, fresh
weights, adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import hf_families
from muster.errors import CheckpointError, RecipeError
from muster.models import lora
from muster.models.attention import Cache
from muster.models.huggingface import folder as huggingface
from muster.models.huggingface.locate import refuse_no_weights
from muster.models.huggingface.transformers_config import TransformersConfig
from muster.models.huggingface.transformers_model import PREFIX, TransformersLM
from muster.models.huggingface.transformers_weights import FreshTransformersWeights
from muster.parallel.materialise import materialise

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 257, (2, 20), generator=torch.Generator().manual_seed(1))
TABLE = [
    *hf_families.FAMILIES,
    *(pytest.param(name, marks=pytest.mark.full) for name in hf_families.MORE),
]


def read(folder: Path, **options: Any) -> Any:
    return huggingface.read_any(folder, "model.pretrained", 0.0, **options)[1]


def load(folder: Path) -> TransformersLM:
    config = read(folder)
    with torch.device("meta"):
        model = TransformersLM(config)
    materialise(model, huggingface.folder_weights(folder, config), CPU)
    return model.eval()


def whole(weights: Any, name: str, shape: tuple[int, ...]) -> Tensor:
    return weights.read(name, shape, tuple(slice(0, n) for n in shape), CPU)


@pytest.mark.parametrize("family", TABLE)
@torch.no_grad()
def test_logits_and_the_export_are_those_of_transformers(family: str, tmp_path: Path):
    theirs = hf_families.save(family, tmp_path / "in")
    ours = load(tmp_path / "in")
    logits = ours(TOKENS)
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, theirs(TOKENS).logits, rtol=0, atol=1e-5)
    cache = Cache()  # token by token
    assert torch.equal(ours(TOKENS[:, :9], cache=cache), ours(TOKENS[:, :9]))
    step = ours(TOKENS[:, 9:10], cache=cache)[:, -1]
    torch.testing.assert_close(step, logits[:, 9], rtol=0, atol=1e-5)

    huggingface.export(tmp_path / "out", ours.config, ours.state_dict())
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(again.eval()(TOKENS).logits, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", TABLE)
@torch.no_grad()
def test_documents_do_not_see_each_other(family: str, tmp_path: Path):
    hf_families.save(family, tmp_path / "in")
    model = load(tmp_path / "in")
    assert model.config.isolates_documents()
    row, cut = TOKENS[:1], 7
    documents = (torch.arange(20) >= cut).long()[None]
    positions = torch.cat([torch.arange(cut), torch.arange(20 - cut)])[None]
    together = model(row, positions=positions, documents=documents)
    apart = torch.cat([model(row[:, :cut]), model(row[:, cut:])], 1)
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-5)
    assert (model(row) - apart)[:, cut:].abs().max() > 1e-3


@pytest.mark.parametrize("family", TABLE)
def test_fresh_weights_are_initialised_as_transformers_does(family: str):
    config = _config(family, hidden_size=64)
    theirs = AutoModelForCausalLM.from_config(hf_families.config(family, hidden_size=64))
    weights = FreshTransformersWeights(7, config)
    for name, reference in theirs.named_parameters():
        shape = tuple(reference.shape)
        ours = whole(weights, PREFIX + name, shape)
        if reference.std() == 0:  # norms and biases
            assert torch.equal(ours, reference), name
            continue
        rtol = 5 / ours.numel() ** 0.5  # five standard errors of the difference
        torch.testing.assert_close(ours.std(), reference.std(), rtol=rtol, atol=0, msg=name)
        assert abs(float(ours.mean())) < 4 * float(ours.std()) / ours.numel() ** 0.5, name
        middle = tuple(slice(n // 3, 2 * n // 3 + 1) for n in shape)  # of another layout's rank
        assert torch.equal(weights.read(PREFIX + name, shape, middle, CPU), ours[middle])


def _config(family: str, **changes: Any) -> Any:
    from muster.models.huggingface.transformers_config import TransformersConfig

    theirs = hf_families.config(family, **changes)
    return TransformersConfig(theirs.to_dict(), 257, 64)


def test_a_rank_reads_its_region_of_fused_experts(tmp_path: Path):
    theirs = hf_families.save("mixtral", tmp_path / "in")
    config = read(tmp_path / "in")
    weights = huggingface.folder_weights(tmp_path / "in", config)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    fused = theirs.get_parameter(name)
    for region in [
        (slice(1, 3), slice(40, 61), slice(3, 9)),  # both of gate and up
        (slice(0, 4), slice(50, 96), slice(0, 32)),
        (slice(2, 2), slice(0, 96), slice(0, 32)),
    ]:
        assert torch.equal(
            weights.read(PREFIX + name, tuple(fused.shape), region, CPU), fused[region]
        )


def test_missing_and_extra_tensors_are_named(tmp_path: Path):
    hf_families.save("mixtral", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    gone = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
    fewer = {name: t for name, t in tensors.items() if name != gone}
    save_file(fewer, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"4 and 3 tensors for the parts of .*gate_up_proj"):
        load(tmp_path / "in")
    save_file({n: t for n, t in tensors.items() if n != "model.norm.weight"}, file)
    with pytest.raises(CheckpointError, match=r"lacks model\.norm\.weight"):
        load(tmp_path / "in")
    save_file(tensors | {"model.layers.0.extra": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.0\.extra"):
        load(tmp_path / "in")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"model_type": "new-thing"}, "does not know"),
        (
            {"model_type": "new-thing", "auto_map": {"AutoModelForCausalLM": "m.M"}},
            "trust_remote_code",
        ),
        ({"model_type": "vit"}, "not a causal language model"),
        ({"model_type": "gemma3"}, "more than text"),
        ({"architectures": ["Olmo2Model"]}, "Olmo2ForCausalLM"),
        ({"model_type": "bert", "architectures": None, "is_decoder": False}, "is_decoder"),
    ],
)
def test_what_is_no_plain_causal_language_model_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
):
    keys = hf_families.config("olmo2").to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(RecipeError, match=message):
        read(tmp_path)


def test_a_folder_without_weights_is_told_of_model_config(tmp_path: Path):
    hf_families.config("olmo2").save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"no weights.*model\.config"):
        refuse_no_weights(tmp_path)


def test_code_of_a_folder_runs_only_where_it_is_trusted(tmp_path: Path):
    """A family of its own, whose Python lies beside its weights."""
    hf_families.save("granite", tmp_path / "in")
    (tmp_path / "in" / "mine.py").write_text(CODE)
    keys = json.loads((tmp_path / "in" / "config.json").read_text())
    keys |= {"model_type": "mine", "architectures": ["MineForCausalLM"]}
    keys["auto_map"] = {
        "AutoConfig": "mine.MineConfig",
        "AutoModelForCausalLM": "mine.MineForCausalLM",
    }
    (tmp_path / "in" / "config.json").write_text(json.dumps(keys))
    with pytest.raises(RecipeError, match=r"model\.trust_remote_code=true"):
        read(tmp_path / "in")
    config = read(tmp_path / "in", trust_remote_code=True)
    with torch.device("meta"):
        model = TransformersLM(config)
    materialise(model, huggingface.folder_weights(tmp_path / "in", config), CPU)
    theirs = hf_families.make("granite")
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-5)
    huggingface.export(tmp_path / "out", config, model.state_dict())
    assert (tmp_path / "out" / "mine.py").read_text() == CODE


def test_code_of_a_known_family_is_never_run(tmp_path):
    """`auto_map` of a family that transformers knows, but not as a causal language model."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    keys = {"model_type": "vit", "vocab_size": 9}
    keys["auto_map"] = {"AutoModelForCausalLM": f"{tmp_path / 'code'}--modeling.Mine"}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(RecipeError, match="'vit', which is not a causal language model"):
        read(tmp_path)
    config = TransformersConfig(keys, vocab=9, positions=9)
    assert not config.isolates_documents()
    assert not (tmp_path / "ran").exists()


CODE = """
from transformers import GraniteConfig, GraniteForCausalLM

class MineConfig(GraniteConfig):
    model_type = "mine"

class MineForCausalLM(GraniteForCausalLM):
    config_class = MineConfig
"""


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("granite", ["q", "v", "gate"]),
        ("gemma3_text", ["k", "o", "up", "down"]),
        ("phi3", ["qkv_proj", "gate_up_proj"]),
        ("gpt_neox", ["query_key_value", "dense_h_to_4h"]),
    ],
)
@torch.no_grad()
def test_adapters_are_merged_and_exported_as_peft_has_them(
    family: str, targets: list[str], tmp_path: Path
):
    from peft import PeftModel

    hf_families.save(family, tmp_path / "in")
    model = load(tmp_path / "in")
    config, plain = model.config, model(TOKENS)
    lora.attach(model, rank=3, alpha=5.0, dropout=0.0, targets=targets)
    base = huggingface.folder_weights(tmp_path / "in", config)
    materialise(model, lora.AdapterWeights(base, 1), CPU)
    assert torch.equal(model(TOKENS), plain)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.3)
    ours, state = model(TOKENS), model.state_dict()
    assert (ours - plain).abs().max() > 0.01
    huggingface.export(tmp_path / "merged", config, lora.merged(state, 5.0, 3))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(TOKENS).logits, ours, rtol=0, atol=1e-5)
    lora.export_adapter(
        tmp_path / "adapter", config, state, rank=3, alpha=5.0, base=str(tmp_path / "in")
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    adapted = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    torch.testing.assert_close(adapted(TOKENS).logits, ours, rtol=0, atol=1e-5)


def test_unknown_targets_are_refused_with_the_names_that_exist(tmp_path: Path):
    hf_families.save("phi3", tmp_path / "in")
    with pytest.raises(RecipeError, match=r"targets: q; .*o, qkv_proj, gate_up_proj, down"):
        lora.attach(load(tmp_path / "in"), rank=2, alpha=1.0, dropout=0.0, targets=["q"])


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2"])
def test_an_architecture_trains_from_its_config_alone(family: str, tmp_path: Path):
    """transformers' module, or muster's own; from the file, and again from a checkpoint's assets."""
    from transformers import GPT2Config

    from muster.recipe.load import load as load_recipe
    from muster.tasks import build_task

    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 257, "n_positions": 64}
    theirs = GPT2Config(**sizes) if family == "gpt2" else hf_families.config(family, hidden_size=64)
    theirs.initializer_range = 0.5
    theirs.save_pretrained(tmp_path / "config")
    recipe = load_recipe(
        "llama-micro",
        [f"model.config={tmp_path / 'config' / 'config.json'}", "data.sequence_length=24"],
    )
    task = build_task(recipe)
    shutil.rmtree(tmp_path / "config")
    again = build_task(recipe, json.loads(json.dumps(task.assets)))
    for one in (task, again):
        with torch.device("meta"):
            model = one.build_model()
        weights = one.weights()
        assert weights is not None
        materialise(model, weights, CPU)
        embedding = next(p for name, p in model.named_parameters() if "embed" in name)
        torch.testing.assert_close(float(embedding.std()), 0.5, rtol=0.05, atol=0)
        logits = model.eval()(TOKENS)
        assert logits.shape == (2, 20, 257)
        assert logits.isfinite().all()
    assert again.assets == task.assets
