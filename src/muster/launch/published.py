"""The run that node 0 publishes in its store, as another node finds and takes part in it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from muster.errors import LaunchError, UnreadableError
from muster.launch import secret
from muster.launch.cluster import Node
from muster.launch.signed_store import SignedStore, unverified
from muster.reading.json_file import parse
from muster.recipe.batch import settle_as
from muster.recipe.load import from_resolved
from muster.recipe.own_task import comparable
from muster.recipe.schema import Recipe
from muster.run_directory import Run

OVERWRITTEN_S = 3.0

Found = TypeVar("Found")


def join_run(node: Node, recipe: Recipe) -> Run:
    """The run that node 0 has made, if it trains the same recipe."""
    from muster.launch import rendezvous

    rendezvous.refuse_loopback(node.address)
    store, where = _store(node, recipe.distributed.timeout_s), _where(node)

    def find() -> tuple[Run, bytes]:
        run = _run(store, where)
        return run, _secret(run, store, where)

    run, found = _authentic(find)
    master_recipe = from_resolved(run.path / "recipe.yaml")
    recipe = settle_as(recipe, master_recipe.training)
    there, here = comparable(master_recipe.as_dict()), comparable(recipe.as_dict())
    if different := differences(there, here):
        hint = "give every node the same recipe and the same key=value overrides"
        if node.least is None:  # of an elastic run, the others go on without it
            refusal = f"node {node.rank} has another recipe ({different[0]}); {hint}"
            SignedStore(store, found).set("refused", refusal)
        raise LaunchError(f"node 0 trains with another recipe ({'; '.join(different[:3])}); {hint}")
    return run


def secret_of(run: Run, node: Node, within_s: float) -> bytes:
    """Of the start of `run` whose node 0 listens now, once it is there."""
    store, where = _store(node, within_s), _where(node)
    return _authentic(lambda: _secret(run, store, where))


def _where(node: Node) -> str:
    return f"{node.address}:{node.port}"


def _store(node: Node, within_s: float) -> Any:
    """Node 0's, once it has published its run, which it does after it has written the secret."""
    from muster.launch import rendezvous

    store = rendezvous.connect(node.address, node.port, within_s)
    try:
        store.wait(["run"])
    except RuntimeError:
        raise LaunchError(
            f"{_where(node)} answers, but has published no run within {within_s:.0f} s; is that node 0 of "
            "this run?"
        ) from None
    return store


def _authentic(find: Callable[[], Found]) -> Found:
    """Node 0 writes again within a second what others have overwritten."""
    end = time.monotonic() + OVERWRITTEN_S
    while True:
        try:
            return find()
        except LaunchError:
            if time.monotonic() > end:
                raise
        time.sleep(0.2)


def _run(store: Any, where: str) -> Run:
    try:
        path = str(parse(unverified(store, "run"), "run").get("path"))
    except UnreadableError:
        path = ""
    if not os.path.isabs(path) or not path.isprintable():
        raise LaunchError(
            f"{where} answers, but publishes no run of muster's; is that node 0 of this run?"
        )
    run = Run(Path(path))
    if not (run.path / "run.json").is_file():
        raise LaunchError(
            f"node 0's run directory {run.path} does not exist on {os.uname().nodename}; put "
            "logging.dir on storage that all nodes share"
        )
    return run


def _secret(run: Run, store: Any, where: str) -> bytes:
    """With which what is published is signed."""
    found = secret.read(run.path)
    if not SignedStore(store, found).check(["run"]):
        raise LaunchError(
            f"what {where} publishes is not signed with the secret of {run.path}: either it is not node 0 of "
            f"that run, or another process writes into its store, or {secret.VARIABLE} differs here"
        )
    return found


def differences(one: Any, other: Any, key: str = "") -> list[str]:
    """Keys whose values differ, in the form `training.lr: 0.1 there, 0.2 here`."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            difference
            for name in sorted({*one, *other})
            for difference in differences(
                one.get(name), other.get(name), f"{key}.{name}".strip(".")
            )
        ]
    return [] if one == other else [f"{key}: {one!r} there, {other!r} here"]
