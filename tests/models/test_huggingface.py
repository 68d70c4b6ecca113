from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from muster.errors import CheckpointError, MusterError, RecipeError
from muster.models.configs import DecoderConfig, RopeScaling
from muster.models.decoder import Decoder
from muster.models.huggingface.config import family_for
from muster.models.huggingface.folder import (
    FolderWeights,
    export,
    locate,
    read_config,
    read_family,
    tokenizer_of,
)

GPT2 = {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 48, "n_inner": 72}
ROTARY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 56,
    "max_position_embeddings": 48,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOW = 5
CASES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2Config(**GPT2, layer_norm_epsilon=1e-3),
    "gpt2-untied": lambda: GPT2Config(**GPT2, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**ROTARY, rms_norm_eps=1e-3),
    "llama-llama3-tied": lambda: LlamaConfig(
        **ROTARY, rope_parameters=dict(LLAMA3), tie_word_embeddings=True
    ),
    "llama-biased": lambda: LlamaConfig(**ROTARY, attention_bias=True, mlp_bias=True),
    "llama-wide-heads": lambda: LlamaConfig(**ROTARY, head_dim=12),
    "mistral": lambda: MistralConfig(**ROTARY, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**ROTARY, rope_parameters={"rope_theta": 1e6}),
    "qwen2-window": lambda: Qwen2Config(
        **ROTARY, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0
    ),
    "qwen3": lambda: Qwen3Config(**ROTARY, head_dim=12, tie_word_embeddings=True),
}
TOKENS = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(1))


def make(case: str) -> PreTrainedModel:
    """Every parameter random, biases and norms too, so that a forgotten one shows."""
    model = AutoModelForCausalLM.from_config(CASES[case]()).eval()
    for name, parameter in model.named_parameters():
        norm = "norm" in name or "ln_" in name
        parameter.data.normal_(1.0 if norm and name.endswith("weight") else 0.0, 0.2)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def save(case: str, **options: Any) -> Path:
        model = make(case)
        model.save_pretrained(tmp_path / case, **options)
        return tmp_path / case

    return save


def read_whole(weights: FolderWeights) -> Decoder:
    with torch.device("meta"):
        model = Decoder(weights.config)
    state = {
        name: weights.read(name, tuple(p.shape), (slice(None),) * p.ndim, torch.device("cpu"))
        for name, p in model.named_parameters()
    }
    model.load_state_dict(state, assign=True)
    return model.eval()


def load(folder: Path) -> Decoder:
    return read_whole(FolderWeights(folder, read_config(folder)))


@torch.no_grad()
def their_logits(folder: Path) -> Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()(TOKENS).logits


@torch.no_grad()
def assert_same(ours: Decoder, theirs: Tensor) -> None:
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours(TOKENS), theirs, rtol=0, atol=1e-5)


def edit(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize("case", CASES)
def test_a_folder_gives_the_logits_transformers_gives(case: str, saved: Callable[..., Path]):
    folder = saved(case)
    assert_same(load(folder), their_logits(folder))


@pytest.mark.parametrize("case", ["gpt2", "llama"])
@torch.no_grad()
def test_positions_given_replace_the_running_ones(case: str, saved: Callable[..., Path]):
    folder = saved(case)
    positions = (2 * torch.arange(24)).expand(2, -1)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    every = torch.ones_like(TOKENS)  # given, so that a jump in positions starts no new document
    logits = theirs(TOKENS, position_ids=positions, attention_mask=every).logits
    ours = load(folder)
    torch.testing.assert_close(ours(TOKENS, positions=positions), logits, rtol=0, atol=1e-5)
    assert (ours(TOKENS) - logits).abs().max() > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_an_export_gives_transformers_our_logits(
    case: str, saved: Callable[..., Path], tmp_path: Path
):
    ours = load(saved(case))
    family = case.split("-")[0]
    for number, name in enumerate((family, None)):
        folder = tmp_path / f"out-{number}"
        export(folder, ours.config, ours.state_dict(), family=name)
        assert read_config(folder) == ours.config
        assert_same(ours, their_logits(folder))
        assert read_family(folder) == (name or read_family(folder))


def test_sharded_folders_are_read_and_written(saved: Callable[..., Path], tmp_path: Path):
    for case in ("gpt2", "llama"):
        folder = saved(case, max_shard_size="12KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        ours = load(folder)
        assert_same(ours, their_logits(folder))
        written = tmp_path / f"{case}-out"
        export(written, ours.config, ours.state_dict(), shard_bytes=12_000)
        sizes = [path.stat().st_size for path in written.glob("model-*-of-*.safetensors")]
        assert len(sizes) > 2
        assert sorted(sizes)[-2] < 14_000  # all but a tensor that is larger by itself
        assert_same(ours, their_logits(written))
        assert_same(load(written), their_logits(folder))


@pytest.mark.parametrize("case", ["gpt2", "qwen2"])
def test_regions_are_slices_of_the_whole(case: str, saved: Callable[..., Path]):
    folder = saved(case)
    weights = FolderWeights(folder, read_config(folder))
    for name, whole in read_whole(weights).named_parameters():
        shape = tuple(whole.shape)
        regions = [
            tuple(slice(n // 3, n - 1) for n in shape),
            (slice(0, 2), *(slice(None),) * (len(shape) - 1)),
            tuple(slice(-3, None) for _ in shape),
            (slice(1, 1), *(slice(None),) * (len(shape) - 1)),  # a rank that holds nothing of it
        ]
        for region in regions:
            part = weights.read(name, shape, region, torch.device("cpu"))
            assert part.is_contiguous()
            torch.testing.assert_close(part, whole[region], rtol=0, atol=0)


def resident(key: str) -> int:
    """Bytes of this process's memory, by the kernel's count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def test_reading_a_region_does_not_read_the_file(tmp_path: Path):
    vocab, width = 100_000, 512  # 205 MB of embedding, in a file full of holes
    config = DecoderConfig(vocab, 0, width, 4, 8, positions=4, norm="rms", bias=False)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in (
        ("transformer.wpe.weight", [4, width]),
        ("transformer.ln_f.weight", [width]),
        ("transformer.wte.weight", [vocab, width]),
    ):
        size = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    words = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(words)) + words)
        file.truncate(8 + len(words) + end)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest mark so far
    weights = FolderWeights(tmp_path, config)
    region = (slice(50_000, 51_000), slice(None))
    part = weights.read("embed.tokens.weight", (vocab, width), region, torch.device("cpu"))
    assert part.shape == (1000, width)
    assert part.untyped_storage().nbytes() == part.nbytes
    assert resident("VmHWM") - before < 20 * 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_folders_are_read_to_float32(
    dtype: torch.dtype, saved: Callable[..., Path], tmp_path: Path
):
    make("llama").to(dtype).save_pretrained(tmp_path / "half")
    ours = load(tmp_path / "half")
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert_same(ours, their_logits(tmp_path / "half"))


@pytest.mark.parametrize(
    ("case", "prefix"), [("gpt2", "transformer."), ("llama-llama3-tied", "model.")]
)
def test_a_folder_of_the_bare_model_is_read(case: str, prefix: str, saved: Callable[..., Path]):
    folder = saved(case)
    whole = load(folder).state_dict()
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.removeprefix(prefix): value for name, value in tensors.items()},
        folder / "model.safetensors",
    )
    torch.testing.assert_close(dict(load(folder).state_dict()), dict(whole), rtol=0, atol=0)


def test_older_names_of_the_rotary_settings_are_read(saved: Callable[..., Path]):
    folder = saved("llama-llama3-tied")
    config = read_config(folder)
    assert config.rope_theta == 500.0
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 16)
    older = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    edit(folder, rope_parameters=None, rope_theta=500.0, rope_scaling=older)
    assert read_config(folder) == config
    edit(folder, rope_scaling=None)
    assert read_config(folder).rope_scaling is None
    assert read_config(folder).rope_theta == 500.0


def test_keys_left_out_mean_what_transformers_assumes(tmp_path: Path):
    required = {key: value for key, value in ROTARY.items() if key != "num_key_value_heads"}
    for family, kv_heads, make_config in (
        ("llama", 4, LlamaConfig),
        ("mistral", 8, MistralConfig),
        ("qwen2", 32, Qwen2Config),
    ):
        required |= {"num_attention_heads": 4 if family == "llama" else 32, "hidden_size": 64}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **required}))
        config, assumed = read_config(tmp_path), make_config(**required)
        assert config.kv_heads == assumed.num_key_value_heads == kv_heads
        assert config.eps == assumed.rms_norm_eps
        assert config.tied == assumed.tie_word_embeddings
        assert config.window == getattr(assumed, "sliding_window", None)
        assert config.rope_theta == assumed.rope_parameters["rope_theta"]
    required = {key: value for key, value in GPT2.items() if key != "n_inner"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **required}))
    config = read_config(tmp_path)
    assert (config.tied, config.hidden, config.eps) == (True, 4 * 32, 1e-5)


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("gpt2", "activation_function", "gelu"),
        ("gpt2", "scale_attn_weights", False),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "n_layer", "two"),
        ("gpt2", "n_embd", 33),
        ("llama", "hidden_act", "gelu"),
        ("llama", "attention_bias", True),  # without mlp_bias: o has one, gate has none
        ("llama", "mlp_bias", True),
        ("llama", "num_key_value_heads", 3),
        ("llama", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("llama", "rope_parameters", {"rope_type": "yarn", "factor": 2.0}),
        ("llama", "rope_parameters", {"rope_type": "llama3", "factor": 2.0}),
        ("llama", "rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "quantization_config", {"quant_method": "gptq"}),
        ("llama", "model_type", "opt"),
        ("qwen2-window", "layer_types", ["full_attention", "sliding_attention"]),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(
    case: str, key: str, value: Any, saved: Callable[..., Path]
):
    folder = saved(case)
    edit(folder, **{key: value})
    named = {"attention_bias": "mlp_bias", "num_key_value_heads": "kv_heads"}.get(key, key)
    with pytest.raises(RecipeError, match=rf"model\.pretrained.*config\.json.*{named}"):
        read_config(folder)


def test_qwen2_windows_on_some_layers_are_refused_and_on_no_layer_are_none(
    saved: Callable[..., Path],
):
    folder = saved("qwen2-window")
    edit(folder, layer_types=None, max_window_layers=1)
    with pytest.raises(RecipeError, match="max_window_layers = 1"):
        read_config(folder)
    edit(folder, max_window_layers=2)
    assert read_config(folder).window is None
    edit(folder, max_window_layers=0)
    assert read_config(folder).window == WINDOW


def test_no_config_or_a_damaged_one_is_named(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"model\.pretrained.*no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(RecipeError, match=r"config\.json cannot be read"):
        read_config(tmp_path)


def test_missing_files_tensors_and_shapes_are_found_before_reading(saved: Callable[..., Path]):
    folder = saved("llama", max_shard_size="12KB")
    config = read_config(folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {shard.name}, which its .*index"):
        FolderWeights(folder, config)
    shard.write_bytes(content[:-5])
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged"):
        FolderWeights(folder, config)
    save_file({"another": torch.zeros(1)}, shard)
    with pytest.raises(CheckpointError, match=f"{shard.name} has no .*index"):
        FolderWeights(folder, config)
    shard.write_bytes(content)
    FolderWeights(folder, config)
    index = folder / "model.safetensors.index.json"
    words = index.read_text()
    document = json.loads(words)
    del document["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"lacks model\.norm\.weight"):
        FolderWeights(folder, config)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        FolderWeights(folder, config)


def test_wrong_shapes_formats_and_pickles_are_refused(saved: Callable[..., Path]):
    folder = saved("gpt2")
    config = read_config(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "transformer.h.1.attn.c_attn.weight"
    save_file(tensors | {name: tensors[name].T.contiguous()}, path)
    with pytest.raises(CheckpointError, match=rf"{name} is \[96, 32\], expected \[32, 96\]"):
        FolderWeights(folder, config)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, path)
    with pytest.raises(CheckpointError, match=f"{name} holds I8"):
        FolderWeights(folder, config)
    path.rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="safetensors only"):
        FolderWeights(folder, config)


def test_what_no_family_can_express_is_refused_by_name():
    rotary = {"position": "rotary", "norm": "rms", "activation": "swiglu"}
    sizes = (61, 2, 32, 4, 56)
    plain = DecoderConfig(*sizes, **rotary, bias=False, qkv_bias=False)
    assert family_for(DecoderConfig(*sizes)) == "gpt2"
    assert family_for(plain) == "llama"
    assert family_for(DecoderConfig(*sizes, **rotary, bias=False)) == "qwen2"
    window = DecoderConfig(*sizes, **rotary, bias=False, qkv_bias=False, window=3)
    assert family_for(window) == "mistral"
    with pytest.raises(MusterError, match="gpt2 cannot have kv_heads = 2"):
        family_for(DecoderConfig(*sizes, kv_heads=2))
    with pytest.raises(MusterError, match="llama cannot have window = 3"):
        family_for(window, "llama")
    with pytest.raises(MusterError, match="qwen2 cannot have qkv_bias = False"):
        family_for(plain, "qwen2")
    with pytest.raises(MusterError, match="llama cannot have position = learned and"):
        family_for(DecoderConfig(*sizes), "llama")
    with pytest.raises(MusterError, match="no family 'opt'"):
        family_for(plain, "opt")


def test_an_export_refuses_a_full_folder_and_another_model(tmp_path: Path):
    config = DecoderConfig(61, 1, 32, 4, 56, positions=8)
    state = Decoder(config).state_dict()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("all of it")
    with pytest.raises(MusterError, match="taken exists and is not an empty folder"):
        export(tmp_path / "taken", config, state)
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty", config, state)
    with pytest.raises(CheckpointError, match=r"does not fit its config in norm\.weight"):
        export(tmp_path / "new", config, {k: v for k, v in state.items() if k != "norm.weight"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "taken"]


def test_an_export_that_fails_leaves_nothing(small_disk: Path):
    config = DecoderConfig(5000, 1, 64, 4, 64, positions=8)
    before = sorted(small_disk.iterdir())
    with pytest.raises(CheckpointError, match="could not be written"):
        export(small_disk / "out", config, Decoder(config).state_dict(), shard_bytes=200_000)
    assert sorted(small_disk.iterdir()) == before


def test_tokenizer_files_and_special_tokens_come_along(saved: Callable[..., Path], tmp_path: Path):
    folder = saved("llama")
    edit(folder, eos_token_id=[7, 8])
    (folder / "tokenizer.json").write_text("{}")
    ours = load(folder)
    files, keys = tokenizer_of(folder)
    export(tmp_path / "out", ours.config, ours.state_dict(), keys=keys, files=files)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["eos_token_id"] == [7, 8]
    assert written["bos_token_id"] == 1


def test_a_model_is_a_folder_or_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert locate(str(tmp_path)) == tmp_path
    with pytest.raises(RecipeError, match=r"model\.pretrained: there is no folder \./nowhere"):
        locate("./nowhere")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RecipeError, match=r"model\.pretrained: there is no folder no-org/no-model"):
        locate("no-org/no-model")
    commit = "0" * 40
    kept = tmp_path / "models--an-org--a-model"
    (kept / "snapshots" / commit).mkdir(parents=True)
    (kept / "snapshots" / commit / "config.json").write_text("{}")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    assert locate("an-org/a-model") == kept / "snapshots" / commit
