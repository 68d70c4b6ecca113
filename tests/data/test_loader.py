"""Batches made ahead by threads are the plan's, in the plan's order."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from muster.data.batches import BatchPlan
from muster.data.loader import Batch, Loader
from muster.errors import DataError
from processes import until


class Numbers:
    """Sample i is the number i; `loaded` notes every one that was asked for."""

    def __init__(self, count: int = 40) -> None:
        self.lengths = np.random.default_rng(0).uniform(1, 9, count)
        self.loaded: list[int] = []
        self.broken: set[int] = set()
        self.delay = lambda index: 0.0

    def __len__(self) -> int:
        return len(self.lengths)

    def name(self, index: int) -> str:
        return f"number {index}"

    def load(self, index: int) -> int:
        time.sleep(self.delay(index))
        self.loaded.append(index)
        if index in self.broken:
            raise DataError(f"number {index} is broken")
        return index


def collate(samples, epoch, longest=0.0) -> Batch:
    tensors = {
        "numbers": torch.tensor(samples),
        "epoch": torch.tensor(epoch),
        "longest": torch.tensor(longest, dtype=torch.float64),
    }
    return Batch(list(samples), tensors, units=len(samples), filled=1, cells=1)


def make(source: Numbers, batch_size: int = 8, **options) -> Loader:
    return Loader(source, BatchPlan(source.lengths, batch_size, seed=0), collate, **options)


def seen(batches: list[Batch]) -> list[tuple[list[int], list[int], int]]:
    return [(b.ids, b["numbers"].tolist(), int(b["epoch"])) for b in batches]


def data_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("data")]


def test_every_micro_batch_hears_of_the_longest_of_its_global_batch():
    source = Numbers()
    for step in range(5):
        ids = make(source).plan.batch(step)
        told = {
            float(batch["longest"])
            for rank in range(2)
            for batch in make(source, rank=rank, ranks=2, accumulation=2).micro_batches(step)
        }
        assert told == {source.lengths[ids].max()}


@pytest.mark.parametrize("workers", [1, 4])
def test_steps_give_the_micro_batches_of_the_plan_in_order(workers):
    source = Numbers()
    rng = np.random.default_rng(1)
    delays = rng.uniform(0, 0.004, len(source))
    source.delay = lambda index: delays[index]
    loader = make(source, rank=1, ranks=2, accumulation=2, workers=workers)
    given = [seen(batches) for batches in loader.steps(3, 12)]
    assert given == [seen(loader.micro_batches(step)) for step in range(3, 12)]
    assert all(len(batches) == 2 for batches in given)
    assert [epoch for batches in given for *_, epoch in batches] == [0] * 4 + [1] * 10 + [2] * 4


def test_all_ranks_together_hold_the_global_batch():
    source = Numbers()
    loaders = [make(source, rank=rank, ranks=3, accumulation=2) for rank in range(3)]
    for step in range(6):
        ids = [i for loader in loaders for batch in loader.micro_batches(step) for i in batch.ids]
        assert sorted(ids) == sorted(loaders[0].plan.batch(step).tolist())


def test_an_epoch_of_another_size_is_refused():
    source = Numbers()
    source.of_epoch = lambda epoch: Numbers(40 - epoch)
    loader = make(source)
    loader.micro_batches(4)
    with pytest.raises(DataError, match=r"of_epoch\(1\) returned a source of 39 .* 40"):
        loader.micro_batches(5)


def test_an_error_in_a_thread_surfaces_at_its_own_step():
    source = Numbers()
    loader = make(source)
    source.broken = {int(loader.plan.batch(2)[0])}
    steps = loader.steps(0, 5)
    next(steps)
    next(steps)
    with pytest.raises(DataError, match=r"number \d+ is broken"):
        next(steps)
    assert data_threads() == []


def test_leaving_early_ends_the_threads_and_drops_what_was_ahead():
    source, leaving, load = Numbers(), threading.Event(), Numbers.load

    def stay(index: int) -> int:
        """A thread that is ahead by ten steps goes on when those are dropped that nobody has begun."""
        if len(source.loaded) >= 8 * 10:
            assert leaving.wait(60)
        return load(source, index)

    source.load = stay
    steps = make(source, workers=2, prefetch=50).steps(0, 1000)
    next(steps)
    assert data_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "shutdown", dropping(leaving))
        steps.close()
    assert data_threads() == []
    done = len(source.loaded)
    assert done < 8 * 25, "of 50 steps ahead"
    time.sleep(0.05)
    assert len(source.loaded) == done


def dropping(leaving: threading.Event):
    """An executor's `shutdown` that tells when it has cancelled what it was asked to."""
    shutdown = ThreadPoolExecutor.shutdown

    def tell(pool, wait=True, *, cancel_futures=False):
        if wait:
            leaving.set()
        shutdown(pool, wait, cancel_futures=cancel_futures)
        leaving.set()

    return tell


def test_the_end_leaves_no_threads():
    assert len(list(make(Numbers()).steps(0, 3))) == 3
    assert data_threads() == []
    assert list(make(Numbers()).steps(3, 3)) == []


def test_nothing_is_loaded_beyond_the_end():
    source = Numbers()
    loader = make(source, prefetch=8)
    list(loader.steps(0, 3))
    wanted = [i for step in range(3) for i in loader.plan.batch(step).tolist()]
    assert sorted(source.loaded) == sorted(wanted)


@pytest.mark.parametrize(("workers", "prefetch", "ahead"), [(1, 1, 1), (1, 3, 3), (4, 2, 4)])
def test_as_many_steps_as_asked_are_prepared_while_one_is_used(workers, prefetch, ahead):
    source = Numbers(800)
    steps = make(source, workers=workers, prefetch=prefetch).steps(0, 100)
    next(steps)
    expected = 8 * (1 + ahead)
    until(lambda: len(source.loaded) >= expected)
    time.sleep(0.02)
    assert len(source.loaded) == expected
    steps.close()


def test_a_batch_moves_and_grows_without_changing():
    batch = collate([3, 4], 0)
    moved = batch.to(torch.device("meta"))
    assert moved["numbers"].device.type == "meta"
    assert batch["numbers"].device.type == "cpu"
    grown = batch.adding(extra=torch.ones(1))
    assert set(grown.tensors) == {"numbers", "epoch", "longest", "extra"}
    assert "extra" not in batch.tensors
    assert grown.ids == [3, 4]
