"""What a run was told, and what was planned."""

import json
import re
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


def test_numbers_that_json_does_not_have_do_not_spoil_the_document(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", ranks=1, steps=20, state="finished")
    recipe = (path / "recipe.yaml").read_text()
    assert "max_grad_norm: 1.0" in recipe
    (path / "recipe.yaml").write_text(recipe.replace("max_grad_norm: 1.0", "max_grad_norm: .inf"))
    for file, key in (("plan.json", "step_time_s"), ("training_results.json", "total_time_s")):
        text = (path / file).read_text()
        (path / file).write_text(re.sub(f'"{key}": [0-9.]+', f'"{key}": NaN', text))
    with (path / "events.jsonl").open("a") as out:
        scores = {"wer": float("nan"), "cer": float("inf")}
        event = {"event": "evaluation", "time": 9e9, "step": 20, "split": "test", "scores": scores}
        out.write(json.dumps(event) + "\n")
    found = read_document(path)
    json.dumps(found, allow_nan=False)
    assert found["evaluations"][-1]["scores"] == {}
    assert {row["key"]: row["value"] for row in found["told"]["recipe"]}[
        "training.max_grad_norm"
    ] == "inf"
