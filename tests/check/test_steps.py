"""The steps that need all ranks at once, on living ranks, with faults planted in one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import few_clips
from check.people import only, rank_names
from muster.checks import balance, collectives, data, gradients, links
from muster.checks.context import Options, RankContext, RankReport
from muster.checks.messages import MessageStore
from muster.launch.cluster import RankInfo
from muster.parallel.mesh import Mesh


@contextmanager
def swapped(owner: object, name: str, other: Callable) -> Iterator[None]:
    """Something of torch replaced for a while, as a broken library or device would."""
    before = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, before)


def ask(
    mesh: Mesh, measure: Callable[[RankContext], RankReport], file: str = "", **options
) -> RankReport:
    """`file` holds the store of the ranks, for steps that need one."""
    rank_info = RankInfo(mesh.rank, mesh.world, mesh.local_rank, mesh.world)
    store = dist.FileStore(file, mesh.world) if file else dist.HashStore()
    return measure(RankContext(rank_info, MessageStore(store), Options(**options), mesh))


def judged(step, said: list[RankReport]) -> list:
    return step.judge(dict(enumerate(said)), rank_names(*["a"] * len(said)))


@pytest.mark.parametrize("world", [2, 4])
def test_every_collective_is_right_over_every_kind_of_number(ranks, world):
    found = judged(collectives, ranks(world)(ask, collectives.measure))
    words = only([f for f in found if f.status != "note"], "ok").words
    assert words.endswith("right on gloo")
    assert len(list(collectives.cases())) == 19


def flips(mesh: Mesh, guilty: int, name: str) -> RankReport:
    """One value of what `name` gives the guilty rank is off by one, in bfloat16 only."""
    real = getattr(dist, name)

    def broken(got, *args, **kwargs):
        done = real(got, *args, **kwargs)
        if mesh.rank == guilty and got.dtype == torch.bfloat16 and len(got) > 7:
            got[7] += 1
        return done

    with swapped(dist, name, broken):
        return ask(mesh, collectives.measure)


@pytest.mark.parametrize(
    ("torch_name", "name"),
    [
        ("all_reduce", "all_reduce"),
        ("all_gather_single", "all_gather"),
        ("reduce_scatter_single", "reduce_scatter"),
        ("broadcast", "broadcast"),
        ("all_to_all_single", "all_to_all"),
    ],
)
def test_a_corrupted_collective_is_named_with_its_rank(ranks, torch_name, name):
    if not hasattr(dist, torch_name):  # torch before 2.13
        torch_name = {"all_gather": "all_gather_into_tensor"}.get(name, "reduce_scatter_tensor")
    finding = only(judged(collectives, ranks(2)(flips, 1, torch_name)), "fail")
    assert finding.words.startswith(f"{name} bfloat16 is wrong on rank 1 on a; ")
    assert "at position 7" in finding.words
    assert finding.ranks == (1,)


def brings_wrong(mesh: Mesh) -> RankReport:
    real = dist.all_reduce

    def broken(got, *args, **kwargs):
        if mesh.rank == 1 and got.dtype == torch.int64:
            got[3] ^= 1
        return real(got, *args, **kwargs)

    with swapped(dist, "all_reduce", broken):
        return ask(mesh, collectives.measure)


def test_a_wrong_contribution_shows_on_every_rank(ranks):
    finding = only(judged(collectives, ranks(2)(brings_wrong)), "fail")
    assert finding.words.startswith("all_reduce int64 is wrong on every rank; ")
    assert finding.ranks == (0, 1)


def sends_to_the_wrong_rank(mesh: Mesh) -> RankReport:
    """The ring runs 0 → 2 → 1 → 3, as with two cables crossed."""
    ring = [0, 2, 1, 3]
    at = ring.index(mesh.rank)

    def crossed(operations):
        send, receive = operations
        after, before = ring[(at + 1) % 4], ring[at - 1]
        return [dist.isend(send.tensor, after), dist.irecv(receive.tensor, before)]

    with swapped(dist, "batch_isend_irecv", crossed):
        return ask(mesh, collectives.measure)


def test_crossed_messages_are_noticed(ranks):
    found = judged(collectives, ranks(4)(sends_to_the_wrong_rank))
    assert [f.words.split(" is")[0] for f in found] == [
        f"send_recv {kind}" for kind in ("float32", "bfloat16", "int64")
    ]


def refuses(mesh: Mesh, everywhere: bool) -> RankReport:
    def refusing(*args, **kwargs):
        raise RuntimeError("Backend gloo does not support alltoall_base\nand a stack trace")

    guilty = everywhere or mesh.rank == 0
    with swapped(dist, "all_to_all_single", refusing if guilty else lambda got, mine: None):
        return ask(mesh, collectives.measure)


def test_what_a_backend_does_not_offer_is_a_note_where_no_rank_has_it(ranks):
    ok, note = judged(collectives, ranks(2)(refuses, True))
    assert ok.words.startswith("16 combinations")
    assert note.status == "note"
    assert note.words == "not supported by gloo: all_to_all (float32, bfloat16, int64)"
    found = judged(collectives, ranks(2)(refuses, False))
    assert any("all_to_all int64 fails on rank 0" in f.words for f in found if f.status == "fail")


def test_ddp_gives_the_gradients_of_the_whole_batch(ranks):
    for world in (2, 4):
        finding = only(judged(gradients, ranks(world)(ask, gradients.measure)), "ok")
        assert 0 < finding.figures["distance"] < 1e-6


def draws_differently(mesh: Mesh) -> RankReport:
    real = torch.manual_seed
    with swapped(torch, "manual_seed", lambda seed: real(seed + (mesh.rank == 1))):
        return ask(mesh, gradients.measure)


def test_a_rank_with_different_weights_is_named(ranks):
    finding = only(judged(gradients, ranks(2)(draws_differently)), "fail")
    assert finding.words == "rank 1 on a initializes other weights from the same seed"


def keeps_its_weights(mesh: Mesh) -> RankReport:
    """DDP's first broadcast does not reach rank 1, which has drawn other weights."""
    real, drawn = torch.nn.parallel.DistributedDataParallel, torch.manual_seed

    def deaf(model, **options):
        kept = [p.detach().clone() for p in model.parameters()]
        wrapped = real(model, **options)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)
        return wrapped

    with (
        swapped(torch, "manual_seed", lambda seed: drawn(seed + (mesh.rank == 1))),
        swapped(gradients, "DistributedDataParallel", deaf),
    ):
        return ask(mesh, gradients.measure)


def test_weights_that_stay_different_spoil_the_gradients_too(ranks):
    drawn, synced, spoilt = judged(gradients, ranks(2)(keeps_its_weights))
    assert drawn.words.startswith("rank 1 on a initializes other weights")
    assert synced.words.startswith("rank 1 on a has other weights")
    assert spoilt.words.startswith("gradients on rank 0 on a, rank 1 on a differ")


def does_not_average(mesh: Mesh) -> RankReport:
    def lonely(model, **options):
        return model

    with swapped(gradients, "DistributedDataParallel", lonely):
        return ask(mesh, gradients.measure)


def test_gradients_that_do_not_travel_are_noticed(ranks):
    finding = only(judged(gradients, ranks(2)(does_not_average)), "fail")
    assert finding.words.startswith("gradients on rank 0 on a, rank 1 on a differ")


def on_core(mesh: Mesh, cores: list[int]) -> RankReport:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cores[mesh.rank]})
    try:
        return ask(mesh, balance.measure)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.serial
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
def test_a_rank_whose_core_is_busy_is_named(ranks):
    pool, cores = ranks(2), sorted(os.sched_getaffinity(0))[:2]
    pool(on_core, cores)  # until both have started
    spin = (
        f"import os; os.sched_setaffinity(0, {{{cores[1]}}}); print(flush=True)\nwhile True: pass"
    )
    command = [sys.executable, "-c", spin]
    # Each in a session of its own: Linux shares a core among sessions first (autogroups).
    options = {"stdout": subprocess.PIPE, "start_new_session": True}
    busy = [subprocess.Popen(command, **options) for _ in range(7)]
    try:
        for process in busy:
            process.stdout.readline()  # it spins
        for _ in range(3):  # the other core may be busy for a moment, too
            (finding,) = judged(balance, pool(on_core, cores))
            if finding.status == "fail":
                break
    finally:
        for process in busy:
            process.kill()
            process.communicate()
    assert (finding.status, finding.ranks) == ("fail", (1,))
    assert finding.words.startswith("rank 1 on a: the same work takes ")
    assert finding.figures["slowest_over_median"] > 1.5


def test_links_of_every_pair_are_measured(ranks):
    said = ranks(4)(ask, links.measure)
    for rank, report in enumerate(said):
        assert sorted(map(int, report["pairs"])) == [r for r in range(4) if r != rank]
        assert all(0.001 < speed < 1000 for speed in report["pairs"].values())
    (finding, *_) = judged(links, said)
    assert finding.figures or finding.status == "warn"


def reads_slowly(mesh: Mesh, seconds: float, file: str) -> RankReport:
    """Each clip takes that long to read, by a clock that stands still while other programs compute."""
    import time

    from muster.data.loader import Loader

    real, waited = Loader._build, [0.0]

    def slow(self, source, ids, epoch, longest):
        waited[0] += seconds * len(ids)
        return real(self, source, ids, epoch, longest)

    clock = SimpleNamespace(perf_counter=lambda: time.process_time() + waited[0])
    with swapped(Loader, "_build", slow), swapped(data, "time", clock):
        overrides = [f"data.train={few_clips.folder()}", "training.global_batch_size=8"]
        overrides += ["data.workers=1", "evaluation.known_words=false", "evaluation.ngram=null"]
        return ask(mesh, data.measure, file, recipe="speech", overrides=overrides)


def test_data_that_is_read_too_slowly_is_noticed(ranks, tmp_path):
    enough = only(judged(data, ranks(2)(reads_slowly, 0.0, str(tmp_path / "a"))), "ok")
    assert enough.words.startswith("enough: read ")
    each = 15 / enough.figures["model_samples_per_s"]
    slow = only(judged(data, ranks(2)(reads_slowly, each, str(tmp_path / "b"))), "fail")
    assert slow.words.startswith("not enough: read ")
    assert slow.figures["read_samples_per_s"] < slow.figures["model_samples_per_s"]
