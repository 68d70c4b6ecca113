"""`python -m muster.worker RUN`: one rank of a run, started by a supervisor or a scheduler."""

from __future__ import annotations

import sys

from muster.launch.orphans import end_with_launcher

if __name__ == "__main__":
    end_with_launcher()  # before torch is imported, which takes seconds

    from muster.worker.main import main

    main(sys.argv[1])
