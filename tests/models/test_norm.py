from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from muster.models.norm import BatchNorm2d, MaskedBatchNorm, valid_frames


def pair(channels: int) -> tuple[MaskedBatchNorm, nn.BatchNorm1d]:
    ours, theirs = MaskedBatchNorm(channels).double(), nn.BatchNorm1d(channels).double()
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.copy_(torch.linspace(0.5, 2, channels))
            norm.bias.copy_(torch.linspace(-1, 1, channels))
    return ours, theirs


def test_without_padding_it_is_torchs_batch_norm():
    ours, theirs = pair(5)
    for _ in range(3):
        x = (3 * torch.randn(4, 7, 5, dtype=torch.float64) + 2).requires_grad_()
        x2 = x.detach().clone().requires_grad_()
        grad = torch.randn_like(x)
        ours(x).backward(grad)
        expected = theirs(x2.transpose(1, 2)).transpose(1, 2)
        expected.backward(grad)
        torch.testing.assert_close(ours(x), expected)
        theirs(x2.transpose(1, 2))  # ours ran once more
        torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x2.transpose(1, 2)).transpose(1, 2))


def test_padding_counts_for_nothing():
    lengths = torch.tensor([3, 7, 5])
    x = torch.randn(3, 7, 4, dtype=torch.float64)
    mask = valid_frames(lengths, 7)
    garbage = x.masked_fill(~mask[..., None], 1e6)
    ours, theirs = pair(4)
    flat = theirs(x[mask])
    torch.testing.assert_close(ours(garbage, mask)[mask], flat)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


def test_a_large_mean_costs_no_digits_once_the_running_mean_is_near():
    norm = MaskedBatchNorm(2, momentum=1.0)
    x = torch.randn(8, 50, 2) * 0.1 + 1000
    norm(x)
    torch.testing.assert_close(norm(x).std((0, 1)), torch.ones(2), rtol=0.01, atol=0)


def test_the_gradient_is_exact():
    norm = MaskedBatchNorm(3).double()
    mask = valid_frames(torch.tensor([2, 4]), 4)
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: norm(x, mask), (x,))


LENGTHS = torch.tensor([4, 9, 2, 7])


def one_step(clips: slice, sync: bool) -> tuple[Tensor, ...]:
    """Output, gradients and running statistics for some clips of one fixed batch."""
    torch.manual_seed(0)
    x = torch.randn(4, 9, 3, dtype=torch.float64)[clips].requires_grad_()
    target = torch.randn(4, 9, 3, dtype=torch.float64)[clips]
    norm = MaskedBatchNorm(3, sync=sync).double()
    mask = valid_frames(LENGTHS[clips], 9)
    out = norm(x, mask)
    (out * target)[mask].square().sum().backward()
    return tuple(
        t.detach()
        for t in (
            out,
            x.grad,
            norm.weight.grad,
            norm.bias.grad,
            norm.running_mean,
            norm.running_var,
        )
    )


def half_on_each_rank(mesh: object, sync: bool) -> tuple[Tensor, ...]:
    rank = torch.distributed.get_rank()
    return one_step(slice(2 * rank, 2 * rank + 2), sync)


def test_two_ranks_see_the_statistics_and_gradients_of_one(ranks):
    whole = one_step(slice(0, 4), sync=False)
    halves = ranks(2)(half_on_each_rank, True)
    for i in (0, 1):  # output and input gradient: side by side
        torch.testing.assert_close(torch.cat([half[i] for half in halves]), whole[i])
    for i in (2, 3):  # parameter gradients: summed, as the loop's all-reduce does
        torch.testing.assert_close(halves[0][i] + halves[1][i], whole[i])
    for i in (4, 5):  # running statistics: the same on every rank
        torch.testing.assert_close(halves[0][i], whole[i])
        torch.testing.assert_close(halves[1][i], whole[i])


def test_without_sync_the_ranks_disagree(ranks):
    whole = one_step(slice(0, 4), sync=False)
    halves = ranks(2)(half_on_each_rank, False)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.cat([half[0] for half in halves]), whole[0])


def test_on_one_rank_images_get_torchs_batch_norm():
    ours, theirs = BatchNorm2d(3).double(), nn.BatchNorm2d(3).double()
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
        theirs.bias.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    ours.load_state_dict(theirs.state_dict())
    for _ in range(2):
        x = 3 * torch.randn(4, 3, 5, 6, dtype=torch.float64) + 2
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_a_single_value_per_channel_trains_to_the_bias():
    norm = BatchNorm2d(3).double()
    with torch.no_grad():
        norm.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    x = torch.randn(1, 3, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(norm(x).flatten(), norm.bias)
    assert norm.running_var.isfinite().all()


def one_image_step(images: slice, sync: bool, layout: torch.memory_format) -> tuple[Tensor, ...]:
    """Output, gradients and state for some images of one fixed batch, of torch's norm or ours."""
    torch.manual_seed(0)
    x = (2 * torch.randn(6, 3, 4, 5, dtype=torch.float64) + 1)[images]
    x = x.to(memory_format=layout).requires_grad_()
    target = torch.randn(6, 3, 4, 5, dtype=torch.float64)[images]
    norm = (BatchNorm2d(3) if sync else nn.BatchNorm2d(3)).double()
    out = norm(x)
    (out * target).square().sum().backward()
    tensors = (out, x.grad, norm.weight.grad, norm.bias.grad, *norm.buffers())
    return tuple(t.detach() for t in tensors)


def uneven_images(mesh: object, layout: torch.memory_format) -> tuple[Tensor, ...]:
    first = torch.distributed.get_rank() == 0
    return one_image_step(slice(0, 2) if first else slice(2, 6), True, layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_two_ranks_normalise_images_as_one_process_with_torchs_norm(ranks, layout):
    whole = one_image_step(slice(0, 6), False, layout)
    parts = ranks(2)(uneven_images, layout)
    for i in (0, 1):
        torch.testing.assert_close(torch.cat([part[i] for part in parts]), whole[i])
    for i in (2, 3):
        torch.testing.assert_close(parts[0][i] + parts[1][i], whole[i])
    for part in parts:
        torch.testing.assert_close(part[4:], whole[4:])
