"""How much quicker each form of the Legendre memory is than walking through time.

    python benchmarks/lmu.py                   # CPU, with torch's default number of threads
    python benchmarks/lmu.py --threads 1       # in CPU time, which other programs on the machine hardly change
    python benchmarks/lmu.py --device cuda

Forward and backward, float32, the shortest of several rounds; the forms take turns within a round,
so a busy machine disturbs all of them alike. "memory" is the memory alone; "mixed" adds the linear
map every model applies to it (`LMUMemory.mix`). "plain fft" is three lines with torch.fft, to compare. Times in milliseconds appear only for a GPU, where
its name gives them meaning.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from muster.models.lmu import LARGEST_TOEPLITZ, LMUMemory, choose_form

SHAPES = [  # batch, steps, channels, order, theta, width of the linear map
    (16, 500, 1, 256, 1000.0, 512),
    (16, 400, 32, 16, 96.0, 256),
    (32, 50, 32, 8, 48.0, 128),
]
FORMS = ["recurrent", "toeplitz", "chunked", "fft"]


class PlainFFT:
    """The convolution as textbooks write it: transforms of twice the length, and autograd."""

    def __init__(self, memory: LMUMemory, u: Tensor) -> None:
        self.response = memory._response(u.shape[1], u).T

    def __call__(self, u: Tensor) -> Tensor:
        length = 2 * u.shape[1]
        spectrum = torch.fft.rfft(u.transpose(1, 2), n=length)[:, :, None]
        m = torch.fft.irfft(spectrum * torch.fft.rfft(self.response, n=length), n=length)
        return m[..., : u.shape[1]].permute(0, 3, 1, 2)

    def mix(self, u: Tensor, weight: Tensor) -> Tensor:
        return F.linear(self(u).flatten(-2), weight)


def shortest(
    work: dict[str, Callable[[], None]], device: torch.device, rounds: int
) -> dict[str, float]:
    """Seconds of the quickest round of each, after two rounds of warm-up; of CPU time for one thread."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    best = dict.fromkeys(work, float("inf"))
    for round_ in range(rounds + 2):
        for name, run in work.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = clock()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_ >= 2:
                best[name] = min(best[name], clock() - start)
    return best


def measure(
    shape: tuple[int, int, int, int, float, int], device: torch.device, rounds: int
) -> None:
    batch, steps, channels, order, theta, width = shape
    u = torch.randn(batch, steps, channels, device=device, requires_grad=True)
    weight = torch.randn(width, channels * order, device=device, requires_grad=True)
    grad_m = torch.randn(batch, steps, channels, order, device=device)
    grad_y = torch.randn(batch, steps, width, device=device)
    forms = [f for f in FORMS if f != "toeplitz" or steps * steps * order <= LARGEST_TOEPLITZ]
    memories = {form: LMUMemory(channels, order, theta, form=form).to(device) for form in forms}
    memories["plain fft"] = PlainFFT(memories["fft"], u)
    alone = {f: lambda m=m: m(u).backward(grad_m) for f, m in memories.items()}
    mixed = {f: lambda m=m: m.mix(u, weight).backward(grad_y) for f, m in memories.items()}
    times = {"memory": shortest(alone, device, rounds), "mixed": shortest(mixed, device, rounds)}

    auto = choose_form(device.type, steps, channels, order)
    print(
        f"\nbatch {batch} × {steps} steps × {channels} channels × order {order}, mixed to {width}"
    )
    print(f"{'form':<12}" + "".join(f"{name:>18}" for name in times))
    for form in memories:
        cells = []
        for best in times.values():
            cell = f"{best['recurrent'] / best[form]:.1f}×"
            cells.append(cell + (f" {1e3 * best[form]:8.2f} ms" if device.type == "cuda" else ""))
        chosen = "   ← auto" if form == auto else ""
        print(f"{form:<12}" + "".join(f"{cell:>18}" for cell in cells) + chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's default otherwise")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    torch.manual_seed(0)
    where = f"CPU threads: {torch.get_num_threads()}"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    print(f"times quicker than step by step ({where}, torch {torch.__version__})")
    for shape in SHAPES:
        measure(shape, device, args.rounds)


if __name__ == "__main__":
    main()
