"""What happened at which step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from muster.page.build import read_document
from muster.page.marks import MOST_CHECKPOINTS, thinned
from page import synthetic


def run_with(tmp_path: Path, *events: dict[str, Any], state: str = "running") -> Path:
    path = synthetic.write(tmp_path / "run", ranks=2, steps=30, state=state)
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_a_kill_and_what_followed_are_marks_at_their_steps(tmp_path: Path) -> None:
    path = run_with(
        tmp_path,
        {"event": "started", "time": 1.0, "step": 0, "steps": 60},
        {"event": "checkpoint", "time": 2.0, "step": 10, "stall_s": 0.1},
        {"event": "restarting", "time": 3.0, "rank": 1, "signal": "SIGKILL", "attempt": 1},
        {
            "event": "resumed",
            "time": 4.0,
            "step": 10,
            "path": "x",
            "passed_over": [],
            "world": 2,
            "saved_by": 4,
        },
        {"event": "started", "time": 4.1, "step": 10, "steps": 60},
    )
    found = read_document(path)
    assert [(mark["kind"], mark["step"]) for mark in found["marks"]] == [
        ("checkpoint", 10),
        ("restart", 10),
        ("resume", 10),
    ]
    assert found["marks"][1]["text"] == "rank 1 was killed (SIGKILL); all ranks restarted"
    assert found["marks"][2]["text"] == "resumed at step 10 with 2 rank(s) instead of 4"
    (finding,) = [one for one in found["findings"] if one["rank"] == 1]
    assert finding["text"] == ("All ranks were restarted once, after rank 1 was killed (SIGKILL).")


def test_a_stop_is_the_last_mark(tmp_path: Path) -> None:
    mark = read_document(run_with(tmp_path, state="stopped"))["marks"][-1]
    assert (mark["kind"], mark["step"], mark["text"]) == ("stop", 30, "stopped at step 30")


def test_of_many_checkpoints_some_are_left_out_and_never_the_last(tmp_path: Path) -> None:
    saves = [{"event": "checkpoint", "time": float(i), "step": i} for i in range(1, 1001)]
    marks = read_document(run_with(tmp_path, *saves))["marks"]
    assert len(marks) == MOST_CHECKPOINTS
    assert marks[-1]["step"] == 1000
    assert thinned([1, 2, 3], 3) == [1, 2, 3]


def test_only_the_best_evaluation_is_marked_as_the_best(tmp_path: Path) -> None:
    def scored(step: int, wer: float, split: str = "validation") -> dict[str, Any]:
        return {
            "event": "evaluation",
            "time": float(step),
            "step": step,
            "split": split,
            "scores": {"wer": wer, "cer": float("nan")},
            "best": True,
            "metric": "wer",
            "better": "min",
        }

    path = run_with(
        tmp_path, scored(10, 0.5), scored(20, 0.3), scored(30, 0.4), scored(30, 0.2, "test")
    )
    found = read_document(path)
    assert [(one["step"], one["split"]) for one in found["evaluations"] if one["best"]] == [
        (20, "validation")
    ]
    assert found["run"]["best"] is not None
    assert found["run"]["best"]["value"] == 0.3
    assert found["evaluations"][0]["scores"] == {"wer": 0.5}
