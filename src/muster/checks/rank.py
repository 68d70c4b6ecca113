"""One rank of a check: registers, runs the steps it is sent, and reports."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from muster.checks.context import Options, RankContext, RankReport
from muster.checks.messages import HEARTBEAT_S, MessageStore
from muster.checks.steps import STEPS
from muster.errors import LaunchError, MusterError
from muster.launch import cluster, rendezvous
from muster.launch.cluster import RankInfo
from muster.launch.secret import from_environment

JOIN_TIMEOUT_S = 30.0


def serve(rank_info: RankInfo, store: Any, timeout_s: float = JOIN_TIMEOUT_S) -> bool:
    """Run steps until the judge ends the check; returns whether this setup is fit to train on."""
    messages, received = MessageStore(store, from_environment()), 0
    context = RankContext(rank_info, messages, Options())
    context.register()
    threading.Thread(
        target=_send_heartbeats, args=(rank_info,), daemon=True, name="heartbeat"
    ).start()
    context.options = Options(**messages.wait("options", timeout_s, "the judge"))
    from muster.launch.process import (
        set_up_process,  # slow to import, so not before registering
    )

    set_up_process(rank_info, "ddp")  # cores, threads and variables, as a training rank
    limit = context.options.timeout_s + JOIN_TIMEOUT_S  # other ranks may still be starting
    while True:
        command = messages.wait(f"command/{received}", limit, "the judge")
        if command["step"] is None:
            messages.post(f"done/{rank_info.rank}", True)
            return bool(command["fit"])
        step = next(step for step in STEPS if step.name == command["step"])
        messages.post(f"report/{received}/{rank_info.rank}", _report(step.measure, context))
        received, limit = received + 1, command["limit_s"] + JOIN_TIMEOUT_S


def _send_heartbeats(rank_info: RankInfo) -> None:
    """Independent of the rank's work: a rank without a heartbeat has stopped, one with a heartbeat may be
    waiting for it. On its own connection, since a blocking call would hold up a shared one."""
    with suppress(LaunchError, RuntimeError):  # the store ends with the check
        own = rendezvous.for_rank(replace(rank_info, agent=True), JOIN_TIMEOUT_S)
        messages = MessageStore(own, from_environment())
        for count in itertools.count():
            messages.post(f"heartbeat/{rank_info.rank}", count)
            time.sleep(HEARTBEAT_S)


def _report(measure: Any, context: RankContext) -> RankReport:
    try:
        report: RankReport = measure(context)
        return report
    except Exception as error:
        message = (
            str(error) if isinstance(error, MusterError) else f"{type(error).__name__}: {error}"
        )
        kind = type(error).__name__
        return {"error": {"time": time.time(), "kind": kind, "message": message.strip()[:2000]}}


def main() -> None:
    """A process of its own under `muster check`. Exits without cleanup: other ranks may still be in a
    collective."""
    rank_info = cluster.detect(os.environ)
    try:
        fit = serve(rank_info, rendezvous.for_rank(rank_info, JOIN_TIMEOUT_S))
    except LaunchError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(2)
    sys.stdout.flush()
    os._exit(0 if fit else 1)


if __name__ == "__main__":
    main()
