"""Ranks on this machine: torch's elastic agent, in a process of its own that outlives the terminal.

`start` returns at once; the supervisor that it starts in the background starts one worker per device,
restarts them from the last checkpoint when one was killed, and writes the outcome to the run directory.
With several nodes each has a supervisor, and node 0's writes run.json.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.errors import AGAIN, LaunchError, MusterError
from muster.launch import published
from muster.launch import secret as run_secret
from muster.launch.cluster import Node, attempt_name
from muster.launch.cluster import node as resolve_node
from muster.launch.orphans import SUPERVISOR
from muster.launch.owned_run import OwnedRun, ReplacedError, is_owner
from muster.launch.signals import leave_on_signal, stop_on_signal
from muster.launch.standby import Standby, wait_for_order
from muster.observe import storage
from muster.observe.events import last_step, write_event
from muster.observe.gather import collecting
from muster.observe.logs import set_up
from muster.observe.results import complete_steps
from muster.recipe.load import from_resolved
from muster.run_directory import Run
from muster.writing import keep_to, open_own, write_json

if TYPE_CHECKING:
    from muster.launch.nodes import Nodes

log = logging.getLogger(__name__)

WORKER = "muster.worker"
ONE_NODE = Node()


def start(
    run: Run,
    ranks: int,
    node: Node = ONE_NODE,
    claim: TextIOWrapper | None = None,
    standby: Standby | None = None,
    least_ranks: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a supervisor, or the one that stands by. It inherits the `claim` on the run, or makes its own."""
    where = ["--nodes", node.asked, "--node-rank", node.rank, "--master-addr", node.address]
    where += ["--master-port", node.port]
    where += ["--least-ranks", least_ranks] if least_ranks is not None else []
    standby = standby or Standby()
    forget_failure(run, node)
    with open_own(run.path / log_name(node), "ab") as out:
        words = [str(word) for word in (run.path, ranks, *where)]
        standby.begin(words, out.fileno(), claim.fileno() if claim else None)
    process = standby.process
    while node.rank == 0 and run.info().get("pid") != process.pid and process.poll() is None:
        time.sleep(0.02)  # until run.json has its pid, so that the run does not look interrupted
    return process


def forget_failure(run: Run, node: Node) -> None:
    """Of an earlier start of this node, which nothing else removes: it is not this one's."""
    if node.rank:
        node_report(run, node).unlink(missing_ok=True)


def node_report(run: Run, node: Node) -> Path:
    """How a node other than 0 failed."""
    return run.path / f"node-{node.label}.json"


def log_name(node: Node) -> str:
    return "launcher.log" if node.rank == 0 else f"launcher-{node.label}.log"


class Supervisor:
    def __init__(self, run: Run, ranks: int, node: Node) -> None:
        self.run, self.ranks, self.node = run, ranks, node
        self.recipe = from_resolved(run.path / "recipe.yaml")
        self.restarts = self.failed_restarts = self.last_step = 0
        self._drawn = secrets.token_bytes(run_secret.BYTES)

    @property
    def is_master(self) -> bool:
        """Only node 0 writes about the run as a whole."""
        return self.node.rank == 0

    def supervise(self) -> int:
        """Run until the end, restarting ranks that were killed. Returns the run's exit code."""
        from muster.launch import local_store

        try:
            secret = self._secret()
            self.nodes = self._connect(secret)
            if self.is_master:
                storage.reserve(self.run.path)
                self.run.keep_alive(self._still_owner)
                self.nodes.publish(path=str(self.run.path.resolve()))
            self._set_environment()
            os.environ.update({SUPERVISOR: str(os.getpid()), run_secret.VARIABLE: secret.hex()})
            os.environ.pop(local_store.VARIABLE, None)
            if self.node.nodes > 1:
                return self._attempts()
            with local_store.folder() as folder:
                os.environ[local_store.VARIABLE] = str(folder)
                return self._attempts()
        finally:
            if self.is_master:
                run_secret.remove(self.run.path, self._drawn)
                if is_owner(self.run):
                    storage.give_back(self.run.path)

    def _still_owner(self) -> bool:
        if is_owner(self.run):
            return True
        self.nodes.give_up()
        return False

    def _secret(self) -> bytes:
        """Other nodes read it from the run directory."""
        if self.node.nodes == 1:
            return self._drawn
        if self.is_master:
            return run_secret.make(self.run.path, self._drawn)
        return published.secret_of(self.run, self.node, self.recipe.distributed.timeout_s)

    def _attempts(self) -> int:
        while True:
            if self.is_master:
                self.run.check_owner()
                self.run.clear_error_reports()
            self._join()
            if self.is_master:
                self.run.update(
                    state="running",
                    ranks=self.world,
                    nodes=list(self.nodes.hosts.values()),
                    restarts=self.restarts,
                )
            report = self._attempt()
            if self.is_master:
                self.run.check_owner()
            decision = self.nodes.decide(report, self._decide)
            if not decision["again"]:
                self._end(decision["exit_code"])
                return int(decision["exit_code"])

    def _connect(self, secret: bytes) -> Nodes:
        from muster.launch.nodes import Nodes

        options = self.recipe.distributed
        return Nodes(self.node, options.timeout_s, options.stall_limit_s, secret)

    def _join(self) -> None:
        """The next attempt of all nodes."""
        self.nodes.join()

    def _end(self, code: int) -> None:
        """After the last attempt."""

    @property
    def world(self) -> int:
        """Ranks of all nodes in this attempt."""
        return self.ranks * self.node.nodes

    def _attempt(self) -> dict[str, Any] | None:
        """Run this node's ranks once: how they failed, or which node's silence ended them; None when all of them
        succeeded or another node's failure ended them."""
        from muster.launch import failure
        from muster.launch.agent import run_ranks

        before = failure.count_oom_kills()
        run_id = f"{self.run.name}.{run_secret.start_name()}.{self.nodes.attempt}"
        command = ("-m", WORKER, str(self.run.path))
        node = self.nodes.node.rank  # in this attempt
        folder = self.run.path / "ranks" / f".torchelastic-{node}"
        attempt = attempt_name(f"{run_id}/0")  # as the ranks' own variables say it
        with collecting(self.run.path, str(node), attempt):
            codes = run_ranks(self.nodes, run_id, self.ranks, command, folder)
        silence = self.nodes.silence() if codes is None else None
        if codes or silence:
            self.nodes.report_failure()
        if not codes:
            return silence
        return failure.collect(self.run.path, codes, self.world, before, attempt)

    def _decide(self, reports: list[dict[str, Any] | None]) -> dict[str, Any]:
        """Whether to restart, from the reports of all nodes."""
        from muster.launch import failure

        failures = [
            self._lost_node(report) if "silent" in report else report
            for report in reports
            if report
        ]
        if not failures:
            return {"again": False, "exit_code": 0}
        worst = failure.first(failures)
        if self._should_restart(worst):
            return {"again": True}
        if self.is_master:
            end_failed(self.run, worst)
        else:
            write_json(node_report(self.run, self.node), worst)
        return {"again": False, "exit_code": 1, "failure": worst}

    def _lost_node(self, report: dict[str, Any]) -> dict[str, Any]:
        from muster.launch import failure

        node = report["silent"]
        seconds = report["seconds"] if "seconds" in report else self.nodes.seconds_silent(node)
        return failure.lost_node(node, self.nodes.hosts[node], seconds)

    def _should_restart(self, worst: dict[str, Any]) -> bool:
        """After a kill by a signal, up to max_restarts times without a new checkpoint."""
        if not self.is_master:
            return False  # node 0 is lost, and with it the rendezvous
        if worst["exit_code"] == AGAIN:
            return True  # each such setting is written down once
        self._count_progress()
        if worst["signal"] is None or self.failed_restarts >= self.recipe.distributed.max_restarts:
            return False
        self.restarts, self.failed_restarts = self.restarts + 1, self.failed_restarts + 1
        told = {key: worst[key] for key in ("rank", "signal", "cause", "cure")}
        step = last_step(self.run.path)
        write_event(self.run.path, "restarting", **told, step=step, attempt=self.restarts)
        return True

    def _count_progress(self) -> None:
        """A new checkpoint: restarts before it do not count."""
        reached = max(complete_steps(self.run.path), default=0)
        if reached > self.last_step:
            self.failed_restarts = 0
        self.last_step = reached

    def _set_environment(self) -> None:
        from muster.hardware import environment, inventory

        found = inventory.detect()
        strategy = self.recipe.distributed.strategy
        variables = environment.variables(
            found, self.ranks, strategy, nodes=self.node.nodes, master=self.node.address
        )
        environment.apply(variables)
        if self.is_master:
            self.run.update(environment=[vars(variable) for variable in variables])


def main(arguments: list[str]) -> int:
    """A supervisor that fails still writes that to run.json."""
    parser = argparse.ArgumentParser(prog="muster.launch.local")
    parser.add_argument("run", type=Path)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--least-ranks", type=int, help="of an elastic run: enough on this machine")
    parser.add_argument("--nodes", default="")
    parser.add_argument("--node-rank", type=int)
    parser.add_argument("--master-addr", default="")
    parser.add_argument("--master-port", type=int, default=0)
    parser.add_argument("--claim", type=int, help="open file with the lock on the run")
    asked = parser.parse_args(arguments)
    set_up("launcher")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    run = Run(asked.run)
    keep_to(run.path)
    node = resolve_node(
        os.environ, asked.nodes, asked.node_rank, asked.master_addr, asked.master_port
    )
    if node.rank > 0:
        forget_failure(run, node)
        return _supervise(run, asked.ranks, node, asked.least_ranks)
    try:
        claim = run.claim() if asked.claim is None else os.fdopen(asked.claim)
    except LaunchError as error:
        log.error("%s", error)
        return 2
    with claim:
        run = OwnedRun.take(run)
        code = _supervise(run, asked.ranks, node, asked.least_ranks)
    from muster.page import report

    if is_owner(run):
        report.write_at_end(run)  # which may take longer than the next owner waits
    return code


def _supervise(run: Run, ranks: int, node: Node, least_ranks: int | None) -> int:
    (leave_on_signal if node.least and node.rank else stop_on_signal)(run)
    codes: list[int] = []
    # torch's agent installs signal handlers if it runs in the main thread
    thread = threading.Thread(target=lambda: codes.append(_guarded(run, ranks, node, least_ranks)))
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    return codes[0]


def _guarded(run: Run, ranks: int, node: Node, least_ranks: int | None) -> int:
    try:
        return _reported(run, ranks, node, least_ranks)
    except ReplacedError as error:
        log.error("%s", error)
        return 1


def _reported(run: Run, ranks: int, node: Node, least_ranks: int | None) -> int:
    try:
        if node.least is None and least_ranks is None:
            return Supervisor(run, ranks, node).supervise()
        from muster.launch.elastic import ElasticSupervisor

        return ElasticSupervisor(run, ranks, node, least_ranks).supervise()
    except ReplacedError:
        raise
    except Exception as error:
        from muster.launch import failure

        if isinstance(error, OSError) and (words := storage.problem_words(error, run.path)):
            error = LaunchError(words)
        expected = isinstance(error, MusterError)
        if expected:
            log.error("%s", error)
        else:
            log.exception("the launcher itself failed")
        found = failure.of_launcher(error, expected)
        if node.rank == 0:
            end_failed(run, found)
        else:
            storage.insist(run.path, lambda: write_json(node_report(run, node), found))
        return 1


def end_failed(run: Run, failure: dict[str, Any]) -> None:
    """Write how the run failed, if there is any way to: without it, the run counts as interrupted."""
    changes = {"state": "failed", "failure": failure, "ended": time.time(), "exit_code": 1}
    try:
        storage.insist(run.path, lambda: run.update(**changes))
    except OSError as error:
        log.error("%s", storage.problem_words(error, run.path) or error)


if __name__ == "__main__":
    words: list[str] | None = sys.argv[1:]
    if sys.argv[1:2] == ["--standby"]:
        with suppress(Exception):  # it is imported again when needed, and then reported
            from muster.launch import agent  # noqa: F401  # torch, while the caller is still busy
        words = wait_for_order(int(sys.argv[2]))
    code = 0 if words is None else main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may still wait for a lost node
