"""What `auto` settles on before the first step, and that a failure of it loses nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muster.auto import AutoChoice
from muster.observe import heartbeat
from muster.observe.choices import read_choices, write_choices
from muster.observe.results import read_lines
from muster.parallel import compilation
from muster.parallel.layout import Layout
from muster.recipe.load import load
from muster.training import warm_up
from muster.training.loop import train
from muster.worker import prepare
from muster.workloads import workload
from pool import RankError
from training import make_job


def cannot_compile(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no compiler here")


def course(mesh, folder: str, compiled: bool) -> tuple[str, list[float]]:
    """What became of compilation, and the losses. Where it is chosen, every graph fails to compile."""
    with pytest.MonkeyPatch.context() as patch:
        if compiled:
            patch.setattr(compilation, "choose", lambda recipe, *_, **__: AutoChoice(True, ""))
            patch.setattr(compilation, "compiler_error", lambda device: None)
            patch.setattr(torch, "compile", partial(torch.compile, backend=cannot_compile))
        job = make_job(
            mesh, folder, ["training.steps=3", "training.global_batch_size=4"], "gpt-micro"
        )
        train(job)
    job.observer.close()
    return str(job.choices["compile"]), [
        x["loss"] for x in read_lines(Path(folder) / "metrics.jsonl")
    ]


@pytest.mark.guides
def test_a_run_goes_on_where_its_model_cannot_be_compiled(ranks, tmp_path):
    ((plain, expected),) = ranks(1)(course, str(tmp_path / "plain"), False)
    ((reason, losses),) = ranks(1)(course, str(tmp_path / "broken"), True)
    assert plain == "no: it gains little on a CPU"
    assert reason.startswith("no: it failed (BackendCompilerFailed: ")
    assert "no compiler here" in reason
    assert losses == expected


@pytest.mark.guides
def test_several_ranks_start_again_where_one_cannot_compile(ranks, tmp_path):
    """And find it written down: they compile nothing then."""
    with pytest.raises(RankError) as failure:
        ranks(2)(course, str(tmp_path), True)
    assert failure.value.kind == "StartAgain"
    kept = read_choices(tmp_path)["compile"]
    assert not kept.used
    assert kept.reason.startswith("it failed (BackendCompilerFailed: ")


@pytest.mark.parametrize("earlier", [AutoChoice(True, "it pays"), AutoChoice(False, "it failed")])
def test_a_resumed_run_chooses_as_its_first_start_did(earlier):
    mesh: Any = SimpleNamespace(device=torch.device("cuda"), world=2)
    for steps in (100, 1000):
        recipe = load("gpt2", [f"training.steps={steps}"])
        assert prepare._choose_compilation(recipe, 10, mesh, earlier, compiles=True) == earlier
    recipe = load("gpt2", ["training.compile=false"])
    assert not prepare._choose_compilation(recipe, 10, mesh, earlier, compiles=True).used


@pytest.mark.parametrize(
    ("recipe", "words", "samples", "on_gpu", "answer", "reason"),
    [
        ("gpt2", [], None, True, True, "yes: it pays"),
        ("gpt2", [], None, False, False, "no: it gains little on a CPU"),
        ("gpt2", ["training.steps=100"], None, True, False, "no: a run of 100 steps is over"),
        ("gpt2", ["training.steps=100", "training.compile=true"], None, True, True, "yes: the"),
        ("gpt2", ["training.precision=fp8", "training.steps=9"], 9, True, True, "yes: float8"),
        ("gpt2", ["training.compile=false"], None, True, False, "no: the recipe says so"),
        (
            "gpt2",
            ["training.steps=null", "training.epochs=2"],
            51_200,
            True,
            True,
            "yes: it pays",
        ),
        (
            "gpt2",
            ["training.steps=null", "training.epochs=2"],
            51_199,
            True,
            False,
            "no: a run of 198",
        ),
        ("gpt2", ["training.steps=null", "training.epochs=2"], None, True, True, "yes: it pays"),
        ("speech", [], 100, True, False, "no: it gains little in a model of speech-ctc"),
    ],
)
def test_compilation_is_chosen_where_it_pays(recipe, words, samples, on_gpu, answer, reason):
    chosen = compilation.choose(load(recipe, words), samples, on_gpu=on_gpu)
    assert chosen.used == answer
    assert str(chosen).startswith(reason)


def test_graphs_that_one_gpu_took_are_not_taken_by_several():
    recipe: Any = load("gpt2", [])
    mesh = SimpleNamespace(world=2, layout=Layout(replicate=2))
    job: Any = SimpleNamespace(
        recipe=recipe,
        mesh=mesh,
        task=SimpleNamespace(facts=workload("causal-lm")),
        choices={"cuda_graphs": AutoChoice(True, "faster")},
    )
    engine: Any = SimpleNamespace(graphs=None)
    warm_up._choose_graphs(job, engine)
    assert engine.graphs is None
    assert str(job.choices["cuda_graphs"]).startswith("no: with several ranks")


def test_only_what_auto_was_free_to_choose_is_kept(tmp_path):
    made = {"compile": AutoChoice.forced(True), "cuda_graphs": AutoChoice(False, "slower")}
    write_choices(tmp_path, made)
    assert read_choices(tmp_path) == {"cuda_graphs": AutoChoice(False, "slower")}
    (tmp_path / "plan.json").write_text('{"choices": {"compile": "yes: it pays"}}')
    assert read_choices(tmp_path) == {}, "an older muster's"


@pytest.mark.gpu
@pytest.mark.serial
def test_graphs_are_taken_where_kernels_wait_for_the_host(ranks, tmp_path):
    """A micro model's do; a wider one's keep the GPU busy."""
    words = ["training.steps=4", "training.global_batch_size=8"]
    wide = ["model.preset=gpt2", "data.sequence_length=1024", "training.global_batch_size=32"]
    wide += ["training.precision=fp32"]
    ((small, captured),) = ranks(1)(graphs, str(tmp_path / "small"), words)
    ((large, plain),) = ranks(1)(graphs, str(tmp_path / "large"), [*words, *wide])
    assert small.startswith("yes: a micro-batch takes ")
    assert captured == 1
    assert large.startswith("no: a micro-batch takes ")
    assert plain is None


def graphs(mesh, folder: str, words: list[str]) -> tuple[str, int | None]:
    job = make_job(mesh, folder, words, "gpt-micro")
    train(job)
    job.observer.close()
    found = job.engine.graphs  # type: ignore[attr-defined]
    return str(job.choices["cuda_graphs"]), found and len(found.captured)


@pytest.mark.gpu
def test_replicas_replay_the_course_of_plain_ones(ranks, tmp_path):
    """Two ranks under DDP."""
    plain = ranks(2)(replayed, str(tmp_path / "plain"), "training.cuda_graphs=false", False)
    graphs = ranks(2)(replayed, str(tmp_path / "graphs"), "training.cuda_graphs=true", False)
    assert [captured for _, captured in graphs] == [1, 1]
    for (losses, _), (expected, _) in zip(graphs, plain, strict=True):
        assert losses == pytest.approx(expected, rel=2e-4)


@pytest.mark.gpu
def test_a_run_goes_on_where_its_work_cannot_be_captured(ranks, tmp_path):
    """With the random numbers of dropout, which a failed capture must not spoil."""
    ((expected, _),) = ranks(1)(
        replayed, str(tmp_path / "plain"), "training.cuda_graphs=false", True
    )
    ((losses, captured),) = ranks(1)(
        replayed, str(tmp_path / "auto"), "training.cuda_graphs=auto", True
    )
    assert captured == 0
    assert losses == pytest.approx(expected, rel=2e-4)


def replayed(mesh, folder: str, asked: str, broken: bool) -> tuple[list[float], int]:
    """Losses, and how many graphs were captured. `broken`: `auto` takes graphs, and every capture fails."""
    words = ["training.steps=6", "training.global_batch_size=8", "training.precision=fp32"]
    words += ["distributed.strategy=ddp", "model.dropout=0.1" if broken else "seed=1", asked]
    job = make_job(mesh, folder, words, "gpt-micro")
    with pytest.MonkeyPatch.context() as patch:
        if broken:
            right = job.task.loss
            job.task.loss = lambda output, batch: _synchronized(right(output, batch))
            patch.setattr(warm_up, "_try_graphs", lambda job, engine: AutoChoice(True, "a test"))
        train(job)
    job.observer.close()
    mesh.barrier()
    found = job.engine.graphs  # type: ignore[attr-defined]
    losses = [x["loss"] for x in read_lines(Path(folder) / "metrics.jsonl")]
    return losses, len(found.captured) if found else 0


def _synchronized(loss: torch.Tensor) -> torch.Tensor:
    """Reading a value waits for the device, which no graph can contain."""
    return loss * float(loss.isfinite())


def test_after_a_compilation_the_phase_is_the_one_it_interrupted(tmp_path, monkeypatch):
    """An evaluation has another limit than a step."""
    told = {}
    monkeypatch.setattr(warm_up.compilation, "tell_compilation", told.update)
    warm_up._tell_compilation.__wrapped__()
    heartbeat.start(tmp_path, 0, None)
    try:
        for phase in ("evaluation", "forward and backward"):
            heartbeat.beat(phase)
            told["begins"](), told["begins"]()
            assert heartbeat.current_phase() == "compiling"
            told["ends"]()
            assert heartbeat.current_phase() == phase
    finally:
        heartbeat.stop()
