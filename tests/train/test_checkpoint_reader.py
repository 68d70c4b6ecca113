"""A checkpoint of a stranger is data: nothing in it runs."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from muster.errors import CheckpointError
from muster.training.checkpoint_reader import METADATA, CheckpointReader


class Forged:
    """Unpickled by torch, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "step-1"
    state = {"model": {"weight": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2).bfloat16()}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def metadata(folder: Path) -> Metadata:
    found: Metadata = pickle.loads((folder / METADATA).read_bytes())
    return found


def test_tensors_are_read_as_by_torch(checkpoint):
    state = {"model": {"weight": torch.zeros(2, 3), "half": torch.zeros(2).bfloat16()}}
    dcp.load(state, storage_reader=CheckpointReader(checkpoint, files(checkpoint)), no_dist=True)
    assert torch.equal(state["model"]["weight"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(state["model"]["half"], torch.ones(2).bfloat16())


@pytest.mark.parametrize("where", ["instead", "inside"])
def test_a_forged_pickle_does_not_run(checkpoint, tmp_path, where):
    trace = tmp_path / "it-ran"
    forged: Any = Forged(trace)
    if where == "inside":
        whole = metadata(checkpoint)
        whole.planner_data = {"model": forged}
        forged = whole
    (checkpoint / METADATA).write_bytes(pickle.dumps(forged))
    with pytest.raises(
        CheckpointError, match=r"it names posix\.mkdir, which is none of the classes"
    ):
        CheckpointReader(checkpoint, files(checkpoint))
    assert not trace.exists()


@pytest.mark.parametrize("target", ["../../secret", "/etc/passwd", "other.distcp"])
def test_only_files_of_the_checkpoint_are_read(checkpoint, target):
    whole = metadata(checkpoint)
    whole.storage_data[MetadataIndex("model.weight")] = _StorageInfo(target, 0, 10)
    (checkpoint / METADATA).write_bytes(pickle.dumps(whole))
    with pytest.raises(CheckpointError, match=f"points to {target}, which is no file of this"):
        CheckpointReader(checkpoint, files(checkpoint))


def test_values_that_are_no_tensors_are_refused(tmp_path):
    """torch would unpickle them with any class."""
    dcp.save(
        {"trainer": {"note": Forged(tmp_path / "x")}}, checkpoint_id=tmp_path / "a", no_dist=True
    )
    with pytest.raises(CheckpointError, match="BytesStorageMetadata"):
        CheckpointReader(tmp_path / "a", files(tmp_path / "a"))


@pytest.mark.parametrize("damage", [b"", b"\x80", b"no pickle", pickle.dumps([1])])
def test_a_damaged_file_is_one_sentence(checkpoint, damage):
    (checkpoint / METADATA).write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: .*; it is damaged"):
        CheckpointReader(checkpoint, files(checkpoint))


@pytest.mark.parametrize("put", [b"r" + (10**7).to_bytes(4, "little"), b"p10000000\n"])
def test_a_number_that_asks_for_memory_is_refused_before_it_is_read(checkpoint, put):
    (checkpoint / METADATA).write_bytes(b"\x80\x02}" + put + b".")
    with pytest.raises(CheckpointError, match="it remembers an object by the number 10000000"):
        CheckpointReader(checkpoint, files(checkpoint))


def test_a_pipe_in_place_of_the_metadata_is_not_waited_for(checkpoint):
    names = files(checkpoint)
    (checkpoint / METADATA).unlink()
    os.mkfifo(checkpoint / METADATA)
    with pytest.raises(CheckpointError, match="not a file but a pipe"):
        CheckpointReader(checkpoint, names)
