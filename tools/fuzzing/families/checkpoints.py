"""Checkpoints: manifest, recipe.json, assets.json, torch's .metadata and its shards."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from fuzzing import mutate
from fuzzing.reader import Case, reader
from muster.inference.load import load_trained
from muster.recipe.load import load
from muster.tasks import build_task
from muster.training.manifest import FORMAT, sealed


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@cache
def files() -> dict[str, bytes]:
    """Of a checkpoint of the smallest language model, as a run writes it; the manifest is made later."""
    recipe = load(
        "gpt-micro", ["model.shape.layers=1", "model.shape.width=16", "model.shape.heads=2"]
    )
    task = build_task(recipe)
    torch.manual_seed(0)
    state = {"model": task.build_model().state_dict()}
    folder = Path(tempfile.mkdtemp())
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)
    found["recipe.json"] = json.dumps(recipe.model_dump(mode="json")).encode()
    found["assets.json"] = json.dumps(task.assets).encode()
    return found


def manifest(content: dict[str, bytes]) -> dict[str, Any]:
    entries = {
        n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in content.items()
    }
    trainer = {"step": 6, "selection": {"best_step": 6, "keeps": True}}
    return {"format": FORMAT, "trainer": trainer, "world": 1, "time": 1.0, "files": entries}


def _unmarked(described: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in described.items() if key != "format"}


def _plain(document: Any) -> bool:
    """Whether Python can write it."""
    try:
        json.dumps(document, sort_keys=True)
    except (TypeError, ValueError):
        return False
    return True


@reader("checkpoint", 1800)
def checkpoint(rng: Random, folder: Path) -> Case:
    """Damaged files; files that were changed with a manifest to match; forged pickles; odd manifests."""
    content = dict(files())
    shards = [name for name in content if name.endswith(".distcp")]
    kind = rng.randrange(6)
    if kind == 0:
        name = rng.choice(["recipe.json", "assets.json"])
        content[name] = mutate.json_file(rng, json.loads(content[name]))
    elif kind == 1:
        content[".metadata"] = mutate.raw_bytes(rng, content[".metadata"])
    elif kind == 2:
        forged = [_Evil(), {"a": _Evil()}, [1] * 10, None, "x", 2**5000, [[]] * 3]
        content[".metadata"] = rng.choice(
            [
                pickle.dumps(rng.choice(forged)),
                b"",
                b"\x80\x05.",
                b"\x80\x02}r\xff\xff\xff\x7f.",
                b"\x80\x02}p2000000000\n.",
                b"(" * 10**5,
                b"cos\nsystem\n(S'touch ran'\ntR.",
            ]
        )
    elif kind == 3:
        content[shards[0]] = mutate.raw_bytes(rng, content[shards[0]])
    described = manifest(content)
    seal = rng.random() < 0.5
    if kind == 4:
        odd = [
            "../../../outside/secret.json",
            "/etc/passwd",
            "",
            ".",
            "a\0b",
            "\ud800",
            "x\x1b[2Jy",
            "[/red]",
        ]
        described["files"][rng.choice(odd)] = rng.choice(
            [{"bytes": 1, "sha256": "x"}, {}, None, {"bytes": -1}]
        )
    if kind == 5 and rng.random() < 0.4:  # sealed after it was changed: its own checksum is right
        described = mutate.document(rng, described)
        seal = isinstance(described, dict) and _plain(described)
    described = sealed(_unmarked(described)) if seal else described
    changed = kind == 5 and rng.random() < 0.6
    saved = mutate.json_file(rng, described) if changed else mutate.to_json(described)
    if rng.random() < 0.1:
        name = rng.choice(list(content))
        content[name] = mutate.raw_bytes(rng, content[name])  # damaged later
    step = (
        folder
        / "run"
        / "checkpoints"
        / rng.choice(["step-6"] * 9 + ["step-06", "step--1", "step-9" * 20])
    )
    step.mkdir(parents=True)
    for name, data in content.items():
        mutate.place(rng, step / name, data, 0.01)
    mutate.place(rng, step / "manifest.json", saved, 0.01)

    def read() -> Any:
        found = load_trained(rng.choice([step, folder / "run"]))
        ids = torch.zeros(1, 4, dtype=torch.long)
        with torch.no_grad():
            return found, found.model(ids)

    def wrong(taken: Any) -> str | None:
        found, _ = taken
        saved = found.saved.manifest
        step = saved["trainer"].get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            return f"step {step!r} was taken"
        if not saved["files"] or any(
            "/" in name or name in ("", ".", "..") for name in saved["files"]
        ):
            return "its table of files was taken"
        return None

    return Case(read, (str(folder), "step-"), wrong)
