"""docs/troubleshooting.md, written from the data that `muster explain` uses."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from muster.diagnose.known import Known, catalogue

INTRODUCTION = """\
# When it does not work

<!-- Written by `python -m muster.diagnose.describe docs/troubleshooting.md`; edit failures.yaml. -->

A run that fails ends with a panel: which rank failed first, the likely cause, the cure. `muster
explain` gives the same for any log of torchrun, DeepSpeed, SLURM, mpirun or NCCL, of muster or of another program:

```
muster explain train.log          # a file
muster explain latest             # a run: its folder, its name, or `latest`
zcat train.log.gz | muster explain -
muster explain train.log --json
```

It finds the rank that failed first and that rank's own exception. The last lines of a log seldom show
it: when one rank fails, the others report a closed connection, and the launcher reports last. For an
unknown failure it says so, and shows the first error of the log. Of a run that was killed and went on it
says that: at which step, by what, and from which step it went on.

{count} failures are known. *Follows* marks those that usually come from something else in the log.
"""


def page() -> str:
    """The whole page, as markdown."""
    parts = [INTRODUCTION.format(count=len(catalogue()))]
    for section, entries in groupby(catalogue(), key=lambda known: known.section):
        parts.append(f"## {section}\n")
        parts.extend(_entry(known) for known in entries)
    return "\n".join(parts)


def _entry(known: Known) -> str:
    mark = " *(a warning)*" if known.warning else " *(follows)*" if known.consequence else ""
    return (
        f"### {known.title}\n\n```\n{known.examples[0].strip()}\n```\n\n"
        f"{known.cause}{mark}\n\n**Cure:** {known.cure}\n\n<sub>{known.id} · {known.source}</sub>\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
