"""Normalisations: of residual streams, of [batch, time, channels] that know which frames are real, and of images."""

from __future__ import annotations

from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from muster.models.configs import NormKind


def valid_frames(lengths: Tensor, time: int) -> Tensor:
    """[batch] → [batch, time], True where a frame is the clip's own."""
    return torch.arange(time, device=lengths.device) < lengths[:, None]


class RMSNorm(nn.RMSNorm):
    """With the weight in the input's type: torch's fused kernel takes no other, and autocast leaves it alone."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.LayerNorm):
    """In float32 under autocast, and back in the input's type, to which the layers that read it would round it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


class FrameLayerNorm(nn.LayerNorm):
    """LayerNorm per frame: padding cannot reach a real frame, the mask is only there to be equal."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


class MaskedBatchNorm(nn.Module):
    """BatchNorm over valid frames only, on one rank or (`sync`) on all of them.

    A plain BatchNorm counts padding, so a clip's output depends on how long its neighbours are.
    With a process group, (sum, sum of squares, count) are summed over `process_group`, forwards
    and backwards: the statistics and the gradients are those of one process with the whole batch.
    Every rank must then call it the same number of times.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1, sync: bool = True
    ) -> None:
        super().__init__()
        self.channels, self.eps, self.momentum, self.sync = channels, eps, momentum, sync
        self.process_group: dist.ProcessGroup | None = None
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("running_mean", torch.empty(channels))
        self.register_buffer("running_var", torch.empty(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        self.running_mean.zero_()
        self.running_var.fill_(1)
        self.num_batches_tracked.zero_()

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}, momentum={self.momentum}, sync={self.sync}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [batch, time, channels], mask [batch, time], True where a frame is real."""
        with torch.autocast(x.device.type, enabled=False):
            wide = x if x.dtype == torch.float64 else x.float()
            if self.training:
                mean, var = self._batch_statistics(wide, mask)
            else:
                mean, var = self.running_mean, self.running_var
            scale = self.weight * torch.rsqrt(var + self.eps)
            return torch.addcmul(self.bias - mean * scale, wide, scale).to(x.dtype)

    def _batch_statistics(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        # Sums are taken about the running mean: E[x²] − E[x]² loses digits when the mean is large.
        shift = self.running_mean.detach().clone()
        centred = x - shift
        if mask is not None:
            centred = centred.masked_fill(~mask[..., None], 0.0)
            count = mask.sum().to(x.dtype)
        else:
            count = x.new_full((), x.shape[0] * x.shape[1])
        sums = torch.cat([centred.sum((0, 1)), centred.square().sum((0, 1)), count[None]])
        if self._spans_ranks():
            sums = _SumOverRanks.apply(sums, self.process_group)
        total, squares, count = sums[: self.channels], sums[self.channels : -1], sums[-1]
        count = count.clamp(min=1)
        offset = total / count
        var = (squares / count - offset.square()).clamp(min=0)
        self._track(shift + offset, var, count)
        return shift + offset, var

    def _spans_ranks(self) -> bool:
        joined = self.sync and dist.is_available() and dist.is_initialized()
        return joined and dist.get_world_size(self.process_group) > 1

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Running statistics, the variance unbiased, as torch's BatchNorm keeps them."""
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        self.num_batches_tracked += 1


class BatchNorm2d(MaskedBatchNorm):
    """The same over every pixel of [batch, channels, height, width].

    torch's own kernel is faster and serves where one rank's statistics are all there is.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            raise ValueError("BatchNorm2d takes no mask: every pixel of an image is real")
        one_value = x.numel() == self.channels  # which torch's kernel refuses to train on
        if self.training and (one_value or self._spans_ranks()):
            pixels = x.flatten(2).transpose(1, 2)
            return super().forward(pixels).transpose(1, 2).reshape(x.shape)
        if self.training:
            self.num_batches_tracked += 1
        kind = self.running_mean.dtype
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight.to(kind),
            self.bias.to(kind),
            self.training,
            self.momentum,
            self.eps,
        )


def make_norm(kind: NormKind, width: int) -> FrameLayerNorm | MaskedBatchNorm:
    if kind not in get_args(NormKind):
        raise ValueError(f"norm is {kind!r}; expected {' or '.join(get_args(NormKind))}")
    return FrameLayerNorm(width) if kind == "layer" else MaskedBatchNorm(width)


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the same all-reduce: each rank's output feeds each rank's loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
