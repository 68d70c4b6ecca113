"""A causal language model of transformers as muster trains it: tokens in, logits out.

The module is transformers' own, built from its config. What it takes for that:

- A head tied to the embedding becomes a module that borrows the embedding's weight, so that every
  parameter exists once, on the meta device and under every strategy.
- Buffers that no checkpoint holds (rotary frequencies, embedding scales) are computed by
  transformers' own rule after the weights have left the meta device.
- Packed sequences are announced instead of searched for, which would make the host wait for the GPU.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from muster.errors import MusterError, RecipeError
from muster.models.attention import Cache
from muster.models.decoder import TiedHead
from muster.models.gpu_kernels import residual_stream
from muster.models.huggingface.transformers_config import TransformersConfig
from muster.models.huggingface.transformers_tensor import tensor_plan
from muster.models.plan import ParallelPlan

PREFIX = "causal_lm."  # of every parameter, before transformers' own name


class TransformersLM(nn.Module):
    """Tokens `[batch, time]` to logits `[batch, time, vocab or more]`."""

    def __init__(self, config: TransformersConfig) -> None:
        super().__init__()
        self.config = config
        self.causal_lm = build(config)
        embedding = self.causal_lm.get_input_embeddings()
        embedding.register_forward_hook(_enter_stream)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """`positions` [batch, time] replace 0, 1, 2 …; tokens of different `documents` [batch, time]
        do not see each other. A `cache` holds tokens, not keys and values: all are computed again."""
        if cache is not None:
            seen = tokens[:, None, :, None]
            tokens = cache.append(0, seen, seen)[0][:, 0, :, 0]
        placed = {} if positions is None else {"position_ids": positions}
        with _packed(documents):
            output = self.causal_lm(input_ids=tokens, use_cache=False, **placed)
        logits: Tensor = output.logits
        return logits

    @property
    def plan(self) -> ParallelPlan:
        model = self.causal_lm
        config = model.config
        blocks = tuple(sorted(model._no_split_modules or ()))
        if not blocks:
            raise RecipeError(
                f"model.pretrained: transformers names no repeated layers in {type(model).__name__} "
                "(_no_split_modules is empty), so it cannot be sharded; take another model"
            )
        styles, refusal = tensor_plan(model, PREFIX)
        heads = int(getattr(config, "num_attention_heads", None) or 0)
        return ParallelPlan(
            blocks=blocks,
            compiled=(PREFIX + _name_of(model, model.get_output_embeddings()),),
            tensor=styles,
            no_tensor=refusal,
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            vocab=self.config.vocab,
            hidden=int(getattr(config, "intermediate_size", None) or 0),
            width=int(getattr(config, "hidden_size", None) or 0),
            cast_weights=True,
        )

    @torch.no_grad()
    def restore_buffers(self, device: torch.device) -> None:
        """Fills the buffers that leaving the meta device left without values."""
        from transformers.initialization import guard_torch_init_functions

        for name, module in self.causal_lm.named_modules():
            if not any(b is not None for b in module._buffers.values()):
                continue
            blank = {n: _blank(b) for n, b in module._buffers.items() if b is not None}
            module._buffers.update(blank)
            parameters = list(module.parameters(recurse=False))
            with torch.device("cpu"), guard_torch_init_functions(), _kept(parameters):
                _model_of(self.causal_lm, name)._init_weights(module)
            for leaf in blank:
                value = module._buffers[leaf]
                assert value is not None
                if value.is_floating_point() and value.isnan().any():
                    raise MusterError(
                        f"{type(self.causal_lm).__name__} keeps {name}.{leaf} outside of its weights, and "
                        "transformers has no rule to compute it; muster cannot train this family"
                    )
                module._buffers[leaf] = value.to(device)


class _InAutocast:
    """A module of experts whose weights are in the type that autocast computes in. torch's grouped
    products, unlike its linear layers, do not see to that themselves."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if floating else value


def grouped_experts(self: Any, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """transformers' grouped products of experts, in the type of autocast."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    kind = states.device.type
    module = self
    if torch.is_autocast_enabled(kind):
        module = _InAutocast(self, torch.get_autocast_dtype(kind))
    output: Tensor = grouped_mm_experts_forward(module, states, chosen, shares)
    return output


def _grouped() -> str:
    """The name that transformers knows `grouped_experts` by."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("muster", grouped_experts)
    return "muster"


def build(config: TransformersConfig) -> Any:
    """transformers' module in float32, its weights without values; on the meta device if the caller
    is."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    theirs = config.build()
    sdpa = getattr(theirs, "attn_logit_softcapping", None) is None
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": config.code is not None}
    with no_init_weights():
        try:
            if not sdpa:
                raise ValueError("scaled_dot_product_attention has no soft capping")
            model = AutoModelForCausalLM.from_config(theirs, attn_implementation="sdpa", **options)
        except ValueError:  # a class without it
            model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager", **options)
    if model.config._experts_implementation == "grouped_mm":
        model.set_experts_implementation(_grouped())
    _tie(model)
    kept = set(dict(model.named_buffers())) & set(model.state_dict())
    if kept:
        raise RecipeError(
            f"model.pretrained: {type(model).__name__} has learned values outside of its parameters "
            f"({', '.join(sorted(kept)[:3])}), which muster does not read; take another model"
        )
    return model


def _tie(model: Any) -> None:
    """The tied head borrows the embedding's weight. In transformers both are one parameter, which
    `to_empty` would make two."""
    ties: dict[str, str] = model.all_tied_weights_keys
    if not ties:
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    expected = {f"{_name_of(model, head)}.weight": f"{_name_of(model, embedding)}.weight"}
    if ties != expected or getattr(head, "bias", None) is not None:
        raise RecipeError(
            f"model.pretrained: {type(model).__name__} shares weights as {ties}; muster trains models whose "
            "head alone shares the embedding's; take another model"
        )
    model.set_submodule(_name_of(model, head), TiedHead(embedding))


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _model_of(model: Any, name: str) -> Any:
    """The innermost of transformers' models around a module: its rules initialise it."""
    from transformers import PreTrainedModel

    found, at = model, model
    for part in name.split(".") if name else ():
        at = getattr(at, part)
        found = at if isinstance(at, PreTrainedModel) else found
    return found


def _blank(buffer: Tensor) -> Tensor:
    floating = buffer.is_floating_point()
    return torch.full(buffer.shape, torch.nan if floating else 0, dtype=buffer.dtype, device="cpu")


@contextlib.contextmanager
def _kept(parameters: list[nn.Parameter]) -> Iterator[None]:
    """transformers initialises no tensor that is marked so."""
    for parameter in parameters:
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter in parameters:
            del parameter._is_hf_initialized  # type: ignore[attr-defined]


def _enter_stream(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return residual_stream(output)


@contextlib.contextmanager
def _packed(documents: Tensor | None) -> Iterator[None]:
    """transformers looks for packed sequences in the positions. Here it is told them: none, or the
    document that each token belongs to."""
    from transformers import masking_utils

    before = masking_utils.find_packed_sequence_indices
    asked = False

    def find(position_ids: Tensor) -> Tensor | None:
        nonlocal asked
        asked = True
        return documents

    masking_utils.find_packed_sequence_indices = find
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before
    if documents is not None and not asked:
        raise MusterError(
            "data.isolate_documents: this model makes its attention mask without asking for documents; "
            "set it to false"
        )


def stacks(model: TransformersLM) -> str:
    """A pattern for where the model's blocks are."""
    blocks = model.plan.blocks
    names = {
        re.escape(name.rpartition(".")[0])
        for name, module in model.named_modules()
        if type(module).__name__ in blocks
    }
    return f"({'|'.join(sorted(names))})"
