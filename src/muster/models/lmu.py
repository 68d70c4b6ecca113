"""The Legendre memory: a window of θ steps of a signal, held as `order` polynomial coefficients.

The memory solves θ·ṁ = A m + B u, held constant between samples: m_t = Ā m_{t-1} + B̄ u_t. It is
linear, so m is also the convolution of u with the impulse response H = [B̄, ĀB̄, Ā²B̄, …], and
training need not walk through time. Four forms give the same numbers:

recurrent   one step after another, float32 state: streaming, and the reference
toeplitz    one product with the whole [time, time] response: short sequences
chunked     the same product per chunk of time, the state carried from chunk to chunk
fft         a product of spectra: many steps, large order
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.models.configs import Form
from muster.models.gpu_kernels import for_gpu, with_values

T = TypeVar("T")


def legendre(order: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """A [order, order] and B [order] of the Legendre delay network, in float64."""
    i = torch.arange(order, dtype=torch.float64, device=device)
    row, column = i[:, None], i[None, :]
    sign = torch.where(row < column, -1.0, torch.where((row - column) % 2 == 0, -1.0, 1.0))
    scale = 2 * i + 1
    return scale[:, None] * sign, scale * torch.where(i % 2 == 0, 1.0, -1.0)


def discretise(a: Tensor, b: Tensor, theta: Tensor | float) -> tuple[Tensor, Tensor]:
    """Zero-order hold, Ā and B̄ from one exponential: expm([[A/θ, B/θ], [0, 0]])."""
    order = a.shape[0]
    system = F.pad(torch.cat([a, b[:, None]], dim=1), (0, 0, 0, 1)) / theta
    held = torch.linalg.matrix_exp(system)
    return held[:order, :order], held[:order, order]


def impulse_response(a: Tensor, b: Tensor, length: int) -> Tensor:
    """H [length, order] by doubling, H₂ₖ = [Hₖ, Āᵏ Hₖ]: about log₂(length) products."""
    response, power = b[None], a
    while response.shape[0] < length:
        response = torch.cat([response, response @ power.T])
        if response.shape[0] < length:
            power = power @ power
    return response[:length]


def powers(a: Tensor, count: int) -> Tensor:
    """Ā¹ … Āᶜᵒᵘⁿᵗ, [count, order, order], by doubling."""
    stack = a[None]
    while stack.shape[0] < count:
        stack = torch.cat([stack, stack @ stack[-1]])
    return stack[:count]


def toeplitz(response: Tensor) -> Tensor:
    """[length, order] → T[t, n, s] = response[t-s, n], zero where s > t."""
    length = response.shape[0]
    return F.pad(response, (0, 0, length - 1, 0)).unfold(0, length, 1).flip(-1)


LARGEST_TOEPLITZ = 2**26  # numbers in [time·order, time]; a quarter of a GiB


def choose_form(
    device_type: str, time: int, channels: int, order: int, learned: bool = False
) -> Form:
    """The quickest form for a shape; `benchmarks/lmu.py` is what measured it.

    Per step and channel one product costs time·order, the chunked ones order·(chunk + order), the
    transforms order·log(time) with a far larger factor: products win while time or order is small. Where
    Ā or B̄ are `learned`, each step also makes the chunk's matrix, of chunk·order², anew.
    """
    if device_type != "cpu":
        return "toeplitz" if time * time * order <= LARGEST_TOEPLITZ else "fft"
    if time <= (128 if order <= 64 else 64):
        return "toeplitz"
    largest = 64 if learned else 128 if time <= 512 else 256
    return "chunked" if order <= largest else "fft"


def choose_chunk(order: int) -> int:
    """Steps per chunk. Of a large order the state's part of the product costs the most, whatever the chunk."""
    return 16 if order <= 16 else 24


class LMUMemory(nn.Module):
    """u [batch, time, channels] → m [batch, time, channels, order]; channels share θ.

    theta            the window, in steps
    trainable_theta  learn log θ, one number per module
    feedback         learn e_m [order], the memory's own way back in: u_t + e_m·m_{t-1}. It is
                     linear, Ā becomes Ā + B̄ e_mᵀ, so every form still holds. Starts at zero
    bidirectional    the first half of the channels reads time forwards, the second half backwards.
                     Zeros after a clip's end leave both halves as if the clip stood alone
    form             see the module; "auto" asks `choose_form`
    """

    def __init__(
        self,
        channels: int,
        order: int,
        theta: float,
        *,
        trainable_theta: bool = False,
        feedback: bool = False,
        bidirectional: bool = False,
        form: Form = "auto",
    ) -> None:
        super().__init__()
        if form not in get_args(Form):
            raise ValueError(f"form is {form!r}; expected one of {', '.join(get_args(Form))}")
        if bidirectional and channels % 2:
            raise ValueError(f"channels is {channels}; both directions need an even number")
        self.channels, self.order, self.theta = channels, order, float(theta)
        self.bidirectional, self.form = bidirectional, form
        self.log_theta = nn.Parameter(torch.empty(1)) if trainable_theta else None
        self.e_m = nn.Parameter(torch.empty(order)) if feedback else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.log_theta is not None:
            nn.init.constant_(self.log_theta, math.log(self.theta))
        if self.e_m is not None:
            nn.init.zeros_(self.e_m)

    def extra_repr(self) -> str:
        ways = ", bidirectional" if self.bidirectional else ""
        return f"{self.channels} × {self.order}, theta={self.theta:g}{ways}, form={self.form}"

    def forward(self, u: Tensor) -> Tensor:
        form = self._form(u)
        parts = [self._causal(form, part, bool(way)) for way, part in enumerate(self._ways(u))]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).to(u.dtype)

    def mix(self, u: Tensor, weight: Tensor) -> Tensor:
        """`linear(memory(u).flatten(-2), weight)`, [batch, time, out], without laying m out.

        weight is [out, channels·order]. With one channel the FFT form multiplies it into the
        response first, and m never exists; the products leave m as they made it and turn the
        weight to match.
        """
        form = self._form(u)
        if form == "fft" and self.channels == 1:
            return self._fft(u, False, weight).squeeze(2).to(u.dtype)
        weight = weight.unflatten(1, (self.channels, self.order))
        out: Tensor | None = None
        ways = zip(self._ways(u), self._ways(weight, dim=1), strict=True)
        for way, (part, part_weight) in enumerate(ways):
            m = self._causal(form, part, bool(way))
            if form in ("toeplitz", "chunked"):  # stored as [batch, time, order, channels]
                m, part_weight = m.transpose(2, 3), part_weight.transpose(1, 2)
            mixed = F.linear(m.flatten(-2).to(u.dtype), part_weight.flatten(1))
            out = mixed if out is None else out + mixed
        assert out is not None
        return out

    def step(self, u: Tensor, state: Tensor) -> Tensor:
        """One step of a stream: u [batch, channels], state [batch, channels, order] → state."""
        if self.bidirectional:
            raise ValueError("a bidirectional memory looks ahead: it cannot run step by step")
        with torch.autocast(u.device.type, enabled=False):
            a, b = self._system(u.device, state.dtype)
            return torch.addcmul(state @ a.T, u.to(state.dtype)[..., None], b)

    def initial_state(self, batch: int, *, device: torch.device | str | None = None) -> Tensor:
        return torch.zeros(batch, self.channels, self.order, device=device)

    def _form(self, u: Tensor) -> Form:
        if self.form != "auto":
            return self.form
        where = "gpu" if for_gpu(u) else "cpu"
        return choose_form(where, u.shape[1], self.channels, self.order, self._learned)

    @property
    def _learned(self) -> bool:
        """Whether Ā or B̄ change in training."""
        return self.log_theta is not None or self.e_m is not None

    def _ways(self, x: Tensor, dim: int = -1) -> tuple[Tensor, ...]:
        return x.chunk(2, dim) if self.bidirectional else (x,)

    def _causal(self, form: Form, u: Tensor, reverse: bool) -> Tensor:
        """One direction's m [batch, time, channels, order]; reverse runs from the last step back."""
        if form == "recurrent":
            u = u.flip(1) if reverse else u
            m = self._recurrent(u)
            return m.flip(1) if reverse else m
        if form == "fft":
            return self._fft(u, reverse)
        chunk = u.shape[1] if form == "toeplitz" else min(u.shape[1], choose_chunk(self.order))
        return self._chunked(u, chunk, reverse).transpose(2, 3)

    def _recurrent(self, u: Tensor) -> Tensor:
        with torch.autocast(u.device.type, enabled=False):
            u = _wide(u)
            a, b = self._system(u.device, u.dtype)
            state = u.new_zeros(*u[:, 0].shape, self.order)
            states = []
            for now in u.unbind(1):
                state = torch.addcmul(state @ a.T, now[..., None], b)
                states.append(state)
            return torch.stack(states, dim=1)

    def _fft(self, u: Tensor, reverse: bool, weight: Tensor | None = None) -> Tensor:
        """m, or with weight [out, order] what it makes of m, [batch, time, channels, out]."""
        with torch.autocast(u.device.type, enabled=False):
            u = _wide(u)
            response = self._response(1 << (u.shape[1] - 1).bit_length(), u)
            if weight is not None:
                response = response @ weight.to(u.dtype).T
            return _SpectralProduct.apply(u, response, reverse)

    def _chunked(self, u: Tensor, chunk: int, reverse: bool) -> Tensor:
        """m as [batch, time, order, channels]. The products follow autocast, the carry does not."""
        batch, time, channels = u.shape
        count = -(-time // chunk)
        if count == 1:  # one block serves all lengths up to its own: its corner is theirs
            block = self._block(-(-chunk // 32) * 32, False, reverse, u)
            block, x = block[: chunk * self.order, :chunk], u
        else:
            block = self._block(chunk, True, reverse, u)
            x = F.pad(u, (0, 0, 0, count * chunk - time)).unflatten(1, (count, chunk))
            x = torch.cat([x, self._carry(x, block, chunk, reverse).to(x.dtype)], dim=2)
            x = x.flatten(0, 1)
        if channels == 1:
            m = F.linear(x.squeeze(-1), block.to(x.dtype))
        else:
            m = torch.bmm(block.to(x.dtype).expand(x.shape[0], -1, -1), x)
        return m.view(batch, count * chunk, self.order, channels)[:, :time]

    def _carry(self, x: Tensor, block: Tensor, chunk: int, reverse: bool) -> Tensor:
        """The state each chunk starts from: x [batch, count, chunk, channels] → [.., order, ..]."""
        with torch.autocast(x.device.type, enabled=False):
            x = _wide(x)
            rows = block.unflatten(0, (chunk, self.order))[0 if reverse else -1]
            gain, jump = rows.split([chunk, self.order], dim=1)
            ends = list(F.linear(x.transpose(2, 3), gain).unbind(1))
            if reverse:
                ends.reverse()
            states = [torch.zeros_like(ends[0])]
            for end in ends[:-1]:
                states.append(end + F.linear(states[-1], jump))
            if reverse:
                states.reverse()
            return torch.stack(states, dim=1).transpose(2, 3)

    def _system(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Ā and B̄, always exponentiated in float64."""
        if self.log_theta is not None:
            theta = self.log_theta.double().exp()
            a, b = discretise(*legendre(self.order, device), theta)
            a, b = a.to(dtype), b.to(dtype)
        else:
            a, b = self._fixed(device, dtype)
        if self.e_m is not None:
            a = a + torch.outer(b, self.e_m.to(dtype))
        return a, b

    def _fixed(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        def make() -> tuple[Tensor, Tensor]:
            a, b = discretise(*legendre(self.order, device), self.theta)
            return a.to(dtype), b.to(dtype)

        return _kept(("system", self.order, self.theta, device, dtype), make)

    def _from_system(
        self, name: str, like: Tensor, shape: tuple[int, ...], make: Callable[..., Tensor]
    ) -> Tensor:
        """What follows from Ā and B̄ alone: kept while they are fixed, made anew while they learn."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        with torch.autocast(like.device.type, enabled=False):
            if self._learned:
                return make(*self._system(like.device, dtype))
            key = (name, self.order, self.theta, like.device, dtype, *shape)
            return _kept(key, lambda: make(*self._fixed(like.device, torch.float64)).to(dtype))

    def _response(self, length: int, like: Tensor) -> Tensor:
        """H, [length, order]."""
        return self._from_system(
            "response", like, (length,), lambda a, b: impulse_response(a, b, length)
        )

    def _block(self, chunk: int, carried: bool, reverse: bool, like: Tensor) -> Tensor:
        """[chunk·order, chunk (+ order)]: a chunk of m from its inputs (and the state before it)."""

        def make(a: Tensor, b: Tensor) -> Tensor:
            block = toeplitz(impulse_response(a, b, chunk))
            block = torch.cat([block, powers(a, chunk)], dim=2) if carried else block
            if reverse:
                inputs, state = block.split([chunk, block.shape[2] - chunk], dim=2)
                block = torch.cat([inputs.flip(0, 2), state.flip(0)], dim=2)
            return block.flatten(0, 1)

        return self._from_system("block", like, (chunk, carried, reverse), make)


class _SpectralProduct(torch.autograd.Function):
    """u [batch, time, channels] ∗ response [taps, order] → [batch, time, channels, order].

    taps ≥ time. Transforms are of the power of two 2·taps, where FFT libraries are several times
    quicker than elsewhere. Written out by hand so that the spectra, twice the size of m, live for
    a few clips at a time: on CPU they then stay in the cache.
    """

    @staticmethod
    def forward(ctx: Any, u: Tensor, response: Tensor, reverse: bool) -> Tensor:
        time, length = u.shape[1], 2 * response.shape[0]
        signal = torch.fft.rfft(u.transpose(1, 2), n=length)[:, :, None]
        kernel = torch.fft.rfft(response.T, n=length)
        kernel = kernel.conj().resolve_conj() if reverse else kernel
        m = u.new_empty(u.shape[0], u.shape[2], response.shape[1], time)
        for some in _few(m, length):
            m[some] = torch.fft.irfft(signal[some] * kernel, n=length)[..., :time]
        ctx.save_for_backward(signal, kernel)
        ctx.reverse = reverse
        return m.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        signal, kernel = ctx.saved_tensors
        grad, length = grads[0].permute(0, 2, 3, 1), 2 * (kernel.shape[-1] - 1)
        signal_bar, kernel_bar = signal.conj().resolve_conj(), kernel.conj().resolve_conj()
        d_signal, d_kernel = torch.empty_like(signal), torch.zeros_like(kernel)
        padded = None
        for some in _few(grad, length):
            part = grad[some]
            if padded is None or len(padded) != len(part):  # zeros after time, filled once
                padded = part.new_zeros(*part.shape[:-1], length)
            padded[..., : part.shape[-1]] = part
            g = torch.fft.rfft(padded)
            if ctx.needs_input_grad[1]:
                d_kernel += (g * signal_bar[some]).sum((0, 1))
            if ctx.needs_input_grad[0]:
                d_signal[some] = g.mul_(kernel_bar).sum(2, keepdim=True)
        du = dr = None
        if ctx.needs_input_grad[0]:
            du = torch.fft.irfft(d_signal.squeeze(2), n=length)[..., : grad.shape[-1]]
            du = du.transpose(1, 2)
        if ctx.needs_input_grad[1]:
            d_kernel = d_kernel.conj() if ctx.reverse else d_kernel
            dr = torch.fft.irfft(d_kernel, n=length)[..., : length // 2].T
        return du, dr, None


def _few(m: Tensor, length: int) -> list[slice]:
    """Slices of the batch whose spectra fit the cores' caches; off the CPU, the whole batch."""
    clips = m.shape[0]
    if not for_gpu(m):
        room = _CACHED * torch.get_num_threads()
        clips = max(1, room // (m.shape[1] * m.shape[2] * length))
    return [slice(start, start + clips) for start in range(0, m.shape[0], clips)]


_CACHED = 2**18  # float32 numbers per core, one MiB
_KEPT: OrderedDict[Hashable, object] = OrderedDict()
_KEEP = 64  # entries; "auto" needs a handful per θ and order, whatever the lengths


def _kept(key: Hashable, make: Callable[[], T]) -> T:
    """`make()` once per key, shared by all memories with the same θ and order.

    What is kept must serve training too: it is never made in inference mode, and made for real
    even while a run is planned on tensors without values.
    """
    if key in _KEPT:
        _KEPT.move_to_end(key)
        return cast(T, _KEPT[key])
    with torch.inference_mode(False), torch.no_grad(), with_values():
        value = make()
    first = value[0] if isinstance(value, tuple) else value
    if type(first) is Tensor:
        _KEPT[key] = value
        if len(_KEPT) > _KEEP:
            _KEPT.popitem(last=False)
    return value


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
