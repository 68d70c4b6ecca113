"""Small conversations, templates and a tokenizer for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_tokenizers import byte_level

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTIONS = ("hello", "what is a world?", "naïve 漢字?", "and hello again, to all of the world")


def conversation(turns: int, number: int = 0) -> list[dict[str, str]]:
    """`turns` questions with their answers."""
    found = [{"role": "system", "content": "Be brief."}] if number % 3 == 0 else []
    for turn in range(turns):
        question = QUESTIONS[(number + turn) % len(QUESTIONS)]
        found.append({"role": "user", "content": f"{question} {number}"})
        found.append({"role": "assistant", "content": f"world {turn} of {number} " * (turn + 1)})
    return found


def write_rows(path: Path, count: int) -> Path:
    """Rows of one to three turns."""
    rows = [{"messages": conversation(1 + i % 3, i)} for i in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """A tokenizer's folder as transformers saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level(SPECIAL).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>",
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def replies(messages: Sequence[dict[str, str]]) -> list[str]:
    return [m["content"] for m in messages if m["role"] == "assistant"]


def write_model(folder: Path, template: str | None = CHATML, **sizes: int) -> Path:
    """A tiny Llama of random weights with its tokenizer, as transformers saves them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {
        "vocab_size": byte_level(SPECIAL).get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**(small | sizes))).save_pretrained(folder)
    return write_tokenizer(folder, template)
