"""The 7,156,253-parameter recogniser of the LMU guide, its memory without recurrence over time.

The guide's cell reads u_t = e_x·x_t + e_h·h_{t-1} + e_m·m_{t-1}, m_t = Ā m_{t-1} + B̄ u_t and
h_t = tanh(W_x x_t + W_h h_{t-1} + W_m m_t). Its way back through the tanh forces one step after
another. Here h_{t-1} is replaced by the previous input x_{t-1}: e_h and W_h keep their place and
size, and what remains is linear. e_m stays exact, as Ā + B̄ e_mᵀ.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.models.configs import Form, LMUAttentionConfig
from muster.models.lmu import LMUMemory, legendre
from muster.models.norm import make_norm, valid_frames
from muster.models.plan import ParallelPlan


class LMULayer(nn.Module):
    """x [batch, time, width] → h [batch, time, width], causal. One memory channel.

    A and B are the continuous system. The guide counts them as parameters, so they are held as
    such, frozen; the memory derives its own from `theta`.
    """

    def __init__(self, width: int, order: int, theta: float, form: Form = "auto") -> None:
        super().__init__()
        self.memory = LMUMemory(1, order, theta, feedback=True, form=form)  # holds e_m
        self.e_x = nn.Parameter(torch.empty(width))
        self.e_h = nn.Parameter(torch.empty(width))
        self.w_x = nn.Parameter(torch.empty(width, width))
        self.w_h = nn.Parameter(torch.empty(width, width))
        self.w_m = nn.Parameter(torch.empty(width, order))
        self.a = nn.Parameter(torch.empty(order, order), requires_grad=False)
        self.b = nn.Parameter(torch.empty(order), requires_grad=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for encoder in (self.e_x, self.e_h):
            bound = (3 / encoder.numel()) ** 0.5  # LeCun uniform, as in the paper
            nn.init.uniform_(encoder, -bound, bound)
        for weight in (self.w_x, self.w_h, self.w_m):
            nn.init.xavier_normal_(weight)
        a, b = legendre(self.memory.order, self.a.device)
        with torch.no_grad():
            self.a.copy_(a)
            self.b.copy_(b)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, F.pad(x, (0, 0, 1, 0))[:, :-1]], dim=-1)  # x_t and x_{t-1}
        u = F.linear(both, torch.cat([self.e_x, self.e_h])[None])
        hidden = F.linear(both, torch.cat([self.w_x, self.w_h], dim=1))
        return torch.tanh(hidden + self.memory.mix(u, self.w_m))


class Attention(nn.Module):
    """Every frame looks at every real frame, in `heads` parts of the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        return self.out(seen.transpose(1, 2).flatten(2))


class LMUAttentionBlock(nn.Module):
    """Attention and memory, each added to its input and normalised after."""

    def __init__(self, config: LMUAttentionConfig) -> None:
        super().__init__()
        width = config.width
        self.attention = Attention(width, config.heads)
        self.lmu = LMULayer(width, config.order, config.theta, config.form)
        self.norms = nn.ModuleList([make_norm(config.norm, width) for _ in range(2)])
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norms[0](x + self.dropout(self.attention(x, mask)), mask)
        return self.norms[1](x + self.dropout(self.lmu(x)), mask)


class LMUAttentionCTC(nn.Module):
    """features [batch, time, mel], lengths [batch] → logits [batch, time, vocab], lengths."""

    plan: ClassVar[ParallelPlan] = ParallelPlan(blocks=(LMUAttentionBlock.__name__,))

    def __init__(self, config: LMUAttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.front = nn.Linear(config.mels, config.width, bias=False)
        self.blocks = nn.ModuleList([LMUAttentionBlock(config) for _ in range(config.blocks)])
        self.head = nn.Linear(config.width, config.vocab)

    @staticmethod
    def output_lengths(lengths: Tensor) -> Tensor:
        return lengths

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        lengths = lengths.to(features.device)
        mask = valid_frames(lengths, features.shape[1])
        x = self.front(features.masked_fill(~mask[..., None], 0.0))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x), lengths
