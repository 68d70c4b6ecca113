"""One rank of a check: signs in, does what it is told, and says how it went."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from muster.check.board import PULSE_S, Board
from muster.check.seat import Account, Options, Seat
from muster.check.steps import STEPS
from muster.errors import LaunchError, MusterError
from muster.launch import cluster, rendezvous
from muster.launch.cluster import Place

FIRST_WORD_S = 30.0


def serve(place: Place, store: Any, patience_s: float = FIRST_WORD_S) -> bool:
    """Until the judge says that the check has ended; whether this set-up is fit to train on."""
    board, orders = Board(store), 0
    seat = Seat(place, board, Options())
    seat.sign_in()
    threading.Thread(target=_pulse, args=(place,), daemon=True, name="pulse").start()
    seat.options = Options(**board.wait("options", patience_s, "the judge"))
    from muster.launch.rank import settle  # takes a while to import, so not before signing in

    settle(place, "ddp")  # cores, threads and variables, as a training rank
    limit = seat.options.timeout_s + FIRST_WORD_S  # others may still be on their way
    while True:
        order = board.wait(f"order/{orders}", limit, "the judge")
        if order["step"] is None:
            board.post(f"bye/{place.rank}", True)
            return bool(order["fit"])
        step = next(step for step in STEPS if step.name == order["step"])
        board.post(f"account/{orders}/{place.rank}", _account(step.measure, seat))
        orders, limit = orders + 1, order["limit_s"] + FIRST_WORD_S


def _pulse(place: Place) -> None:
    """A sign of life that does not depend on the rank's work: who is silent has stopped, who is not
    may be waiting for them. On a connection of its own, since a wait holds the other one up."""
    with suppress(LaunchError, RuntimeError):  # the store ends with the check
        board = Board(rendezvous.for_rank(replace(place, agent=True), FIRST_WORD_S))
        for beat in itertools.count():
            board.post(f"pulse/{place.rank}", beat)
            time.sleep(PULSE_S)


def _account(measure: Any, seat: Seat) -> Account:
    try:
        account: Account = measure(seat)
        return account
    except Exception as error:
        words = str(error) if isinstance(error, MusterError) else f"{type(error).__name__}: {error}"
        kind = type(error).__name__
        return {"error": {"time": time.time(), "kind": kind, "message": words.strip()[:2000]}}


def main() -> None:
    """A process of its own under `muster check`. Leaves without tearing anything down: others may
    still sit in a collective."""
    place = cluster.detect(os.environ)
    try:
        fit = serve(place, rendezvous.for_rank(place, FIRST_WORD_S))
    except LaunchError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(2)
    sys.stdout.flush()
    os._exit(0 if fit else 1)


if __name__ == "__main__":
    main()
