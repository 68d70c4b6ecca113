"""Logs for `muster explain`."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from fuzzing import mutate
from fuzzing.families.runs import shown, unprintable
from fuzzing.reader import Case, reader
from muster.cli.explain import panel
from muster.diagnose.explain import explain_file, explain_stream
from muster.diagnose.known import HINTS, catalogue

LOGS = Path(__file__).resolve().parents[3] / "tests" / "diagnose" / "logs"
LINES = [
    *(
        "Traceback (most recent call last):",
        "ValueError: x",
        '  File "x", line 3, in f',
        "[rank3]: RuntimeError: no",
    ),
    *(
        "Root Cause (first observed failure):",
        "Failures:",
        "  exitcode  : -9 (pid: 3)",
        "  rank      : 99999999999999999999",
    ),
    *(
        "  traceback : Traceback (most recent call last):",
        "process 7 terminated with signal SIGFOO",
        "Exit Code: 137",
    ),
    *(
        "srun: error: a: task 1: Killed",
        "-- Process 99999999999999999999 terminated with the following error",
        "x:1:2 [0] rank 3 nranks 9",
    ),
    *(
        "[rank" + "9" * 5000 + "]: x",
        "mpirun noticed that process rank 1 with PID 3 on node x exited on signal 999",
        "exitcode: " + "9" * 5000,
    ),
    *(
        "During handling of the above exception, another exception occurred:",
        "=" * 50,
        "\x1b[31mError: red\x1b[0m",
        "Error: " + "\x9d" * 50_000,
        "Error: [/red]",
    ),
    *(
        "process 1 terminated with signal SIG_DFL",
        "exits with return code = " + "9" * 5000,
        "sigkill_handler] [x --local_rank=1] exits with return code = -9",
    ),
]


@cache
def logs() -> list[bytes]:
    found = [path.read_bytes() for path in sorted(LOGS.glob("*.log"))]
    return [
        *found,
        "\n".join(example for known in catalogue() for example in known.examples).encode(),
    ]


@reader("log", 2200)
def log(rng: Random, folder: Path) -> Case:
    kind = rng.randrange(6)
    content = rng.choice(logs())
    if kind == 0:
        word = rng.choice([*HINTS, *LINES, "Error ", "Error: ", "x", "[rank1]: "]).encode()
        end = rng.choice([b"", b"", b"\n", b" ", b"\r"])
        content = (word + end) * rng.choice([1000, 2000, 200_000 // len(word)])
    elif kind == 1:
        lines = [line.encode("utf-8", "surrogatepass") for line in [*LINES, *mutate.TEXTS[:60]]]
        content = b"\n".join(rng.choice(lines) for _ in range(rng.choice([3, 10, 60])))
    elif kind == 2:
        lines = content.splitlines()
        for _ in range(4):
            lines.insert(
                rng.randrange(len(lines) + 1),
                rng.choice([*LINES, *mutate.TEXTS]).encode("utf-8", "surrogatepass"),
            )
        content = b"\n".join(lines)
    elif kind == 3:
        lines = content.splitlines()
        rng.shuffle(lines)
        content = b"\n".join(lines)
    if rng.random() < 0.5:
        content = mutate.raw_bytes(rng, content)
    path = folder / mutate.name(rng, "train.log")
    streamed = rng.random() < 0.6
    if not streamed:
        mutate.place(rng, path, content)

    def read() -> Any:
        report = (
            explain_stream(io.BytesIO(content), "standard input")
            if streamed
            else explain_file(path)
        )
        json.dumps(report.as_dict(), default=str)
        return shown(panel(report))

    names = ("standard input",) if streamed else (path.name,) if path.name.isprintable() else ()
    return Case(read, names, unprintable)
