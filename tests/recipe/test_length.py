"""`training.steps` and `training.epochs`: the one given last counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.errors import RecipeError
from muster.recipe.load import load

BASE = "name: base\ntraining: {steps: 5}\n"
OLDER = "name: base\ntraining: {num_train_epochs: 5}\n"


def lengths(folder: Path, *overrides: str, **files: str) -> tuple[int | None, int | None]:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    training = load(str(folder / "mine.yaml"), overrides).training
    return training.steps, training.epochs


@pytest.mark.parametrize(
    ("file", "overrides", "expected"),
    [
        (BASE, ["training.epochs=2"], (None, 2)),
        (BASE, ["training.num_train_epochs=2"], (None, 2)),
        (OLDER, ["training.steps=2"], (2, None)),
        (OLDER, ["training.max_steps=2"], (2, None)),
        (BASE, ["training={epochs: 2}"], (None, 2)),
        (BASE, ["training.epochs=null"], (5, None)),
        (BASE, ["training.steps=null", "training.epochs=2"], (None, 2)),
        (BASE, ["training.epochs=2", "training.steps=null"], (None, 2)),
        (BASE, ["training.steps=9"], (9, None)),
        ("training: {steps: 5}\nseed: ${training.steps}\n", ["training.steps=2"], (2, None)),
    ],
)
def test_an_override_replaces_the_length_of_the_file(tmp_path, file, overrides, expected):
    assert lengths(tmp_path, *overrides, mine=file) == expected


@pytest.mark.parametrize(
    ("file", "overrides", "got"),
    [
        (BASE, ["training.steps=2", "training.epochs=2"], "both"),
        (BASE, ["training.max_steps=2", "training.num_epochs=2"], "both"),
        ("training: {steps: 2, epochs: 3}\n", [], "both"),
        ("training: {max_steps: 2, epochs: 3}\n", [], "both"),
        (BASE, ["training.steps=null"], "neither"),
        ("name: x\n", [], "neither"),
    ],
)
def test_two_lengths_in_one_place_and_none_are_refused(tmp_path, file, overrides, got):
    with pytest.raises(RecipeError, match=f"^training: needs either steps or epochs, got {got}"):
        lengths(tmp_path, *overrides, mine=file)


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        ("defaults: [base]\ntraining: {epochs: 2}\n", (None, 2)),
        ("defaults: [base]\ntraining: {num_epochs: 2}\n", (None, 2)),
        ("defaults: [base, _self_]\ntraining: {epochs: 2}\n", (None, 2)),
        ("defaults: [_self_, base]\ntraining: {epochs: 2}\n", (5, None)),
        ("defaults: [base]\n", (5, None)),
        ("defaults: [speech, other]\n", (None, 3)),
        ("defaults: [other, speech]\n", (750, None)),
        ("defaults: [middle]\n", (None, 4)),
        ("defaults: [middle]\ntraining: {steps: 8}\n", (8, None)),
        ("defaults: [base, {training: long}]\n", (None, 99)),
    ],
)
def test_a_file_replaces_the_length_of_what_it_builds_on(tmp_path, mine, expected):
    files = {
        "base": BASE,
        "other": "training: {epochs: 3}\n",
        "middle": "defaults: [base]\ntraining: {epochs: 4}\n",
        "training__long": "epochs: 99\n",
    }
    assert lengths(tmp_path, mine=mine, **files) == expected


def test_both_in_a_file_that_builds_on_another_are_refused(tmp_path):
    both = "defaults: [base]\ntraining: {epochs: 2, steps: 3}\n"
    with pytest.raises(RecipeError, match="got both"):
        lengths(tmp_path, mine=both, base=BASE)
