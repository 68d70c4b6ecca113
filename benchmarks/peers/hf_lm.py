"""A causal language model pretrained by Hugging Face's Trainer on random tokens: bf16, fused AdamW,
torch.compile. Prints tokens per second and the peak of memory as JSON."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

WARM_UP = 15
CONFIGS: dict[str, Any] = {
    "gpt2": lambda: GPT2Config(use_cache=False),
    "llama-1b": lambda: LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=4096,
        use_cache=False,
    ),
}


class RandomTokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, rows: int, length: int, vocab: int) -> None:
        self.rows, self.length, self.vocab = rows, length, vocab

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self.vocab, (self.length,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):
    def __init__(self, steps: int) -> None:
        self.steps, self.began, self.seconds = steps, 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (WARM_UP, self.steps):
            torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds, self.began = now - self.began, now


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="gpt2", choices=list(CONFIGS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=45)
    args = parser.parse_args()
    config = CONFIGS[args.model]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    clock = Clock(args.steps)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model=model,
            args=TrainingArguments(
                folder,
                per_device_train_batch_size=args.batch,
                max_steps=args.steps,
                bf16=True,
                torch_compile=True,
                optim="adamw_torch_fused",
                max_grad_norm=1.0,
                dataloader_num_workers=4,
                save_strategy="no",
                report_to=[],
                logging_steps=10,
                disable_tqdm=True,
            ),
            train_dataset=RandomTokens(args.batch * args.steps, args.seq, config.vocab_size),
            callbacks=[clock],
        ).train()
    tokens = (args.steps - WARM_UP) * args.batch * args.seq
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps({"per_s": tokens / clock.seconds, "memory_gib": memory}))


if __name__ == "__main__":
    main()
