"""Recipe files, overrides, and DeepSpeed's JSON."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import hydra.core.override_parser.overrides_parser  # noqa: F401 - loaded before the limits
import yaml

from fuzzing import mutate
from fuzzing.reader import Case, reader
from muster.parallel import deepspeed_config
from muster.recipe.describe import to_yaml
from muster.recipe.load import SHIPPED, from_resolved, load
from muster.recipe.schema import Recipe

NAMES = ["gpt-micro", "speech", "mnist", "whisper-micro", "chat", "speech-7m"]
KEYS = (*Recipe.model_fields, "override", "recipe", "no such key")
PLACES = {
    "slurm": {
        "partition": "gpu",
        "time": "10:00",
        "setup": ["module load cuda"],
        "options": ["--exclusive"],
    },
    "kubernetes": {"image": "x:1", "namespace": "a", "mount_path": "/workspace", "memory": "64Gi"},
    "distributed": {"strategy": "ddp", "backend": "gloo"},
}
ODD_YAML = [
    b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
    b"d: &d [*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e]\n",
    b"name: &n [*n]\n",
    b"name: !!python/object/apply:os.system ['touch ran']\n",
    b"name: !!binary aGk=\ntask: causal-lm\n",
    b"name: x\nname: y\n",
    b"<<: {name: x}\n",
    b"? [a, b]\n: c\n",
    b"? {a: b}\n: c\n",
    b"name: x\n---\nname: y\n",
    b"\tname: x\n",
    b"name: 2026-01-01\n",
    b"1: 2\n",
    b"null: x\n",
    b"true: x\n",
    b"defaults: [recipe]\n",
    b"defaults: [/etc/passwd]\n",
    b"defaults: [../../outside/secret]\n",
    b"defaults: [gpt-micro, gpt-micro, _self_]\n",
    b"defaults: 5\n",
    b"defaults: [{override hydra/launcher: x}]\n",
    b"name: ${oc.env:FUZZ_SECRET}\n",
    b"name: ${oc.env:FUZZ_SECRET,x}\n",
    b"name: ${oc.decode:${oc.env:FUZZ_SECRET}}\n",
    b"slurm: {setup: ['$', '{oc.e', 'nv:FUZZ_SECRET}', '${slurm.setup.0}${slurm.setup.1}${slurm.setup.2}']}\n"
    b"description: '${oc.decode :${slurm.setup.3}}'\n",
    b"task_options: {'${oc.env:FUZZ_SECRET}': 1}\ndescription: '${oc.dict.keys:task_options}'\n",
    b"task_options: {a0: x, "
    + b", ".join(
        b"a%d: '%b'" % (n, b'${oc.select:"task_options.a%d"}' % (n - 1) * 9) for n in range(1, 9)
    )
    + b"}\n",
    b"defaults: ['gpt-micro@a', '${task}']\n",
    b"a: " + b"1:" * 50_000 + b"1\n",
    b"name: ${name}\n",
    b"name: ${now:%Y}\n",
    b"name: ${${${a}}}\n",
    b"name: ???\n",
    b"hydra: {run: {dir: /tmp/x}}\n",
    b"training: {lr: 0x7fffffffffffffffffff, steps: 0o17, global_batch_size: 1_000}\n",
    b"training: {lr: .inf, warmup_steps: .nan}\n",
    b"training: {steps: 1:30:00}\n",
    b"%YAML 9.9\n---\nname: x\n",
    b"name: >\n" + b"  x\n" * 20_000,
    b"a: [" + b"1," * 100_000 + b"]\n",
    b"name: [" * 3000,
    b"- " * 3000,
    b"".join(b"k%d: 1\n" % i for i in range(20_000)),
    b"training:\n" + b"".join(b" " * (i + 1) + b"a:\n" for i in range(600)),
]


@cache
def shipped(name: str) -> Any:
    return yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())


def strange(document: Any) -> str | None:
    """A value that no recipe may hold: text that is no text, integers that are not exact, planted secrets."""
    if isinstance(document, dict):
        pairs = [*document, *document.values()]
        return next((words for one in pairs if (words := strange(one))), None)
    if isinstance(document, list | tuple):
        return next((words for one in document if (words := strange(one))), None)
    if isinstance(document, str):
        if mutate.SECRET in document:
            return "a variable of the environment was taken"
        if "\0" in document or any("\ud800" <= c <= "\udfff" for c in document):
            return f"the text {document[:20]!r} was taken"
    if isinstance(document, int) and abs(document) > 2**53:
        return "an integer beyond 2^53 was taken"
    return None


def _strange_recipe(recipe: Any) -> str | None:
    return strange(recipe.model_dump(mode="json"))


@reader("recipe", 2400)
def recipe_file(rng: Random, folder: Path) -> Case:
    if rng.random() < 0.2:
        content = rng.choice(ODD_YAML)
        if rng.random() < 0.5:
            content = yaml.safe_dump(shipped("gpt-micro")).encode() + content
    else:
        found = mutate.document(rng, {**shipped(rng.choice(NAMES)), **PLACES}, rng.choice([1, 2]))
        content = mutate.to_json(found) if rng.random() < 0.5 else mutate.to_json(found, indent=1)
        content = mutate.raw_bytes(rng, content) if rng.random() < 0.2 else content
    path = mutate.place(rng, folder / mutate.name(rng, "recipe.yaml", 0.05), content)

    def read() -> Any:
        found = load(str(path))
        to_yaml(found)
        return found

    names = (*KEYS, path.name, *([str(path)] if path.name.isprintable() else [""]))
    return Case(read, names, _strange_recipe)


@cache
def resolved(name: str) -> Any:
    """Some name no data, or leave it to who uses them."""
    own = shipped(name)
    given = ["data.train=train"] * (
        own.get("data", {}).get("train") == "???" or name == "speech-7m"
    )
    given += ["model.pretrained=model"] * (own.get("model", {}).get("pretrained") == "???")
    return yaml.safe_load(to_yaml(load(name, given)))


@reader("recorded", 600)
def recorded(rng: Random, folder: Path) -> Case:
    """recipe.yaml of a run."""
    content = mutate.to_json(mutate.document(rng, resolved(rng.choice(NAMES))))
    content = mutate.raw_bytes(rng, content) if rng.random() < 0.3 else content
    path = mutate.place(rng, folder / "recipe.yaml", content)
    return Case(lambda: from_resolved(path), (*KEYS, path.name), _strange_recipe)


def _leaves(document: Any, prefix: str = "") -> list[str]:
    if not isinstance(document, dict):
        return [prefix.rstrip(".")]
    return [leaf for key, value in document.items() for leaf in _leaves(value, f"{prefix}{key}.")]


@reader("override", 1500)
def override(rng: Random, folder: Path) -> Case:
    words = []
    for _ in range(rng.choice([1, 1, 2])):
        key = rng.choice(_leaves(resolved("gpt-micro")))
        value = mutate.value(rng)
        value = value.text if isinstance(value, mutate.Raw) else value
        word = f"{rng.choice(['', '', '', '+', '++', '~'])}{key}={value}"
        if rng.random() < 0.15:
            word = rng.choice(
                [
                    str(value),
                    f"{value}={value}",
                    f"{key}",
                    f"~{key}",
                    f"{key}={{a: {value}}}",
                    f"{key}=[{value}",
                ]
            )
        words.append(word)

    def read() -> Any:
        found = load("gpt-micro", words)
        to_yaml(found)
        return found

    return Case(read, (*KEYS, *[w[:20] for w in words if w[:20].isprintable()]), _strange_recipe)


@cache
def _zero() -> Any:
    return load("gpt-micro", ["distributed.strategy=zero2", "training.precision=bf16"])


@cache
def _generated() -> Any:
    return deepspeed_config.config_for(_zero(), 2, 2, "bf16")


@reader("deepspeed", 900)
def deepspeed(rng: Random, folder: Path) -> Case:
    """distributed.deepspeed.config: the user's own JSON."""
    more = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "x"},
        "comms_logger": {"enabled": True},
    }
    source = _generated() if rng.random() < 0.6 else {**_generated(), **more}
    path = mutate.place(
        rng, folder / mutate.name(rng, "deepspeed.json"), mutate.json_file(rng, source)
    )
    options = _zero().distributed.deepspeed.model_copy(update={"config": str(path)})
    distributed = _zero().distributed.model_copy(update={"deepspeed": options})
    recipe = _zero().model_copy(update={"distributed": distributed})
    names = (path.name, "deepspeed") if path.name.isprintable() else ()

    def wrong(taken: Any) -> str | None:
        """A link is followed, as the user's own file may be one: what it leads to is not told by the environment."""
        return None if path.is_symlink() else strange(taken)

    return Case(lambda: deepspeed_config.config_for(recipe, 2, 2, "bf16"), names, wrong)
