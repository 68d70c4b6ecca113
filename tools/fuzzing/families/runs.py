"""Run directories: run.json, metrics, events, ranks' files, trackers.json; the list, the page and explain."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

from fuzzing import mutate
from fuzzing.families.recipes import ODD_YAML, resolved
from fuzzing.reader import Case, reader
from muster import run_directory
from muster.api.run import runs as api_runs
from muster.cli.explain import panel
from muster.diagnose import hang
from muster.diagnose.explain import explain_run
from muster.observe.ranks import RankTable
from muster.observe.terminal import KEPT, Terminal
from muster.observe.trackers.sender import Point
from muster.observe.trackers.sent import Sent
from muster.page.build import read_document
from muster.page.live import LiveRuns, to_json

NOW = 1_760_000_000.0
INFO: Any = {
    **{
        "state": "failed",
        "created": NOW,
        "owned": NOW,
        "pid": 1,
        "pid_started": 5,
        "host": "a",
        "boot": "b",
    },
    **{
        "ranks": 2,
        "restarts": 1,
        "exit_code": 1,
        "slurm_job": "12",
        "rehearsal": False,
        "ended": NOW,
    },
    "failure": {
        "rank": 1,
        "host": "a",
        "exit_code": -9,
        "signal": "SIGKILL",
        "what": "it was killed",
        "time": NOW,
        "error": None,
        "hang": None,
        "cause": "x",
        "cure": "y",
    },
}
METRICS: Any = [
    {
        "step": i,
        "epoch": 0,
        "loss": 2.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "samples": i * 8,
        "samples_per_s": 5.0,
    }
    | {"step_time_s": 0.1, "data_wait_s": 0.0, "memory_gib": 0.5, "tokens_per_s": 9.0}
    for i in range(1, 6)
]
EVENTS: Any = [
    {"event": "started", "time": NOW, "step": 0},
    {
        "event": "evaluation",
        "time": NOW,
        "step": 3,
        "split": "validation",
        "scores": {"loss": 1.0},
        "examples": [],
    },
    {
        "event": "restarting",
        "time": NOW,
        "step": 3,
        "rank": 1,
        "signal": "SIGKILL",
        "cause": "x",
        "cure": "y",
    },
    {"event": "started", "time": NOW, "step": 2},
    {"event": "warning", "time": NOW, "words": "x"},
    {"event": "checkpoint", "time": NOW, "step": 3, "seconds": 0.1},
    {"event": "continuing", "time": NOW, "why": "x", "step": 3},
]
RESULTS: Any = {
    **{
        "status": "finished",
        "total_time_s": 5.0,
        "world_size": 2,
        "devices": ["cpu"],
        "strategy": "ddp",
        "steps": 5,
    },
    **{
        "global_batch_size": 8,
        "epochs": [{"epoch": 0, "time_s": 1.0}],
        "throughput": {"samples_per_s": 5.0},
    },
    **{
        "balance": {"slowest_over_mean": 1.0},
        "planned": {},
        "measured": {},
        "scores": {"validation": {"loss": 1.0}},
    },
}
BEAT: Any = {
    "rank": 0,
    "host": "a",
    "pid": 1,
    "time": NOW,
    "step": 3,
    "phase": "training",
    "idle": 0.0,
}
TIMES: Any = [
    {"step": i, "time": NOW, "compute_s": 0.1, "comm_wait_s": 0.0, "data_wait_s": 0.0}
    for i in range(5)
]
ERROR: Any = {
    "rank": 1,
    "kind": "ValueError",
    "message": "x",
    "expected": False,
    "time": NOW,
    "trace": "…",
}
STALL: Any = {
    **{
        "rank": 0,
        "why": "stalled",
        "lost": False,
        "seconds": 30.0,
        "phase": "training",
        "step": 3,
        "host": "a",
    },
    **{
        "thread": "1",
        "call": "all_reduce",
        "silent": {"1": "sleeping"},
    },
    "lines": [{"file": "x.py", "line": 3, "function": "f", "code": "g()"}],
}
FLIGHT: Any = {
    "groups": {"0": [0, 1]},
    "entries": [
        {
            "profiling_name": "gloo:all_reduce",
            "process_group": ["0", "default"],
            "collective_seq_id": n,
            "is_p2p": False,
        }
        | {
            "input_dtypes": ["Float"],
            "input_sizes": [[4]],
            "retired": n < 3,
            "state": "scheduled",
            "thread_id": "1",
        }
        for n in range(1, 4)
    ],
}
DOCUMENTS: dict[str, Any] = {
    "run.json": INFO,
    "plan.json": {
        "steps": 5,
        "parameters": 100,
        "precision": "fp32",
        "global_batch_size": 8,
        "strategy": "ddp",
    },
    "environment.json": {
        "devices": ["cpu"],
        "software": {"torch": "2"},
        "variables": [{"name": "A", "value": "1"}],
    },
    "training_results.json": RESULTS,
    "data.json": {"train": {"samples": 5, "files": []}},
    "trackers.json": {"wandb": {"id": "x", "steps": {"train": 3}}},
    "ranks/0.heartbeat.json": BEAT,
    "ranks/1.heartbeat.json": BEAT,
    "ranks/1.error.json": ERROR,
    "ranks/0.stall.json": STALL,
    "ranks/0.flight.json": FLIGHT,
}
LINES: dict[str, Any] = {
    "metrics.jsonl": METRICS,
    "events.jsonl": EVENTS,
    "ranks/0.jsonl": TIMES,
    "ranks/1.jsonl": TIMES,
}


def write(rng: Random, folder: Path, spoilt: list[str]) -> Path:
    """A run of which these files are mutated."""
    (folder / "ranks").mkdir(parents=True)
    for name, document in DOCUMENTS.items():
        made = mutate.json_file(rng, document) if name in spoilt else json.dumps(document).encode()
        mutate.place(rng, folder / name, made, 0.03 if name in spoilt else 0.0)
    for name, rows in LINES.items():
        plain = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        made = mutate.json_lines(rng, rows) if name in spoilt else plain
        mutate.place(rng, folder / name, made, 0.03 if name in spoilt else 0.0)
    recipe = resolved("gpt-micro")
    made = mutate.json_file(rng, recipe) if "recipe.yaml" in spoilt else mutate.to_json(recipe)
    mutate.place(rng, folder / "recipe.yaml", made, 0.0)
    log = b"step 1\nTraceback (most recent call last):\n  x\nValueError: no\n"
    (folder / "ranks" / "1.log").write_bytes(mutate.raw_bytes(rng, log) if "log" in spoilt else log)
    return folder


def _some(rng: Random) -> list[str]:
    return rng.sample([*DOCUMENTS, *LINES, "recipe.yaml", "log"], rng.choice([1, 1, 2]))


def _lead_out(rng: Random, run: Path) -> None:
    """A file or folder of the run is a link to one outside of it."""
    outside = run.parent / "outside"
    outside.mkdir()
    (outside / "0.jsonl").write_text(
        json.dumps({**TIMES[1], "step": 5, "compute_s": 4711.25}) + "\n"
    )
    (outside / "metrics.jsonl").write_text(json.dumps({**METRICS[0], "loss": 4711.25}) + "\n")
    (outside / "recipe.yaml").write_text("description: '4711.25'\n")
    name = rng.choice(["ranks", "ranks/0.jsonl", "metrics.jsonl", "recipe.yaml"])
    if name == "ranks":
        shutil.rmtree(run / name)
        (run / name).symlink_to(outside)
    else:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / Path(name).name)


def shown(renderable: Any) -> str:
    """As the terminal would get it."""
    text = io.StringIO()
    Terminal(file=text, width=100, force_terminal=True, color_system=None).print(renderable)
    return text.getvalue()


def unprintable(text: str) -> str | None:
    bad = sorted({c for c in text if ord(c) in KEPT or "\ud800" <= c <= "\udfff"})
    return f"{bad[0]!r} is printed" if bad else None


@reader("run", 1500)
def listed(rng: Random, folder: Path) -> Case:
    """The list of runs, its states, and what Python gives of a run."""
    name = mutate.name(rng, "run-1")
    path = write(rng, folder / "runs" / name, _some(rng))

    def read() -> Any:
        root = folder / "runs"
        for run in run_directory.every(root):
            run.state(), run.elsewhere(), run.last_metrics(), run.processes(), run.results()
        for one in api_runs(root):
            (
                one.state,
                one.info,
                one.last,
                one.results,
                one.metrics(),
                one.events,
                one.restarts,
                one.best,
                one.log(1),
            )
            repr(one), one._repr_html_()
        for line in RankTable(path).lines():
            assert isinstance(line, str)

    return Case(read, (name, "run.json", ".json") if name.isprintable() else ())


@reader("page", 900)
def page(rng: Random, folder: Path) -> Case:
    name = mutate.name(rng, "run-1")
    path = write(rng, folder / "runs" / name, _some(rng))
    if rng.random() < 0.2:
        (path / "recipe.yaml").write_bytes(rng.choice(ODD_YAML))
    if rng.random() < 0.1:
        odd = rng.choice(["²", "٣", "9" * 200])
        (path / "ranks" / f"{odd}.jsonl").write_bytes(b'{"step": 1}\n')
    if rng.random() < 0.1:
        _lead_out(rng, path)

    def read() -> Any:
        live = LiveRuns(folder / "runs")
        return [live.list().whole(), to_json(read_document(path))]

    def wrong(texts: Any) -> str | None:
        if not all(isinstance(json.loads(text), dict) for text in texts):
            return "no JSON"
        return "a file outside of the run is shown" if any("4711.25" in t for t in texts) else None

    return Case(read, (name,) if name.isprintable() else (), wrong)


@reader("explain-run", 900)
def explained(rng: Random, folder: Path) -> Case:
    path = write(rng, folder / "runs" / "run-1", _some(rng))
    if rng.random() < 0.5:
        (path / "ranks" / "1.stacks.txt").write_bytes(
            mutate.raw_bytes(
                rng,
                b'Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File "x.py", line 3 in f\n',
            )
        )

    def read() -> Any:
        report = explain_run(path)
        json.dumps(report.as_dict(), default=str)
        hang.analyse(path, 2)
        hang.last_line(path, 1)
        return shown(panel(report))

    return Case(read, ("run-1", ".json"), unprintable)


@reader("trackers", 500)
def trackers(rng: Random, folder: Path) -> Case:
    """trackers.json: what was sent before a run went on."""
    document = {"wandb": {"id": "x", "steps": {"train": 3}}, "mlflow": {"id": None, "steps": {}}}
    mutate.place(rng, folder / "trackers.json", mutate.json_file(rng, document))

    def read() -> Any:
        sent = Sent(folder)
        for name in ("wandb", "mlflow", "other"):
            sent.started(name, sent.id_of(name))
            sent.without_repeated(name, [Point("metrics", 5, "train", {"loss": 1.0})])
        return json.loads((folder / "trackers.json").read_text())

    return Case(read, ("trackers.json",))
