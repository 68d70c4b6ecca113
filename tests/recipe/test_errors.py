"""What a user reads when a key or a value is wrong: one line, the key, the cure."""

from __future__ import annotations

import pytest

from muster.errors import RecipeError
from muster.recipe.load import load


def refusal(*overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load("speech", overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("training.learn_rate=3", "training.lr"),
        ("training.bach_size=3", "training.global_batch_size"),
        ("trainning.steps=3", "training.steps"),
        ("trainning=3", "training"),
        ("lr=3", "training.lr"),
        ("training.strategy=ddp", "distributed.strategy"),
        ("optimiser={lr: 3}", "training.lr"),
        ("data.spec_augment.freq_mask=3", "data.spec_augment.freq_masks"),
        ("training.warmup-steps=3", "training.warmup_steps"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(override: str, nearest: str) -> None:
    assert refusal(override).endswith(f": no such key; nearest is {nearest}")


def test_an_unknown_key_like_no_other_points_to_the_list() -> None:
    assert refusal("zzz=1") == "zzz: no such key; `muster recipe schema` lists them all"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.steps=many", "got 'many', expected a whole number greater than 0"),
        ("training.steps=0", "got 0, expected a whole number greater than 0"),
        ("training.steps=1.5", "got 1.5, expected a whole number greater than 0"),
        ("training.steps=true", "got true, expected a whole number greater than 0"),
        ("training.lr=-1", "got -1, expected a number greater than 0"),
        ("training.lr=nan", "got .nan, expected a number greater than 0"),
        ("training.lr.x=3", "got {x: 3}, expected a number greater than 0"),
        ("training.warmup_steps=-1", "got -1, expected a whole number of at least 0"),
        ("model.dropout=2", "got 2, expected a number from 0 to 1"),
        ("training.betas=[1]", "got [1], expected a list of 2 numbers"),
        ("training.betas=[1,x]", "got [1, x], expected a list of 2 numbers"),
        ("data.workers=0", "got 0, expected a whole number greater than 0 or auto"),
        ("data.lowercase=maybe", "got 'maybe', expected true or false"),
        (
            "training.schedule=cosin",
            "got 'cosin', expected cosine, linear, constant or wsd; nearest is cosine",
        ),
        ("distributed.strategy=fdsp", "context or hybrid; nearest is fsdp"),
        ("training.compile=atuo", "expected true or false or auto; nearest is auto"),
        ("logging.dir=3", "got 3, expected text: put it in quotes"),
        ("seed=-1", "got -1, expected a whole number from 0 to 2147483647"),
        ("training=3", "got 3, expected keys of its own, such as training.steps"),
        ("data.spec_augment=3", "got 3, expected keys of its own, such as data.spec_augment.freq_"),
        ("logging=null", "leave the section out for its defaults"),
        ("logging.dir=[" + "a," * 99 + "a]", "a, a, a…, expected text"),
    ],
)
def test_a_wrong_value_says_what_it_got_and_what_would_be_right(
    override: str, message: str
) -> None:
    text = refusal(override)
    key = override.partition("=")[0].removesuffix(".x")
    assert text.startswith(f"{key}: got ")
    assert message in text


def test_a_name_that_cannot_be_a_folder_is_refused() -> None:
    assert refusal("name='a b'").startswith("name: got 'a b', expected text matching `^")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["training.epochs=3", "training.steps=9"],
            "training: needs either steps or epochs, got both",
        ),
        (["~training.steps"], "training: needs either steps or epochs, got neither"),
        (
            ["evaluation.decoder=greedy"],
            "evaluation: ngram needs the beam: set evaluation.decoder=beam",
        ),
        (["training.lr_scaling=linear"], "training: lr_scaling is 'linear' without a reference"),
    ],
)
def test_keys_that_contradict_each_other_name_their_section(
    overrides: list[str], message: str
) -> None:
    assert refusal(*overrides).startswith(message)


def test_of_several_errors_the_first_is_told_and_the_others_named() -> None:
    assert refusal("training.steps=0", "data.mels=x", "lr=3") == (
        "lr: no such key; nearest is training.lr (and 2 more: data.mels, training.steps)"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training", "training: not an override, expected key=value"),
        ("=3", "=3: not an override, expected key=value"),
        ("model@x=3", "model@x=3: not an override, expected key=value"),
        ("training.lr=1,2", "training.lr: got 1,2, which is several values, expected one"),
        ("training.betas=[1,2", "training.betas: got [1,2, which has no end"),
        ('name="x', 'name: got "x, which has no end'),
        (
            "~training.eps",
            "~training.eps: nothing to delete, the recipe does not give training.eps",
        ),
    ],
)
def test_an_override_that_cannot_be_read_is_refused(override: str, message: str) -> None:
    assert refusal(override).startswith(message)
