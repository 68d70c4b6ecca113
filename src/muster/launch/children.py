"""This machine's ranks as child processes, for a check or a measurement: started together, logged,
and killed with their parent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import Signals

import psutil

from muster.errors import LaunchError
from muster.launch import cluster, secret
from muster.launch.cluster import Node, RankInfo
from muster.launch.orphans import die_with_parent

RANK_BYTES = 2**28  # at least, of a process that has imported torch


class Children:
    """`python -m …` once for each of `count` ranks, which connect to a store that the parent hosts
    on `port`. Each one's output goes to its own file in `folder`."""

    def __init__(
        self, arguments: Sequence[str], node: Node, port: int, count: int, folder: Path
    ) -> None:
        if count > (most := psutil.virtual_memory().available // RANK_BYTES):
            raise LaunchError(
                f"--gpus {count}: this machine has no memory for so many processes; start at "
                f"most {most}"
            )
        drawn = secret.drawn()
        self.first, self.folder = node.rank * count, folder
        self.environments: list[dict[str, str]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for local in range(count):
            rank_info = RankInfo(
                self.first + local, count * node.nodes, local, count, node.address, port
            )
            env = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            cluster.export(rank_info, env)
            if node.nodes == 1:
                env.setdefault(secret.VARIABLE, drawn)
            self.environments.append(env)
            with self._log(local).open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", *arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=env,
                        preexec_fn=die_with_parent,  # set before exec
                    )
                )

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *problem: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    @property
    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def exits(self) -> dict[int, str]:
        """How ranks of this machine ended, with the last line of their output."""
        found = {}
        for local, code in enumerate(self.codes):
            if code is not None:
                how = (
                    f"was killed by {Signals(-code).name}"
                    if code < 0
                    else f"ended with code {code}"
                )
                found[self.first + local] = how + self._last_line(local)
        return found

    def _log(self, local: int) -> Path:
        return self.folder / f"rank-{self.first + local}.log"

    def _last_line(self, local: int) -> str:
        text = self._log(local).read_text(errors="replace").strip()
        return f", last line: {text.splitlines()[-1][:300]}" if text else ""
