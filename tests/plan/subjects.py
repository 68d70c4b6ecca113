"""Small things to plan for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from muster.hardware import catalogue
from muster.planner.find_recipe import find_recipe
from muster.planner.open_subject import open_subject
from muster.planner.planner import Planner
from muster.planner.subject import Subject
from muster.planner.time import Cluster

SMALL = ("data.sequence_length=64", "training.global_batch_size=64")
SMALL += ("training.compile=false",)  # a compiled block takes three times as long to record
GPT = ("gpt-micro", *SMALL)
LLAMA = ("llama-micro", *SMALL)


@cache
def subject(name: str, *overrides: str) -> Subject:
    return open_subject(find_recipe(name, overrides))


@cache
def _recorded(thing: Subject) -> Planner:
    """Recordings take seconds, and serve every test."""
    return Planner(thing, Cluster(catalogue.find("h100"), 1, 8), "bf16")


def planner(
    thing: Subject,
    gpus: int = 1,
    *,
    gib: float | None = None,
    per_node: int = 8,
    network: float | None = None,
    launch_us: float | None = None,
) -> Planner:
    """On so many H100s, or devices like it with other memory, a network of so many GB/s, or another host."""
    device = catalogue.find("h100")
    if network is not None:
        device = replace(device, network_gb_per_s=network)
    if launch_us is not None:
        device = replace(device, measured={"launch_us": launch_us})
    if gib is not None:
        device = replace(device, memory_gib=gib)
    return _recorded(thing).on(Cluster(device, gpus, per_node))
