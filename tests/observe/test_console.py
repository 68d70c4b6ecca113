"""What a terminal shows of a run, read from its files."""

import json
import os

from muster.observe import console as shown
from muster.observe.console import Tail, event_words, events_to_come, follow
from muster.observe.terminal import Terminal

STEP = {"loss": 1.25, "grad_norm": 0.5, "lr": 1e-3, "samples_per_s": 64.0, "step_time_s": 0.5}


def append(path, *documents) -> None:
    with path.open("a") as file:
        for document in documents:
            file.write(json.dumps(document) + "\n")


def test_a_tail_gives_each_line_once(tmp_path):
    path = tmp_path / "a.jsonl"
    tail = Tail(path)
    assert list(tail.new()) == []
    append(path, 1, 2)
    assert list(tail.new()) == [1, 2]
    assert list(tail.new()) == []
    append(path, 3)
    assert list(tail.new()) == [3]


def test_a_tail_waits_for_the_end_of_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    tail = Tail(path)
    path.write_text('{"step": 1}\n{"st')
    assert list(tail.new()) == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}')
    assert list(tail.new()) == []
    with path.open("a") as file:
        file.write("\n")
    assert list(tail.new()) == [{"step": 2}]


def test_a_tail_starts_over_when_the_file_is_replaced(tmp_path):
    path = tmp_path / "a.jsonl"
    tail = Tail(path)
    append(path, 1, 2, 3)
    assert list(tail.new()) == [1, 2, 3]
    other = tmp_path / ".a.jsonl"
    append(other, 1, 2, 3, 4, 5)
    other.replace(path)
    assert list(tail.new()) == [1, 2, 3, 4, 5]


def test_a_tail_starts_over_when_the_file_is_cut_back(tmp_path):
    path = tmp_path / "a.jsonl"
    tail = Tail(path)
    append(path, 10, 20, 30)
    assert list(tail.new()) == [10, 20, 30]
    path.write_text("1\n")
    assert list(tail.new()) == [1]


def test_a_tail_passes_over_a_line_that_is_no_json(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('1\n{"event": "che{"event": "started"}\n2\n')
    assert list(Tail(path).new()) == [1, 2]


def test_following_shows_events_and_steps_until_the_run_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(shown, "POLL_S", 0.0)
    append(
        tmp_path / "events.jsonl",
        {"event": "started", "step": 0, "steps": 2, "world": 4},
        {"event": "unheard of"},
    )
    append(tmp_path / "metrics.jsonl", {"step": 1, **STEP})
    states = iter(["starting", "running", "finished"])

    def state() -> str:
        now = next(states)
        if now == "finished":
            append(tmp_path / "metrics.jsonl", {"step": 2, **STEP})
            append(
                tmp_path / "events.jsonl",
                {"event": "evaluation", "step": 2, "split": "test", "scores": {"wer": 0.125}},
            )
        return now

    console = Terminal(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    assert follow(tmp_path, state, console) == "finished"
    assert console.export_text().splitlines() == [
        "4 rank(s), steps 0 to 2",
        "step 1/2  loss 1.2500  grad 0.500  lr 1.00e-03  64.0 samples/s  0 s left",
        "step 2: test WER 12.50%",
        "step 2/2  loss 1.2500  grad 0.500  lr 1.00e-03  64.0 samples/s  0 s left",
    ]


def test_a_run_that_starts_again_shows_only_the_steps_of_this_start(tmp_path, monkeypatch):
    monkeypatch.setattr(shown, "PLAIN_EVERY_S", 0.0)
    first = {"event": "started", "step": 0, "steps": 2, "world": 4}
    append(tmp_path / "events.jsonl", first)
    append(tmp_path / "metrics.jsonl", {"step": 1, **STEP}, {"step": 2, **STEP})
    to_come = events_to_come(tmp_path)
    append(tmp_path / "events.jsonl", {**first, "step": 1, "steps": 3, "world": 2})
    append(tmp_path / "metrics.jsonl", {"step": 3, **STEP})
    console = Terminal(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    follow(tmp_path, lambda: "finished", console, events=to_come)
    said = [line.partition("  ")[0] for line in console.export_text().splitlines()]
    assert said == ["2 rank(s), steps 1 to 3", "step 2/3", "step 3/3"]


def test_a_rehearsal_shows_no_speed(tmp_path):
    started = {"event": "started", "step": 0, "steps": 9, "world": 4, "rehearsal": True}
    append(tmp_path / "events.jsonl", started)
    append(tmp_path / "metrics.jsonl", {"step": 4, **STEP})
    for terminal in (False, True):
        file = (tmp_path / f"out-{terminal}").open("w+")
        console = Terminal(width=200, file=file, force_terminal=terminal)
        follow(tmp_path, lambda: "stopped", console)
        file.seek(0)
        written = file.read()
        assert "loss 1.2500" in written
        assert "samples/s" not in written


def test_a_terminal_gets_a_bar(tmp_path):
    append(tmp_path / "events.jsonl", {"event": "started", "step": 0, "steps": 9, "world": 1})
    append(tmp_path / "metrics.jsonl", {"step": 4, **STEP})
    file = (tmp_path / "out").open("w+")
    console = Terminal(width=200, file=file, force_terminal=True)
    assert follow(tmp_path, lambda: "stopped", console) == "stopped"
    file.seek(0)
    written = file.read()
    assert "1 rank(s), steps 0 to 9" in written
    assert "step 4/9" in written
    assert "loss 1.2500" in written


def test_before_the_first_step_a_terminal_shows_what_rank_0_last_said(tmp_path, monkeypatch):
    monkeypatch.setattr(shown, "POLL_S", 0.0)
    (tmp_path / "ranks").mkdir()
    log = tmp_path / "ranks" / "0.log"
    log.write_text("[Rank 0] of an earlier start\n")
    states = iter(["starting", "starting", "stopped"])
    seen = []
    monkeypatch.setattr(
        shown._Bar, "preparing", lambda self, words: seen.append((words, bar_of(self)))
    )

    def bar_of(show) -> str:
        return show.progress.tasks[0].fields["head"]

    def state() -> str:
        now = next(states)
        with log.open("a") as file:
            file.write(f"[Rank 0] tokenized 1 of 9 documents, {now}\n")
        if now == "stopped":
            append(
                tmp_path / "events.jsonl", {"event": "started", "step": 0, "steps": 9, "world": 1}
            )
        return now

    file = (tmp_path / "out").open("w+")
    follow(tmp_path, state, Terminal(width=200, file=file, force_terminal=True))
    assert next(words for words, _ in seen).endswith("tokenized 1 of 9 documents, starting")
    assert {head for _, head in seen} == {"starting …"}
    assert not any("earlier" in words for words, _ in seen)
    file.seek(0)
    assert "step 0/9" in file.read()


def test_events_in_words():
    resumed = {"event": "resumed", "step": 5, "path": "p", "passed_over": ["step-9: torn"]}
    assert event_words(resumed) == "resumed at step 5 from p; passed over step-9: torn"
    words = event_words({**resumed, "passed_over": [], "world": 2, "saved_by": 4})
    assert words == "resumed at step 5 from p, with 2 rank(s) instead of 4"
    killed = {"event": "restarting", "rank": 2, "signal": "SIGKILL"}
    assert event_words(killed).startswith("rank 2 was killed (SIGKILL)")
    assert event_words({"event": "checkpoint", "step": 5}) is None
    scoring = {"event": "scoring", "split": "test", "done": 2, "batches": 8, "seconds": 10.0}
    assert event_words(scoring) == "scoring test data: 2 of 8 batches, 30 s left"
    assert event_words({**scoring, "done": 0}) == "scoring test data: 0 of 8 batches"
    scored = {"event": "evaluation", "step": 5, "split": "test", "scores": {"wer": 1.5}}
    assert event_words({**scored, "remarks": ["why"]}) == "step 5: test WER 150.00%\nwhy"
    assert event_words({"event": "data", "lines": ["a", "b"]}) == "a\nb"


def test_brackets_in_events_are_shown_as_they_are(tmp_path, monkeypatch):
    resumed = {"event": "resumed", "step": 5, "path": "[/a]/[bold]b", "passed_over": []}
    append(tmp_path / "events.jsonl", resumed)
    for terminal in (False, True):
        file = (tmp_path / "out").open("w+")
        console = Terminal(width=200, file=file, force_terminal=terminal)
        follow(tmp_path, lambda: "failed", console)
        file.seek(0)
        assert "from [/a]/[bold]b" in file.read()
