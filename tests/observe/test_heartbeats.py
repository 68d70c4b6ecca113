"""The heartbeats of a node's ranks in one file, and how they are read."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muster.observe import gather, heartbeat, heartbeats
from muster.observe.gather import Collector, Sender
from muster.observe.heartbeats import Heartbeats
from processes import until


def state(rank: int, step: int = 1, when: float | None = None) -> dict[str, object]:
    now = time.time() if when is None else when
    return {
        "rank": rank,
        "host": "a",
        "pid": 1,
        "step": step,
        "phase": "saving",
        "since": now,
        "time": now,
    }


@pytest.fixture
def ranks(tmp_path) -> Path:
    (tmp_path / "ranks").mkdir()
    return tmp_path / "ranks"


@pytest.fixture
def collector(ranks):
    found = Collector(ranks.parent, "3")
    yield found
    found.close()


def test_the_ranks_of_a_node_share_one_file(ranks, collector):
    senders = [Sender(collector.address) for _ in range(64)]
    for step in (1, 2):
        for rank, sender in enumerate(senders):
            assert sender.send(state(rank, step))
    collector.close()
    assert [path.name for path in ranks.iterdir()] == ["node-3.heartbeats.json"]
    found = heartbeats.read(ranks)
    assert list(found) == list(range(64))
    assert {one["step"] for one in found.values()} == {2}
    assert not senders[0].send(state(0)), "nobody takes it any more"


def test_a_file_is_written_once_a_second_however_many_ranks_there_are(ranks, collector):
    sender, written = Sender(collector.address), set()
    end = time.monotonic() + 1.6
    while time.monotonic() < end:
        for rank in range(8):
            sender.send(state(rank))
        if collector.path.exists():
            written.add(collector.path.stat().st_mtime_ns)
        time.sleep(0.02)
    assert 1 <= len(written) <= 3


def test_what_is_no_heartbeat_is_left_out(ranks, collector):
    sender = Sender(collector.address)
    for other in ([1], {"rank": "x"}, {"no": "rank"}):
        sender.send(other)  # type: ignore[arg-type]
    assert sender.send(state(7))
    collector.close()
    assert list(heartbeats.read(ranks)) == [7]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_is_not_heard(ranks, collector):
    program = (
        "import os, socket, sys; os.setuid(65534); "
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), chr(0) + sys.argv[1])"
    )
    words = [sys.executable, "-c", program, collector.address, json.dumps(state(5))]
    subprocess.run(words, check=True)
    Sender(collector.address).send(state(6))
    collector.close()
    assert list(heartbeats.read(ranks)) == [6]


def test_a_rank_whose_collector_is_stopped_writes_its_own_file(ranks):
    program = (
        "import sys, time; from pathlib import Path; from muster.observe.gather import Collector; "
        "print(Collector(Path(sys.argv[1]), '0').address, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(ranks.parent)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        sender = Sender(process.stdout.readline().strip())
        assert sender.send(state(0))
        process.send_signal(signal.SIGSTOP)
        until(lambda: not sender.send(state(0)), 20.0)  # its queue is full
    finally:
        process.kill()
        process.wait()
    heartbeat.start(ranks.parent, 4, None, collector=sender.address)
    heartbeat.stop()
    assert heartbeats.read(ranks)[4]["phase"] == "ended"
    assert (ranks / "4.heartbeat.json").exists()


def test_a_supervisors_collector_is_in_the_environment_of_its_ranks(ranks):
    with gather.collecting(ranks.parent, "0"):
        address = os.environ[gather.ADDRESS]
        heartbeat.start(ranks.parent, 1, None, collector=address)
        heartbeat.beat("evaluation", 12)
        heartbeat.stop()
    assert gather.ADDRESS not in os.environ
    names = {path.name for path in ranks.iterdir()}
    assert names == {"1.stacks.txt", "node-0.heartbeats.json"}
    assert heartbeats.read(ranks)[1]["step"] == 12


def test_of_two_heartbeats_the_newer_counts(ranks):
    (ranks / "2.heartbeat.json").write_text(json.dumps(state(2, step=9, when=100.0)))
    (ranks / "node-0.heartbeats.json").write_text(
        json.dumps({"ranks": [state(2, 4, 90.0), state(3)]})
    )
    assert heartbeats.read(ranks)[2]["step"] == 9
    (ranks / "node-0.heartbeats.json").write_text(json.dumps({"ranks": [state(2, 11, 101.0)]}))
    assert heartbeats.read(ranks)[2]["step"] == 11


def test_a_file_left_from_before_the_clock_was_set_back_hides_no_heartbeat(ranks):
    """A rank wrote its own file once, while its collector was stopped."""
    (ranks / "2.heartbeat.json").write_text(json.dumps(state(2, step=9, when=5000.0)))
    watched = Heartbeats(ranks)
    for second in range(3):
        node = {"ranks": [state(2, 10 + second, 1000.0 + second)]}
        (ranks / "node-0.heartbeats.json").write_text(json.dumps(node))
        watched.refresh()
    assert watched.latest[2]["step"] == 12
    assert watched.silent_s(2) < 5.0


@pytest.mark.parametrize(
    "text", ["", "[1", "null", "[]", '{"ranks": 3}', '{"ranks": [[], {"rank": "1"}, {"rank": 1}]}']
)
def test_spoilt_files_are_no_heartbeats(ranks, text):
    (ranks / "node-0.heartbeats.json").write_text(text)
    (ranks / "1.heartbeat.json").write_text(text)
    assert heartbeats.read(ranks) == {}


@pytest.mark.parametrize("hours", [-5.0, 5.0], ids=["behind", "ahead"])
def test_a_clock_that_is_wrong_silences_nobody_who_beats(ranks, hours):
    watched, wrong = Heartbeats(ranks), time.time() + 3600 * hours
    for second in range(3):
        (ranks / "0.heartbeat.json").write_text(json.dumps(state(0, when=wrong + second)))
        watched.refresh()
    assert watched.silent_s(0) < 5.0


def test_a_clock_that_is_set_back_is_seen_as_a_new_heartbeat(ranks):
    watched = Heartbeats(ranks)
    for when in (1000.0, 400.0):
        (ranks / "0.heartbeat.json").write_text(json.dumps(state(0, when=when)))
        watched.refresh()
    assert watched.latest[0]["time"] == 400.0
    assert watched.silent_s(0) < 5.0
    until(lambda: watched.silent_s(0) > 0.05)


def beats(senders: list[Sender], done) -> None:
    """Until `done`; heartbeats of all of them, as once a second."""

    def once() -> bool:
        for rank, sender in enumerate(senders):
            sender.send({**state(rank), "limit_s": 60.0})
        return bool(done())

    until(once, 20.0)


def test_the_collector_looks_for_a_stall_on_behalf_of_its_ranks(ranks, collector):
    senders = [Sender(collector.address) for _ in range(3)]
    assert [sender.stalled() for sender in senders] == [None] * 3, "it has not answered yet"
    beats(senders, lambda: all(sender.stalled() is False for sender in senders))
    heartbeats.stall_file(ranks, "").touch()
    beats(senders, lambda: all(sender.stalled() for sender in senders))


def test_storage_that_fails_for_a_moment_ends_no_collector(ranks, collector, monkeypatch):
    """NFS answers ESTALE to a look for a file, which pathlib raises."""
    sender, fails = Sender(collector.address), [True]

    class Stale(type(ranks)):
        def exists(self) -> bool:
            if fails:
                raise OSError(errno.ESTALE, "stale file handle")
            return super().exists()

    monkeypatch.setattr(collector, "_stall_file", Stale(collector._stall_file))
    written = ranks / "node-3.heartbeats.json"
    beats([sender], lambda: written.exists() and collector._where)
    assert collector.is_alive()
    assert sender.stalled() is None
    fails.clear()
    beats([sender], lambda: sender.stalled() is False)


def test_a_stall_of_another_attempt_is_not_told(ranks):
    collector = gather.Collector(ranks.parent, "0", "new")
    sender = Sender(collector.address)
    try:
        heartbeats.stall_file(ranks, "old").touch()
        beats([sender], lambda: sender.stalled() is not None)
        assert sender.stalled() is False
        heartbeats.stall_file(ranks, "new").touch()
        beats([sender], sender.stalled)
    finally:
        sender.close()
        collector.close()


def test_a_rank_that_waits_long_is_told_of_those_on_other_nodes(ranks, collector):
    other = {**state(9), "limit_s": 540.0, "device": {"name": "x" * 200}}
    thousand = [{**other, "rank": rank} for rank in range(9, 4096)]
    (ranks / "node-1.heartbeats.json").write_text(json.dumps({"ranks": thousand}))
    senders = [Sender(collector.address) for _ in range(8)]
    before = len(os.listdir("/proc/self/fd"))
    beats(senders, lambda: all((look := sender.look()) and look.number for sender in senders))
    for sender in senders:
        found = {one["rank"]: one for one in sender.look().states}
        assert set(found) >= set(range(9, 4096))
        assert found[9] == {name: other[name] for name in gather.LOOKED_AT}
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "files that came are closed"


def test_a_rank_whose_collector_falls_silent_looks_itself(ranks, collector, monkeypatch):
    monkeypatch.setattr(gather, "HEARD_S", 0.5)
    sender = Sender(collector.address)
    beats([sender], lambda: sender.stalled() is False and sender.look())
    collector.close()
    until(lambda: sender.stalled() is None and sender.look() is None, 20.0)


def test_an_answer_of_another_process_is_not_believed(ranks, collector):
    """Of the same user, by another address than the collector's."""
    sender = Sender(collector.address)
    beats([sender], lambda: sender.stalled() is False)
    assert sender._socket is not None
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    answer = json.dumps({"stalled": True, "every_s": 1.0}).encode()
    stranger.sendto(answer, sender._socket.getsockname())
    stranger.close()
    assert sender.stalled() is False
