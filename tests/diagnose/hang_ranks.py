"""Ranks that go astray, as real processes over gloo: `python hang_ranks.py FOLDER` plays every scene
at once and prints the exit codes of each. torch is imported once, and ranks are forked."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from muster.observe import heartbeat, stall
from muster.observe.heartbeat import beat
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh
from muster.training.checkpoint import Checkpoints

STALL_S = 8.0  # a rank may come late to a step by some seconds, on a busy machine
CALM_S = 2.0  # between the steps of a rank that is never stalled, for longer than STALL_S in all
ASTRAY = 4  # the step at which rank 1 does what its scene asks
LAST = 6
SLEEP_S = 2 * heartbeat.TICK_S
AGENT_S = (
    1.0  # after the first rank ended, one that cannot end by itself is killed, as an agent does
)
PATIENCE_S = 60.0  # with all others
GLOO_S = 60.0  # gloo's own limit, which ends no wait but one
START_S = STALL_S + 4.0  # that one


def one_step(step: int, skip: str = "") -> None:
    beat("forward and backward", step)
    if skip != "small":
        dist.all_reduce(torch.ones(2))
    if skip != "large":
        dist.all_reduce(torch.ones(5000))
    dist.all_reduce(torch.ones(4, dtype=torch.float64))
    if skip != "gather":
        dist.all_gather([torch.ones(3)] * dist.get_world_size(), torch.ones(3))


def sleeps() -> None:
    time.sleep(60)


def holds_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(60)


def is_slow(times: int = 300) -> None:
    for _ in range(times):
        beat("evaluation")
        time.sleep(0.2)


def gathers_in_the_background(rank: int, group: dist.ProcessGroup, waits: bool) -> None:
    """As the checkpoint's thread does. Rank 0 waits for its own, or rank 1 for nobody: its own
    thread's waiting is no excuse."""
    thread = threading.Thread(
        target=dist.all_gather_object, args=([None] * 2, rank), kwargs={"group": group}
    )
    if rank == (0 if waits else 1):
        thread.start()
    if rank == 0 and waits:
        beat("saving")
        thread.join()
    if rank == 1:
        sleeps()


def waits_for_a_save(folder: Path, grows: bool) -> None:
    """A save in the background that takes long, on a disk that is slow or does not answer."""
    file = folder / "checkpoints" / "step-1" / "shard"
    file.parent.mkdir(parents=True)

    def write() -> None:
        for _ in range(int(2 * STALL_S)):
            if grows:
                with file.open("a") as shard:
                    shard.write("more")
            time.sleep(1.0)

    alone = Mesh(0, 0, Layout(), torch.device("cpu"), None)
    saves = Checkpoints(folder / "checkpoints", alone, {}, {}, keep=1, asynchronous=True)
    saves._thread = threading.Thread(target=write, name="checkpoint")
    saves._thread.start()
    saves.wait()


def waits_for_a_message(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(3), 1)
    else:
        sleeps()


def stops(how: signal.Signals) -> None:
    os.kill(os.getpid(), how)


def raises() -> None:
    raise ValueError("a mistake of its own")


def astray(folder: Path) -> None:
    """From here on time is counted: a file, by the last rank to come."""
    (folder / "astray").touch()


def play(scene: str, rank: int, world: int, folder: Path) -> None:
    first, second = dist.new_group(), dist.new_group()
    for step in range(1, LAST):
        skip = ""
        if step == ASTRAY and scene != "calm":
            astray(folder)
            time.sleep(SLEEP_S)  # until a sign of life of the step before is on disk
        if step == ASTRAY and rank == world - 1:
            actions = {
                "sleep": sleeps,
                "native": holds_the_interpreter,
                "slow": is_slow,
                "stopped": lambda: stops(signal.SIGSTOP),
                "auto stopped": lambda: stops(signal.SIGSTOP),
                "auto slow": lambda: is_slow(int(5 * (STALL_S + CALM_S))),
                "killed": lambda: stops(signal.SIGKILL),
                "own failure": raises,
            }
            skip = SKIPS.get(scene, "")
            actions.get(scene, lambda: None)()
        if step == ASTRAY and scene.startswith("background"):
            gathers_in_the_background(rank, first, waits=scene.endswith("waited for"))
        if step == ASTRAY and scene == "message":
            waits_for_a_message(rank)
        if step == ASTRAY and scene == "other group":
            dist.all_reduce(torch.ones(1), group=(first, second)[rank])
        if scene == "calm":
            time.sleep(CALM_S)
        one_step(step, skip)


def before_the_first_beat(rank: int) -> None:
    """No stall is counted there; gloo's own limit ends the wait."""
    if rank == 1:
        sleeps()
    dist.all_reduce(torch.ones(7))


SKIPS = {  # gloo ends a rank that is sent more than it expects
    "skip": "gather",
    "skip of three": "gather",
    "crash of the other": "small",
    "crash": "large",
}
SCENES = {
    "calm": 2,
    "sleep": 2,
    "skip": 2,
    "skip of three": 3,
    "crash of the other": 2,
    "crash": 2,
    "stopped": 2,
    "killed": 2,
    "native": 2,
    "slow": 2,
    "auto stopped": 2,
    "auto slow": 2,
    "background": 2,
    "background waited for": 2,
    "message": 2,
    "other group": 2,
    "start": 2,
    "own failure": 2,
    "alone": 1,
    "save to a slow disk": 1,
    "save to a dead disk": 1,
}


def live(scene: str, rank: int, world: int, folder: Path) -> int:
    log = (folder / "ranks" / f"{rank}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    limit = datetime.timedelta(seconds=START_S if scene == "start" else GLOO_S)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    if scene.startswith("auto"):  # the limit within steps, by the recipe's default
        stall.LEAST_S, stall.GONE_S = STALL_S, 3.0
        heartbeat.start(folder, rank, GLOO_S, adaptive=True)
    else:
        heartbeat.start(folder, rank, STALL_S)
    try:
        if scene == "start":
            before_the_first_beat(rank)
        elif scene.startswith("save"):
            waits_for_a_save(folder, grows=scene == "save to a slow disk")
        elif scene == "alone":
            beat("waiting for data", 3)
            astray(folder)
            sleeps()
        else:
            play(scene, rank, world, folder)
    except Exception as error:
        heartbeat.failed(error)
        return 1
    heartbeat.stop()
    return 0


def fork(root: Path) -> dict[int, tuple[str, int]]:
    started = {}
    for scene, world in SCENES.items():
        (root / scene / "ranks").mkdir(parents=True)
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                os._exit(live(scene, rank, world, root / scene))
            started[pid] = scene, rank
    return started


def main(root: Path) -> None:
    living, ended, codes = fork(root), {}, {scene: {} for scene in SCENES}
    while living:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            scene, rank = living.pop(pid)
            codes[scene][rank] = os.waitstatus_to_exitcode(status)
            ended.setdefault(scene, time.time())
            continue
        for pid, (scene, _) in living.items():
            patience = AGENT_S if scene in ("stopped", "auto stopped", "start") else PATIENCE_S
            if time.time() - ended.get(scene, time.time()) > patience:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    begun = {s: (root / s / "astray") for s in SCENES}
    lived = {s: ended[s] - file.stat().st_mtime for s, file in begun.items() if file.exists()}
    print(json.dumps({s: {"codes": codes[s], "seconds": lived.get(s)} for s in SCENES}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
