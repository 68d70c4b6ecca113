"""A run in one line: its state, how far it is, how good, how fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.observe.evaluations import best
from muster.page.document import Summary, Throughput
from muster.page.read import RunFacts

SPEEDS = {  # the first that a run has is its own; the unit
    "tokens_per_s": "tokens/s",
    "audio_s_per_s": "× real time",
    "samples_per_s": "samples/s",
}


def summary(facts: RunFacts) -> Summary:
    info, recipe, state = facts.info, facts.recipe, facts.state
    model = recipe.get("model") or {}
    failure = info.get("failure") or {}
    return {
        "name": facts.run.name,
        "state": state,
        "words": str(failure["what"]) if failure.get("what") else None,
        "task": str(recipe.get("task", "")),
        "model": str(model.get("pretrained") or model.get("config") or model.get("preset") or ""),
        "strategy": str(facts.plan.get("strategy") or strategy_asked(recipe)),
        "world": info.get("ranks"),
        "nodes": list(info.get("nodes") or ([info["host"]] if "host" in info else [])),
        "created": float(info.get("created", 0.0)),
        "seconds": facts.run.ran_s(
            info, facts.read_at if facts.alive and state != "queued" else None
        ),
        "progress": {"step": int(facts.last.get("step", 0)), "steps": facts.steps},
        "loss": facts.last.get("loss"),
        "best": best(facts.events),
        "throughput": None if info.get("rehearsal") else _throughput(facts),
        "rehearsal": bool(info.get("rehearsal")),
    }


def strategy_asked(recipe: Mapping[str, Any]) -> str:
    return str((recipe.get("distributed") or {}).get("strategy", ""))


def _throughput(facts: RunFacts) -> Throughput | None:
    """Of the whole run once it has ended, else of the last step."""
    measured = facts.results.get("throughput") or facts.last
    name = next((name for name in SPEEDS if measured.get(name)), None)
    return None if name is None else {"value": float(measured[name]), "unit": SPEEDS[name]}
