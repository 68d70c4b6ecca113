"""What a recipe calls the layers that get adapters. Without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from muster.errors import MusterError, RecipeError
from muster.models.configs import DecoderConfig

WHISPER_NAMES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "out_proj",
    "up": "fc1",
    "down": "fc2",
}
# transformers' names in most families; a layer that has none of these goes by its own name.
SHORT_NAMES = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
OTHER_NAMES = SHORT_NAMES | {"out_proj": "o", "fc1": "up", "fc2": "down"}


def check_targets(targets: Sequence[str], config: DecoderConfig | None) -> None:
    """Against the layers of muster's own models; `config` None is Whisper's."""
    names = list(WHISPER_NAMES)
    if config is not None and config.activation == "swiglu":
        names.insert(names.index("up"), "gate")
    settled(targets, names)


def settled(targets: Sequence[str], names: Iterable[str]) -> list[str]:
    """`targets` as a model with layers of these `names` calls them, by transformers' names or the short ones."""
    known = list(dict.fromkeys(names))
    found = {t: t if t in known else OTHER_NAMES.get(t, t) for t in targets}
    unknown = [target for target, name in found.items() if name not in known]
    if unknown or not targets:
        raise RecipeError(
            f"model.lora.targets: {', '.join(unknown) or 'the list is empty'}; "
            f"this model's layers are {', '.join(known)}"
        )
    return list(dict.fromkeys(found.values()))


def refuse_missing_library() -> None:
    if find_spec("peft") is None:
        raise MusterError("model.lora needs peft: pip install 'muster-train[peft]'")
