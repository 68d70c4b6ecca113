"""transformers' tensor-parallel plans as muster's."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from muster.models.decoder import TiedHead
from muster.models.plan import Split

ATTENTION = re.compile(r"attn|attention")
KNOWN = ("colwise", "rowwise", "replicated_with_grad_allreduce")
NOT_TRANSLATED = "muster has only " + ", ".join(KNOWN)


def tensor_plan(model: Any, prefix: str) -> tuple[dict[str, Split], str]:
    """The plan for `model`, whose modules are named after `prefix`; or none, and why."""
    theirs: dict[str, str] = dict(model.config.base_model_tp_plan or {})
    if not theirs:
        return {}, "transformers has no tensor-parallel plan for it"
    names = dict(model.named_modules())
    base = f"{model.base_model_prefix}." if model.base_model_prefix in names else ""
    embedding = model.get_input_embeddings()
    theirs = {p: s for p, s in theirs.items() if names.get(f"{base}{p}") is not embedding}
    unknown = sorted({style for style in theirs.values() if style not in KNOWN})
    if unknown:
        return {}, f"its plan in transformers has {', '.join(unknown)}, and {NOT_TRANSLATED}"
    plan: dict[str, Split] = {}
    for pattern, style in theirs.items():
        if any(_matches(f"{base}{pattern}", name) for name in names):
            plan[f"{prefix}{base}{pattern}"] = _split(pattern, style)
    return plan | _ends(model, prefix, names), ""


def _split(pattern: str, style: str) -> Split:
    if style == "replicated_with_grad_allreduce":
        return "head-norm"
    if style == "rowwise":
        return "row"
    return "heads" if ATTENTION.search(pattern) else "column"


def _ends(model: Any, prefix: str, names: dict[str, nn.Module]) -> dict[str, Split]:
    """The embedding and the head along the vocabulary. An embedding that also scales its output
    (Gemma) stays whole, and so does a head that is tied to it."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    named = {id(module): name for name, module in names.items()}
    found: dict[str, Split] = {}
    plain = type(embedding) is nn.Embedding
    if plain:
        found[prefix + named[id(embedding)]] = "embedding"
    if isinstance(head, TiedHead):
        if plain:
            found[prefix + named[id(head)]] = "tied-head"
    else:
        found[prefix + named[id(head)]] = "head"
    return found


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None
