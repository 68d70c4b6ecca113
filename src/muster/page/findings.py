"""What is wrong with a run, in sentences that name the rank: the page's first lines."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from muster.page.document import Finding, Level, Row
from muster.page.ranks import IDLE, SLOW, Compared, Times, others_medians
from muster.page.read import RunFiles

WAS_SLOW = 1.2  # × the others over a whole run, in which noise averages out
MUCH_SLOWER = 2.0  # × the others: the run has half the speed it could have
DATA_SHARE = 0.1  # of a step spent waiting for data: worth a change of data.workers
WAIT_SHARE = 0.5  # of a step spent waiting for others, where no rank is slow
STUCK_S = 30.0  # in one phase: longer than saving or an evaluation's batch takes
OVER_PLAN = 1.5  # × the planned step time; plans are right within a few tenths
MOST_NAMED = 8  # ranks in a sentence
ORDER: tuple[Level, ...] = ("bad", "warn", "good")


def findings(files: RunFiles, rows: Sequence[Row], compared: Compared) -> list[Finding]:
    """The worst first."""
    found = [*_ended(files), *_numbers(files)]
    if files.alive:
        found += [*_silent(rows), *_stuck(files, rows)]
    found += [*_unused_gpus(files)]
    if not files.info.get("rehearsal"):
        slow = [*_slow(rows, compared)] or [*_was_slow(files, rows)]
        found += [*_idle(files, compared), *slow, *_waiting(compared)]
    found += [*_against_plan(files)]
    if not found and len(compared.times) > 1:
        found += [_equal(compared.times)]
    return sorted(found, key=lambda finding: ORDER.index(finding["level"]))


def _finding(level: Level, text: str, rank: int | None = None) -> Finding:
    return {"level": level, "text": text, "rank": rank}


def _ended(files: RunFiles) -> Iterator[Finding]:
    failure = files.info.get("failure") or {}
    if files.state == "failed" and failure:
        told = [str(failure[key]) for key in ("what", "cause", "cure") if failure.get(key)]
        yield _finding("bad", " ".join(told), failure.get("rank"))
    if files.state == "interrupted":
        yield _finding(
            "bad", f"The run's process is gone; go on: muster train {files.run.path.name}"
        )
    restarts = [event for event in files.events if event["event"] == "restarting"]
    if restarts:
        last = restarts[-1]
        times = f"{len(restarts)} times, the last time" if len(restarts) > 1 else "once,"
        yield _finding(
            "warn",
            f"All ranks were restarted {times} after rank {last['rank']} was killed ({last['signal']}).",
            last["rank"],
        )


def _numbers(files: RunFiles) -> Iterator[Finding]:
    skipped = np.flatnonzero(files.metrics.column("skipped") > 0)
    if not len(skipped):
        return
    steps = files.metrics.column("step")
    last = int(steps[skipped[-1]])
    now = files.alive and skipped[-1] == files.metrics.rows - 1
    yield _finding(
        "bad" if now else "warn",
        f"{len(skipped):,} of {files.metrics.rows:,} steps were skipped because the loss or the gradient was "
        f"not finite or, with training.on_spike, too large, the last at step {last:,}.",
    )


def _silent(rows: Sequence[Row]) -> Iterator[Finding]:
    silent = [row for row in rows if row["state"] == "silent"]
    if silent:
        longest = max(row["silent_s"] for row in silent)
        what = "its process is gone or frozen, or its machine cannot"
        if len(silent) > 1:
            what = "their processes are gone or frozen, or their machines cannot"
        yield _finding(
            "bad",
            f"No heartbeat of {_named(silent)} for {longest:.0f} s: {what} write to the run directory.",
            silent[0]["rank"],
        )


def _stuck(files: RunFiles, rows: Sequence[Row]) -> Iterator[Finding]:
    """The ranks that are furthest behind: the others wait for them."""
    running = [row for row in rows if row["state"] not in ("silent", "ended", "failed")]
    steps = [row["step"] for row in running if row["step"] is not None]
    if not steps:
        return
    for row in running:
        beat = files.heartbeats.get(row["rank"], {})
        since = beat.get("time", 0.0) - beat.get("since", 0.0)
        if row["step"] == min(steps) and since > STUCK_S and row["phase"] != "starting":
            yield _finding(
                "warn",
                f"Rank {row['rank']} on {row['node']} has been in the phase “{row['phase']}” for "
                f"{since:.0f} s.",
                row["rank"],
            )
            return


def _idle(files: RunFiles, compared: Compared) -> Iterator[Finding]:
    """A run in which only one GPU works is said in one sentence."""
    by_device = [rank for rank in files.ranks if compared.device_idle(rank)]
    idle = by_device or [rank for rank in compared.times if compared.does_nothing(rank)]
    if not idle:
        return
    working = [rank for rank in files.ranks if rank not in idle]
    what = (
        f"utilisation under {IDLE:.0%} in the last ten seconds"
        if by_device
        else "they compute next to nothing"
    )
    if len(working) == 1 and len(files.ranks) > 1:
        yield _finding(
            "bad",
            f"Only {_device(files, working[0])} works: {len(idle)} of {len(files.ranks)} ranks do nothing, "
            f"{_numbers_of(idle)} ({what}).",
            idle[0],
        )
        return
    named = f"{_device(files, idle[0])} does" if len(idle) == 1 else f"{_numbers_of(idle)} do"
    yield _finding("bad", f"{named} nothing while the others work ({what}).", idle[0])


def _slow(rows: Sequence[Row], compared: Compared) -> Iterator[Finding]:
    times = compared.times
    slow = [row for row in rows if compared.is_slow(row["rank"])]
    slow.sort(key=lambda row: -times[row["rank"]].work)
    whom = _others(times)
    for row in slow[:MOST_NAMED]:
        mine, others = times[row["rank"]], compared.others_work[row["rank"]]
        computes = compared.others_compute[row["rank"]]
        ratio = mine.work / others if others else float("inf")
        verb = "computes" if mine.compute > SLOW * computes else "takes for its own part of a step"
        yield _finding(
            "bad" if ratio >= MUCH_SLOWER else "warn",
            f"Rank {row['rank']} on {row['node']} {verb} {ratio:.1f} × as long as {whom} "
            f"({mine.work:.3g} s a step against {others:.3g} s); all wait for it.",
            row["rank"],
        )


def _others(ranks: Collection[int]) -> str:
    return "the median of the others" if len(ranks) > 2 else "the other"


def _was_slow(files: RunFiles, rows: Sequence[Row]) -> Iterator[Finding]:
    """Of a run that has ended: over all of its steps, if not in the last ones."""
    if files.alive:
        return
    means = {row["rank"]: files.times.computing(row["rank"]) for row in rows}
    known = {rank: mean for rank, mean in means.items() if mean is not None}
    others = others_medians(known)
    for row in rows:
        mine, usual = known.get(row["rank"]), others.get(row["rank"])
        if mine is not None and usual is not None and mine > WAS_SLOW * usual:
            yield _finding(
                "warn",
                f"Over the whole run, rank {row['rank']} on {row['node']} computed {mine / (usual or mine):.1f} × as "
                f"long as {_others(known)} ({mine:.3g} s a step against {usual:.3g} s).",
                row["rank"],
            )


def _waiting(compared: Compared) -> Iterator[Finding]:
    times = compared.times
    if not times:
        return
    rank = max(times, key=lambda r: times[r].data)
    worst = times[rank]
    if worst.data > DATA_SHARE * worst.step > 0:
        usual = statistics.median(found.data for found in times.values())
        who = "The ranks wait" if usual > worst.data / 2 else f"Rank {rank} waits"
        yield _finding(
            "warn",
            f"{who} for data {worst.data / worst.step:.0%} of each step ({worst.data:.3g} s of "
            f"{worst.step:.3g} s): raise data.workers, or bring the data nearer.",
            None if usual > worst.data / 2 else rank,
        )
    elif len(times) > 1 and not any(compared.is_slow(r) for r in times):
        share = statistics.median(found.wait / found.step for found in times.values() if found.step)
        if share > WAIT_SHARE:
            yield _finding(
                "warn",
                f"The ranks wait for each other {share:.0%} of each step although none of them is slow: the "
                "gradients take long to travel. `muster bench collectives` measures the links; a larger "
                "global batch needs them less often.",
            )


def _unused_gpus(files: RunFiles) -> Iterator[Finding]:
    """GPUs that this run could use and does not."""
    by_host: dict[str, int] = {}
    visible: dict[str, int] = {}
    for beat in files.heartbeats.values():
        host = str(beat.get("host", ""))
        by_host[host] = by_host.get(host, 0) + 1
        visible[host] = max(visible.get(host, 0), (beat.get("device") or {}).get("visible", 0))
    for host, count in visible.items():
        if count > by_host[host] and not files.info.get("rehearsal"):
            yield _finding(
                "warn",
                f"{host} offers {count} GPUs and the run has {by_host[host]} rank(s) there: "
                f"{count - by_host[host]} of them do nothing for it. `--gpus all` starts a rank on each.",
            )


def _against_plan(files: RunFiles) -> Iterator[Finding]:
    planned = files.plan.get("step_time_s")
    taken = files.metrics.column("step_time_s")[-100:]
    if not planned or len(taken) < 10 or files.info.get("rehearsal"):
        return
    measured = float(np.nanmedian(taken))
    if measured > OVER_PLAN * planned:
        yield _finding(
            "warn",
            f"A step takes {measured:.3g} s, {measured / planned:.1f} × the {planned:.3g} s that were planned.",
        )


def _equal(times: dict[int, Times]) -> Finding:
    work = [found.work for found in times.values()]
    ratio = max(work) / (statistics.mean(work) or 1.0)
    return _finding(
        "good",
        f"All {len(times)} ranks work, and equally long: in the last steps the slowest takes {ratio:.2f} × the mean.",
    )


def _device(files: RunFiles, rank: int) -> str:
    beat = files.heartbeats.get(rank, {})
    index = (beat.get("device") or {}).get("index")
    what = f"rank {rank}" if index is None else f"GPU {index} (rank {rank})"
    return f"{what} on {beat.get('host', 'an unknown host')}"


def _named(rows: Sequence[Row]) -> str:
    if len(rows) == 1:
        return f"rank {rows[0]['rank']} on {rows[0]['node']}"
    return _numbers_of([row["rank"] for row in rows])


def _numbers_of(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    word = "ranks" if len(ranks) > 1 else "rank"
    return f"{word} {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"
