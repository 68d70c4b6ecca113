"""Inference over several devices: DeepSpeed cuts a Hugging Face model in N by itself.

    torchrun --nproc_per_node=2 03-deepspeed/deepspeed_inference.py
    deepspeed --num_gpus=2 03-deepspeed/deepspeed_inference.py --hidden 2048 --layers 16 --heads 16

`deepspeed.init_inference` with `tensor_parallel` finds the linear layers (AutoTP): those that spread
the features are cut by columns, those that bring them together by rows, with one all-reduce after
them. It works on GPUs and CPUs, for Llama and many others; for GPT-2 it says that it needs the other
way, `replace_with_kernel_inject`, which puts CUDA kernels in place of whole blocks.

Asserted on every rank: the logits of the whole model, the same greedy text, and 1/N of the blocks.
"""

import argparse
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from muster.launch.cluster import own_arguments
from muster.launch.join import joined
from muster.parallel.deepspeed import library


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4, help="a multiple of the number of ranks")
    parser.add_argument("--tokens", type=int, default=8, help="to write")
    return parser.parse_args(own_arguments(sys.argv[1:]))


def make_model(wanted: argparse.Namespace) -> LlamaForCausalLM:
    """Random weights, the same on every rank. `from_pretrained` would stand here."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=wanted.hidden,
        num_hidden_layers=wanted.layers,
        num_attention_heads=wanted.heads,
        num_key_value_heads=wanted.heads,
        intermediate_size=4 * wanted.hidden,
        initializer_range=0.1,  # strong enough that one token clearly comes first
        bos_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def write(model, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """Greedy, without a cache: every rank computes all logits, so all choose the same token."""
    for _ in range(tokens):
        following = model(prompt).logits[:, -1].argmax(-1, keepdim=True)
        prompt = torch.cat([prompt, following], dim=1)
    return prompt


def block_bytes(model) -> int:
    return sum(p.numel() * p.element_size() for p in model.model.layers.parameters())


@torch.no_grad()
def main() -> None:
    wanted = options()
    logging.set_verbosity_error()
    with joined("tensor") as mesh:
        if wanted.heads % mesh.world:
            raise SystemExit(f"--heads {wanted.heads}: no multiple of {mesh.world} ranks")
        deepspeed = library()  # `import deepspeed`, told not to compile a transport for CPUs
        model = make_model(wanted).to(mesh.device)
        prompt = torch.arange(24, device=mesh.device).reshape(2, 12)
        expected, text, whole = (
            model(prompt).logits,
            write(model, prompt, wanted.tokens),
            block_bytes(model),
        )

        engine = deepspeed.init_inference(
            model, tensor_parallel={"tp_size": mesh.world}, dtype=torch.float32
        )
        logits, mine = engine(prompt).logits, block_bytes(engine.module)

        far = ((logits - expected).abs().max() / expected.abs().max()).item()
        share = mine / whole
        # float32 sums of N parts in another order
        assert far < 1e-4, f"logits {far:.1e} apart"
        assert torch.equal(write(engine, prompt, wanted.tokens), text), "another text"
        assert share < 1 / mesh.world + 0.05, (
            f"{share:.2f} of the blocks on rank {mesh.rank}"
        )  # norms are whole
        if mesh.first:
            for name, layer in engine.module.model.layers[0].named_modules():
                if hasattr(layer, "weight"):
                    print(f"{name:26} {type(layer).__name__:16} {list(layer.weight.shape)}")
            print(
                f"{mesh.world} rank(s): logits within {far:.0e} of the whole model's, the same {wanted.tokens} "
                f"greedy tokens; each holds {share:.0%} of the blocks ({mine / 2**20:.2f} MiB)"
            )


if __name__ == "__main__":
    main()
