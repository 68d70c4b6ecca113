"""The best checkpoint is saved, kept, recorded and used; early stopping ends all ranks at one step."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from muster import run_directory
from muster.errors import CheckpointError, RecipeError
from muster.inference.choose import choose
from muster.inference.load import load_trained
from muster.observe.results import best_step, complete_steps, read_lines, selection_of
from muster.observe.results_table import best_words
from muster.recipe.load import load
from muster.recipe.training import EarlyStopping
from muster.tasks import build_task
from muster.training.checkpoint import Checkpoints
from muster.training.loop import train
from muster.training.selection import Selection, selection_for
from muster.worker.results import finish
from training import make_job

# Perplexity after so many steps; 4 is the best, where no checkpoint is due.
SCRIPT = {2: 5.0, 4: 3.0, 6: 4.0, 8: 6.0}
ASKED = ["training.steps=8", "evaluation.every_steps=2", "checkpoint.every_steps=3"]


def prepared(mesh, folder: str, overrides: list[str], recipe: str, script: dict[int, float]) -> Any:
    """The job, really evaluated, with the script's perplexity instead of the real one."""
    job = make_job(mesh, folder, [*ASKED, *overrides], recipe)
    seen = job.selection.step or 0
    steps = iter(sorted(step for step in script if step > seen))
    real = job.task.summarise
    job.task.summarise = lambda counts: real(counts) | {"perplexity": script[next(steps)]}
    return job


def run(mesh, folder, overrides, recipe, script, stop: int | None = None) -> int:
    """Train, as if a stop had been asked for during step `stop`. Steps done."""
    job = prepared(mesh, folder, overrides, recipe, script)
    lines = Path(folder) / "metrics.jsonl"
    job.observer.stop_requested = lambda: stop is not None and len(read_lines(lines)) == stop - 1
    done = train(job)
    job.observer.close()
    mesh.barrier()
    return done


@pytest.fixture(scope="module")
def tiny_recipe(tmp_path_factory) -> tuple[str, list[str]]:
    import tiny

    folder = tmp_path_factory.mktemp("tiny")
    recipe = tiny.write(folder)
    (folder / "unseen.txt").write_text(
        "Two roads diverged in a yellow wood, and sorry I could not."
    )
    return str(recipe), [f"data.validation={folder / 'unseen.txt'}"]


@pytest.fixture(scope="module")
def finished(ranks, tiny_recipe, tmp_path_factory) -> Path:
    recipe, unseen = tiny_recipe
    folder = tmp_path_factory.mktemp("finished")
    assert ranks(1)(run, str(folder), [*unseen, "checkpoint.keep=1"], recipe, SCRIPT) == [8]
    return folder


def test_the_best_step_is_saved_where_no_checkpoint_was_due_and_never_pruned(finished):
    assert complete_steps(finished) == [4, 8]
    root = finished / "checkpoints"
    assert best_step(root) == 4
    assert selection_of(root)["best"] == 3.0
    marked = [
        (e["step"], e["best"])
        for e in read_lines(finished / "events.jsonl")
        if e["event"] == "evaluation"
    ]
    assert marked == [(2, True), (4, True), (6, False), (8, False)]


# At 4, an evaluation is due, and is made after the stop.
@pytest.mark.guides
@pytest.mark.parametrize("stop", [4, pytest.param(5, marks=pytest.mark.full)])
def test_a_resumed_run_keeps_the_best_that_it_had(ranks, tiny_recipe, finished, tmp_path, stop):
    recipe, unseen = tiny_recipe
    overrides = [*unseen, "checkpoint.keep=1"]
    assert ranks(1)(run, str(tmp_path), overrides, recipe, SCRIPT, stop) == [stop]
    assert ranks(2)(run, str(tmp_path), overrides, recipe, SCRIPT) == [8, 8]
    assert complete_steps(tmp_path) == [4, 8]
    straight, resumed = (selection_of(f / "checkpoints") for f in (finished, tmp_path))
    assert resumed == straight


def killed(mesh, folder, overrides, recipe, script, method: str) -> None:
    """As if the process had been killed at the beginning of this method of the save at step 4."""
    job = prepared(mesh, folder, overrides, recipe, script)
    real = getattr(Checkpoints, method)

    def killed_at_4(self, first, *rest):
        if (first if isinstance(first, int) else int(first.name[5:])) == 4:
            raise RuntimeError("killed")
        return real(self, first, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, method, killed_at_4)
        with pytest.raises(RuntimeError, match="killed"):
            train(job)
    job.observer.close()


@pytest.mark.guides
@pytest.mark.parametrize(
    ("method", "best"), [("_write_manifest", 2), pytest.param("_prune", 4, marks=pytest.mark.full)]
)
def test_a_kill_while_the_best_is_saved_leaves_a_mark_that_holds(
    ranks, tiny_recipe, finished, tmp_path, method, best
):
    """Before its manifest the one before is the best and still there; after it, it is itself."""
    recipe, unseen = tiny_recipe
    overrides = [*unseen, "checkpoint.keep=1"]
    ranks(1)(killed, str(tmp_path), overrides, recipe, SCRIPT, method)
    assert best_step(tmp_path / "checkpoints") == best
    assert best in complete_steps(tmp_path)
    ranks(1)(run, str(tmp_path), overrides, recipe, SCRIPT)
    assert complete_steps(tmp_path) == [4, 8]
    assert selection_of(tmp_path / "checkpoints") == selection_of(finished / "checkpoints")


def finish_and_weigh(mesh, folder, overrides, recipe, script) -> tuple[dict[str, Any], Any]:
    job = prepared(mesh, folder, overrides, recipe, script)
    done = train(job)
    results = finish(job, run_directory.Run(Path(folder)), done)
    state = job.engine.state()["model"]
    whole = {n: getattr(t, "full_tensor", lambda t=t: t)().float().cpu() for n, t in state.items()}
    job.observer.close()
    return results, whole


@pytest.mark.guides
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero3", marks=pytest.mark.full)])
def test_an_engine_that_has_trained_in_shards_is_scored_with_its_best_weights(
    ranks, tiny_recipe, tmp_path, strategy
):
    """The test data is scored twice: with the last weights, then with those of the best step."""
    recipe, unseen = tiny_recipe
    file = unseen[0].partition("=")[2]
    asked = [*unseen, f"data.test={file}", f"distributed.strategy={strategy}"]
    asked += ["evaluation.final=true", "training.lr=3e-3"]
    (tmp_path / "run.json").write_text('{"created": 0}')
    script = SCRIPT | {9: 60.0, 10: 30.0}
    results, whole = ranks(2)(finish_and_weigh, str(tmp_path), asked, recipe, script)[0]
    assert (results["last_scores"]["perplexity"], results["scores"]["perplexity"]) == (60.0, 30.0)
    best, last = (results[key].rpartition("-")[2] for key in ("checkpoint", "last_checkpoint"))
    assert (best, last) == ("4", "8")
    assert results["best"]["step"] == 4
    assert best_words(results["best"]) == (
        "step 4: validation perplexity 3.000; the last, step 8, is worse: perplexity 6.000"
    )
    alone = load_trained(tmp_path)
    assert alone.words == "step-4, the best by validation perplexity 3.000; the last is step-8"
    for name, value in alone.model.state_dict().items():
        assert torch.equal(whole[name], value), name
    losses = [scores["loss"] for scores in (results["last_scores"], results["scores"])]
    assert losses[0] != losses[1]


def finish_without_best(mesh, folder, overrides, recipe, script) -> dict[str, Any]:
    """The best checkpoint is damaged before the run scores it."""
    job = prepared(mesh, folder, overrides, recipe, script)
    done = train(job)
    damage(Path(folder) / "checkpoints" / "step-4")
    results = finish(job, run_directory.Run(Path(folder)), done)
    job.observer.close()
    return results


def damage(checkpoint: Path) -> None:
    shard = next(checkpoint.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


@pytest.mark.guides
def test_a_best_checkpoint_that_is_damaged_does_not_end_a_run(ranks, tiny_recipe, tmp_path):
    recipe, unseen = tiny_recipe
    file = unseen[0].partition("=")[2]
    asked = [*unseen, f"data.test={file}", "evaluation.final=true"]
    (tmp_path / "run.json").write_text('{"created": 0}')
    (results,) = ranks(1)(finish_without_best, str(tmp_path), asked, recipe, SCRIPT | {9: 60.0})
    assert results["scores"]["perplexity"] == 60.0
    assert results["last_scores"] == {}


def disagreeing(mesh, folder, overrides, recipe) -> tuple[int, bool]:
    """Rank 1 sees a score that improves for ever."""
    script = {2: 5.0, 4: 3.0, 6: 2.95, 8: 3.5, 10: 1.0}
    if mesh.rank == 1:
        script = {step: 10.0 - step for step in script}
    job = prepared(mesh, folder, overrides, recipe, script)
    done = train(job)
    job.observer.close()
    return done, job.ended_early


def test_all_ranks_end_early_at_the_same_step_and_a_resumed_run_stays_ended(
    ranks, tiny_recipe, tmp_path
):
    recipe, unseen = tiny_recipe
    early = ["training.early_stopping.patience=2", "training.early_stopping.min_delta=0.1"]
    asked = [*unseen, "training.steps=30", *early]
    assert ranks(2)(disagreeing, str(tmp_path), asked, recipe) == [(8, True)] * 2
    assert selection_of(tmp_path / "checkpoints")["best_step"] == 6  # better, though by less
    stops = [e for e in read_lines(tmp_path / "events.jsonl") if e["event"] == "early_stop"]
    assert [(e["step"], e["words"]) for e in stops] == [
        (8, "no better perplexity than 3 in 2 evaluations")
    ]
    assert ranks(1)(disagreeing, str(tmp_path), asked, recipe) == [(8, True)]
    patient = [*asked, "training.steps=12", "training.early_stopping.patience=3"]
    script = {10: 3.0, 12: 1.0}
    assert ranks(1)(run, str(tmp_path), patient, recipe, script) == [10]
    ends = [*asked, "training.steps=8"]  # where it would have ended anyway
    assert ranks(1)(disagreeing, str(tmp_path / "ends"), ends, recipe) == [(8, True)]
    events = read_lines(tmp_path / "ends" / "events.jsonl")
    assert "early_stop" not in {event["event"] for event in events}


def test_early_stopping_needs_an_evaluation_before_the_end(tiny_recipe, tmp_path):
    recipe, unseen = tiny_recipe
    asked = [*unseen, "training.steps=8", "training.early_stopping.patience=2"]
    loaded = load(recipe, [*asked, "evaluation.every_steps=8"])
    with pytest.raises(RecipeError, match=r"every_steps is 8 and the run has 8 steps"):
        selection_for(loaded, build_task(loaded), 8)


def feed(rule: Selection, *scores: float, name: str = "wer") -> list[bool]:
    return [rule.add(step, {name: score}) for step, score in enumerate(scores, 1)]


def test_the_first_of_equal_scores_is_the_best_and_one_that_is_not_finite_never():
    rule = Selection("wer", {"wer": "min"})
    assert feed(rule, math.nan, 0.5, 0.5, math.inf, 0.4) == [False, True, False, False, True]
    assert (rule.best_step, rule.best) == (5, 0.4)
    more = Selection("accuracy", {"accuracy": "max"})
    assert feed(more, 0.5, 0.4, 0.6, name="accuracy") == [True, False, True]
    with pytest.raises(RecipeError, match="'wer' is not among the scores of this task: cer"):
        rule.add(6, {"cer": 0.1})


def test_patience_counts_from_the_last_improvement_that_is_large_enough():
    rule = Selection("wer", {"wer": "min"}, early=EarlyStopping(patience=3, min_delta=0.1))
    ends = []
    for step, score in enumerate((0.5, 0.45, 0.41, 0.39, 0.35, 0.31, 0.30), 1):
        rule.add(step, {"wer": score})
        ends.append(rule.exhausted)
    assert ends == [False] * 6 + [
        True
    ]  # 0.39 is better than 0.5 by more than 0.1, 0.30 not than 0.39
    assert rule.best == 0.30
    again = Selection("wer", {"wer": "min"}, early=rule.early)
    again.load(json.loads(json.dumps(rule.state())), {7})
    assert again.exhausted
    assert again.state() == rule.state()


def test_what_another_score_chose_or_is_gone_is_not_the_best_any_more():
    rule = Selection("wer", {"wer": "min"})
    feed(rule, 0.5, 0.4)
    other = Selection("cer", {"cer": "min"})
    other.load(rule.state(), {2})
    assert other.best_step is None
    gone = Selection("wer", {"wer": "min"})
    gone.load(rule.state(), {1})
    assert gone.add(3, {"wer": 0.45})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ["evaluation.metric=wer"],
            "evaluation.metric is 'wer', which is no score of causal-lm; choose perplexity or",
        ),
        (
            ["training.early_stopping.patience=2", "evaluation.every_steps=null"],
            "training.early_stopping counts evaluations, and evaluation.every_steps is null",
        ),
    ],
)
def test_what_cannot_choose_is_refused_by_its_key(changes, words):
    with pytest.raises(RecipeError, match=words):
        load("gpt-micro", changes)


def test_a_checkpoint_of_a_run_is_chosen_by_word(finished, tmp_path):
    assert (
        choose(finished).words
        == "step-4, the best by validation perplexity 3.000; the last is step-8"
    )
    assert choose(finished, "last").saved.step == 8
    assert choose(finished, "step-4").words == ""
    assert [s.step for s in choose(finished, "best", 2).all] == [4, 8]
    assert [s.step for s in choose(finished, None, 2).all] == [8, 4]
    with pytest.raises(CheckpointError, match="expected best, last or one of step-8, step-4 in"):
        choose(finished, "step-5")
    with pytest.raises(CheckpointError, match="chooses among the checkpoints of a run"):
        choose(finished / "checkpoints" / "step-4", "best")
    with pytest.raises(
        CheckpointError, match="has 2 with a score on validation data; ask for fewer"
    ):
        choose(finished, "best", 3)
    shutil.copytree(finished, tmp_path / "run")
    cut_off = tmp_path / "run" / "checkpoints" / "step-9"
    cut_off.mkdir()
    assert choose(tmp_path / "run").words == choose(finished).words, "step-9 has no manifest"
    cut_off.rmdir()
    damage(tmp_path / "run" / "checkpoints" / "step-4")
    found = choose(tmp_path / "run")
    assert found.saved.step == 8
    assert "step-8, the last; the best is damaged (" in found.words
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        choose(tmp_path / "run", "best")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    assert choose(tmp_path / "run").words == "step-8, the last"
    with pytest.raises(CheckpointError, match="has no best checkpoint"):
        choose(tmp_path / "run", "best")


def test_the_mean_of_checkpoints_is_loaded_to_be_scored(finished):
    mean = load_trained(finished, average=2)
    assert mean.words == "the mean of step-8, step-4"
    states = [load_trained(finished, which=f"step-{n}").model.state_dict() for n in (4, 8)]
    for name, value in mean.model.state_dict().items():
        expected = (states[0][name].double() + states[1][name].double()) / 2
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-7)
