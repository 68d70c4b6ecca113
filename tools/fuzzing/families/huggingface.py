"""Hugging Face folders: config.json, safetensors and their index, tokenizers, vocabularies."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers.models.gemma3.modeling_gemma3
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.phi3.modeling_phi3
import transformers.models.wav2vec2.modeling_wav2vec2  # noqa: F401 - loaded before the limits
from safetensors.torch import save

from fuzzing import mutate
from fuzzing.reader import Case, reader
from muster.data.speech.ctc_tokenizer import FolderVocabulary
from muster.data.speech.whisper_text import WhisperTokens
from muster.data.text.tokenizers import HuggingFace
from muster.models.configs import DecoderConfig
from muster.models.decoder import Decoder
from muster.models.huggingface import generation
from muster.models.huggingface.folder import export, folder_weights, read_any
from muster.models.huggingface.speech_folder import read_document
from muster.models.whisper import folder as whisper_folder
from muster.parallel.materialise import materialise

SIZES = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 256,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 257,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS: list[Any] = [
    GPT2 | {"architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"},
    SIZES
    | {
        "model_type": "llama",
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    SIZES | {"model_type": "llama", "rope_scaling": ROPE, "hidden_act": "silu"},
    SIZES | {"model_type": "qwen3", "head_dim": 8, "use_sliding_window": False},
    SIZES | {"model_type": "mistral", "sliding_window": 8},
    SIZES | {"model_type": "phi3", "pad_token_id": None},
    SIZES
    | {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0},
    },
    SIZES
    | {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
]
WHISPER: Any = {
    **{
        "model_type": "whisper",
        "vocab_size": 2000,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
    },
    **{
        "encoder_ffn_dim": 64,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 64,
    },
    **{
        "num_mel_bins": 80,
        "max_source_positions": 100,
        "max_target_positions": 64,
        "is_encoder_decoder": True,
    },
    **{"suppress_tokens": [1, 2], "begin_suppress_tokens": [3], "activation_function": "gelu"},
}
WAV2VEC: Any = {
    **{
        "model_type": "wav2vec2",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 30,
    },
    **{
        "intermediate_size": 32,
        "conv_dim": [16, 16],
        "conv_stride": [5, 2],
        "conv_kernel": [10, 3],
    },
    **{
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
    },
}
LARGE = [2**40, 10**9, 2**31, -(2**40), 10**12, 0, -1, 1.5, 2**20]


def _config(rng: Random, source: Any) -> bytes:
    if rng.random() < 0.35:
        source = dict(source)
        key = rng.choice(
            [k for k, v in source.items() if isinstance(v, int) and not isinstance(v, bool)]
        )
        source[key] = rng.choice(LARGE)
        return mutate.to_json(source)
    return mutate.json_file(rng, source)


@reader("hf-config", 1500)
def config(rng: Random, folder: Path) -> Case:
    """config.json and generation_config.json of language models, Whisper and the Wav2Vec2 family."""
    kind = rng.randrange(10)
    source = CONFIGS[kind] if kind < len(CONFIGS) else [WHISPER, WAV2VEC][kind - len(CONFIGS)]
    mutate.place(rng, folder / "config.json", _config(rng, source))
    if rng.random() < 0.3:
        keys = {
            "eos_token_id": [1, 2],
            "suppress_tokens": [1],
            "begin_suppress_tokens": [2],
            "is_multilingual": True,
        }
        mutate.place(rng, folder / "generation_config.json", mutate.json_file(rng, keys))

    def read() -> Any:
        if source is WHISPER:
            whisper_folder.read_generation(folder)
            return whisper_folder.parameter_shapes(whisper_folder.read_config(folder))
        if source is WAV2VEC:
            return read_document(folder)
        _, found = read_any(folder, "model.pretrained", 0.0)
        generation.read_generation(folder)
        with torch.device("meta"):
            return Decoder(found) if isinstance(found, DecoderConfig) else found.build()

    return Case(read, ("model.pretrained", "config.json", str(folder)))


@cache
def _weights() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Files of a small model: in one file, and in shards with an index."""
    found = []
    plain = DecoderConfig(vocab=257, layers=2, width=32, heads=4, hidden=128, positions=64)
    model = Decoder(plain)
    for shard in (1 << 30, 60_000):
        root = Path(tempfile.mkdtemp())
        export(root / "m", plain, model.state_dict(), shard_bytes=shard)
        found.append({path.name: path.read_bytes() for path in (root / "m").iterdir()})
        shutil.rmtree(root)
    return found[0], found[1]


def _tensor_file(rng: Random, content: bytes) -> bytes:
    """Header and data of safetensors, mutated apart."""
    size = int.from_bytes(content[:8], "little")
    if rng.random() < 0.5:
        header = mutate.json_file(rng, json.loads(content[8 : 8 + size]))
        length = (
            len(header)
            if rng.random() < 0.85
            else rng.choice([0, 2**63, 2**64 - 1, 2**31, 10**8, 7])
        )
        return length.to_bytes(8, "little") + header + content[8 + size :]
    return mutate.raw_bytes(rng, content)


@reader("hf-weights", 1200)
def weights(rng: Random, folder: Path) -> Case:
    whole, sharded = _weights()
    files = dict(rng.choice([whole, sharded]))
    index = "model.safetensors.index.json"
    tensors = sorted(name for name in files if name.endswith(".safetensors"))
    if index in files and rng.random() < 0.6:
        document = json.loads(files[index])
        if rng.random() < 0.4:
            planted = save({key: torch.zeros(1) for key in list(document["weight_map"])[:2]})
            (folder.parent / "outside" / "secret.safetensors").write_bytes(planted)
            odd = [
                "../outside/secret.safetensors",
                str(folder.parent / "outside/secret.safetensors"),
                "/dev/zero",
            ]
            document["weight_map"][rng.choice(list(document["weight_map"]))] = rng.choice(
                [*odd, "", ".", "..", "config.json", "link.safetensors"]
            )
            files[index] = mutate.to_json(document)
            (folder / "link.safetensors").symlink_to("../outside/secret.safetensors")
        else:
            files[index] = mutate.json_file(rng, document)
    else:
        one = rng.choice(tensors)
        files[one] = _tensor_file(rng, files[one])
    for name, content in files.items():
        mutate.place(rng, folder / name, content, 0.02)

    def read() -> Any:
        _, found = read_any(folder, "model.pretrained", 0.0)
        held = folder_weights(folder, found)
        with torch.device("meta"):
            model = Decoder(found) if isinstance(found, DecoderConfig) else found.build()
        materialise(model, held, torch.device("cpu"))
        return held

    def wrong(held: Any) -> str | None:
        here = folder.resolve()
        outside = [
            name
            for name in set(held._holder.values())
            if not (here / name).resolve().is_relative_to(here)
        ]
        return f"it read {outside[0]}" if outside else None

    return Case(read, ("model.pretrained", str(folder), "model.safetensors"), wrong)


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator(["some words of a text, and some more"] * 5, trainer)
    return json.loads(tokenizer.to_str())


def _bomb(rng: Random, document: Any) -> Any:
    """One id far above the others; a text that doubles with each step."""
    if rng.random() < 0.5:
        model = document["model"]
        vocab = {**model["vocab"], "far": 2 ** rng.choice([24, 28, 31])}
        return {**document, "model": {**model, "vocab": vocab}}
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 30
    return {**document, "normalizer": {"type": "Sequence", "normalizers": steps}}


@reader("tokenizer", 1400)
def tokenizer(rng: Random, folder: Path) -> Case:
    """tokenizer.json with tokenizer_config.json, and encoding with it."""
    document = _tokenizer()
    if rng.random() < 0.1:
        document = _bomb(rng, document)
    content = (
        mutate.json_file(rng, document) if rng.random() < 0.6 else json.dumps(document).encode()
    )
    mutate.place(rng, folder / "tokenizer.json", content)
    names = {
        "eos_token": rng.choice(["<|endoftext|>", {"content": "<|endoftext|>"}]),
        "bos_token": "<s>",
    }
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        if rng.random() < 0.5:
            mutate.place(rng, folder / file, mutate.json_file(rng, names))

    def read() -> Any:
        found = HuggingFace.read(folder, "model.pretrained")
        for ids, sizes in found.encode_all(["some words é字", "", "more\n"]):
            assert len(ids) == len(sizes)
            found.decode(ids.tolist())
        found.encode_marked("a <|endoftext|> b")
        return found.fingerprint(), found.special, found.end_text

    return Case(read, ("model.pretrained", str(folder)))


@reader("vocabulary", 800)
def vocabulary(rng: Random, folder: Path) -> Case:
    """vocab.json of CTC models; vocab.json and merges.txt of Whisper."""
    settings = {
        "tokenizer_class": "Wav2Vec2CTCTokenizer",
        "pad_token": "<pad>",
        "word_delimiter_token": "|",
        "do_lower_case": True,
    }
    letters = {
        letter: i for i, letter in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdef"])
    }
    if rng.random() < 0.6:
        mutate.place(
            rng,
            folder / "vocab.json",
            mutate.json_file(rng, letters) if rng.random() < 0.6 else json.dumps(letters).encode(),
        )
        mutate.place(rng, folder / "tokenizer_config.json", mutate.json_file(rng, settings))
        if rng.random() < 0.2:
            mutate.place(rng, folder / "added_tokens.json", mutate.json_file(rng, {"<x>": 12}))

        def read() -> Any:
            found = FolderVocabulary.read(folder, "model.pretrained", rng.choice([None, 11]))
            found.decode(found.encode("abc def", drop=True))
            return found.to_json()

    else:
        files = WhisperTokens.plain_bytes().files()
        for name, content in files.items():
            if name == "tokenizer.json" and rng.random() < 0.4:
                continue
            made = mutate.raw_bytes(rng, content) if rng.random() < 0.3 else content
            if name in ("vocab.json", "tokenizer.json") and rng.random() < 0.1:
                found = json.loads(content)
                vocab = found if name == "vocab.json" else found["model"]["vocab"]
                vocab["far"] = 2 ** rng.choice([24, 28, 31])
                made = json.dumps(found).encode()
            elif name.endswith(".json") and rng.random() < 0.3:
                made = mutate.json_file(rng, json.loads(content))
            mutate.place(rng, folder / name, made)
        mutate.place(rng, folder / "config.json", mutate.json_file(rng, {"vocab_size": 2000}))

        def read() -> Any:
            found = WhisperTokens.read(folder, "model.pretrained")
            return found.decode(found.encode("some words")), found.suppress, found.files()

    return Case(read, ("model.pretrained", str(folder)))
