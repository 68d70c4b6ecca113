"""The table of a run's results."""

import os

from muster.observe.results_table import results_table
from muster.observe.terminal import Terminal


def text_of(thing, width: int = 300) -> str:
    console = Terminal(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(thing)
    return console.export_text()


RESULTS = {
    "status": "finished",
    "steps": 200,
    "total_time_s": 300.0,
    "scored": "test",
    "scores": {"wer": 0.1234, "cer": 0.05, "words": 99},
    "throughput": {"samples_per_s": 51.25, "audio_s_per_s": 123.0},
    "world_size": 4,
    "devices": ["H200 (cuda:1)", "H200 (cuda:0)", "H200 (cuda:0)"],
    "balance": {
        "slowest_over_mean": 1.0213,
        "comm_wait_share": 0.031,
        "data_wait_share": 0.002,
        "padding_share": 0.045,
    },
    "measured": {"memory_gib": 1.5},
    "checkpoint": "runs/[x]/checkpoints/step-200",
}


def test_the_results_table_holds_what_matters():
    told = {"remarks": ["[why]"], "overlap": ["[some]"], "unseen": False}
    text = text_of(results_table(RESULTS | told, "runs/[x]"))
    assert "[why]" in text
    assert "[some]" in text
    assert "unseen" not in text
    assert "unseen test data" in text_of(results_table(RESULTS | {"unseen": True}, "runs/[x]"))
    for words in (
        "finished: 200 steps in 5.0 min",
        "WER 12.34%, CER 5.00%",
        "51.2 clips/s, 123 × real time",
        "4 (H200 (cuda:0), H200 (cuda:1))",
        "slowest ÷ mean 1.021; waiting for others 3.1%, for data 0.2%; padding 4.5%",
        "1.50 GiB",
        " runs/[x] ",
        "runs/[x]/checkpoints/step-200",
    ):
        assert words in text


def test_what_was_planned_stands_beside_what_was_measured():
    measured = {"memory_gib": 1.5, "median_step_time_s": 0.25}
    planned = {"memory_gib": 1.42, "step_time_s": 0.2345}
    text = text_of(results_table(RESULTS | {"measured": measured, "planned": planned}, "r"))
    assert "1.50 GiB (planned: 1.42)" in text
    assert "0.25 s (planned: 0.234)" in text
    assert "planned" not in text_of(results_table(RESULTS | {"measured": measured}, "r"))


def test_the_results_table_of_a_run_without_a_step():
    from muster.observe.results import summarise_metrics

    text = text_of(
        results_table(RESULTS | summarise_metrics([]) | {"balance": {}, "scores": {}}, "r")
    )
    assert "finished: 0 steps" in text
    assert "balance" not in text
    assert "WER" not in text


def test_the_throughput_is_said_to_be_the_mean():
    assert "throughput, the mean" in text_of(results_table(RESULTS, "r"))


def test_short_times_are_in_seconds():
    assert "in 119 s" in text_of(results_table(RESULTS | {"total_time_s": 119.0}, "r"))


def test_the_results_table_names_the_newest_restarts_and_counts_all():
    one = {"kind": "restarted", "time": 0.0, "why": "rank [1] was killed by SIGKILL"}
    again = [one | {"step": n, "from_step": n - 1} for n in range(11, 18)]
    again.append({"kind": "resumed", "time": 0.0, "why": "it was stopped", "from_step": 20})
    text = text_of(results_table(RESULTS | {"restarts": again}, "r"))
    assert "finished: 200 steps in 5.0 min, 7 restarts, 1 resume" in text
    assert "3 more times before, see events.jsonl" in text
    assert "at step 13 rank" not in text
    assert "at step 17 rank [1] was killed by SIGKILL; went on from step 16" in text
    assert "resumed; it was stopped; went on from step 20" in text
