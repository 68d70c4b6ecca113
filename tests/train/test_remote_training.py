"""Training on data from a bucket, and its checkpoints in one: the laws hold as on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import remote_servers
from muster.data.remote import retry
from muster.data.remote.bucket import Bucket
from muster.entrypoints.open_run import check_before_launch, open_run
from muster.errors import CheckpointError, MusterError, RecipeError
from muster.observe.results import complete_steps, read_lines
from muster.recipe.load import load
from muster.training import mirror
from muster.training.loop import train
from muster.training.mirror import Mirror, complete, restore, restore_if_none
from training import make_job

STEPS = 4
CHEAP = [
    "model.preset=gpt2-micro",
    "data.sequence_length=16",
    "training.global_batch_size=8",
    f"training.steps={STEPS}",
    "training.warmup_steps=0",
    "checkpoint.every_steps=2",
    "evaluation.final=false",
]


@pytest.fixture(autouse=True)
def impatient(monkeypatch, tmp_path):
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def s3():
    with remote_servers.s3() as server:
        remote_servers.upload(server, "mirror", {})
        yield server


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """A page of text in three parquet files of several row groups, of about 6 KB."""
    folder = tmp_path_factory.mktemp("text")
    texts = Path(str(textwrap.__file__)).read_text().split("\n\n")
    for number in range(3):
        table = pa.table({"text": texts[number::3]})
        pq.write_table(table, folder / f"train-{number}.parquet", row_group_size=8)
    return folder


def run_here(
    mesh: Any, folder: str, overrides: list[str], variables: dict[str, str], stop: int = STEPS
) -> dict[str, Any]:
    """Train in a rank that has these variables until after `stop` steps; what the mirror came to."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(retry, "FIRST_WAIT_S", 0.0)
        patch.setattr(retry, "TRIES", 3)
        job = make_job(mesh, folder, [*CHEAP, *overrides], "gpt-micro")
        lines = Path(folder) / "metrics.jsonl"
        job.observer.stop_requested = lambda: (  # type: ignore[method-assign]
            stop < STEPS and len(read_lines(lines)) >= stop - 1
        )
        assert train(job) == stop
        mirror = job.checkpoints.mirror
        if mirror is not None:
            mirror.wait()
        job.observer.close()
        mesh.barrier()
        return mirror.summary() if mirror else {}


def results(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_lines(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def disk(ranks, shards, tmp_path_factory) -> list[tuple[float, float]]:
    """Losses and gradient norms of two ranks that read from disk, without a mirror."""
    folder = tmp_path_factory.mktemp("disk")
    ranks(2)(run_here, str(folder), [f"data.train={shards}"], {})
    return results(folder)


@pytest.mark.guides
def test_training_from_a_bucket_that_fails_is_bit_for_bit_as_from_disk(
    s3, ranks, shards, disk, tmp_path
):
    """Two ranks, which copy each file once between them; their checkpoints are copied to a bucket."""
    there = {f"text/{path.name}": path for path in shards.iterdir()}
    remote_servers.upload(s3, "shards", there)
    s3.asked.clear()
    s3.faults = ["503", "drop", "", "503", "drop"]
    variables = remote_servers.environment(s3) | {"XDG_CACHE_HOME": str(tmp_path / "of-the-ranks")}
    asked = ["data.train=s3://shards/text", "checkpoint.mirror=s3://mirror/a", "checkpoint.keep=1"]
    mirror, nothing = ranks(2)(run_here, str(tmp_path / "run"), asked, variables)
    assert results(tmp_path / "run") == disk
    assert len(disk) == STEPS
    assert not s3.faults
    whole = [path for method, path, _, size in s3.asked if method == "GET" and size > 4096]
    assert sorted(whole) == sorted(f"/shards/{name}" for name in there), "each is sent whole once"
    assert mirror == {"address": "s3://mirror/a/run", "copied": [2, 4], "failed": {}}
    assert nothing == {}
    assert complete(Mirror("s3://mirror/a", "run", tmp_path, 1).bucket, "a/run") == ["step-4"]
    files = (path for path in (tmp_path / "run").rglob("*") if path.suffix in (".json", ".jsonl"))
    kept = "".join(path.read_text() for path in files)
    assert "s3://shards/text" in kept
    for secret in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        assert variables[secret] not in kept


@pytest.mark.guides
def test_a_run_goes_on_from_the_mirror_on_an_empty_disk(s3, ranks, shards, disk, tmp_path):
    variables = remote_servers.environment(s3)
    asked = [f"data.train={shards}", "checkpoint.mirror=s3://mirror/b"]
    before, after = tmp_path / "before" / "run", tmp_path / "after" / "run"
    ranks(2)(run_here, str(before), asked, variables, 2)
    assert restore_if_none(after, "run", "s3://mirror/b", "auto") == after / "checkpoints/step-2"
    ranks(2)(run_here, str(after), asked, variables)
    assert results(before) + results(after) == disk
    assert complete_steps(after) == [2, 4]


@pytest.mark.full
def test_a_mirror_that_fails_does_not_stop_the_training_and_is_said(ranks, shards, disk, tmp_path):
    with remote_servers.web({}) as server:
        variables = {**remote_servers.KEYS, "AWS_ENDPOINT_URL": server.url}
    asked = [
        f"data.train={shards}",
        "checkpoint.mirror=s3://mirror/c",
        "checkpoint.every_steps=null",
    ]
    found = ranks(2)(run_here, str(tmp_path), asked, variables)[0]
    assert results(tmp_path) == disk
    assert (found["copied"], list(found["failed"])) == ([], [STEPS])
    (event,) = [e for e in read_lines(tmp_path / "events.jsonl") if e["event"] == "mirror failed"]
    assert "3 times in a row" in event["why"]


def checkpoint(folder: Path, step: int, recipe: dict[str, Any] | None = None) -> Path:
    """A complete checkpoint, as far as files go."""
    target = folder / f"step-{step}"
    target.mkdir(parents=True)
    (target / "__0_0.distcp").write_bytes(b"weights %d" % step)
    (target / ".metadata").write_bytes(b"where they are")
    (target / "recipe.json").write_text(json.dumps(recipe or {}))
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in target.iterdir()
    }
    manifest = {"format": 2, "trainer": {"step": step}, "world": 1, "files": files}
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def mirrored(name: str, root: Path, keep: int = 3, address: str = "s3://mirror") -> Mirror:
    """What is in `root` is copied."""
    mirror = Mirror(address, name, root, keep)
    mirror.update(9)
    mirror.wait()
    assert not mirror.failed
    return mirror


def folders(mirror: Mirror) -> set[str]:
    return {file.relative.split("/")[0] for file in mirror.bucket.objects(mirror.folder)}


def test_what_is_damaged_or_not_read_back_yet_is_not_copied(s3, tmp_path):
    """Nor is the whole copy of one that was damaged since removed for it."""
    first = checkpoint(tmp_path, 1)
    mirrored("damaged", tmp_path)
    (first / "manifest.json").write_text((first / "manifest.json").read_text() + "x")
    (checkpoint(tmp_path, 2) / ".metadata").unlink()
    checkpoint(tmp_path, 3)
    checkpoint(tmp_path, 11)
    mirror = mirrored("damaged", tmp_path)
    assert mirror.copied == [3]
    assert folders(mirror) == {"step-1", "step-3"}


def test_what_a_killed_start_left_half_copied_is_removed(s3, tmp_path):
    half = {"orphan/step-1/__0_0.distcp": b"weights", "orphan/notes/x": b"not muster's"}
    remote_servers.upload(s3, "mirror", half)
    checkpoint(tmp_path, 2)
    assert folders(mirrored("orphan", tmp_path)) == {"notes", "step-2"}


def test_a_copy_that_fails_is_said_and_made_with_the_next(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "TRIES", 2)
    told: list[dict[str, Any]] = []
    mirror = Mirror("s3://gone", "run", tmp_path, 3)
    mirror.tell = lambda what, **details: told.append({"event": what, **details})
    checkpoint(tmp_path, 1)
    mirror.update(9)
    mirror.wait()
    assert (mirror.copied, list(mirror.failed)) == ([], [1])
    assert [(event["event"], event["step"]) for event in told] == [("mirror failed", 1)]
    remote_servers.upload(s3, "gone", {})
    checkpoint(tmp_path, 2)
    mirror.update(9)
    mirror.wait()
    assert (mirror.copied, mirror.failed) == ([2, 1], {})


def test_a_bucket_that_stops_answering_is_not_waited_for(s3, tmp_path, monkeypatch):
    monkeypatch.setattr("muster.training.mirror.PATIENCE_S", 0.2)
    monkeypatch.setattr("muster.training.mirror.POLL_S", 0.05)
    answer = threading.Event()

    def hangs(self, path: Path, key: str) -> Iterator[int]:
        answer.wait()
        yield 0

    monkeypatch.setattr(Bucket, "write", hangs)
    mirror = Mirror("s3://mirror", "hangs", tmp_path, 3)
    checkpoint(tmp_path, 1)
    mirror.update(9)
    mirror.wait()
    assert "not a byte was copied" in mirror.failed[1]
    answer.set()


def test_a_save_that_was_cut_off_gives_way_to_the_mirror(s3, tmp_path):
    checkpoint(tmp_path / "here", 1)
    mirrored("cut", tmp_path / "here")
    half = tmp_path / "cut" / "checkpoints" / "step-1"
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(b"half")
    found = restore_if_none(tmp_path / "cut", "cut", "s3://mirror", "auto")
    assert found == half
    assert (half / "__0_0.distcp").read_bytes() == b"weights 1"
    assert restore_if_none(tmp_path / "cut", "cut", "s3://mirror", "auto") is None


def test_a_checkpoint_in_the_mirror_is_complete_or_passed_over(s3, tmp_path):
    """One without a manifest, and one with a file that does not match it."""
    for step in (1, 2, 3):
        checkpoint(tmp_path / "here", step)
    mirror = mirrored("half", tmp_path / "here")
    assert mirror.copied == [3, 2, 1]
    bucket = mirror.bucket
    bucket.delete("half/step-3/manifest.json")
    damaged = {"half/step-2/__0_0.distcp": b"weights x"}
    remote_servers.upload(s3, "mirror", damaged)
    found = restore("s3://mirror/half", tmp_path / "there")
    assert found == tmp_path / "there" / "step-1"
    assert (found / "__0_0.distcp").read_bytes() == b"weights 1"
    assert restore("s3://mirror/half/step-1", tmp_path / "exact") == tmp_path / "exact" / "step-1"
    assert restore("s3://mirror/none", tmp_path / "none") is None


def test_the_manifest_is_copied_last_and_removed_first(s3, tmp_path):
    s3.asked.clear()
    mirrored("order", checkpoint(tmp_path, 1).parent, 1)
    shutil.rmtree(tmp_path / "step-1")
    mirrored("order", checkpoint(tmp_path, 2).parent, 1)
    changes = [
        (method, path.rpartition("/")[2])
        for method, path, _, _ in s3.asked
        if method in ("PUT", "POST", "DELETE") and "/step-1/" in path and not path.endswith("/")
    ]
    written = [name for method, name in changes if method != "DELETE"]
    removed = [name for method, name in changes if method == "DELETE"]
    assert written[-1] == "manifest.json"
    assert removed[0] == "manifest.json"
    assert len(removed) == 4


def test_a_named_run_on_an_empty_disk_begins_with_what_the_mirror_has(s3, shards, tmp_path):
    options = [f"data.train={shards}", f"logging.dir={tmp_path}", "checkpoint.mirror=s3://mirror/d"]
    recipe = load("gpt-micro", [*CHEAP, *options])
    checkpoint(tmp_path / "old", 2, recipe.as_dict())
    mirrored("mine", tmp_path / "old", address="s3://mirror/d")
    other = load("gpt-micro", [*CHEAP, *options, "seed=7"])
    with pytest.raises(CheckpointError, match="seed=42"):
        open_run(other, 1, 1, None, "mine")
    (tmp_path / "mine").rename(tmp_path / "refused")
    run, claim, _ = open_run(recipe, 1, 1, None, "mine")
    claim.close()
    assert complete_steps(run.path) == [2]
    run, claim, _ = open_run(recipe, 1, 1, None, "another")
    claim.close()
    assert complete_steps(run.path) == []


def test_a_run_is_not_resumed_to_fewer_steps_than_it_has_done(tmp_path):
    def asked(steps: int):
        words = [*CHEAP, f"logging.dir={tmp_path}", f"training.steps={steps}"]
        return load("gpt-micro", words)

    run, claim, _ = open_run(asked(6), 1, 1, None, "mine")
    claim.close()
    run.update(state="stopped")
    checkpoint(run.path / "checkpoints", 6, asked(6).as_dict())
    before = (run.path / "recipe.yaml").read_text()
    with pytest.raises(RecipeError, match=r"training\.steps: 5 is less than the 6 steps that mine"):
        open_run(asked(5), 1, 1, run, None)
    assert (run.path / "recipe.yaml").read_text() == before
    assert run.state() == "stopped"


def test_a_mirror_that_cannot_be_reached_is_given_up_within_seconds(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.5)
    monkeypatch.setattr(mirror, "PROBE_S", 3.0)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))  # nothing listens: refused at once, each time
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        monkeypatch.setenv("AWS_REGION", "x")
        begun = time.monotonic()
        with pytest.raises(
            CheckpointError, match=r"checkpoint\.mirror: .*, tried for \d s; try again"
        ):
            mirror.check("s3://bucket/x")
        assert time.monotonic() - begun < 10


def test_a_mirror_that_cannot_be_is_refused_before_there_is_a_run(s3, shards):
    for address in ("s3://", "https://example.com/x", "folder"):
        with pytest.raises(RecipeError, match=r"checkpoint\.mirror: got .*expected s3://BUCKET"):
            load("gpt-micro", [f"checkpoint.mirror={address}"])
    with pytest.raises(RecipeError, match=r"checkpoint\.mirror: .*credentials are read from"):
        load("gpt-micro", ["checkpoint.mirror=s3://me:secret@bucket/x"])
    asked = [f"data.train={shards}", "checkpoint.mirror=s3://no-such-bucket/x"]
    with pytest.raises(
        MusterError, match=r"checkpoint\.mirror: s3://no-such-bucket/x/\.muster.* does not exist"
    ):
        check_before_launch(load("gpt-micro", [*CHEAP, *asked]), 1, 1)


def test_the_best_checkpoint_comes_back_with_the_newest_and_none_is_copied_twice(s3, tmp_path):
    selection = {"selection": {"keeps": True, "best_step": 1}}
    for step in (1, 2, 3):
        folder = checkpoint(tmp_path / "here", step)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["trainer"] |= selection
        (folder / "manifest.json").write_text(json.dumps(manifest))
    mirrored("best", tmp_path / "here")
    assert mirrored("best", tmp_path / "here").copied == []
    assert restore("s3://mirror/best", tmp_path / "there") == tmp_path / "there" / "step-3"
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["step-1", "step-3"]


@pytest.mark.full
def test_corpora_mixed_by_weight_go_on_within_an_epoch_at_the_same_sample(
    s3, ranks, shards, tmp_path
):
    """One on disk and one in a bucket; three of four sequences are of the second."""
    here = tmp_path / "here.txt"
    here.write_text(Path(str(json.decoder.__file__)).read_text())
    remote_servers.upload(s3, "mixed", {path.name: path for path in shards.iterdir()})
    sources = f"[{{path:'{here}',weight:1}},{{path:'s3://mixed',weight:3}}]"
    asked, variables = [f"data.train={sources}"], remote_servers.environment(s3)
    straight, parted = tmp_path / "straight", tmp_path / "parted"
    ranks(2)(run_here, str(straight), asked, variables)
    ranks(2)(run_here, str(parted), asked, variables, 2)
    ranks(2)(run_here, str(parted), asked, variables)
    assert results(parted) == results(straight)
    data = json.loads((straight / "data.json").read_text())["splits"]["train"]
    assert data["files"] == 1 + len(list(shards.iterdir()))
