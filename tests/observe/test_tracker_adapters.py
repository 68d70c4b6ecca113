"""Each tracker's own client reads back what muster sent it, also after a run was resumed."""

import json
import os
import struct
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from muster.observe.trackers import Trackers

RECIPE = {"name": "small", "training": {"lr": 1e-3, "steps": 6}, "logging": {"to": ["x"]}}
SECRET = "s3cr3t" * 6 + "abcd"  # as long as an API key of Weights & Biases
NAMES = {"train/loss", "train/lr", "validation/wer", "test/wer"}
BLOCK, HEAD = 32768, 7  # of the files of Weights & Biases


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        find_spec(package) is None, reason=f"needs pip install 'muster-train[{package}]'"
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for variable in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("MY_PASSWORD", SECRET)
    found = tmp_path / "runs" / "small-1"
    found.mkdir(parents=True)
    return found


def send(name: str, folder: Path, steps, *, start: int = 0, status="finished", limit=60) -> None:
    made = Trackers([name], folder, RECIPE, start)
    for step in steps:
        made.metrics(step, "train", {"step": step, "loss": 1 / step, "lr": 1e-3})
        if step % 2 == 0:
            made.evaluation(step, "validation", {"wer": 1 / step, "words": 9}, [f"at {step}"])
    if status == "finished":
        made.evaluation(5, "test", {"wer": 0.125})  # of the best checkpoint
    made.close(status, limit_s=limit)


def interrupted(name: str, folder: Path) -> None:
    """Fails after step 5 and goes on from a checkpoint of step 3, to step 7."""
    send(name, folder, range(1, 6), status="failed")
    send(name, folder, range(4, 8), start=3)


def test_tensorboard_has_every_step_once_after_a_resume(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupted("tensorboard", folder)
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [e.step for e in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6, 7]
    assert board.Scalars("train/loss")[6].value == pytest.approx(1 / 7)
    assert [e.step for e in board.Scalars("validation/wer")] == [2, 4, 6]
    assert [(e.step, e.value) for e in board.Scalars("test/wer")] == [(5, 0.125)]
    assert set(board.Tags()["scalars"]) == NAMES
    assert board.Tensors("validation/remarks/text_summary")[-1].tensor_proto.string_val == [b"at 6"]


def check_mlflow(client, status: str) -> None:
    (run,) = client.search_runs([client.get_experiment_by_name("muster").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(s, 1 / s) for s in range(1, 8)]
    scores = client.get_metric_history(run.info.run_id, "validation/wer")
    assert [m.step for m in scores] == [2, 4, 6]
    assert set(run.data.metrics) == NAMES
    assert [m.step for m in client.get_metric_history(run.info.run_id, "test/wer")] == [5]
    assert run.data.params == {
        "name": "small",
        "training.lr": "0.001",
        "training.steps": "6",
        "logging.to": "['x']",
    }
    assert run.data.tags["validation/remarks"] == "at 6"
    assert (run.info.run_name, run.info.status) == ("small-1", status)
    assert SECRET not in str(run.to_dictionary())


@needs("mlflow")
def test_mlflow_goes_on_in_the_same_run(folder, monkeypatch, tmp_path):
    from mlflow.tracking import MlflowClient

    store = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    interrupted("mlflow", folder)
    check_mlflow(MlflowClient(store), "FINISHED")


@pytest.mark.full
@needs("mlflow")
def test_mlflow_makes_a_database_beside_the_runs(folder):
    from mlflow.tracking import MlflowClient

    interrupted("mlflow", folder)
    check_mlflow(MlflowClient(f"sqlite:///{folder.parent}/mlflow.db"), "FINISHED")


def wandb_records(path: Path):
    """The records of a run's file, which is a log in blocks, as LevelDB writes it."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part = path.read_bytes(), HEAD, b""
    while at + HEAD <= len(data):
        if (left := BLOCK - at % BLOCK) < HEAD:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(part)
            yield record
            part = b""


@pytest.mark.guides
@needs("wandb")
def test_weights_and_biases_offline_has_the_metrics_and_nothing_of_the_machine(
    folder, monkeypatch, capfd
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    interrupted("wandb", folder)
    files = sorted(
        (folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime_ns
    )
    assert len(files) == 2
    assert (
        len({file.name for file in files}) == 1
    )  # the same id: `wandb sync` makes one run of both
    found, names, exits, summary = [], set(), [], {}
    for file in files:
        for record in wandb_records(file):
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                names.add(name)
                if name in ("train/loss", "validation/wer"):
                    found.append((record.history.step.num, name, float(item.value_json)))
            for item in record.summary.update:
                summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            if record.WhichOneof("record_type") == "exit":
                exits.append(record.exit.exit_code)
            if record.WhichOneof("record_type") == "run":
                assert (record.run.display_name, record.run.host) == ("small-1", "")
                keys = {u.key for u in record.run.config.update}
                assert keys - {"_wandb"} == {"name", "training", "logging"}
    losses = [(s, "train/loss", 1 / s) for s in range(1, 8)]
    scores = [(s, "validation/wer", 1 / s) for s in (2, 4, 6)]
    assert sorted(found) == sorted(losses + scores)
    assert {n for n in names if not n.startswith("_")} == NAMES - {"test/wer"}
    assert summary["test/wer"] == 0.125
    assert exits == [1, 0]
    sent = b"".join(file.read_bytes() for file in files)
    private = [SECRET, str(Path.cwd()), sys.executable]
    assert [text for text in private if text.encode() in sent] == []
    assert list((folder / "wandb").rglob("requirements.txt")) == []
    assert list((folder / "wandb").rglob("output.log")) == []
    assert "wandb" not in "".join(capfd.readouterr())


@needs("trackio")
def test_trackio_goes_on_in_the_same_run(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        with suppress(KeyError):
            del sys.modules[name]  # it reads TRACKIO_DIR when it is imported
    interrupted("trackio", folder)
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("muster") == ["small-1"]
    rows = SQLiteStorage.get_logs("muster", "small-1")
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(s, 1 / s) for s in range(1, 8)]
    assert [row["step"] for row in rows if "validation/wer" in row] == [2, 4, 6]
    assert [row["step"] for row in rows if "test/wer" in row] == [5]
    assert SECRET not in str(rows)
