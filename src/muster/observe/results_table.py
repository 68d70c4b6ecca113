"""The table of a run's results, shown at its end."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from muster.observe.events import Restart, count_words
from muster.observe.scores import score_words

SHOWN_RESTARTS = 5  # the newest
SHOWN_TEXT = 200  # characters of a question or an answer


def results_table(results: dict[str, Any], folder: str) -> Table:
    """The results of a run."""
    balance, rehearsal = results["balance"], results.get("rehearsal")
    rates, again = results["throughput"], results.get("restarts", [])
    table = Table(
        title=f"{'rehearsal ' if rehearsal else ''}{results['status']}: {results['steps']} steps in "
        + ", ".join([_minutes(results["total_time_s"]), *count_words(again)])
    )
    table.add_column("what", style="bold")
    table.add_column("value", overflow="fold")
    best = results.get("best") or {}
    if results["scores"]:
        known = "unseen " if results.get("unseen") else ""
        what = f"{known}{results['scored']} data"
        if last := results.get("last_scores"):
            table.add_row(f"{what}, best: step {best['step']}", score_words(results["scores"]))
            table.add_row(f"{what}, last: step {best['last_step']}", score_words(last))
        else:
            table.add_row(what, score_words(results["scores"]))
        for words in results.get("overlap", []):
            table.add_row("", words)
        for remark in results.get("remarks", []):
            table.add_row("", remark)
        for why, count in results.get("not_scored", {}).items():
            if why.startswith("beyond"):
                table.add_row("not scored", f"{count} {why}")
    if len(again) > SHOWN_RESTARTS:
        table.add_row(
            "restarted", f"{len(again) - SHOWN_RESTARTS} more times before, see events.jsonl"
        )
    for restart in (Restart(**facts) for facts in again[-SHOWN_RESTARTS:]):
        table.add_row(restart.kind, f"{restart.when()}: {restart.words()}")
    for answer in results.get("answers", []):
        table.add_row("asked", _end_of(answer["asked"]))
        table.add_row("answered", _start_of(answer["answer"]))
    if best:
        table.add_row("best checkpoint", best_words(best))
    speed = f"{rates['samples_per_s']:.1f} samples/s"
    if "audio_s_per_s" in rates:
        speed = f"{rates['samples_per_s']:.1f} clips/s, {rates['audio_s_per_s']:.0f} × real time"
    if "tokens_per_s" in rates:
        speed += f", {rates['tokens_per_s']:.0f} tokens/s"
    table.add_row("throughput, the mean", "not shown: ranks share GPUs" if rehearsal else speed)
    table.add_row(
        "ranks",
        f"{results['world_size']} ({', '.join(sorted(set(results['devices'])))})",
    )
    if balance:
        table.add_row(
            "balance of the ranks",
            f"slowest ÷ mean {balance['slowest_over_mean']:.3f}; waiting for others "
            f"{balance['comm_wait_share']:.1%}, for data {balance['data_wait_share']:.1%}; "
            f"padding {balance['padding_share']:.1%}",
        )
    for what, key in (("left out", "left_out"), ("cut", "cut")):
        if counts := results.get(key):
            table.add_row(what, "; ".join(f"{n} {why}" for why, n in counts.items()))
    memory, step = _held_against(results["measured"], results.get("planned", {}))
    table.add_row("memory per rank", memory)
    if step and not rehearsal:
        table.add_row("a step, the median", step)
    table.add_row("everything is in", folder)
    table.add_row("checkpoint", results["checkpoint"] or "none")
    if mirror := results.get("mirror"):
        table.add_row("mirror", _mirrored(mirror))
    return table


def _end_of(text: str) -> str:
    text = text.strip()
    return text if len(text) <= SHOWN_TEXT else f"… {text[-SHOWN_TEXT:]}"


def _start_of(text: str) -> str:
    text = text.strip()
    return text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]} …"


def best_words(best: dict[str, Any]) -> str:
    """Which step was the best, and whether the last is worse."""
    metric, step, last = best["metric"], best["step"], best["last_step"]
    words = f"step {step}: validation {score_words({metric: best['score']})}"
    if not best["kept"]:
        words += ", not kept"
    if step == last:
        words += "; it is the last"
    elif best["last_score"] is not None:
        told = score_words({metric: best["last_score"]})
        worse = best["last_score"] != best["score"]
        words += f"; the last, step {last}, is {'worse' if worse else 'as good'}: {told}"
    if best["ended_early"]:
        words += f"; training ended early: {best['ended_early']}"
    return words


def _mirrored(mirror: dict[str, Any]) -> str:
    copied = max(mirror["copied"], default=None)
    words = f"step-{copied} in {mirror['address']}" if copied is not None else "nothing was copied"
    failed = ", ".join(f"step {step}: {why}" for step, why in mirror["failed"].items())
    return f"{words}; not copied: {failed}" if failed else words


def _held_against(measured: dict[str, Any], planned: dict[str, Any]) -> tuple[str, str]:
    """Memory and step time, with what was planned where something was."""
    memory, step = f"{measured['memory_gib']:.2f} GiB", ""
    if median := measured.get("median_step_time_s"):
        step = f"{median:.3g} s"
    if "memory_gib" in planned:
        memory += f" (planned: {planned['memory_gib']:.2f})"
    if "step_time_s" in planned:
        step += f" (planned: {planned['step_time_s']:.3g})"
    return memory, step


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
