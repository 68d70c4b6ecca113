"""Where a Hugging Face model is: a folder, or a hub id. Without torch."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from muster.errors import RecipeError
from muster.reading.files import expanded

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
SPEECH_FILES = ("generation_config.json", "preprocessor_config.json", "normalizer.json")
WEIGHT_FILES = (
    "*.safetensors",
    "*.index.json",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
    "*.msgpack",
)


def is_hub_id(spec: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", spec) is not None


def locate(spec: str, *, fetch: bool = True) -> Path:
    """The folder `spec`, or the hub's model of that id, which is fetched unless it is here."""
    folder = expanded(spec)
    if folder.is_dir():
        return folder
    if not is_hub_id(spec):
        raise RecipeError(f"model.pretrained: there is no folder {spec}; give one that exists")
    try:
        from huggingface_hub import snapshot_download

        wanted = ["config.json", "model*.safetensors*", "*.py", *TOKENIZER_FILES, *SPEECH_FILES]
        if fetch:
            log.info("asking the Hugging Face hub for %s, to be kept in its cache", spec)
        return Path(snapshot_download(spec, allow_patterns=wanted, local_files_only=not fetch))
    except Exception as error:  # of several libraries: no such id, no access, no network
        reason = str(error).strip().splitlines()
        raise RecipeError(
            f"model.pretrained: there is no folder {spec}, and the Hugging Face hub gave no model "
            f"of that id ({type(error).__name__}: {reason[0] if reason else 'no reason given'}); "
            "check the name, or copy the model's folder here and name that"
        ) from None


def refuse_no_weights(folder: Path) -> None:
    holds = any(path for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    if not holds and (folder / "config.json").is_file():
        raise RecipeError(
            f"model.pretrained: {folder} has a config.json and no weights; to train this architecture from "
            f"scratch, set model.config={folder} instead"
        )
