"""Another user of the machine, and a process that reaches the store of several nodes."""

from __future__ import annotations

import ipaddress
import json
import os
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

import processes
from muster import run_directory
from muster.errors import LaunchError
from muster.launch import addresses, local_store, rendezvous, secret
from muster.launch.cluster import Node
from muster.launch.nodes import NodeRendezvous, Nodes
from muster.launch.published import join_run
from muster.launch.rendezvous import LOOPBACK
from muster.recipe.describe import to_yaml
from muster.recipe.load import load
from processes import muster, until
from tiny import held_after, losses

STEPS = 8
TELL = """
if "RANK" in os.environ:
    import json
    with open(f"{os.environ['TOLD']}/{os.environ['RANK']}.environ", "w") as told:
        json.dump(dict(os.environ), told)
"""
NOBODY = """
import json, os, socket, struct, sys
import encodings.idna  # which nobody may not be able to read
os.setgroups([]), os.setgid(65534), os.setuid(65534)
ports, files = json.loads(sys.argv[1])
read, stores = [], []
for file in files:
    try:
        read.append((file, len(open(file, "rb").read(1))))
    except OSError:
        pass
for port in ports:
    with socket.create_connection(("127.0.0.1", port), 5) as client:
        client.sendall(b"1/decision" * 64)
    with socket.create_connection(("127.0.0.1", port), 5) as client:
        client.settimeout(0.5)
        client.sendall(struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 4711))  # as a TCPStore begins: is it one?
        try:
            if client.recv(4) == struct.pack("<I", 4711):
                stores.append(port)
        except OSError:
            pass
print(json.dumps({"read": read, "stores": stores}))
"""


@pytest.mark.guides
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_of_the_machine_finds_no_store_no_secret_and_changes_nothing(
    recipe, undisturbed, tmp_path
):
    go = tmp_path / "go"
    env = held_after(STEPS - 2, tmp_path, go)
    with (tmp_path / "sitecustomize.py").open("a") as file:
        file.write(TELL)  # a forked process shows the environment of the one it is forked from
    words = [f"training.steps={STEPS}", "distributed.stall_s=600", "--gpus", "2", "--detach"]
    muster("train", recipe, *words, folder=tmp_path, env={**env, "TOLD": str(tmp_path)})
    run = run_directory.find("latest", tmp_path / "runs")
    until(lambda: len(losses(run)) > 2)
    of_run = run.processes()
    assert len(of_run) == 3
    environments = [json.loads((tmp_path / f"{rank}.environ").read_text()) for rank in range(2)]
    (drawn,) = {env[secret.VARIABLE] for env in environments}
    assert not [p.cmdline() for p in of_run if drawn in " ".join(p.cmdline())]
    listening = [c for p in of_run for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert {ipaddress.ip_address(c.laddr.ip).is_loopback for c in listening} <= {True}
    (folder,) = {env[local_store.VARIABLE] for env in environments}
    stores = list(Path(folder).iterdir())
    assert len(stores) == 1
    closed = [*stores, *(f"/proc/{p.pid}/environ" for p in of_run)]
    other = rendezvous.host(LOOPBACK, 0, 10.0)  # such a store is recognized
    ports = [other.port, *(c.laddr.port for c in listening)]
    asked = json.dumps([ports, list(map(str, closed))])
    found = processes.run([sys.executable, "-c", NOBODY, asked], tmp_path)
    go.touch()
    assert json.loads(found.stdout.splitlines()[-1]) == {"read": [], "stores": [other.port]}
    until(lambda: run.state() not in run_directory.ALIVE)
    assert run.state() == "finished", run.info()
    assert losses(run) == [line["loss"] for line in undisturbed(2)[:STEPS]]
    assert not Path(folder).exists()
    told = [path for path in run.path.rglob("*") if path.is_file() and drawn in text_of(path)]
    assert told == []


def text_of(path: Path) -> str:
    return path.read_bytes().decode("latin-1")


OUTSIDE = [a for a in addresses.own_addresses() if not ipaddress.ip_address(a).is_loopback]
SECRET = bytes(range(32))


@pytest.fixture
def pair():
    one = Nodes(Node(0, 2, OUTSIDE[0], 0), 60.0, 60.0, SECRET)
    other = Nodes(Node(1, 2, OUTSIDE[0], one.port), 60.0, 60.0, SECRET)
    yield one, other
    other.close()
    one.close()


def forge(store: dist.Store, attempt: int) -> None:
    """Every message that could decide something, as it was before messages were signed."""
    end = json.dumps({"again": False, "exit_code": 7})
    for key, value in {
        "refused": "the run is over",
        "ended": "7",
        "run": json.dumps({"path": "/etc"}),
        f"{attempt}/failed/": "1",
        f"{attempt}/decision/": end,
        f"{attempt}/report/0": json.dumps({"rank": 0, "signal": None}),
        f"{attempt}/report/1": json.dumps({"rank": 1, "signal": None}),
        f"{attempt}/read/1": "",
        f"{attempt}/joined/0": "intruder 1",
        f"{attempt}/joined/1": "intruder 2",
        "heartbeat/0": "1",
        "heartbeat/1": "1",
    }.items():
        store.set(key, value)


@pytest.mark.skipif(not OUTSIDE, reason="needs an address besides the loopback")
def test_who_reaches_the_store_of_several_nodes_decides_nothing(pair):
    one, other = pair
    intruder = rendezvous.connect(OUTSIDE[0], one.port, 10.0)
    forge(intruder, 1)
    joining = threading.Thread(target=other.join)
    joining.start()
    one.join()
    joining.join()
    assert "intruder" not in str(one.hosts)
    forge(intruder, 1)
    assert not one.peer_failed()
    assert not other.peer_failed()
    reports, decisions = [], []

    def judge(found):
        reports.extend(found)
        return {"again": True}

    deciding = threading.Thread(target=lambda: decisions.append(other.decide(None, judge)))
    deciding.start()
    decisions.append(one.decide({"rank": 3}, judge))
    deciding.join()
    assert reports == [{"rank": 3}, None]
    assert decisions == [{"again": True}] * 2


@pytest.mark.skipif(not OUTSIDE, reason="needs an address besides the loopback")
def test_who_reaches_the_store_gives_no_rank_another_number(pair):
    """What torch's agents tell each other: how many ranks each node has, and which numbers they get."""
    intruder = rendezvous.connect(OUTSIDE[0], pair[0].port, 10.0)
    for nodes in pair:
        nodes.attempt = 1
    for node in (0, 1):
        info = {"role": "rank", "rank": node, "local_world_size": 64}
        for prefix in ("1/agents/", "agents/run.1/"):
            intruder.set(f"{prefix}torchelastic/role_info/{node}", json.dumps(info))
            intruder.set(f"{prefix}torchelastic/assigned_ranks/{node}", "[0, 1, 0, 1]")
    found: dict[int, list[tuple[int, int]]] = {}

    def assign(nodes: Nodes) -> None:
        handler = NodeRendezvous(nodes, "run.1")
        spec = WorkerSpec("rank", 2, handler, entrypoint="true")
        agent = LocalElasticAgent(spec, DefaultLogsSpecs())
        agent._rendezvous(agent._worker_group)
        workers = agent._worker_group.workers
        found[nodes.node.rank] = [(one.global_rank, one.world_size) for one in workers]

    assigning = threading.Thread(target=assign, args=(pair[1],))
    assigning.start()
    assign(pair[0])
    assigning.join()
    assert found == {0: [(0, 4), (1, 4)], 1: [(2, 4), (3, 4)]}


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Node 0 of a run, and another node that joins it."""
    monkeypatch.setattr(rendezvous, "refuse_loopback", lambda address: None)
    monkeypatch.setattr("muster.launch.published.OVERWRITTEN_S", 0.5)
    recipe = load("gpt-micro", [])
    run = run_directory.create(tmp_path, "run", {"recipe.yaml": to_yaml(recipe)})
    nodes = Nodes(Node(0, 2, LOOPBACK, 0), 5.0, 60.0, secret.make(run.path))
    nodes.publish(path=str(run.path))
    yield run, nodes, lambda: join_run(Node(1, 2, LOOPBACK, nodes.port), recipe)
    nodes.close()


def test_another_node_finds_the_run_by_its_path_and_the_recipe_is_not_in_the_store(published):
    run, nodes, join = published
    assert join().path == run.path
    keys = nodes.store.raw.list_keys()
    text = b"".join(nodes.store.raw.get(key) for key in keys)
    assert b"path" in text
    assert b"training" not in text


@pytest.mark.parametrize(("least", "written"), [(None, True), (1, False)])
def test_another_recipe_ends_the_run_unless_it_can_go_on_without_that_node(
    published, least, written
):
    _, nodes, _ = published
    other = load("gpt-micro", ["seed=7"])
    with pytest.raises(LaunchError, match="node 0 trains with another recipe"):
        join_run(Node(1, 2, LOOPBACK, nodes.port, least), other)
    assert nodes.store.check(["refused"]) == written


def test_a_run_that_another_process_published_is_refused(published, tmp_path):
    _, nodes, join = published
    nodes.close()  # nobody writes the true one again
    forged = run_directory.create(tmp_path, "forged", {"recipe.yaml": ""})
    secret.make(forged.path)
    for path, words in {
        str(forged.path): "is not signed with the secret of",
        "relative": "publishes no run of muster's",
        "/\x1b[2J": "publishes no run of muster's",
        str(tmp_path): "does not exist on",
    }.items():
        nodes.store.raw.set("run", b"0" * 48 + json.dumps({"path": path}).encode())
        with pytest.raises(LaunchError, match=words):
            join()
    nodes.store.raw.set("run", b"0" * 48 + b"[" * 100_000)
    with pytest.raises(LaunchError, match="publishes no run of muster's"):
        join()
