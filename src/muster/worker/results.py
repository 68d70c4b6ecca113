"""Files of a run: data.json, plan.json, environment.json and training_results.json."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch

from muster import __version__, run_directory
from muster.auto import AutoChoice
from muster.data.account import DATA_FILE, make_account
from muster.data.batches import BatchPlan
from muster.data.mixture import mixture_of
from muster.data.splits import Split
from muster.hardware import rehearsal
from muster.observe.choices import PLAN_FILE, to_json
from muster.observe.events import EVENTS_FILE, restarts_in, worlds_in
from muster.observe.heartbeat import beat
from muster.observe.observer import memory_gib
from muster.observe.results import (
    best_step,
    complete_steps,
    read_lines,
    stream_lines,
    summarise_metrics,
    write_json,
)
from muster.parallel.layout import strategy_name
from muster.parallel.mesh import Mesh
from muster.recipe.batch import BatchSizes
from muster.recipe.references import may_be_secret
from muster.recipe.schema import Recipe
from muster.tasks.base import Task
from muster.training.answers import answers, continuations, generates_answers
from muster.training.evaluate import Evaluation, log_bad_rows
from muster.training.job import Job
from muster.training.loop import score
from muster.worker.recordings import keep_recordings

log = logging.getLogger(__name__)

TOLD = ("NCCL_", "CUDA_", "OMP_", "GLOO_", "TORCH_")  # begin the names of variables
HIDDEN = "not written down: it may be a secret"


def write_plan(
    run: run_directory.Run,
    mesh: Mesh,
    sizes: BatchSizes,
    plan: BatchPlan,
    steps: int,
    precision: str,
    parameters: int,
    promised: dict[str, Any],
    choices: dict[str, AutoChoice],
) -> None:
    """plan.json and environment.json: what was planned, what was found."""
    devices = mesh.gather(_device_name(mesh))
    if not mesh.first:
        return
    write_json(
        run.path / PLAN_FILE,
        {
            "strategy": strategy_name(mesh.layout),
            "layout": vars(mesh.layout),
            "global_batch_size": sizes.global_batch,
            "per_device_batch_size": sizes.per_device,
            "gradient_accumulation_steps": sizes.accumulation,
            "data_ranks": sizes.data_ranks,
            "steps": steps,
            "steps_per_epoch": plan.steps_per_epoch,
            "samples": len(plan.lengths),
            "parameters": parameters,
            "precision": precision,
            "ranks_per_gpu": mesh.ranks_per_gpu,
            "choices": to_json(choices) if mesh.device.type == "cuda" else {},
            **promised,
        },
    )
    write_json(
        run.path / "environment.json",
        {
            "muster": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "devices": devices,
            "threads_per_rank": torch.get_num_threads(),
            "variables": told_variables(os.environ),
        },
    )


def told_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of libraries that training depends on, without what may be a secret."""
    return {
        name: HIDDEN if may_be_secret(name, value) else value
        for name, value in sorted(environment.items())
        if name.startswith(TOLD)
    }


def write_data(run: run_directory.Run, task: Task, recipe: Recipe) -> list[str]:
    """data.json: what is read of each split, and what is left out. Rank 0 calls it; returns it in words."""
    data = recipe.data
    specs: dict[Split, str | Sequence[str] | None]
    specs = {"train": data.sources, "validation": data.validation, "test": data.test}
    content = task.facts.content
    account = make_account(
        task.source,
        specs,
        content,
        data.max_parquet_files,
        check_overlap=recipe.evaluation.check_overlap,
    )
    if (train := task.source("train")) and (mixture := mixture_of(train, data.weights)):
        account.notes.extend(mixture.lines(data.sources))
    write_json(run.path / DATA_FILE, account.to_json())
    lines = account.lines()
    for line in lines:
        log.info("%s", line)
    return lines


def _device_name(mesh: Mesh) -> str:
    if mesh.device.type == "cuda":
        return f"{torch.cuda.get_device_name(mesh.device)} ({mesh.device})"
    threads = torch.get_num_threads()
    return f"CPU ({threads} thread{'s' if threads > 1 else ''})"


def finish(job: Job, run: run_directory.Run, done: int) -> dict[str, Any]:
    """Evaluate the trained model, and write the results: rank 0 returns them. The memory is that of the rank
    that needed most, as it is planned; a pipeline's stages differ."""
    peak = max(job.mesh.gather(memory_gib()))
    final = final_scores(job, done)
    wrote = continuations(job, done, cast(Split, final.split)) if final else []
    best = None if final is None else best_scores(job, done, final.split)
    log_bad_rows(job.loader.source, job.mesh)
    scored = cast(Split, final.split) if final else "train"
    said = answers(job, scored) if _is_scored(job, done) else []
    if not job.mesh.first:
        return {}
    beat("ending the trackers")
    job.observer.end_trackers(_status(job, done))
    changes: dict[str, Any] = {}
    if final is not None and best is not None:
        changes["last_scores"] = final.scores
    if shown := best or final:
        data = job.recipe.data
        count, source = job.recipe.evaluation.recordings, job.task.source(cast(Split, shown.split))
        changes["recordings"] = keep_recordings(
            run.path, source, shown.worst, count, data.sample_rate
        )
    if wrote:
        changes["continuations"] = [vars(continuation) for continuation in wrote]
    if said:
        changes["answers"] = [vars(answer) for answer in said]
    results = write_results(job, run, done, best or final, peak, **changes)
    if mirror := job.checkpoints.mirror:
        mirror.update(done)  # an earlier start may have been killed before it had copied all
        mirror.wait()  # when nothing else is left to lose
        changes["mirror"] = mirror.summary()
        results = write_results(job, run, done, best or final, peak, **changes)
    return results


def _is_scored(job: Job, done: int) -> bool:
    return (done == job.steps or job.ended_early) and job.recipe.evaluation.final


def final_scores(job: Job, done: int) -> Evaluation | None:
    """Of a finished run: on test data if there is any, else on validation data."""
    if not _is_scored(job, done):
        return None
    if done in job.validated and job.task.source("test") is None:
        return job.validated[done]
    return score(job, done, "test", "validation")


def best_scores(job: Job, done: int, split: str) -> Evaluation | None:
    """Of the best checkpoint on the data of the last one's final scores; None where the last is the best. The
    engine has the best weights from then on where they are still needed: to be scored, or to answer."""
    chosen = job.selection
    step = chosen.best_step if chosen and chosen.keeps else None
    if step is None or step == done:
        return None
    known = job.validated.get(step) if split == "validation" else None
    if known and not generates_answers(job):
        return known
    saved = job.checkpoints.at(step)
    if isinstance(saved, str):
        log.warning("the best checkpoint is not whole, and only the last is scored: %s", saved)
        return None
    beat("loading the best checkpoint")
    job.checkpoints.load(saved, job.engine)
    return known or score(job, step, cast(Split, split))


def write_results(
    job: Job,
    run: run_directory.Run,
    done: int,
    final: Evaluation | None,
    peak_gib: float | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """training_results.json, and the end of the run in run.json."""
    results = results_page(job, run, done) | scores_part(final) | seen_part(run, final) | changes
    if peak_gib is not None:
        results["measured"]["memory_gib"] = peak_gib
    write_json(run.path / "training_results.json", results)
    run.update(state=results["status"], ended=time.time(), exit_code=0)
    return results


def _status(job: Job, done: int) -> Literal["finished", "stopped"]:
    return "finished" if done == job.steps or job.ended_early else "stopped"


def results_page(job: Job, run: run_directory.Run, done: int) -> dict[str, Any]:
    """The contents of training_results.json without the scores."""
    planned = json.loads((run.path / PLAN_FILE).read_text())
    environment = json.loads((run.path / "environment.json").read_text())
    metrics = summarise_metrics(stream_lines(run.path / "metrics.jsonl"))
    events = read_lines(run.path / EVENTS_FILE)
    saves = [event for event in events if event["event"] == "checkpoint"]
    whole = complete_steps(run.path)
    chosen = best_step(job.checkpoints.root)
    return {
        "status": _status(job, done),
        "total_time_s": run.ran_s(run.info(), time.time()),
        "world_size": job.mesh.world,
        "devices": environment["devices"],
        "strategy": planned["strategy"],
        "global_batch_size": planned["global_batch_size"],
        **metrics,
        "rehearsal": rehearsal.active(),
        "balance": {} if rehearsal.active() else job.observer.balance.summary(),
        "left_out": dict(getattr(job.loader.source, "left_out", {})),
        "cut": dict(getattr(job.loader.source, "cut", {})),
        "planned": planned,
        "measured": {**metrics["measured"], **_stalls(saves), **_comparisons(job)},
        "worlds": worlds_in(events),
        "restarts": [vars(restart) for restart in restarts_in(events)],
        "shrunk": [event["words"] for event in events if event["event"] == "shrunk"],
        "spikes": _spikes(events),
        "best": _best_part(job, done, chosen),
        "last_scores": {},
        "answers": [],
        "continuations": [],
        "recordings": {},
        "checkpoint": _folder(job, whole[-1] if whole and chosen is None else chosen),
        "last_checkpoint": _folder(job, whole[-1] if whole else None),
    }


def _folder(job: Job, step: int | None) -> str | None:
    return None if step is None else str(job.checkpoints.root / f"step-{step}")


def _best_part(job: Job, done: int, step: int | None) -> dict[str, Any] | None:
    """Which checkpoint was chosen, by its score on validation data, and the last step's beside it."""
    rule = job.selection
    if rule is None or rule.best_step is None:
        return None
    return {
        "step": rule.best_step,
        "metric": rule.metric,
        "better": rule.better[str(rule.metric)],
        "score": rule.best,
        "kept": step == rule.best_step,
        "last_step": done,
        "last_score": rule.score if rule.step == done else None,
        "ended_early": rule.words() if rule.exhausted and done < job.steps else None,
    }


def scores_part(final: Evaluation | None) -> dict[str, Any]:
    """The scores' part of training_results.json."""
    return {
        "scored": final.split if final else "",
        "scores": final.scores if final else {},
        "not_scored": final.left_out if final else {},
        "remarks": final.remarks if final else [],
        "worst": [vars(example) for example in final.worst] if final else [],
    }


def seen_part(run: run_directory.Run, final: Evaluation | None) -> dict[str, Any]:
    """Whether the scored data are known not to be training data, and what is in both."""
    path = run.path / DATA_FILE
    if final is None or not path.is_file():
        return {}
    data = json.loads(path.read_text())
    found = [part for part in data["overlap"].get(final.split, []) if part["decisive"]]
    told = [part["words"] for part in found if part["seen"] or part["unchecked"]]
    return {"unseen": data["unseen"].get(final.split, False), "overlap": told}


def _comparisons(job: Job) -> dict[str, Any]:
    """How often, and for how long at most, replicas were compared; nothing where there are none."""
    if not job.comparisons:
        return {}
    return {
        "comparisons": job.comparisons,
        "longest_comparison_s": job.longest_comparison_s,
    }


def _spikes(events: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Steps whose loss or gradient norm was a spike, of those the skipped, and how often the run went back."""
    found = {e["step"]: e["skipped"] for e in events if e["event"] == "spike"}
    rewinds = sum(e["event"] == "rewind" for e in events)
    return {"steps": len(found), "skipped": sum(found.values()), "rewinds": rewinds}


def _stalls(saves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How often, and for how long at most, a checkpoint blocked training."""
    longest = max((event["stall_s"] for event in saves), default=None)
    return {"saves": len(saves), "longest_save_stall_s": longest}
