"""GPT-2 124M in a loop of its own, without any framework: the whole model compiled, bf16 autocast, fused
AdamW, 50,304 rows in the vocabulary. Prints tokens per second and the peak of memory as JSON."""

from __future__ import annotations

import json
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, LAYERS, BATCH, LENGTH = 50304, 768, 12, 12, 32, 1024
WARM_UP, STEPS = 15, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main() -> None:
    torch.set_float32_matmul_precision("high")
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model)
    for step in range(STEPS):
        # New tokens: gradients of a batch that is learned by heart vanish, and products with zeros are faster.
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == WARM_UP - 1:
            torch.cuda.synchronize()
            begin = time.perf_counter()
    torch.cuda.synchronize()
    rate = (STEPS - WARM_UP) * BATCH * LENGTH / (time.perf_counter() - begin)
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps({"per_s": rate, "memory_gib": memory}))


if __name__ == "__main__":
    main()
