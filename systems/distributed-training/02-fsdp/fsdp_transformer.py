"""A transformer under FSDP, with everything large ones need: built without memory, sharded block by
block, weights rounded to bf16 on the way, the next block fetched early, activations computed again.

    torchrun --nproc_per_node=2 02-fsdp/fsdp_transformer.py
    torchrun --nproc_per_node=2 02-fsdp/fsdp_transformer.py --precision bf16
    torchrun --nproc_per_node=8 02-fsdp/fsdp_transformer.py --preset llama-1b --length 2048 --no-proof

Asserted: loss and gradient norm of every step are those of one process with the whole model in
float32; each rank holds 1/N of it; of what a forward pass computes, less than a quarter is kept for the
backward pass.
"""

import argparse
import dataclasses
import itertools

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from muster.launch.join import joined
from muster.models import configure
from muster.models.configs import DecoderConfig
from muster.models.decoder import Decoder, initial_std
from muster.models.weights import FreshWeights
from muster.parallel.materialise import materialise
from muster.parallel.mesh import Mesh
from muster.planner.trace import Recorder
from muster.tasks.likelihood import negative_log_likelihood
from muster.training.precision import resolve_precision


def shard(model: Decoder, mesh: Mesh, options: argparse.Namespace) -> None:
    """Each block a group of its own; embedding, last norm and head belong to the root's.

    The order counts: checkpointing first, so that a block that computes again gathers again; inner
    modules before the root, which takes what is left.
    """
    axes = init_device_mesh(mesh.device.type, (mesh.world,))
    low = torch.bfloat16 if resolve_precision(options.precision, mesh.device) == "bf16" else None
    policy = MixedPrecisionPolicy(
        param_dtype=low,  # gathered and computed with; the shards that are updated stay float32
        reduce_dtype=torch.float32,  # gradients of many ranks are summed without rounding
    )
    blocks = list(model.blocks.values())
    for block in blocks:
        if options.checkpointing:
            plain = block.forward
            block.forward = lambda *x, plain=plain: checkpoint(plain, *x, use_reentrant=False)
        # free the gathered weights after the block's forward pass, gather again for its backward
        fully_shard(block, mesh=axes, mp_policy=policy, reshard_after_forward=True)
    # The root's are needed last in forward and first in backward: freeing them would be for nothing.
    policy = dataclasses.replace(policy, output_dtype=torch.float32)  # logits, for the loss
    fully_shard(model, mesh=axes, mp_policy=policy, reshard_after_forward=False)

    # While block i computes, gather block i + 1; in the backward pass, block i - 1.
    for one, following in itertools.pairwise(blocks):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])


def forward(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    """Logits, and the bytes kept for the backward pass: what a forward pass leaves in memory, less
    what one that needs no backward pass leaves (logits, and weights that FSDP has gathered)."""
    left = []
    for needs_backward in (False, True):
        with Recorder() as recorder, torch.set_grad_enabled(needs_backward):  # muster's recorder
            logits = model(tokens)
            left.append(recorder.allocated.total())
        if isinstance(model, FSDPModule) and not needs_backward:
            del logits
            model.reshard()
    return logits, left[1] - left[0]


def steps(model: nn.Module, options, mesh: Mesh, rank: int, ranks: int) -> tuple[list, int]:
    """Loss and gradient norm of every step, and bytes of activations kept for the backward pass."""
    vocab, batch = model.config.vocab, options.batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path = []
    for step in range(options.steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(vocab, (batch, options.length + 1), generator=generator)
        tokens = tokens.chunk(ranks)[rank].to(mesh.device)
        logits, kept = forward(model, tokens[:, :-1])
        loss = negative_log_likelihood(logits, tokens[:, 1:], vocab, "sum")
        # FSDP averages gradients over the ranks, as DDP does: the sum over all tokens, divided once
        (loss * ranks / (batch * options.length)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        total = mesh.sum(loss.item())[0] if ranks > 1 else loss.item()
        path.append((total / (batch * options.length), norm.item()))
        if mesh.first and isinstance(model, FSDPModule):
            print(
                f"step {step + 1}  loss {path[-1][0]:.4f}  gradient {path[-1][1]:.3f}", flush=True
            )
    return path, kept


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="llama-micro", help="a decoder of muster's")
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8, help="sequences, on all ranks together")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--no-proof", action="store_true", help="one rank cannot hold the model")
    options = parser.parse_args()

    with joined("fsdp") as mesh:
        if options.batch % mesh.world:
            raise SystemExit(f"--batch {options.batch}: no multiple of {mesh.world} ranks")
        config = configure(options.preset, vocab=options.vocab)
        weights = FreshWeights(0, lambda name: initial_std(config, name))  # by name: any layout
        with torch.device("meta"):
            model = Decoder(config)  # shapes only: no rank ever holds the whole model
        whole = sum(p.numel() for p in model.parameters())
        shard(model, mesh, options)
        materialise(model, weights, mesh.device)  # each rank its shards
        mine = sum(p.to_local().numel() for p in model.parameters())
        path, kept = steps(model, options, mesh, mesh.rank, mesh.world)
        if mesh.first:
            print(
                f"weights: {whole:,} in all, {mine:,} on this rank; kept for backward: {kept:,} bytes"
            )
            if not options.no_proof:
                print(prove(config, weights, options, mesh, path, kept, mine / whole))
        mesh.barrier()


def prove(
    config: DecoderConfig, weights, options, mesh: Mesh, path: list, kept: int, share: float
) -> str:
    model = Decoder(config).to(mesh.device)
    materialise(model, weights, mesh.device)
    reference, plainly = steps(model, options, mesh, 0, 1)
    pairs = list(zip(path, reference, strict=True))
    off = [max(abs(p[k] / q[k] - 1) for p, q in pairs) for k in (0, 1)]
    exact = resolve_precision(options.precision, mesh.device) == "fp32"
    limits = (1e-5, 1e-4) if exact else (1e-2, 1e-1)  # bf16 keeps 3 digits, norms add up many
    for found, limit, what in zip(off, limits, ("loss", "norm"), strict=True):
        assert found < limit, f"{what} is off by {found:.1e}, at most {limit} is rounding"
    assert share < 1.05 / mesh.world, f"rank 0 holds {share:.3f} of the weights"
    if options.checkpointing:
        fraction = kept * mesh.world / plainly
        assert fraction < 0.25, f"{fraction:.0%} of the activations were kept"
    return (
        f"claim holds on {mesh.world} rank(s): loss within {off[0]:.0e} and gradient norm within "
        f"{off[1]:.0e} of one process; {share:.3f} of the weights and {kept * mesh.world / plainly:.0%} "
        "of the activations held"
    )


if __name__ == "__main__":
    main()
