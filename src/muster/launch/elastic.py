"""The supervisor of a run with `--nodes MIN:MAX` or `--gpus MIN:MAX`: it goes on with what is left, and grows.

After a loss the rest start again from the last complete checkpoint, in a layout that is chosen for
their number as at the start. When machines wait, the ranks end after their next checkpoint, and the
next attempt has all. The global batch, and which samples are in it, stay.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from muster.errors import LaunchError
from muster.launch import published, secret
from muster.launch.cluster import Node
from muster.launch.local import Supervisor
from muster.launch.membership import ElasticNodes, Node0LostError
from muster.launch.nodes import RunEndedError
from muster.launch.share import share
from muster.launch.signals import LEAVE
from muster.observe.events import last_step, write_event
from muster.observe.results import REGROUP_FILE, STOP_FILE, complete_steps
from muster.reading.text import in_one_line
from muster.run_directory import Run, here
from muster.writing import touch

log = logging.getLogger(__name__)

AGAIN_S = 0.5  # between two tries to reach node 0
TRY_S = 10.0


@dataclass(frozen=True)
class World:
    """Who trains in one attempt."""

    hosts: tuple[str, ...]
    ranks: int
    offered: int


class ElasticSupervisor(Supervisor):
    """`ranks` are offered at most by this machine, and at least `least_ranks`, or it takes no part."""

    nodes: ElasticNodes

    def __init__(self, run: Run, ranks: int, node: Node, least_ranks: int | None) -> None:
        super().__init__(run, ranks, node)
        self.offered, self.least_ranks = ranks, least_ranks or ranks
        self.mask, self.devices = _visible_devices(ranks)
        self._process = secrets.token_hex(8)
        self._users_secret = os.environ.get(secret.VARIABLE, "")
        self._before: World | None = None

    def supervise(self) -> int:
        try:
            return super().supervise()
        except RunEndedError as ended:
            if isinstance(ended.why, str):
                raise LaunchError(ended.why) from None
            return int(ended.why)

    def _connect(self, secret: bytes) -> ElasticNodes:
        options = self.recipe.distributed
        return ElasticNodes(
            self.node,
            options.timeout_s,
            options.stall_limit_s,
            secret=secret,
            ranks=self.offered if self.offered >= self.least_ranks else 0,
            share=lambda offers: share(self.recipe, offers),
            machine=self._machine(),
            process=self._process,
            on_growth=self._ask_to_regroup,
            check=self._check_wait,
            leaving=LEAVE,
        )

    def _ask_to_regroup(self, grows: bool) -> None:
        """Storage that fails for a moment is asked again soon."""
        path = self.run.path / REGROUP_FILE
        with suppress(OSError):
            touch(path) if grows else path.unlink(missing_ok=True)

    def _check_wait(self) -> None:
        """While this node waits for others, no rank looks for a requested stop."""
        self.run.check_owner()
        if LEAVE.is_set():
            log.warning("SIGTERM: this machine leaves the run, and the others go on")
            with suppress(RuntimeError):
                self.nodes.offer(0)
            raise RunEndedError(0)
        asked = False
        with suppress(OSError):  # storage that fails for a moment
            asked = (self.run.path / STOP_FILE).exists()
        if not asked:
            return
        log.warning("a stop was requested while this machine waited for others: it ends")
        if self.is_master:
            self.run.update(state="stopped", ended=time.time(), exit_code=0)
            self.nodes.end(0)
        raise RunEndedError(0)

    def _machine(self) -> str:
        """The same when this machine comes back. In a rehearsal several nodes may be one machine."""
        from muster.hardware import rehearsal

        return self._process if rehearsal.active() else "/".join(here().values())

    def _join(self) -> None:
        while True:
            try:
                self.nodes.join()
                break
            except Node0LostError:
                self._find_node_0()
        if self.is_master:
            self.run.check_owner()
            (self.run.path / REGROUP_FILE).unlink(missing_ok=True)  # those who waited are here
        self.ranks = self.nodes.ranks
        if self.is_master:
            self._tell_world()

    @property
    def world(self) -> int:
        return self.nodes.world

    def _find_node_0(self) -> None:
        """It may come back, or the link to it; else a person starts another one."""
        silent, successor = self.nodes.seconds_silent(0), self.nodes.successor
        limit = self.recipe.distributed.timeout_s
        told = (
            f"node 0 ({self.nodes.hosts.get(0, self.node.address)}) has sent no heartbeat for "
            f"{silent:.0f} s"
        )
        command = self._command(successor)
        log.warning(
            "%s; trying to reach it for %.0f s; if it is gone for good, run on every node that is left: %s",
            told, limit, command,
        )  # fmt: skip
        self.nodes.close()
        end, problem = time.monotonic() + limit, "no answer"
        while (left := end - time.monotonic()) > 0:
            self._check_wait()
            try:
                self.nodes = self._connect(self._new_secret(min(left, TRY_S)))
                return
            except (LaunchError, RuntimeError) as error:  # torch's, when the link is cut again
                problem = in_one_line(error, most=500)
            time.sleep(AGAIN_S)
        raise LaunchError(
            f"{told}, and could not be reached for {limit:.0f} s more (the last try: {problem}); to go on "
            f"without it, run on every node that is left: {command}"
        )

    def _new_secret(self, within_s: float) -> bytes:
        """Of the node 0 that listens now, for this node and its ranks; refused if it has another run."""
        os.environ[secret.VARIABLE] = self._users_secret  # with which the file's is mixed
        found = published.secret_of(self.run, self.node, within_s)
        os.environ[secret.VARIABLE] = found.hex()
        return found

    def _command(self, address: str) -> str:
        ranks = (
            str(self.offered)
            if self.least_ranks == self.offered
            else f"{self.least_ranks}:{self.offered}"
        )
        words = ["muster", "train", str(self.run.path), "--gpus", ranks]
        words += ["--nodes", f"{self.node.least}:{self.node.nodes}", "--master-addr", address]
        return shlex.join([*words, "--master-port", str(self.node.port)])

    def _attempt(self) -> dict[str, Any] | None:
        found = super()._attempt()
        rank = found.get("rank") if found else None
        if found and rank is not None and _device_failed(found):
            self._exclude(rank - self.nodes.first_rank)
            found["lost_device"] = found["host"]
        return found

    def _exclude(self, local_rank: int) -> None:
        """The device of that rank is not used any more by this supervisor. With too few left, this machine takes
        no part."""
        if not 0 <= local_rank < self.ranks:
            return  # another node's
        self.offered -= 1
        if self.devices:
            del self.devices[local_rank]
            os.environ[self.mask] = ",".join(self.devices)
        enough = self.offered >= self.least_ranks
        with suppress(RuntimeError):  # node 0 is lost, and told when it is found
            self.nodes.offer(self.offered if enough else 0)
        if not enough:
            log.warning(
                "%d of at least %d devices are left here: this machine takes no part any more",
                self.offered, self.least_ranks,
            )  # fmt: skip

    def _decide(self, reports: list[dict[str, Any] | None]) -> dict[str, Any]:
        if not self.is_master and any(report and "silent" in report for report in reports):
            return {"again": True}  # from a node 0 that is found, or not at all
        return super()._decide(reports)

    def _should_restart(self, worst: dict[str, Any]) -> bool:
        """Also without a node or a device that is lost; as often as after a kill, and once more for each
        node."""
        if self.is_master and not self.nodes.me.ranks:
            return False  # node 0 itself has too few devices left, whatever else failed
        lost = "silent_node" in worst or "lost_device" in worst
        if not lost:
            return super()._should_restart(worst)
        self._count_progress()
        if self.failed_restarts >= self.recipe.distributed.max_restarts + self.node.nodes:
            return False
        self.restarts, self.failed_restarts = self.restarts + 1, self.failed_restarts + 1
        what = "node_lost" if "silent_node" in worst else "device_lost"
        step = last_step(self.run.path)
        write_event(
            self.run.path,
            what,
            host=worst["host"],
            rank=worst["rank"],
            why=worst["what"],
            step=step,
        )
        return True

    def _tell_world(self) -> None:
        """To whoever follows the run, where it is another one than before, or smaller than asked for."""
        members = self.nodes.roster.values()
        present = [self.nodes.known[n].ranks for n in self.nodes.present()]
        now = World(tuple(m.host for m in members), self.nodes.world, sum(present))
        before, self._before = self._before, now
        if before and now.hosts == before.hosts and now.ranks == before.ranks:
            return
        joined = [host for host in now.hosts if before and host not in before.hosts]
        if joined:
            self.restarts += 1
            step = max(complete_steps(self.run.path), default=0)
            write_event(self.run.path, "node_joined", hosts=joined, step=step)
        write_event(
            self.run.path,
            "world",
            ranks=now.ranks,
            before=before and before.ranks,
            hosts=list(now.hosts),
            most_nodes=self.node.nodes,
            offered=now.offered,
        )

    def _end(self, code: int) -> None:
        if self.is_master:
            self.nodes.end(code)


def _device_failed(failure: dict[str, Any]) -> bool:
    """Whether the rank failed because its device computes wrong (muster.parallel.device_test)."""
    error = failure["error"] or {}
    return error.get("kind") == "DeviceError"


def _visible_devices(ranks: int) -> tuple[str, list[str]]:
    """The variable that says which devices ranks see, and what it may name, in the order of local ranks: nothing
    without GPUs of their own."""
    from muster.hardware import amd, inventory, nvidia, rehearsal

    found = inventory.detect()
    of_amd = any(gpu.vendor == "amd" for gpu in found.gpus)
    variable = amd.mask(os.environ) if of_amd else nvidia.MASK
    if not found.gpus or rehearsal.active():
        return variable, []
    given = os.environ.get(variable)
    names = given.split(",") if given else [str(i) for i in range(len(found.gpus))]
    return variable, names[:ranks]
