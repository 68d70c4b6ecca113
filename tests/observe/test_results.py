"""training_results.json."""

import json

import pytest

from muster.observe.results import read_lines, summarise_metrics
from muster.writing import write_json


def line(step: int, epoch: int, seconds: float, **more) -> dict:
    return {
        "step": step,
        "epoch": epoch,
        "loss": 10.0 / step,
        "samples": 8,
        "samples_per_s": 8 / seconds,
        "step_time_s": seconds,
        "memory_gib": 1.0 + step % 2,
        **more,
    }


def test_metrics_are_summed_up():
    lines = [
        line(1, 0, 2.0, audio_s_per_s=10.0),
        line(2, 0, 1.0, audio_s_per_s=40.0, skipped=True),
        line(3, 1, 1.0, audio_s_per_s=20.0),
        line(4, 1, 4.0, audio_s_per_s=5.0),
    ]
    assert summarise_metrics(lines) == {
        "steps": 4,
        "skipped_steps": 1,
        "final_loss": 2.5,
        "epochs": [{"epoch": 0, "time_s": 3.0}, {"epoch": 1, "time_s": 5.0}],
        "throughput": {"samples_per_s": 4.0, "audio_s_per_s": 100.0 / 8.0},
        "measured": {"step_time_s": 2.0, "median_step_time_s": 1.5, "memory_gib": 2.0},
    }


def test_without_a_step_the_keys_are_the_same():
    nothing = summarise_metrics([])
    assert set(nothing) == set(summarise_metrics([line(1, 0, 1.0)]))
    assert nothing["steps"] == 0
    assert nothing["throughput"] == {"samples_per_s": 0.0}


def test_only_whole_lines_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    assert read_lines(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"step": 2}')
    assert read_lines(path) == [{"step": 1}], "not whole until its end is written"


def test_a_document_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    write_json(path, [2])
    assert json.loads(path.read_text()) == [2]
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path):
    (tmp_path / "run.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path / "run.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
