"""A recogniser built on Legendre memories: features in, CTC logits out, every clip on its own.

[batch, time, mel] → two stride-2 convolutions → blocks of (memory, depthwise convolution,
feed-forward) → [batch, ⌈time/4⌉, vocab]. What stands in the padding, and how much of it there is,
never reaches a clip's own frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.models.configs import LMUCTCConfig
from muster.models.lmu import LMUMemory
from muster.models.norm import make_norm, valid_frames
from muster.models.plan import ParallelPlan

SUBSAMPLING = 4


@dataclass
class StreamState:
    """State of a causal model between two chunks. All of it is [batch, …]."""

    pending: Tensor  # frames that do not fill a group of four yet
    tails: list[Tensor]  # the last input frame of each front convolution
    blocks: list[tuple[Tensor, Tensor]]  # each block's memory, and its convolution's past


def output_lengths(lengths: Tensor) -> Tensor:
    """⌈length/4⌉: a clip's last, unfilled group of four frames counts."""
    return (lengths + SUBSAMPLING - 1) // SUBSAMPLING


class Subsample(nn.Module):
    """Two convolutions of kernel 3 and stride 2 over time, the mels as channels.

    Output t sees inputs 2t−1, 2t and 2t+1 of each, so it is complete once its group of four
    frames is: the same front serves causal models. As a product over gathered frames it is
    quicker than a strided convolution, and works on [batch, time, channels] as it stands.
    """

    def __init__(self, mels: int, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Linear(3 * mels, width), nn.Linear(3 * width, width)])
        self.inputs = (mels, width)

    def forward(
        self, x: Tensor, lengths: Tensor, tails: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """x [batch, time, mel], time a multiple of four → [batch, time/4, width], new tails."""
        if tails is None:
            tails = [x.new_zeros(x.shape[0], 1, width) for width in self.inputs]
        ends = []
        for conv, tail in zip(self.convs, tails, strict=True):
            x = x.masked_fill(~valid_frames(lengths, x.shape[1])[..., None], 0.0)
            ends.append(x[:, -1:])
            second = x[:, 1::2]
            before = torch.cat([tail.to(x.dtype), second[:, :-1]], dim=1)
            pairs = x.unflatten(1, (-1, 2)).flatten(2)
            x = F.silu(conv(torch.cat([before, pairs], dim=2)))
            lengths = (lengths + 1) // 2
        return x, ends


class DepthwiseConv(nn.Module):
    """Depthwise convolution over time on [batch, time, channels].

    Written as a channels-last 2-d convolution of height one: no transposition, and on CPU about
    four times the speed of `conv1d`.
    """

    def __init__(self, channels: int, kernel: int, causal: bool) -> None:
        super().__init__()
        self.kernel = kernel
        self.pad = (kernel - 1, 0) if causal else (kernel // 2, kernel // 2)
        weight = torch.empty(channels, 1, 1, kernel)  # laid out as its gradient comes
        self.weight = nn.Parameter(weight.to(memory_format=torch.channels_last))
        self.bias = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.kernel**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        """past [batch, kernel−1, channels] replaces the left padding (streaming)."""
        if past is not None:
            x, pad = torch.cat([past.to(x.dtype), x], dim=1), 0
        elif self.pad[0] == self.pad[1]:
            pad = self.pad[0]
        else:
            x, pad = F.pad(x, (0, 0, *self.pad)), 0
        x = x.transpose(1, 2).unsqueeze(2)
        x = F.conv2d(x, self.weight, self.bias, padding=(0, pad), groups=x.shape[1])
        return x.squeeze(2).transpose(1, 2)


class LMUMixer(nn.Module):
    """width → a few channels → Legendre memory → width, gated by the input itself."""

    def __init__(self, config: LMUCTCConfig) -> None:
        super().__init__()
        channels = config.channels * (2 if config.bidirectional else 1)
        self.split = [channels, config.width]
        self.proj = nn.Linear(config.width, sum(self.split), bias=False)
        self.memory = LMUMemory(
            channels, config.order, config.theta_frames, bidirectional=config.bidirectional
        )
        self.out = nn.Linear(channels * config.order, config.width, bias=False)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        u, gate = self.proj(x).split(self.split, dim=-1)
        if padding is not None:
            u = u.masked_fill(padding, 0.0)
        return self.memory.mix(u, self.out.weight) * F.silu(gate)

    def stream(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        u, gate = self.proj(x).split(self.split, dim=-1)
        states = []
        for now in u.unbind(1):
            state = self.memory.step(now, state)
            states.append(state)
        m = torch.stack(states, dim=1).flatten(-2).to(x.dtype)
        return self.out(m) * F.silu(gate), state


class Block(nn.Module):
    """Pre-norm residuals: memory (far), depthwise convolution (near), feed-forward (depth).

    The products have no biases: each follows a norm that has one, and on CPU they cost 5 %.
    """

    def __init__(self, config: LMUCTCConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.width * config.ff_mult
        self.norms = nn.ModuleList([make_norm(config.norm, width) for _ in range(3)])
        self.mixer = LMUMixer(config)
        self.depthwise = DepthwiseConv(width, config.kernel, config.causal)
        self.pointwise = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.causal = config.causal

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        padding = None if self.causal else ~mask[..., None]
        x = x + self.dropout(self.mixer(self.norms[0](x, mask), padding))
        near = self.norms[1](x, mask)
        if padding is not None:
            near = near.masked_fill(padding, 0.0)
        x = x + self.dropout(self.pointwise(F.silu(self.depthwise(near))))
        return x + self.dropout(self.down(F.silu(self.up(self.norms[2](x, mask)))))

    def stream(
        self, x: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        memory, past = state
        mixed, memory = self.mixer.stream(self.norms[0](x), memory)
        x = x + mixed
        near = self.norms[1](x)
        x = x + self.pointwise(F.silu(self.depthwise(near, past)))
        past = torch.cat([past.to(near.dtype), near], dim=1)[:, near.shape[1] :]
        return x + self.down(F.silu(self.up(self.norms[2](x)))), (memory, past)


class LMUCTC(nn.Module):
    """See the module."""

    plan: ClassVar[ParallelPlan] = ParallelPlan(blocks=(Block.__name__,))

    def __init__(self, config: LMUCTCConfig) -> None:
        super().__init__()
        self.config = config
        self.front = Subsample(config.mels, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.blocks)])
        self.norm = make_norm(config.norm, config.width)
        self.head = nn.Linear(config.width, config.vocab)

    @staticmethod
    def output_lengths(lengths: Tensor) -> Tensor:
        return output_lengths(lengths)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """features [batch, time, mel], lengths [batch] in frames → logits, their lengths.

        Logits [batch, ⌈time/4⌉, vocab] are not normalised; those past a clip's own length mean
        nothing.
        """
        lengths = lengths.to(features.device)
        features = F.pad(features, (0, 0, 0, -features.shape[1] % SUBSAMPLING))
        x, _ = self.front(features, lengths)
        lengths = output_lengths(lengths)
        mask = valid_frames(lengths, x.shape[1])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x, mask)), lengths

    def stream_state(self, batch: int) -> StreamState:
        """The state before the first frame, on the model's device."""
        self._refuse_to_look_ahead()
        config, like = self.config, self.head.weight
        return StreamState(
            pending=like.new_zeros(batch, 0, config.mels),
            tails=[like.new_zeros(batch, 1, width) for width in self.front.inputs],
            blocks=[
                (
                    block.mixer.memory.initial_state(batch, device=like.device),
                    like.new_zeros(batch, config.kernel - 1, config.width),
                )
                for block in self._blocks()
            ],
        )

    @torch.no_grad()
    def stream(
        self, chunk: Tensor, state: StreamState, *, last: bool = False
    ) -> tuple[Tensor, StreamState]:
        """chunk [batch, frames, mel], any number of frames → the logits that are now complete.

        One output per group of four frames; what does not fill a group waits in the state.
        `last=True` flushes: the unfilled group is closed with silence, as the offline model does
        at a clip's end, and the state must not be used again. Call it in eval mode.
        """
        self._refuse_to_look_ahead()
        frames = torch.cat([state.pending, chunk.to(state.pending.dtype)], dim=1)
        whole = frames.shape[1] if last else frames.shape[1] // SUBSAMPLING * SUBSAMPLING
        ready, pending = frames[:, :whole], frames[:, whole:]
        lengths = torch.full((len(frames),), whole, device=frames.device)
        if whole == 0:
            empty = frames.new_zeros(len(frames), 0, self.config.vocab)
            return empty, StreamState(pending, state.tails, state.blocks)
        ready = F.pad(ready, (0, 0, 0, -whole % SUBSAMPLING))
        x, tails = self.front(ready, lengths, state.tails)
        blocks = []
        for block, before in zip(self._blocks(), state.blocks, strict=True):
            x, after = block.stream(x, before)
            blocks.append(after)
        return self.head(self.norm(x)), StreamState(pending, tails, blocks)

    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def _refuse_to_look_ahead(self) -> None:
        if not self.config.causal:
            raise ValueError(
                "this model looks ahead (causal is false), so it cannot stream; "
                "use a causal preset such as lmu-micro-causal"
            )
