"""Several corpora with weights: which samples an epoch has."""

from collections import Counter

import numpy as np
import pytest

from muster.data.batches import BatchPlan
from muster.data.mixture import MixedSource, Mixture, mixture_of
from muster.data.sources import ListSource
from muster.errors import DataError, RecipeError
from muster.recipe.describe import to_yaml
from muster.recipe.load import from_resolved, load
from muster.tasks.speech import speech_source

PARTS = np.repeat([0, 1], [70, 30])


def epochs(plan, count):
    steps = plan.steps_per_epoch
    return [np.concatenate([plan.batch(e * steps + s) for s in range(steps)]) for e in range(count)]


@pytest.mark.parametrize("streams", [False, True])
def test_every_epoch_has_the_shares_and_no_sample_comes_twice_before_all_came_once(streams):
    """A corpus of 30 at half of 100 samples is passed through five times in three epochs; one of 70 has
    its first sample again only after the 70th."""
    groups = np.arange(100) // 7 if streams else None
    plan = BatchPlan(np.ones(100), 10, 3, 2, groups=groups, mixture=Mixture(PARTS, (2.0, 2.0)))
    assert plan.steps_per_epoch == 10
    seen = epochs(plan, 3)
    assert [int((PARTS[ids] == 1).sum()) for ids in seen] == [50, 50, 50]
    small, large = (Counter(np.concatenate(seen)[PARTS[np.concatenate(seen)] == p]) for p in (1, 0))
    assert set(small.values()) == {5}
    assert set(large.values()) == {2, 3}
    assert len(large) == 70
    assert max(Counter(seen[0][PARTS[seen[0]] == 0]).values()) == 1


def test_what_an_epoch_takes_of_each_corpus_is_said():
    assert Mixture(PARTS, (1.0, 3.0)).lines(["a", "s3://b"]) == [
        "train: 25.0% of an epoch from a: 25 samples, where it has 70",
        "train: 75.0% of an epoch from s3://b: 75 samples, where it has 30",
    ]


def test_an_epoch_depends_on_the_seed_and_its_number_alone():
    def plan(seed):
        return BatchPlan(np.ones(100), 10, seed, mixture=Mixture(PARTS, (1.0, 3.0)))

    walked = plan(5)
    before = [walked.batch(step).tolist() for step in range(25)]
    assert plan(5).batch(24).tolist() == before[24], "a resumed run goes on with other samples"
    assert plan(6).batch(24).tolist() != before[24]
    assert sorted(before[0] + before[1]) != sorted(before[10] + before[11])


def test_samples_of_row_groups_come_together():
    """An epoch that has a seventh of a corpus reads few of its row groups."""
    parts = np.repeat([0, 1], [700, 300])
    groups = np.arange(1000) // 10
    mixture = Mixture(parts, (0.1, 0.9))
    ids = mixture.samples(0, 0, groups)
    large = ids[parts[ids] == 0]
    assert len(large) == 100
    assert len(np.unique(groups[large])) == 10
    assert len(np.unique(groups[mixture.samples(0, 0)[:100]])) > 40


def test_shares_are_rounded_to_the_whole_epoch():
    counts = Mixture(np.repeat([0, 1, 2], [5, 3, 3]), (1.0, 1.0, 1.0)).counts
    assert sorted(counts.tolist()) == [3, 4, 4]


def test_a_source_without_samples_or_share_is_refused():
    with pytest.raises(DataError, match="source 2 of 2 has no usable sample"):
        Mixture(np.zeros(5, np.int64), (1.0, 1.0))
    with pytest.raises(RecipeError, match="the weight of source 2 gives it no sample"):
        Mixture(PARTS, (1e6, 1.0))
    with pytest.raises(RecipeError, match="does not say which corpus"):
        mixture_of(ListSource(["a", "b"]), (1.0, 1.0))


def test_sources_as_one_say_whose_a_sample_is():
    mixed = MixedSource([ListSource(["a", "b"], [1, 2]), ListSource(["c"], [3])])
    assert mixed.lengths.tolist() == [1, 2, 3]
    assert mixed.parts.tolist() == [0, 0, 1]
    assert mixed.name(2) == "sample 0"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[{path:a,weight:1},{path:b}]", "source 2 has no weight and others have"),
        ("[{path:a,weight:0},{path:b,weight:1}]", "source 1 has the weight 0; expected a number"),
        ("[{path:a,wieght:1}]", "source 1 has the key wieght; expected"),
        ("[{weight:1}]", "source 1 has no path"),
        ("[a,b]", "source 1 has no path"),
        ("[]", "the list is empty"),
        ("[{path:'s3://me:secret@bucket/x'}]", "credentials are read from"),
    ],
)
def test_a_list_of_sources_that_cannot_be_is_refused_in_one_sentence(value, words):
    with pytest.raises(RecipeError, match=rf"^data\.train: .*{words}") as caught:
        load("gpt-micro", [f"data.train={value}"])
    assert "secret" not in str(caught.value)


def test_images_take_one_source():
    with pytest.raises(RecipeError, match="image-classification takes one folder"):
        load("mnist", ["data.train=[{path:a},{path:b}]"])


def test_a_list_of_sources_survives_the_run_directory(tmp_path):
    recipe = load("gpt-micro", ["data.train=[{path:a,weight:3},{path:'s3://b/c',weight:1}]"])
    assert recipe.data.sources == ("a", "s3://b/c")
    assert recipe.data.weights == (3.0, 1.0)
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    assert from_resolved(tmp_path / "recipe.yaml").data == recipe.data


def test_clips_are_of_the_corpus_that_their_file_is_of(corpus_file, tmp_path):
    """Through the recipe; also after some were left out."""
    corpus_file("one/train-0.parquet", 3)
    corpus_file("one/train-1.parquet", 2)
    corpus_file("two/train.parquet", 4)
    one, two = tmp_path / "corpus" / "one", tmp_path / "corpus" / "two"
    recipe = load("speech", [f"data.train=[{{path:'{one}',weight:1}},{{path:'{two}',weight:1}}]"])
    source = speech_source(recipe, "train", lowercase=True)
    assert source.parts.tolist() == [0] * 5 + [1] * 4
    source.keep([True, False, True, True, True, False, True, True, True], "not wanted here")
    assert source.parts.tolist() == [0] * 4 + [1] * 3
    assert mixture_of(source, recipe.data.weights).counts.sum() == 7
