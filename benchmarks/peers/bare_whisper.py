"""Transformers' whisper-small in a loop of its own: log-mel on the GPU, compiled, bf16 autocast, fused AdamW,
noise of 2 to 15 s. Prints clips per second and the peak of memory as JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

WARM_UP, STEPS, BATCH, WORKERS, RATE, LABELS, IGNORE = 15, 55, 64, 14, 16000, 64, -100
Clip = tuple[np.ndarray, list[int]]  # type: ignore[type-arg]


class Noise(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> Clip:
        rng = np.random.default_rng(index)
        sound = rng.standard_normal(int(rng.uniform(2, 15) * RATE), np.float32) * 0.1
        return sound, rng.integers(0, 50000, int(rng.uniform(10, 60))).tolist()


class Collate:
    def __init__(self, seconds: float) -> None:
        self.samples = int(seconds * RATE)

    def __call__(self, clips: Sequence[Clip]) -> tuple[Tensor, Tensor]:
        sounds = torch.zeros(len(clips), self.samples)
        labels = torch.full((len(clips), LABELS), IGNORE)
        for row, (sound, tokens) in enumerate(clips):
            sounds[row, : len(sound)] = torch.from_numpy(sound)
            labels[row, : len(tokens)] = torch.tensor(tokens)
        return sounds, labels


def log_mel(sounds: Tensor, filters: Tensor, window: Tensor) -> Tensor:
    spectrum = torch.stft(sounds, 400, 160, window=window, return_complex=True)
    power = spectrum[..., :-1].abs() ** 2
    found = (filters.T @ power).clamp(min=1e-10).log10()
    found = torch.maximum(found, found.amax(dim=(1, 2), keepdim=True) - 8)
    return (found + 4) / 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of the window")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    config = WhisperConfig(
        d_model=768,
        encoder_layers=12,
        decoder_layers=12,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        vocab_size=51865,
        max_source_positions=int(args.seconds * 50),
        use_cache=False,
    )
    model = WhisperForConditionalGeneration(config).cuda()
    filters = torch.tensor(WhisperFeatureExtractor().mel_filters, dtype=torch.float32).cuda()
    window = torch.hann_window(400, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    compiled = torch.compile(model)
    loader = torch.utils.data.DataLoader(
        Noise(),
        BATCH,
        num_workers=WORKERS,
        collate_fn=Collate(args.seconds),
        pin_memory=True,
        prefetch_factor=4,
    )
    for step, (sounds, labels) in enumerate(loader):
        features = log_mel(sounds.cuda(non_blocking=True), filters, window)
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(input_features=features, labels=labels.cuda(non_blocking=True)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == WARM_UP - 1:
            torch.cuda.synchronize()
            begin = time.perf_counter()
    torch.cuda.synchronize()
    rate = (STEPS - WARM_UP) * BATCH / (time.perf_counter() - begin)
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps({"per_s": rate, "memory_gib": memory}))


if __name__ == "__main__":
    main()
