"""Small Hugging Face tokenizers, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def byte_level(special: Sequence[str] = ("<|endoftext|>",)) -> Tokenizer:
    """GPT-2's kind: every byte has a token, so a character may be several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world hello world"] * 4, trainer)
    return tokenizer


def word_level() -> Tokenizer:
    """Drops spaces, and knows two words."""
    vocabulary = {"</s>": 0, "<unk>": 1, "hello": 2, "world": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
