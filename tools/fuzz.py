"""Give every reader of muster broken and hostile input, and see that each case ends as it should.

    python tools/fuzz.py                            # 20,000 cases over all readers, about 15 minutes on two cores
    python tools/fuzz.py audio images --cases 3000  # of these readers
    python tools/fuzz.py audio --seed 7 --case 41   # one case again, with its stack trace and its files

A case is taken, or refused in one sentence that names its file or key. Anything else is a bug: a stack
trace, a message of several lines or with control characters, a case that takes more than 10 s, a half-written
file, memory beyond the input's, a process that dies, or a value that should have been refused.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from fuzzing import alone, run, worker  # noqa: F401 - `alone` first
from fuzzing.families import every as families  # noqa: F401 - registers the readers
from fuzzing.outcome import BAD, REFUSED, TAKEN
from fuzzing.reader import READERS


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("readers", nargs="*", metavar="READER", help=", ".join(READERS))
    parser.add_argument("--cases", type=int, default=20_000, help="of all readers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one, of one reader")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(arguments)
    for name in asked.readers:
        if name not in READERS:
            parser.error(f"no reader {name}; there are {', '.join(READERS)}")
    names = asked.readers or list(READERS)
    if asked.case is not None:
        if len(names) != 1:
            parser.error("--case needs the name of one reader")
        return _again(names[0], asked.seed, asked.case)
    begin = time.monotonic()
    try:
        tallies = run.every(names, asked.cases, asked.seed, asked.workers)
    finally:
        shutil.rmtree(run.SCRATCH, ignore_errors=True)
    print(table(tallies))
    bad = run.problems(tallies)
    for words in bad:
        print(words)
    total = sum(sum(tally.counts.values()) for tally in tallies.values())
    print(f"{total:,} cases in {time.monotonic() - begin:.0f} s, seed {asked.seed}")
    return 1 if bad else 0


def _again(name: str, seed: int, case: int) -> int:
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-{case}-"))
    worker.limit(folder, quiet=False)
    outcome = worker.run(name, seed, case, folder / "case", tell=True)
    print(f"{name} {case}: {outcome.kind} after {outcome.seconds:.1f} s: {outcome.detail}")
    print(f"its files are in {folder}/case/in")
    return 1 if outcome.kind in BAD else 0


def table(tallies: dict[str, run.Tally]) -> str:
    """As markdown."""
    heads = ["reader", "cases", TAKEN, REFUSED, *BAD, "slowest"]
    rows = [heads, ["---"] + ["---:"] * (len(heads) - 1)]
    for name, tally in tallies.items():
        counts = [tally.counts[kind] for kind in (TAKEN, REFUSED, *BAD)]
        rows.append([name, str(sum(counts)), *map(str, counts), f"{tally.slowest:.1f} s"])
    sums = [sum(int(row[i]) for row in rows[2:]) for i in range(1, len(heads) - 1)]
    rows.append(
        ["all", *map(str, sums), f"{max((t.slowest for t in tallies.values()), default=0):.1f} s"]
    )
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of libraries are of no interest
