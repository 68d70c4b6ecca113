"""A supervisor that is started before it is known what it is to supervise."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys

import setproctitle

from muster.errors import LaunchError


class Standby:
    """A supervisor's process that imports torch while the caller still reads the recipe and looks at the
    machine: it waits to be told which run it is for, and exits if the caller does. In its own session, so
    that neither Ctrl-C nor SIGHUP reaches it."""

    def __init__(self) -> None:
        self._channel, other = socket.socketpair()
        self._begun = False
        atexit.register(self.end)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "muster.launch.local", "--standby", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[other.fileno()],
            )

    def begin(self, arguments: list[str], out: int, claim: int | None) -> None:
        """Its arguments and this process's environment, where its output goes, and the open file with the
        lock on the run."""
        order = json.dumps({"arguments": arguments, "environment": dict(os.environ)}).encode()
        files = [out] if claim is None else [out, claim]
        atexit.unregister(self.end)
        self._begun = True
        try:
            with self._channel:
                socket.send_fds(self._channel, [len(order).to_bytes(8)], files)
                self._channel.sendall(order)
        except OSError as error:
            raise LaunchError(
                f"the supervisor ended before it had begun ({error}); what `python -m muster.launch.local` "
                "says may show why"
            ) from error

    def end(self) -> None:
        """It is not needed after all; one that has begun goes on."""
        if self._begun:
            return
        atexit.unregister(self.end)
        self._begun = True  # and ended
        self._channel.close()
        self.process.kill()
        self.process.wait()


def wait_for_order(channel_number: int) -> list[str] | None:
    """In the process of a `Standby`: the arguments it is to start with, or None if its caller has ended."""
    with socket.socket(fileno=channel_number) as channel:
        size, files, *_ = socket.recv_fds(channel, 8, 2)
        if not size:
            return None
        with channel.makefile("rb") as stream:
            order = json.loads(stream.read(int.from_bytes(size)))
    # Before the environment changes: the title is found and written beside it.
    setproctitle.setproctitle(
        " ".join([sys.executable, "-m", "muster.launch.local", *order["arguments"]])
    )
    os.environ.clear()
    os.environ.update(order["environment"])
    out, *claim = files
    for number in (1, 2):
        os.dup2(out, number)
    os.close(out)
    return [*order["arguments"], *(["--claim", str(claim[0])] if claim else [])]
