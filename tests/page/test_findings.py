"""What is wrong with a run is said in words that name the rank."""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from muster.page.build import read_document
from muster.page.ranks import last_times, others_medians
from page import synthetic


def findings(path: Path) -> list[dict[str, Any]]:
    return [dict(found) for found in read_document(path)["findings"]]


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_equal_ranks_are_said_to_be_equal(tmp_path: Path) -> None:
    (found,) = findings(synthetic.write(tmp_path / "run", ranks=4, steps=50))
    assert found["level"] == "good"
    assert found["text"].startswith(
        "All 4 ranks work, and equally long: in the last steps the slowest takes 1.0"
    )


def test_the_slow_rank_is_named_with_its_host_and_by_how_much(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=10, steps=100, slow=9)
    (found,) = findings(path)
    assert (found["level"], found["rank"]) == ("bad", 9)
    assert found["text"].startswith("Rank 9 on node-1 computes 2.5 × as long as the median")
    states = {row["rank"]: row["state"] for row in read_document(path)["ranks"]["rows"]}
    assert states[9] == "slow"
    assert states[0] == "ok"


def test_of_two_ranks_one_is_compared_with_the_other(tmp_path: Path) -> None:
    (found,) = findings(synthetic.write(tmp_path / "run", ranks=2, steps=100, slow=0))
    assert found["text"].startswith("Rank 0 on node-0 computes 2.")
    assert "× as long as the other (" in found["text"]


def test_a_rank_that_was_slow_before_is_not_named_now(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=4, steps=100, slow=2)
    for rank in range(4):
        file = path / "ranks" / f"{rank}.jsonl"
        last = json.loads(file.read_text().splitlines()[10])
        with file.open("a") as out:
            for step in range(101, 131):
                out.write(json.dumps(last | {"step": step}) + "\n")
    assert [found["level"] for found in findings(path)] == ["good"]
    change(path / "run.json", state="finished")
    (found,) = findings(path)
    assert (found["level"], found["rank"]) == ("warn", 2)
    assert found["text"].startswith("Over the whole run, rank 2 on node-0 computed 1.2 ×")


def test_twice_the_work_of_little_work_names_nobody(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=4, steps=50)
    for rank in range(4):
        file, work = path / "ranks" / f"{rank}.jsonl", 0.04 if rank == 1 else 0.02
        times = {"compute_s": work, "comm_wait_s": 1.0 - work, "data_wait_s": 0.0}
        lines = [json.loads(line) | times for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line | {"step_time_s": 1.0}) + "\n" for line in lines))
    assert [found["rank"] for found in findings(path)] == [None]  # they wait for their gradients


def test_a_slow_rank_shows_within_five_seconds_or_three_steps() -> None:
    def rows(step_s: float, count: int) -> Any:
        return np.tile([0.0, step_s, 0.0, 0.0, step_s, np.nan], (count, 1))

    for normal in (0.01, 0.2, 1.0):
        slow = 3 * normal
        became = rows(slow, int(max(3, np.ceil(5.0 / slow))))
        times = last_times(np.concatenate([rows(normal, 1000), became]))
        assert times is not None
        assert times.work == slow


def test_the_median_of_the_others_is_that_without_oneself() -> None:
    for count in (2, 3, 6, 7):
        values = {rank: float((7 * rank) % 5) for rank in range(count)}
        assert others_medians(values) == {
            rank: statistics.median(value for other, value in values.items() if other != rank)
            for rank in values
        }
    assert others_medians({0: 1.0}) == {}


def test_one_step_that_took_long_names_nobody(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=4, steps=50)
    file = path / "ranks" / "1.jsonl"
    lines = file.read_text().splitlines()
    last = json.loads(lines[-1])
    lines[-1] = json.dumps(last | {"compute_s": 9.0, "step_time_s": 9.5})
    file.write_text("\n".join(lines) + "\n")
    assert [found["level"] for found in findings(path)] == ["good"]


def test_a_run_in_which_only_gpu_0_works_is_said_in_one_sentence(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=4, steps=50, idle=(1, 2, 3))
    found, *others = findings(path)
    assert found["level"] == "bad"
    assert found["text"].startswith(
        "Only GPU 0 (rank 0) on node-0 works: 3 of 4 ranks do nothing, ranks 1, 2, 3 "
    )
    assert not others


def test_one_idle_gpu_is_named(tmp_path: Path) -> None:
    (found,) = findings(synthetic.write(tmp_path / "run", ranks=4, steps=50, idle=(2,)))
    assert found["text"].startswith("GPU 2 (rank 2) on node-0 does nothing while the others work")
    assert found["rank"] == 2


def test_a_gpu_that_rests_while_another_scores_its_last_batch_is_not_idle(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=2, steps=50, idle=(1,))
    change(path / "ranks" / "1.heartbeat.json", phase="evaluation")
    assert [found["level"] for found in findings(path)] == ["good"]


def test_gpus_that_have_no_rank_are_counted(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=1, steps=50)
    beat = path / "ranks" / "0.heartbeat.json"
    change(beat, device=json.loads(beat.read_text())["device"] | {"visible": 4})
    (found,) = findings(path)
    assert found["text"].startswith(
        "node-0 offers 4 GPUs and the run has 1 rank(s) there: 3 of them"
    )


def test_a_rank_without_heartbeat_is_named(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=2, steps=50)
    change(path / "ranks" / "1.heartbeat.json", time=time.time() - 90)
    found = findings(path)[0]
    assert found["text"].startswith("No heartbeat of rank 1 on node-0 for 90 s")
    assert read_document(path)["ranks"]["rows"][1]["state"] == "silent"


def test_a_rank_that_stays_in_one_phase_is_named(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=2, steps=50)
    change(path / "ranks" / "1.heartbeat.json", since=time.time() - 70, phase="waiting for data")
    lines = (path / "ranks" / "0.jsonl").read_text()
    extra = json.loads(lines.splitlines()[-1]) | {"step": 51}
    (path / "ranks" / "0.jsonl").write_text(lines + json.dumps(extra) + "\n")
    texts = [found["text"] for found in findings(path)]
    assert "Rank 1 on node-0 has been in the phase “waiting for data” for 70 s." in texts


def test_waiting_for_data_is_said_with_its_share(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=2, steps=50)
    for rank in (0, 1):
        file = path / "ranks" / f"{rank}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        slow = [row | {"data_wait_s": 0.6, "step_time_s": row["step_time_s"] + 0.6} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in slow))
    (found,) = findings(path)
    assert found["text"].startswith("The ranks wait for data 5")
    assert "raise data.workers" in found["text"]


def test_skipped_steps_are_counted(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=1, steps=50)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows[9] |= {"loss": None, "skipped": True}
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = findings(path)
    assert found["text"].startswith("1 of 50 steps were skipped")
    assert found["text"].endswith("the last at step 10.")


def test_a_failure_comes_with_its_cause_and_cure(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=2, steps=50, state="failed")
    failure = {"what": "Rank 1 was killed.", "cause": "No memory.", "cure": "Use less.", "rank": 1}
    change(path / "run.json", failure=failure | {"time": time.time()})
    found = read_document(path)
    assert found["findings"][0]["text"] == "Rank 1 was killed. No memory. Use less."
    assert found["ranks"]["rows"][1]["state"] == "failed"
    assert found["marks"][-1]["kind"] == "failure"
    assert found["run"]["words"] == "Rank 1 was killed."


def test_ranks_that_share_a_gpu_are_not_compared(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=4, steps=100, slow=1)
    change(path / "run.json", rehearsal=True)
    assert all("as long as" not in found["text"] for found in findings(path)[:-1])
    assert read_document(path)["ranks"]["rows"][1]["state"] == "ok"
