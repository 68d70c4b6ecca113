"""ZeRO-Offload: weights rest in host memory between uses, the optimizer there or on an NVMe disk.

    torchrun --nproc_per_node=2 03-deepspeed/zero_offload.py                    # host memory
    torchrun --nproc_per_node=2 03-deepspeed/zero_offload.py --to nvme --nvme-path /mnt/nvme
    torchrun --nproc_per_node=2 03-deepspeed/zero_offload.py --cpu-adam

The JSON grows by two entries, `offload_optimizer` and `offload_param`; the loop does not change. With
the optimizer's state goes its work: the update runs on the CPU. torch's AdamW does that everywhere;
`--cpu-adam` takes DeepSpeed's vectorised one, which is compiled at its first start (minutes). NVMe
needs a compiler and libaio's headers (`apt install libaio-dev`).

Asserted on every rank: losses and gradient norms are those of the same run without offload; on a GPU
at least the optimizer's bytes are gone from the device; with NVMe they lie on the disk.
"""

import argparse
import copy
import gc
import json
import os
import shutil
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch

from muster import models
from muster.launch.cluster import own_arguments
from muster.launch.join import joined
from muster.models.decoder import initial_std
from muster.models.weights import FreshWeights
from muster.parallel.deepspeed import library
from muster.parallel.materialise import materialise

CONFIG = Path(__file__).parent / "configs" / "zero3_config.json"
VOCAB = 512
warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed's older names


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--to", choices=("cpu", "nvme"), default="cpu")
    parser.add_argument("--nvme-path", type=Path, help="a folder on the disk, with --to nvme")
    parser.add_argument("--cpu-adam", action="store_true", help="DeepSpeed's own AdamW for CPUs")
    parser.add_argument("--preset", default="gpt2-micro", help="any of muster's decoders")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=3)
    wanted = parser.parse_args(own_arguments(sys.argv[1:]))
    if (wanted.to == "nvme") != (wanted.nvme_path is not None):
        parser.error("--to nvme and --nvme-path FOLDER go together")
    return wanted


def refuse_what_cannot_be_built(wanted: argparse.Namespace) -> None:
    """DeepSpeed would start, and fail in the middle of its set-up."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    builders = [AsyncIOBuilder] * (wanted.to == "nvme") + [CPUAdamBuilder] * wanted.cpu_adam
    if builders and not shutil.which("g++"):
        raise SystemExit(
            "not possible here: no C++ compiler for DeepSpeed's operators: apt install g++"
        )
    for builder in builders:
        if not builder().is_compatible():
            raise SystemExit(
                f"not possible here: DeepSpeed cannot build {builder.NAME}. NVMe offload needs libaio and "
                "its headers: apt install libaio-dev"
            )


def settings(wanted: argparse.Namespace, offload: bool, device: torch.device) -> dict:
    config = json.loads(CONFIG.read_text())
    config["bf16"]["enabled"] = device.type == "cuda"
    if not offload:
        return config
    place = {"device": wanted.to, "pin_memory": device.type == "cuda"}
    if wanted.to == "nvme":
        place["nvme_path"] = str(wanted.nvme_path)
    weights = {"device": "cpu", "pin_memory": device.type == "cuda"}  # the optimizer is the bulk
    config["zero_optimization"] |= {"offload_optimizer": place, "offload_param": weights}
    config["optimizer"]["params"]["torch_adam"] = not wanted.cpu_adam
    config["zero_force_ds_cpu_optimizer"] = wanted.cpu_adam  # else torch's AdamW is refused
    return config


def train(config: dict, wanted: argparse.Namespace, mesh) -> tuple[list[float], int, int]:
    """Losses and gradient norms; bytes of optimizer state; bytes on the device after the last step."""
    gc.collect()  # what an earlier engine left
    base = torch.cuda.memory_allocated() if mesh.device.type == "cuda" else 0
    model = models.build(wanted.preset, vocab=VOCAB)
    materialise(model, FreshWeights(0, partial(initial_std, model.config)), mesh.device)
    engine, optimizer, _, _ = library().initialize(model=model, config=copy.deepcopy(config))
    generator, history = torch.Generator().manual_seed(1), []
    for _ in range(wanted.steps):
        shape = (config["train_batch_size"], wanted.length + 1)
        tokens = torch.randint(VOCAB, shape, generator=generator)[mesh.rank :: mesh.world]
        tokens = tokens.to(mesh.device)
        logits = engine(tokens[:, :-1])[..., :VOCAB].float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        mean = mesh.sum(loss.item())[0] / mesh.world
        history += [mean, float(engine.get_global_grad_norm())]
    place = config["zero_optimization"].get("offload_optimizer", {}).get("device")
    assert optimizer.offload_optimizer == (place is not None), (
        "DeepSpeed took no notice of the place"
    )
    state = [v for s in optimizer.optimizer.state.values() for v in s.values()]
    held = sum(v.nbytes for v in state if torch.is_tensor(v))
    on_device = torch.cuda.memory_allocated() - base if mesh.device.type == "cuda" else 0
    engine.destroy()
    return history, held, on_device


def main() -> None:
    wanted = options()
    with joined("zero3") as mesh:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed wants it of a lone process too
        library()  # `import deepspeed`, told not to compile a transport for CPUs
        refuse_what_cannot_be_built(wanted)
        kept, state, before = train(settings(wanted, False, mesh.device), wanted, mesh)
        began = time.time()
        moved, _, after = train(settings(wanted, True, mesh.device), wanted, mesh)

        far = max(abs(a / b - 1) for a, b in zip(moved, kept, strict=True))
        # The update runs elsewhere, so its float32 rounds elsewhere; bf16 weights carry 8 bits.
        assert far < (2e-2 if mesh.device.type == "cuda" else 1e-5), f"{far:.1e} apart"
        words = f"{state / 2**20:.2f} MiB of AdamW's state per rank would leave a GPU"
        if mesh.device.type == "cuda":
            assert before - after > state, f"{before - after} bytes saved, expected over {state}"
            words = f"{before / 2**20:.1f} MiB on the GPU without, {after / 2**20:.1f} MiB with"
        if wanted.to == "nvme":
            files = [f.stat() for f in wanted.nvme_path.rglob(f"optimizer/rank{mesh.rank}/*")]
            on_disk = sum(file.st_size for file in files if file.st_mtime >= began)
            assert on_disk >= state * 0.99, f"{on_disk} bytes on the disk, expected {state}"
            words += f", {on_disk / 2**20:.2f} MiB on the disk"
        if mesh.first:
            print(f"loss, gradient norm by step: {' '.join(f'{x:.4f}' for x in moved)}")
            print(
                f"offload to {wanted.to} on {mesh.world} rank(s): losses and gradient norms within {far:.0e}; {words}"
            )


if __name__ == "__main__":
    main()
