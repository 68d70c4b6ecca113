"""Hugging Face's config.json to our `DecoderConfig` and back.

Whatever changes the maths is carried over or refused by its name. Dropout does not come along: it
is the recipe's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from muster.errors import MusterError, RecipeError
from muster.models.configs import DecoderConfig, RopeScaling
from muster.reading import json_file
from muster.reading.text import in_one_line, printable

FAMILIES = ("gpt2", "llama", "qwen2", "mistral", "qwen3")  # in the order they are tried for export
SPEECH_FAMILIES = ("wav2vec2", "hubert", "wavlm", "wav2vec2-bert")
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast")
SILU = ("silu", "swish")
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
# Far beyond any model: a module per layer is made before a planner can say that it does not fit.
MOST_LAYERS, LARGEST_SIZE = 1024, 2**24
COUNTS = re.compile(r"layers?$|depth|blocks?$|experts$")
SIZES = re.compile(
    r"size|dim|width|embd|inner|heads?$|position|embeddings|length|kernel|stride|channels|mels|groups|window"
    r"|rank|^n_|^num_|^d_"
)


class UnsupportedSettingError(RecipeError):
    """A setting that muster's own decoder does not have."""


class ConfigFile:
    """config.json's keys, with errors that name the file."""

    def __init__(
        self,
        folder: Path,
        families: tuple[str, ...] | None = FAMILIES,
        *,
        key: str = "model.pretrained",
    ) -> None:
        """`folder` may be the file itself. `families` None takes any model_type; `key` is the recipe's."""
        self.key, self.path = key, folder / "config.json" if folder.is_dir() else folder
        try:
            self.keys: dict[str, Any] = json_file.read(self.path)
        except FileNotFoundError:
            if not folder.exists():
                raise RecipeError(
                    f"{self.key}: there is no folder or file {folder}; give one that exists"
                ) from None
            raise RecipeError(
                f"{self.key}: {folder} has no config.json; expected a folder that "
                "save_pretrained of transformers wrote"
            ) from None
        except (ValueError, OSError) as error:
            raise RecipeError(
                f"{self.key}: {printable(str(self.path))} cannot be read ({in_one_line(error, 300)}); "
                "copy the folder again"
            ) from None
        self._refuse_sizes()
        self.family = self.keys.get("model_type")
        if not isinstance(self.family, str) or (families and self.family not in families):
            raise RecipeError(
                f"{self.key}: {self.path} has model_type {in_one_line(repr(self.family))}; "
                f"for this task muster reads {', '.join(families or ('any that names a model_type',))}"
            )

    def refuse(self, key: str, value: object, expected: str) -> NoReturn:
        raise UnsupportedSettingError(
            f"{self.key}: {self.path} has {key} = {in_one_line(json.dumps(value))}; "
            f"muster reads {expected}; take another model"
        )

    def size(self, key: str) -> int:
        value = self.keys.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self.refuse(key, value, "a positive whole number")
        return value

    def size_or(self, key: str, default: int | None = None) -> int | None:
        """`default` where the key is missing; None where it is null."""
        return default if key not in self.keys else self.size(key) if self.keys[key] else None

    def number(self, key: str, default: float) -> float:
        """A positive one."""
        value = self.keys.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            self.refuse(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.keys.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return value

    def _refuse_sizes(self) -> None:
        """Of all sections: a model of 10^9 layers, or 2^40 wide, is asked for no memory."""
        waiting: list[tuple[str, Any]] = [("", self.keys)]
        while waiting:
            key, value = waiting.pop()
            if isinstance(value, dict):
                waiting += value.items()
            elif isinstance(value, list):
                most = MOST_LAYERS if "layer" in key else LARGEST_SIZE
                if len(value) > most:
                    self._too_large(key, f"a list of {len(value):,}", most)
                waiting += [(key, part) for part in value]
            elif isinstance(value, int | float) and not isinstance(value, bool):
                most = MOST_LAYERS if COUNTS.search(key) else LARGEST_SIZE
                sized = SIZES.search(key) or COUNTS.search(key)
                if sized and abs(value) > most:
                    self._too_large(key, in_one_line(json.dumps(value), 40), most)

    def _too_large(self, key: str, has: str, most: int) -> NoReturn:
        raise RecipeError(
            f"{self.key}: {printable(str(self.path))} has {in_one_line(key)} = {has}, which is too large: "
            f"muster builds models of up to {most:,} there; correct it, or take another model"
        )

    def get(self, key: str, default: Any) -> Any:
        return self.keys.get(key, default)

    def only(self, key: str, default: object, *allowed: object) -> None:
        if (value := self.keys.get(key, default)) not in allowed:
            self.refuse(key, value, f"{key} = {' or '.join(json.dumps(a) for a in allowed)}")


def read_family(folder: Path) -> str:
    """The folder's model_type, one of FAMILIES."""
    return str(ConfigFile(folder).family)


def read_config(folder: Path, key: str = "model.pretrained") -> DecoderConfig:
    """The architecture of a GPT-2, Llama, Mistral, Qwen2 or Qwen3 folder. Reads config.json only."""
    file = ConfigFile(folder, key=key)
    file.only("quantization_config", None, None)
    file.only("is_encoder_decoder", False, False)
    read = _read_gpt2 if file.family == "gpt2" else _read_rotary
    try:
        return read(file)
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{file.key}: {file.path}: {in_one_line(error, 300)}") from None


def _read_gpt2(file: ConfigFile) -> DecoderConfig:
    file.only("activation_function", "gelu_new", *TANH_GELU)
    file.only("scale_attn_weights", True, True)
    file.only("scale_attn_by_inverse_layer_idx", False, False)
    file.only("add_cross_attention", False, False)
    width, heads = file.size("n_embd"), file.size("n_head")
    if width % heads:
        file.refuse("n_embd", width, f"a multiple of n_head = {heads}")
    return DecoderConfig(
        vocab=file.size("vocab_size"),
        layers=file.size("n_layer"),
        width=width,
        heads=heads,
        hidden=file.size_or("n_inner") or 4 * width,
        positions=file.size("n_positions"),
        tied=file.flag("tie_word_embeddings", True),
        eps=file.number("layer_norm_epsilon", 1e-5),
    )


def _read_rotary(file: ConfigFile) -> DecoderConfig:
    file.only("hidden_act", "silu", *SILU)
    bias = file.flag("attention_bias", False) if file.family == "llama" else False
    if file.family == "llama":
        file.only("mlp_bias", False, bias)  # one switch for o, gate, up and down
    if file.family == "qwen3":
        file.only("attention_bias", False, False)
    theta, scaling = _rope(file)
    width, heads = file.size("hidden_size"), file.size("num_attention_heads")
    return DecoderConfig(
        vocab=file.size("vocab_size"),
        layers=file.size("num_hidden_layers"),
        width=width,
        heads=heads,
        hidden=file.size("intermediate_size"),
        kv_heads=file.size_or("num_key_value_heads") or _kv_heads(file, heads),
        head_size=file.size_or("head_dim", 128 if file.family == "qwen3" else None)
        or width // heads,
        positions=file.size("max_position_embeddings"),
        position="rotary",
        norm="rms",
        activation="swiglu",
        bias=bias,
        qkv_bias=bias or file.family == "qwen2",
        qk_norm=file.family == "qwen3",
        tied=file.flag("tie_word_embeddings", False),
        eps=file.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        window=_window(file),
    )


def _kv_heads(file: ConfigFile, heads: int) -> int:
    """Null means one per head; a missing key means what the family's first model had."""
    missing = {"llama": heads, "mistral": 8, "qwen2": 32, "qwen3": 32}[str(file.family)]
    return heads if "num_key_value_heads" in file.keys else missing


def _rope(file: ConfigFile) -> tuple[float, RopeScaling | None]:
    """transformers 5 writes `rope_parameters`; before, `rope_theta` and `rope_scaling`."""
    key = "rope_scaling" if file.get("rope_scaling", None) else "rope_parameters"
    rope = file.get(key, None) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        file.refuse(key, rope, "one set of rotary positions for all layers")
    theta = _positive(file, key, rope, "rope_theta", file.get("rope_theta", None) or 10_000.0)
    partial = rope.get("partial_rotary_factor", file.get("partial_rotary_factor", None))
    if partial not in (None, 1, 1.0):
        file.refuse("partial_rotary_factor", partial, "partial_rotary_factor = 1")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        file.refuse(key, rope, "the rope types default and llama3")
    factor, low, high = (_positive(file, key, rope, name) for name in LLAMA3)
    name = "original_max_position_embeddings"
    original = file.get(name, rope.get(name, file.size("max_position_embeddings")))
    return theta, RopeScaling(factor, low, high, int(_positive(file, key, {name: original}, name)))


def _positive(
    file: ConfigFile, key: str, rope: dict[str, Any], name: str, default: Any = None
) -> float:
    value = rope.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        file.refuse(key, rope, f"rotary positions with a positive {name}")
    return float(value)


def _window(file: ConfigFile) -> int | None:
    if file.family == "llama":
        return None
    window = file.size_or("sliding_window", 4096)
    if file.family == "mistral":
        return window
    if not file.flag("use_sliding_window", False) or window is None:
        return None
    layers = file.size("num_hidden_layers")
    full = min(file.size_or("max_window_layers", 28) or 0, layers)
    kinds = file.get("layer_types", None) or (
        ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    )
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        file.refuse("layer_types", kinds, "a list of words")
    if len(set(kinds)) > 1:
        key = "layer_types" if file.get("layer_types", None) else "max_window_layers"
        file.refuse(key, file.get(key, 28), "one sliding_window for all layers, or none")
    return window if "sliding_attention" in kinds else None


def family_for(config: DecoderConfig, family: str | None = None) -> str:
    """`family` if it can represent `config`, or the first that can; else an error."""
    if family is not None and family not in FAMILIES:
        raise MusterError(f"no family {family!r} to export to; known: {', '.join(FAMILIES)}")
    tried = FAMILIES if family is None else (family,)
    problems = {name: _inexpressible(config, name) for name in tried}
    for name, problem in problems.items():
        if not problem:
            return name
    words = "; ".join(f"{name} cannot have {problem}" for name, problem in problems.items())
    raise MusterError(f"this architecture has no Hugging Face form: {words}")


def _inexpressible(config: DecoderConfig, family: str) -> str:
    """The settings of `config` that `family` cannot represent, as text; empty if there are none."""
    wanted: dict[str, tuple[object, ...]] = {
        "position": ("rotary",),
        "norm": ("rms",),
        "activation": ("swiglu",),
        "bias": (False,),
        "qkv_bias": (False,),
        "qk_norm": (family == "qwen3",),
    }
    if family == "gpt2":
        wanted = {"position": ("learned",), "norm": ("layer",), "activation": ("gelu",)}
        wanted |= {"bias": (True,), "qkv_bias": (True,), "kv_heads": (config.heads,)}
        wanted |= {"head_size": (config.width / config.heads,), "window": (None,)}
        wanted |= {"rope_scaling": (None,), "qk_norm": (False,)}
    elif family == "llama":
        wanted |= {"bias": (config.qkv_bias,), "qkv_bias": (config.bias,), "window": (None,)}
    elif family == "qwen2":
        wanted |= {"qkv_bias": (True,)}
    found = [
        f"{key} = {getattr(config, key)}"
        for key, allowed in wanted.items()
        if getattr(config, key) not in allowed
    ]
    if family != "gpt2" and config.width % config.heads:
        found.append(f"width = {config.width} with heads = {config.heads}")
    return " and ".join(found)


def write_config(config: DecoderConfig, family: str, dtype: str) -> dict[str, Any]:
    """What config.json must say for transformers to build the same model."""
    common = {
        "model_type": family,
        "architectures": [
            "GPT2LMHeadModel" if family == "gpt2" else f"{family.capitalize()}ForCausalLM"
        ],
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        "dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "gpt2":
        return common | {
            "n_layer": config.layers,
            "n_embd": config.width,
            "n_head": config.heads,
            "n_inner": config.hidden,
            "n_positions": config.positions,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": config.eps,
            "resid_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            "embd_pdrop": 0.0,
        }
    return common | _rotary_keys(config) | _family_keys(config, family)


def _rotary_keys(config: DecoderConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        rope |= {"rope_type": "llama3", **dict(zip(LLAMA3, scaling, strict=False))}
        rope["original_max_position_embeddings"] = scaling.original_positions
    return {
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.positions,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        "attention_dropout": config.dropout,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,  # for transformers before 5
        "rope_scaling": rope if config.rope_scaling else None,
    }


def _family_keys(config: DecoderConfig, family: str) -> dict[str, Any]:
    if family == "llama":
        return {"attention_bias": config.qkv_bias, "mlp_bias": config.bias}
    keys: dict[str, Any] = {"sliding_window": config.window}
    if family in ("qwen2", "qwen3"):
        kind = "full_attention" if config.window is None else "sliding_attention"
        keys |= {
            "use_sliding_window": config.window is not None,
            "max_window_layers": config.layers if config.window is None else 0,
            "layer_types": [kind] * config.layers,
        }
    return keys
