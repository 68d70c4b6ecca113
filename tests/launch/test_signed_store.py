"""The store of a run: what another process writes into it is neither believed nor lasting."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from muster.errors import LaunchError
from muster.launch import signed_store
from muster.launch.signed_store import SignedStore

SECRET = b"0123456789abcdef"


def both(scope: str = "", secret: bytes | None = SECRET) -> tuple[SignedStore, SignedStore]:
    """Two processes of a run, whose store is open to others by `raw`."""
    store = dist.HashStore()
    return SignedStore(store, secret, scope), SignedStore(store, secret, scope)


def soon(store: SignedStore, key: str, limit_s: float = 0.0) -> None:
    store.wait([key], datetime.timedelta(seconds=limit_s))


FORGED: dict[str, Callable[[bytes], bytes]] = {
    "plain text": lambda signed: b'{"again": false}',
    "nothing": lambda signed: b"",
    "one bit of the payload": lambda signed: signed[:-1] + bytes([signed[-1] ^ 1]),
    "one bit of the code": lambda signed: bytes([signed[0] ^ 1]) + signed[1:],
    "a longer payload": lambda signed: signed + b" ",
    "a shorter payload": lambda signed: signed[:-1],
    "another writer": lambda signed: signed[:32] + bytes(8) + signed[40:],
    "a later count": lambda signed: signed[:47] + bytes([signed[47] + 1]) + signed[48:],
    "too large": lambda signed: signed + bytes(signed_store.MOST_BYTES),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_value_that_is_not_signed_counts_as_absent(forged, caplog):
    one, other = both()
    one.set("decision", "go on")
    one.raw.set("decision", forged(bytes(one.raw.get("decision"))))
    assert not other.check(["decision"])
    with pytest.raises(RuntimeError, match="no authentic value of decision"):
        soon(other, "decision")
    assert caplog.text.count("another process writes into this run's store") == 1


def test_a_value_of_another_key_run_or_attempt_is_not_authentic():
    one, other = both("run.1")
    one.set("failed", "1")
    taken = bytes(one.raw.get("failed"))
    for scope, key in (("run.1", "refused"), ("run.2", "failed"), ("run.", "1failed")):
        reader = SignedStore(dist.HashStore(), SECRET, scope)
        reader.raw.set(key, taken)
        assert not reader.check([key]), (scope, key)
    assert other.get("failed") == b"1"


def test_a_value_that_was_read_before_a_newer_one_is_not_taken_again():
    one, other = both()
    one.set("heartbeat", "1")
    first = bytes(one.raw.get("heartbeat"))
    assert [other.get("heartbeat"), other.get("heartbeat")] == [b"1", b"1"]
    one.set("heartbeat", "2")
    assert other.get("heartbeat") == b"2"
    one.raw.set("heartbeat", first)
    assert not other.check(["heartbeat"])


def test_what_was_overwritten_or_removed_is_written_again_by_its_writer():
    one, other = both()
    one.set("decision", "stop")
    one.set("report", "fine")
    one.raw.set("decision", "go on")
    one.raw.delete_key("report")
    one.write_again()
    assert [other.get("decision"), other.get("report")] == [b"stop", b"fine"]


def test_what_another_process_of_the_run_wrote_later_stays():
    one, other = both()
    one.set("failed", "0")
    other.set("failed", "1")
    one.write_again()
    assert other.get("failed") == b"1"


class Slow(dict):
    """Another thread always comes between two of its keys."""

    def __iter__(self):
        for key in super().__iter__():
            time.sleep(0.001)
            yield key


def test_several_threads_may_write_at_once():
    """The heartbeats, and what waits for the other nodes."""
    store, errors = both()[0], list[Exception]()
    store._own = Slow()

    def write(name: int) -> None:
        try:
            for number in range(10):
                store.set(f"{number}/{name}", "ready")
                store.write_again()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_the_first_of_the_run_wins_a_key_also_where_a_stranger_was_before():
    one, other = both()
    one.raw.set("joined", "stranger")
    assert one.compare_set("joined", "", "one") == b"one"
    assert other.compare_set("joined", "", "other") == b"one"


def test_a_message_larger_than_the_limit_is_refused_where_it_is_written():
    with pytest.raises(LaunchError, match=r"report .* is larger than the store takes"):
        both()[0].set("report", "x" * (signed_store.MOST_BYTES + 1))


def test_without_a_secret_values_are_read_as_they_are_but_not_of_any_size():
    one, other = both(secret=None)
    one.raw.set("registered", "{}")
    assert other.get("registered") == b"{}"
    one.raw.set("registered", bytes(signed_store.MOST_BYTES + 100))
    assert not other.check(["registered"])


def test_what_is_of_no_attempt_is_written_again_however_many_attempts_came_after():
    one, other = both()
    one.set("run", "mine")
    for attempt in range(3 * signed_store.KEPT):
        one.set(f"{attempt}/decision/", "again")
    one.raw.set("run", "another")
    one.write_again()
    assert other.check(["run"])
    assert len(one._own) <= signed_store.KEPT + 1


class Counting:
    """A store of torch's, and how often it was asked."""

    def __init__(self) -> None:
        self.store, self.asked = dist.HashStore(), 0

    def __getattr__(self, name):
        self.asked += 1
        return getattr(self.store, name)


def test_what_there_is_of_many_keys_is_found_in_few_messages():
    raw = Counting()
    one, other = (SignedStore(raw, SECRET) for _ in range(2))
    keys = [f"heartbeat/{n}" for n in range(128)]
    for key in keys:
        one.set(key, key)
    raw.asked = 0
    assert other.present(keys) == {key: key.encode() for key in keys}
    assert raw.asked == 2
    raw.store.set("heartbeat/5", "forged")
    raw.store.delete_key("heartbeat/77")
    raw.asked = 0
    left = {key: key.encode() for key in keys if key not in ("heartbeat/5", "heartbeat/77")}
    assert other.present(keys) == left
    assert raw.asked < 32
    assert other.present([]) == other.present(["none"]) == {}
