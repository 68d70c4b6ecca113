"""Language models that transformers builds: what muster must know of their config.json."""

from __future__ import annotations

import inspect
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.errors import RecipeError
from muster.models.configs import DecoderConfig
from muster.models.huggingface.config import (
    FAMILIES,
    ConfigFile,
    UnsupportedSettingError,
    read_config,
)
from muster.reading.text import in_one_line

UNLIMITED = 2**31 - 1  # positions of a family that does not limit them
DROPOUT = re.compile(r"dropout|pdrop")
DRAWN = re.compile(
    r"layerdrop|jitter"
)  # random choices by batch or rank, which no recipe key asks for
MASKS = ("create_causal_mask", "create_masks_for_generate")


@dataclass(frozen=True)
class TransformersConfig:
    """`keys` is config.json as it came: an export writes it again."""

    keys: dict[str, Any]
    vocab: int
    positions: int
    dropout: float = 0.0
    code: str | None = None  # the folder whose own Python builds it (model.trust_remote_code)

    @property
    def family(self) -> str:
        return str(self.keys["model_type"])

    def build(self) -> Any:
        """transformers' own config object, with the recipe's dropout and nothing that only generating
        or another loss needs."""
        config = _parse(self.keys, self.code)
        for name, value in config.to_dict().items():
            if DROPOUT.search(name) and not name.startswith("classifier") and _is_number(value):
                setattr(config, name, self.dropout)
            elif DRAWN.search(name) and _is_number(value):
                setattr(config, name, 0.0)
        for name in ("use_cache", "output_router_logits"):
            if hasattr(config, name):
                setattr(config, name, False)
        return config

    def isolates_documents(self) -> bool:
        """Whether attention masks and positions come from transformers' own masking, which takes them."""
        cls = model_class(_parse(self.keys, self.code), self.code)
        if cls is None or getattr(cls, "_is_stateful", False):
            return False
        home = sys.modules[cls.__module__]
        takes = "position_ids" in inspect.signature(cls.forward).parameters
        return takes and any(hasattr(home, name) for name in MASKS)


def read_transformers_config(
    file: ConfigFile, *, dropout: float, trust_remote_code: bool
) -> TransformersConfig:
    """From a config.json of any family that transformers can build a causal language model of."""
    code = check_keys(file, trust_remote_code)
    try:
        config = _parse(file.keys, code)
    except RecipeError:
        raise
    except Exception as error:  # of transformers' own validation, or of a folder's own code
        raise RecipeError(f"{file.key}: {file.path}: {in_one_line(error, 300)}") from None
    _check_causal(file, config, code)
    vocab = getattr(config, "vocab_size", None)
    if not isinstance(vocab, int) or vocab <= 0:
        file.refuse("vocab_size", vocab, "a positive whole number")
    positions = getattr(config, "max_position_embeddings", None)
    return TransformersConfig(file.keys, vocab, positions or UNLIMITED, dropout, code)


def check_folder(folder: Path, key: str, *, trust_remote_code: bool) -> DecoderConfig | None:
    """Refuse a folder, or a config.json, that no language model can be made of, as far as its keys tell.
    None where transformers will build it."""
    file = ConfigFile(folder, None, key=key)
    if file.family in FAMILIES:
        with suppress(UnsupportedSettingError):
            return read_config(folder, key)
    check_keys(file, trust_remote_code)
    return None


def check_keys(file: ConfigFile, trust_remote_code: bool) -> str | None:
    """What can be refused without building anything; the folder whose code is needed, if any."""
    file.only("quantization_config", None, None)
    file.only("is_encoder_decoder", False, False)
    return _code(file, trust_remote_code)


def model_class(config: Any, code: str | None) -> Any:
    """transformers' class of a causal language model with this config, or that of the folder whose `code` may
    run; None if there is none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None and code is not None:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        name = config.auto_map.get("AutoModelForCausalLM")
        return name and get_class_from_dynamic_module(name, config._name_or_path)
    return found[0] if isinstance(found, tuple) else found


def _parse(keys: dict[str, Any], code: str | None) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if code is not None:
        return AutoConfig.from_pretrained(code, trust_remote_code=True)
    return CONFIG_MAPPING[keys["model_type"]].from_dict(dict(keys))


def _code(file: ConfigFile, trusted: bool) -> str | None:
    """The folder whose code is needed, because this transformers has no model of the family."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if file.family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    if file.family in transformers.CONFIG_MAPPING:
        raise _not_causal(file)
    automatic = file.get("auto_map", None)
    if not isinstance(automatic, dict) or "AutoModelForCausalLM" not in automatic:
        raise RecipeError(
            f"{file.key}: {file.path} has model_type {in_one_line(repr(file.family))}, which transformers "
            f"{transformers.__version__} does not know; take another model, or a newer transformers"
        )
    if not trusted:
        raise RecipeError(
            f"{file.key}: {file.path} has model_type {in_one_line(repr(file.family))}, whose model is Python code in that "
            "folder; read it, and set model.trust_remote_code=true to run it"
        )
    return str(file.path.parent.absolute())


def _not_causal(file: ConfigFile) -> RecipeError:
    return RecipeError(
        f"{file.key}: {file.path} has model_type {in_one_line(repr(file.family))}, which is not a causal language model "
        "in transformers; take another model"
    )


def _check_causal(file: ConfigFile, config: Any, code: str | None) -> None:
    cls = model_class(config, code)
    if cls is None:
        raise _not_causal(file)
    if config.get_text_config() is not config:
        raise RecipeError(
            f"{file.key}: {file.path} has model_type {in_one_line(repr(file.family))}, a model of more than text; take "
            "the folder of its language model alone"
        )
    architectures = file.get("architectures", None)
    if isinstance(architectures, str) or (architectures and not isinstance(architectures, list)):
        file.refuse("architectures", architectures, "a list of names")
    if architectures and cls.__name__ not in architectures:
        raise RecipeError(
            f"{file.key}: {file.path} has architectures = {in_one_line(architectures)}; for this task muster "
            f"reads {cls.__name__}; save the model as that class"
        )
    if "is_decoder" in file.keys and not file.keys["is_decoder"] and _sees_ahead(cls):
        file.refuse(
            "is_decoder", False, "is_decoder = true: without it, each token sees the next ones"
        )


def _sees_ahead(cls: Any) -> bool:
    """Encoders that are decoders only if their config says so."""
    return "= config.is_decoder" in inspect.getsource(sys.modules[cls.__module__])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
