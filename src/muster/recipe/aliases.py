"""Older key names, in one table.

Configurations written for other trainers keep working: their names are moved onto today's keys
before anything is validated, so that the rest of muster only ever sees one spelling.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from muster.errors import RecipeError


@dataclass(frozen=True)
class Alias:
    """`old` means `new`.

    A switch has `when`: what each of its positions writes to `new`. A `silent` position writes
    nothing and so agrees with whatever `new` holds. Where muster leaves nothing to choose there is
    no `new`, all positions are silent, and `note` says how it does things. Words are read in either
    case: other trainers write both.
    """

    old: str
    new: str = ""
    when: Mapping[Any, Any] | None = None
    silent: tuple[Any, ...] = ()
    note: str = ""

    @property
    def positions(self) -> list[Any]:
        return [*self.silent, *(self.when or {})]

    @property
    def meaning(self) -> str:
        return self.new or f"nothing: {self.note}"

    def position(self, value: Any) -> Any:
        """The switch's own spelling of `value`."""
        return value.lower() if self.when is not None and isinstance(value, str) else value

    def takes(self, value: Any) -> bool:
        value = self.position(value)
        return self.when is None or any(
            type(p) is type(value) and p == value for p in self.positions
        )

    def sets(self, value: Any) -> bool:
        return self.when is None or (self.takes(value) and self.position(value) not in self.silent)


TABLE: tuple[Alias, ...] = (
    Alias("training.distributed_strategy", "distributed.strategy"),
    Alias("training.ddp_backend", "distributed.backend"),
    Alias("training.ddp_find_unused_parameters", "distributed.ddp.find_unused_parameters"),
    Alias("distributed.find_unused_parameters", "distributed.ddp.find_unused_parameters"),
    Alias("training.ddp_bucket_cap_mb", "distributed.ddp.bucket_mb"),
    Alias("distributed.bucket_cap_mb", "distributed.ddp.bucket_mb"),
    Alias("distributed.bucket_mb", "distributed.ddp.bucket_mb"),
    Alias("training.fsdp_config.fsdp_transformer_layer_cls_to_wrap", "distributed.fsdp.wrap"),
    Alias("training.fsdp_config.fsdp_offload_params", "distributed.fsdp.cpu_offload"),
    Alias(
        "training.fsdp_config.fsdp_backward_prefetch",
        "distributed.fsdp.backward_prefetch",
        when={"backward_pre": True, "no_prefetch": False},
    ),
    Alias(
        "training.fsdp_config.fsdp_state_dict_type",
        when={},
        silent=("full_state_dict", "sharded_state_dict"),
        note="checkpoints are always in shards, which any layout loads; `muster export` writes whole "
        "weights",
    ),
    Alias(
        "training.gradient_checkpointing",
        "training.activation_checkpointing",
        when={True: "full", False: "none"},
    ),
    Alias("distributed.enabled", "distributed.devices", when={False: 1}, silent=(True,)),
    Alias("training.batch_size", "training.global_batch_size"),
    Alias("training.per_device_train_batch_size", "training.per_device_batch_size"),
    Alias("training.learning_rate", "training.lr"),
    Alias("training.num_train_epochs", "training.epochs"),
    Alias("training.num_epochs", "training.epochs"),
    Alias("training.max_steps", "training.steps"),
    Alias("training.max_parquet_files", "data.max_parquet_files"),
    Alias("data.max_files", "data.max_parquet_files"),
    Alias("logging.tensorboard", "logging.to", when={True: ["tensorboard"], False: []}),
)


def same_as(key: str) -> list[Alias]:
    """The rows that tie `key` to another name, `key` being on either side of them.

    Two older names of one key are tied as well, hence the second step.
    """
    targets = {key} | {row.new for row in TABLE if row.old == key and row.new}
    return [row for row in TABLE if row.new in targets]


def outrank(config: DictConfig, key: str, value: Any, given: set[str]) -> None:
    """An override of `key` wins over files that use another name for the same thing.

    The other name stays behind as a pointer, for files that refer to it as `${other.name}`. Names
    in `given` are overrides themselves: two that disagree are left for `translate` to refuse.
    """
    for row in same_as(key):
        if row.old == key and not row.sets(value):
            return
        for other in {row.old, row.new} - given:
            if not has(config, other):
                continue
            if row.when is None:
                OmegaConf.update(config, other, f"${{{key}}}")
            else:
                remove(config, other)


def delete(config: DictConfig, key: str) -> None:
    """Take `key` out, under whichever name the files gave it."""
    names = {key}.union(*({row.old, row.new} for row in same_as(key)))
    present = [name for name in names if has(config, name)]
    if not present:
        raise RecipeError(f"~{key}: nothing to delete, the recipe does not give {key}")
    for name in present:
        remove(config, name)


def has(config: DictConfig, key: str) -> bool:
    section, _, leaf = key.rpartition(".")
    parent = OmegaConf.select(config, section) if section else config
    return isinstance(parent, DictConfig) and leaf in list(parent)  # `in parent` is false for ???


def remove(config: DictConfig, key: str) -> None:
    section, _, leaf = key.rpartition(".")
    parent = OmegaConf.select(config, section) if section else config
    parent.pop(leaf, None)


def translate(document: dict[str, Any]) -> dict[str, str]:
    """Move the older names in `document` onto their keys, in place; returns {old: new} of them, or
    the note of one that means nothing here."""
    renamed: dict[str, str] = {}
    written_by: dict[str, str] = {}
    for row in TABLE:
        found, value = _pop(document, row.old)
        if not found:
            continue
        renamed[row.old] = row.meaning
        if not row.takes(value):
            raise RecipeError(
                f"{row.old}: got {_yaml(value)}, expected {' or '.join(map(_yaml, row.positions))}"
            )
        if not row.sets(value):
            continue
        if row.when is not None:
            value = row.when[row.position(value)]
        taken, other = get(document, row.new)
        if taken and other != value:
            raise RecipeError(
                f"{row.old} is an older name of {row.new}: {row.old} asks for {value!r} and "
                f"{written_by.get(row.new, row.new)} for {other!r}; keep {row.new} alone"
            )
        if not taken:
            _put(document, row.new, value)
            written_by[row.new] = row.old
    return renamed


def as_named_today(document: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of a checkpoint, which a muster with older key names may have written."""
    renamed = copy.deepcopy(dict(document))
    translate(renamed)
    return renamed


def alias_table() -> str:
    """The table as markdown, for the manual."""
    lines = ["| older name | key |", "|---|---|"]
    for row in TABLE:
        if row.when is None:
            meaning = f"`{row.new}`"
        elif not row.new:
            taken = " or ".join(f"`{_yaml(position)}`" for position in row.positions)
            meaning = f"{taken}: says nothing; {row.note}"
        else:
            meaning = "; ".join(
                f"`{_yaml(position)}`: "
                + (
                    f"`{row.new}={_yaml(row.when[position])}`"
                    if row.sets(position)
                    else "says nothing"
                )
                for position in row.positions
            )
        lines.append(f"| `{row.old}` | {meaning} |")
    return "\n".join(lines)


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def get(document: dict[str, Any], key: str) -> tuple[bool, Any]:
    node: Any = document
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False, None
        node = node[part]
    return True, node


def _pop(document: dict[str, Any], key: str) -> tuple[bool, Any]:
    """Take `key` out, and a section within a section that is empty without it."""
    section, _, leaf = key.rpartition(".")
    found, parent = get(document, section)
    if not found or not isinstance(parent, dict) or leaf not in parent:
        return False, None
    value = parent.pop(leaf)
    if "." in section and not parent:
        _pop(document, section)
    return True, value


def _put(document: dict[str, Any], key: str, value: Any) -> None:
    """Write `value`, making its sections; one that is not a mapping is left to validation."""
    *sections, leaf = key.split(".")
    parent: Any = document
    for section in sections:
        parent = parent.setdefault(section, {})
        if not isinstance(parent, dict):
            return
    parent[leaf] = value
