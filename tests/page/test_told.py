"""What a run was told, and what was planned."""

from pathlib import Path

from muster.page.build import read_document
from page import synthetic


def test_defaults_are_told_from_what_the_recipe_sets(tmp_path: Path) -> None:
    recipe = read_document(synthetic.write(tmp_path / "run", ranks=1, steps=5))["told"]["recipe"]
    keys = {row["key"]: row for row in recipe}
    assert keys["training.steps"] == {"key": "training.steps", "value": 10, "default": False}
    assert keys["training.lr"]["default"]
    assert keys["checkpoint.keep"]["default"]
    assert not any(isinstance(row["value"], dict) and row["value"] for row in recipe)


def test_variables_come_with_their_reason_and_who_set_them(tmp_path: Path) -> None:
    told = read_document(synthetic.write(tmp_path / "run", ranks=1, steps=5))["told"]
    assert told["environment"] == [
        {
            "name": "NCCL_NVLS_ENABLE",
            "value": "1",
            "reason": "reductions in the NVSwitch",
            "by": "muster",
        },
        {
            "name": "OMP_NUM_THREADS",
            "value": "8",
            "reason": "8 cores for each rank",
            "by": "user",
        },
    ]
    assert told["choices"] == [{"key": "compile", "value": True, "reason": "a GPU"}]


def test_data_is_told_by_split_with_what_was_dropped(tmp_path: Path) -> None:
    train, validation = read_document(synthetic.write(tmp_path / "run", ranks=1, steps=5))["told"][
        "data"
    ]
    assert (train["split"], train["samples"], train["hours"]) == ("train", 8000, 96.4)
    assert (train["dropped"], train["left_out"]) == (12, {"too long": 12})
    assert validation["dropped"] == 0


def test_the_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=1, steps=50)
    memory, step = read_document(path)["planned"]
    assert (memory["planned"], memory["measured"]) == (21.5, 19.75)
    assert step["planned"] == 0.41
    assert step["measured"] is not None
    assert 0.35 < step["measured"] < 0.5
