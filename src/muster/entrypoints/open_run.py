"""Before a run starts: checks, and creating or finding its run directory."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from muster.errors import CheckpointError, LaunchError, MusterError, RecipeError
from muster.urls import is_remote
from muster.workloads import WORKLOADS
from muster.writing import write

if TYPE_CHECKING:
    from io import TextIOWrapper

    from rich.console import Console

    from muster.recipe.schema import Recipe
    from muster.run_directory import Run

log = logging.getLogger(__name__)


def existing_run(text: str, runs_elsewhere: bool = False) -> Run | None:
    """A run to resume; None for anything else. On other nodes than 0 it may already be running."""
    run = _run_at(text)
    if run is None:
        return None
    if not runs_elsewhere and run.state() in ("queued", "starting", "running"):
        raise LaunchError(f"{run.name} is still running; watch it with `muster watch {text}`")
    return run


def _run_at(text: str) -> Run | None:
    from muster import run_directory

    path = Path(text)
    if text == "latest" and not path.exists():
        path = Path("runs", text)
    return run_directory.Run(path.resolve()) if (path / "run.json").is_file() else None


def await_lost_owner(text: str, console: Console | None = None) -> None:
    """Of a run whose node 0 is lost: until it is certain that it is."""
    if run := _run_at(text):
        _await_end(run, console)


def _await_end(run: Run, console: Console | None) -> None:
    """A lost pod's run looks like a running one, or by a clock that is wrong a living one like a lost one, until
    its heartbeat file has not changed for long. A queued run waits for this very start."""
    from muster import run_directory

    limit = run_directory.STALE_S
    start, told = time.monotonic(), False
    while (host := run.elsewhere()) and run.info().get("state") in ("starting", "running"):
        waited, alive = time.monotonic() - start, run.state() != "interrupted"
        if waited > limit + 5.0 or (waited > limit and not alive):
            break
        if not told:
            told = True
            _say(
                f"{run.name} ran on {host}; making sure for {limit:.0f} s that it does not", console
            )
        time.sleep(min(1.0, limit / 10))
    if run.state() == "queued":
        run.update(state="stopped")


def open_run(
    recipe: Recipe,
    ranks: int,
    local_ranks: int,
    existing: Run | None,
    name: str | None,
    console: Console | None = None,
) -> tuple[Run, TextIOWrapper, Recipe]:
    """The run directory, the claim on it, and the recipe written into it: of a new run on `ranks`,
    `local_ranks` on each machine, or of one to resume with the same maths. With a `console`, speech is indexed first, with a progress bar."""
    from muster import run_directory
    from muster.recipe.batch import scaling_words
    from muster.recipe.own_task import adopt, changed_original, with_original

    if existing and recipe.training.scale_with_ranks != "none":
        raise RecipeError(
            f"{scaling_words(recipe.training)}: {existing.name} keeps the global batch and the learning rate of "
            "its first start; leave that out, or start a new run: muster train RECIPE"
        )
    root = Path(recipe.logging.dir)
    if name is not None:
        run_directory.check_name(name)
    if existing is None and name and (root / name / "run.json").is_file():
        _await_end(run_directory.Run(root / name), console)
        existing = existing_run(str(root / name))
    recipe, words = _settled(recipe, ranks, local_ranks, existing)
    if words:
        _say(words, console)
    recipe = _as_begun(recipe, existing, console)
    if existing:
        _check_same_maths(existing, recipe)
    if console:
        _index_speech(recipe)
    copied = (existing.info().get("task") or {}) if existing else {}
    if existing and changed_original(recipe, copied):
        newer = with_original(recipe, copied) if _nothing_done(existing, recipe) else None
        _say(str(changed_original(recipe, copied, taken=newer is not None)), console)
        recipe = settle_task(newer) if newer else recipe
    mode = recipe.logging.mode
    if existing:
        existing.refuse_links()
    run = existing or run_directory.create(root, recipe.name, {}, exact=name, mode=mode)
    claim = run.claim()
    if existing:
        run.open_to(mode)
    recipe = _restore(recipe, run, console)
    recipe, record = adopt(recipe, run.path)
    if record:
        run.update(task=record)
    _write_recipe(run, recipe)
    return run, claim, recipe


def _nothing_done(run: Run, recipe: Recipe) -> bool:
    """Whether the run has no step to go on from, here or in a bucket."""
    from muster.observe.results import step_folders

    elsewhere = recipe.checkpoint.mirror or is_remote(recipe.checkpoint.resume)
    return not (elsewhere or run.last_metrics() or step_folders(run.path / "checkpoints"))


def _as_begun(recipe: Recipe, run: Run | None, console: Console | None) -> Recipe:
    """With what newer keys mean for the checkpoint to go on from, unless the recipe gives them."""
    from muster.observe.results import complete_steps
    from muster.recipe.recorded import as_begun, as_recorded

    asked = recipe.checkpoint.resume
    if run and complete_steps(run.path):
        folder = run.path
    elif asked != "auto" and not is_remote(asked):
        folder = Path(asked)
    else:
        return recipe
    if as_recorded(recipe) is recipe:
        return recipe
    from muster.training.manifest import open_checkpoint

    try:
        saved = open_checkpoint(folder, parts=0)
        begun = as_begun(recipe, saved.recipe)
    except (CheckpointError, OSError, ValueError):  # told by whoever loads it
        return recipe
    if begun is not recipe:
        packing = begun.data.sequence_packing
        _say(f"data.sequence_packing={packing}, as {saved.path} was trained with", console)
    return begun


def _restore(recipe: Recipe, run: Run, console: Console | None) -> Recipe:
    """From the mirror, or another bucket that `checkpoint.resume` names, if there is no checkpoint here. The
    recipe for what is there then."""
    from muster.observe.results import complete_steps

    options = recipe.checkpoint
    if complete_steps(run.path) or not (options.mirror or is_remote(options.resume)):
        return recipe
    from muster.training.mirror import restore_if_none

    try:
        found = restore_if_none(run.path, run.name, options.mirror, options.resume)
        if found:
            recipe = _as_begun(recipe, run, console)
            _check_same_maths(run, recipe)
    except MusterError:
        run.update(state="failed")
        raise
    if found:
        _say(f"{found.name} was copied from {options.mirror or options.resume}", console)
    return recipe


def _say(words: str, console: Console | None) -> None:
    if console:
        console.print(words, soft_wrap=True, markup=False)
    else:
        log.info("%s", words)


def _settled(
    recipe: Recipe, ranks: int, local_ranks: int, existing: Run | None
) -> tuple[Recipe, str]:
    """`training.scale_with_ranks` applied, as it was at the first start or for this one; and in words."""
    from muster.parallel.layout import layout_for
    from muster.recipe.batch import scaling_words, settle, settle_as
    from muster.recipe.load import from_resolved

    before = recipe.training
    if before.scale_with_ranks == "none":
        return recipe, ""
    if existing and (existing.path / "recipe.yaml").is_file():
        recipe = settle_as(recipe, from_resolved(existing.path / "recipe.yaml").training)
    layout = layout_for(recipe.distributed, ranks, local_world=local_ranks)
    recipe = settle(recipe, layout.data_ranks)
    now, part = recipe.training, before.global_batch_size
    return recipe, (
        f"{scaling_words(before)}: {part} × {now.global_batch_size // part} "
        f"data ranks = {now.global_batch_size} samples per optimizer step, lr={now.lr:g}; this run keeps "
        "them on any number of ranks, a new run on other ranks trains differently"
    )


def check_before_launch(
    recipe: Recipe, ranks: int, local_ranks: int, resumed: bool = False
) -> Recipe:
    """Refuse what is known to fail on `ranks` ranks, `local_ranks` on each machine, before a run directory
    exists. A run that goes on has its model and tokenizer in its checkpoint. The recipe comes back with all
    options of its task."""
    from muster.data import corpus
    from muster.entrypoints.before_launch import check_model, check_samples, check_tokenizer
    from muster.observe import prometheus
    from muster.observe.trackers import named as trackers
    from muster.parallel.adapters import refuse_adapters
    from muster.parallel.layout import layout_for
    from muster.parallel.optimizers.facts import refuse_optimizer
    from muster.recipe.batch import settle, solve

    data = recipe.data
    layout = layout_for(recipe.distributed, ranks, local_world=local_ranks)
    layout.check_sequences(recipe)
    refuse_optimizer(recipe, layout)
    refuse_adapters(recipe, layout)
    solve(recipe.training, layout.data_ranks)
    trackers.refuse_missing(recipe.logging.to)
    if recipe.logging.prometheus:
        prometheus.refuse_missing()
    if recipe.task in WORKLOADS and (not resumed or recipe.model.pretrained is None):
        check_model(recipe, layout)
    if recipe.checkpoint.mirror and not resumed:
        from muster.observe.progress import working
        from muster.training import mirror

        with working(f"trying to write to checkpoint.mirror, {recipe.checkpoint.mirror}"):
            mirror.check(recipe.checkpoint.mirror)
    corpus.check(recipe.task, data.sources, data.validation, data.test)
    if recipe.task in WORKLOADS:
        tokenizer = None if resumed else check_tokenizer(recipe)
        training = settle(recipe, layout.data_ranks).training
        check_samples(recipe, training.global_batch_size, tokenizer)
    return settle_task(recipe)


def settle_task(recipe: Recipe) -> Recipe:
    """Of a user's own task, its class is looked at and its options are filled in; torch is imported."""
    from muster.recipe.own_task import parse

    if parse(recipe.task) is None and not recipe.task_options:
        return recipe
    from muster.tasks.own import settle_options

    return settle_options(recipe)


def _index_speech(recipe: Recipe) -> None:
    """Durations are read here, once and with a progress bar, rather than by the ranks."""
    from muster.data import corpus
    from muster.data.speech import index
    from muster.observe.progress import working
    from muster.workloads import workload

    if workload(recipe.task).content != "speech":
        return
    data = recipe.data
    named = (data.sources, data.validation, data.test)
    if any(is_remote(spec) for spec in (*data.sources, data.validation, data.test) if spec):
        return  # the ranks copy it first
    splits: tuple[corpus.Split, ...] = ("train", "validation", "test")
    paths = [p for s in splits for p in corpus.split_files(*named, s, data.max_parquet_files)]
    files = list(dict.fromkeys(paths))
    with working("indexing durations", "clips") as progress:
        index.ensure_index(files, data.audio_column, data.text_column, progress=progress)


def _check_same_maths(run: Run, recipe: Recipe) -> None:
    """A run resumes only with the same maths; checked before its recipe is replaced. One that was killed
    during its first save has no checkpoint, and starts from step 0."""
    from muster.observe.results import complete_steps
    from muster.training.compatibility import refuse_other_recipe
    from muster.training.manifest import open_checkpoint

    if not complete_steps(run.path):
        return
    saved = open_checkpoint(run.path, parts=0)
    refuse_other_recipe(saved, recipe.as_dict())
    if recipe.training.steps is not None and recipe.training.steps < saved.step:
        raise RecipeError(
            f"training.steps: {recipe.training.steps} is less than the {saved.step} steps that {run.name} has done; give "
            "at least those, or start a run of another name"
        )


def _write_recipe(run: Run, recipe: Recipe) -> None:
    from muster.recipe.describe import to_yaml
    from muster.recipe.own_task import shown

    write(run.path / "recipe.yaml", to_yaml(shown(recipe, run.path)))  # ranks may be reading it
