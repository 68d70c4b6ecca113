"""Recordings in the cache folder: the same plan from them, and none that no longer holds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from muster.hardware import catalogue
from muster.planner import recordings
from muster.planner.messages import Message
from muster.planner.op_cost import OpCost
from muster.planner.planner import Planner
from muster.planner.profile import KEPT, ExecutionMode, Profile, ProfileRecorder
from muster.planner.recordings import Recordings, digest_of, recording_key
from muster.planner.search import search
from muster.planner.time import Cluster
from muster.planner.trace import Trace, TracePoint
from muster.recipe.distributed import TensorOptions
from plan.subjects import GPT, SMALL, subject

HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor")


def made_up(scale: int = 1) -> Profile:
    """With every kind of value that a recording has."""
    inside = TracePoint("forward", "blocks", "in first")
    product = OpCost("mm", "matrix", 1e30 / 3, 0.1 * scale, "bfloat16", (1, 2, 3, 4))
    trace = Trace(
        [(product, inside), (OpCost("add", "memory", 0.0, 7.0, "float32"), KEPT), (product, KEPT)],
        [(Message("all_reduce", 2**40 + 1, (0, 1), "float32"), inside)],
        Counter({(inside, "op"): 3, (KEPT, "graph"): 1}),
        {inside: [(512 * scale, 1024), (0, 0)], KEPT: [(5, 5)]},
        2**41,
        {"weights": 2**40},
    )
    return Profile({"blocks": 2}, (trace, trace), {"blocks": (trace, Trace())})


def key_of(*overrides: str, mode: ExecutionMode | None = None) -> str:
    thing, mode = subject(*GPT, *overrides), mode or ExecutionMode("bf16")
    return recording_key(thing, mode, costliest=True, options=TensorOptions())


def test_what_is_saved_is_loaded_as_it_was(tmp_path):
    saved = Recordings(tmp_path / "recordings")
    assert saved.load("one") is None
    saved.save("one", made_up())
    assert saved.load("one") == made_up()
    assert saved.load("other") is None


def test_a_plan_from_the_cache_is_the_same_and_records_nothing(tmp_path, monkeypatch):
    """And a model that waits for Python is recorded once, without checkpointing."""
    cluster, cached = Cluster(catalogue.find("h100"), 1, 8), Recordings(tmp_path)
    made = []
    real = ProfileRecorder.profile

    def noted(self):
        made.append(self.mode)
        return real(self)

    monkeypatch.setattr(ProfileRecorder, "profile", noted)
    found = [search(Planner(subject(*GPT), cluster, "bf16", recordings=cached)) for _ in range(2)]
    assert [mode.checkpointing for mode in made] == ["none"]
    assert found[0] == found[1]
    monkeypatch.setattr(recordings, "_sources_digest", lambda: "other sources")
    again = Planner(subject(*GPT), cluster, "bf16", recordings=cached)
    monkeypatch.setattr(ProfileRecorder, "profile", lambda _: pytest.fail("recorded again"))
    with pytest.raises(pytest.fail.Exception, match="recorded again"):
        again._profile(ExecutionMode("bf16"), True)


def test_a_changed_added_or_renamed_source_changes_the_digest(tmp_path):
    folder, single = tmp_path / "plan", tmp_path / "names.py"
    folder.mkdir()
    digests = []
    for file in (single, folder / "a.py", folder / "b.py"):
        for text in ("1", "2"):
            file.write_text(text)
            digests.append(digest_of([folder, single]))
    file.rename(folder / "c.py")
    digests.append(digest_of([folder, single]))
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    "override",
    [
        "data.sequence_length=65",
        "model.lora.rank=4",
        "training.label_smoothing=0.1",
        "model.vocab_size=300",
        "seed=7",
    ],
)
def test_the_key_changes_with(override):
    assert key_of(override) != key_of()


def test_the_key_changes_with_the_mode_the_torch_and_the_tensor_options(monkeypatch):
    keys = [key_of(mode=ExecutionMode("bf16", mode)) for mode in ("none", "full")]
    keys += [key_of(mode=ExecutionMode("bf16", tensor=2)), key_of(mode=ExecutionMode("fp32"))]
    options = TensorOptions(loss_parallel=not TensorOptions().loss_parallel)
    mode = ExecutionMode("bf16", tensor=2)
    keys.append(recording_key(subject(*GPT), mode, costliest=True, options=options))
    monkeypatch.setattr(recordings.torch, "__version__", "9.9")
    keys.append(key_of())
    assert len(set(keys)) == len(keys)


def test_the_key_does_not_change_with_what_a_recording_does_not_depend_on():
    others = ("training.global_batch_size=32", "distributed.strategy=fsdp", "name=another")
    assert key_of(*others) == key_of()


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"points": 3}', "cut"])
def test_a_broken_file_is_ignored_and_replaced(tmp_path, text):
    saved = Recordings(tmp_path)
    saved.save("one", made_up())
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:-9] if text == "cut" else text)
    assert saved.load("one") is None
    saved.save("one", made_up())
    assert saved.load("one") == made_up()


def test_those_used_least_recently_are_removed(tmp_path, monkeypatch):
    saved = Recordings(tmp_path)
    for age, key in enumerate(("newest", "used", "unused")):
        saved.save(key, made_up())
        os.utime(tmp_path / f"{key}.json", (10 - age, 10 - age))
    size = (tmp_path / "used.json").stat().st_size
    assert saved.load("used") == made_up()
    monkeypatch.setattr(recordings, "MAX_BYTES", 3 * size)
    saved.save("more", made_up())
    assert {path.stem for path in tmp_path.iterdir()} == {"newest", "used", "more"}


def test_a_folder_that_cannot_be_written_to_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("")
    saved = Recordings(tmp_path / "file" / "folder")
    saved.save("one", made_up())
    assert saved.load("one") is None


@pytest.mark.guides
def test_a_plan_from_the_cache_does_not_import_what_only_recording_needs():
    """In an interpreter of its own. A model on the meta device is part of every plan."""
    code = f"""
import sys
from muster.planner import report, search
from muster.planner.find_recipe import find_recipe
from muster.planner.open_subject import open_subject
print(open_subject(find_recipe("gpt-micro", {list(SMALL)!r})).parameters)
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
