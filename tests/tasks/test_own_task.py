"""A task of the user's own: found, checked, and the same under every strategy that it claims."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import own
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import muster as public
from muster import run_directory as runs
from muster.checks.parity import TrainingCurve, cause, distance, short_recipe, training_curve
from muster.cli import app
from muster.entrypoints.open_run import _check_same_maths, check_before_launch, open_run
from muster.errors import CheckpointError, DataError, MusterError, RecipeError
from muster.inference.load import load_trained
from muster.inference.score import score
from muster.launch import kubernetes
from muster.launch.job import ClusterJob
from muster.models.plan import ParallelPlan
from muster.observe.results import read_lines
from muster.parallel.compilation import choose
from muster.parallel.conflicts import no_graphs, refuse_conflicts
from muster.parallel.default_plan import plan_of
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh
from muster.planner.open_subject import open_subject
from muster.planner.strategy import parameter_count
from muster.recipe.load import from_resolved, load
from muster.recipe.own_task import OwnTask, comparable, parse
from muster.tasks import build_task
from muster.tasks.base import Task
from muster.tasks.own import load_class, named
from muster.training.compatibility import refuse_other_recipe
from muster.training.evaluate import SingleProcess
from muster.training.manifest import Saved
from muster.training.trial import try_task
from muster.worker.main import _check_agreement
from pool import RankError
from processes import muster, start

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
CPU = torch.device("cpu")


def curve(mesh: Mesh, recipe: str, words: list[str], folder: str) -> TrainingCurve:
    few = ["training.steps=3", "training.global_batch_size=8"]
    return training_curve(load(recipe, [*short_recipe([]), *few, *words]), mesh, Path(folder))


def compared(ranks: Any, folder: Path, recipe: Path, *rows: tuple[str, ...]) -> list[Any]:
    """The distance of each row's training on two ranks from that of one process."""
    alone = ranks(1)(curve, str(recipe), [], str(folder / "alone"))[0]
    assert alone.losses[0] > 0
    assert alone.norms[0] > 0
    return [
        distance(alone, ranks(2)(curve, str(recipe), list(row), str(folder / f"row-{number}"))[0])
        for number, row in enumerate(rows)
    ]


@pytest.mark.parametrize(
    "name", ["text_classifier", pytest.param("autoencoder", marks=pytest.mark.full)]
)
def test_the_examples_of_the_manual_are_the_same_on_two_ranks(ranks, tmp_path, name):
    small = ("task_options.width=16",)
    rows = [(*small, f"distributed.strategy={strategy}") for strategy in ("ddp", "fsdp")]
    recipe = tmp_path / "small.yaml"
    shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    recipe.write_text(
        f"task: {name}.py:{_class(name)}\ntask_options: {{width: 16}}\ntraining: {{steps: 3}}\n"
    )
    for found in compared(ranks, tmp_path, recipe, *rows):
        assert found.small, found


def _class(name: str) -> str:
    return load(str(EXAMPLES / f"{name}.yaml")).task.rpartition(":")[2]


@pytest.mark.parametrize("name", ["autoencoder.py", "text_classifier.py", "autoencoder.yaml"])
def test_the_manual_shows_the_examples_as_they_are(name):
    assert (EXAMPLES / name).read_text() in (EXAMPLES.parent / "tasks.md").read_text()


def test_micro_batches_and_every_strategy_agree(ranks, tmp_path):
    accumulated = ("distributed.strategy=fsdp", "training.gradient_accumulation_steps=2")
    for found in compared(ranks, tmp_path, own.write(tmp_path), accumulated):
        assert found.small, found


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_zero_agrees(ranks, tmp_path, strategy):
    row = (f"distributed.strategy={strategy}",)
    for found in compared(ranks, tmp_path, own.write(tmp_path), row):
        assert found.small, found


def told(mesh: Mesh, recipe: str, words: list[str], folder: str) -> str:
    try:
        curve(mesh, recipe, words, folder)
    except MusterError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
def test_what_such_a_model_cannot_is_refused_by_name(ranks, tmp_path, strategy):
    words = [f"distributed.strategy={strategy}"]
    found = ranks(2)(told, str(own.write(tmp_path)), words, str(tmp_path / "run"))
    assert all(f"the model of fit.py:Fit has no {strategy}-parallel plan" in said for said in found)


def tried(recipe: Path) -> None:
    loaded = load(str(recipe))
    task = build_task(loaded)
    source, model = task.source("train"), SingleProcess(task.build_model())
    found = parse(loaded.task)
    assert found is not None
    assert source is not None
    try_task(found, task, model, source, Mesh(0, 0, Layout(), CPU, None), nullcontext)  # type: ignore[arg-type]


SUM = 'return (output.float() - batch["y"]).square().sum()'
LIST = "return muster.ListSource(list(points))"
BATCH = 'return muster.Batch(tensors={"x": x, "y": x.sum(1, keepdim=True)}, units=len(x))'


def with_score(result: str) -> tuple[str, str]:
    return SUM, f"{SUM}\n\n    def score(self, output, batch):\n        return {result}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((SUM, SUM.replace("sum()", "mean()")), r"loss is a mean: .* Return the sum"),
        ((SUM, SUM.replace(".sum()", "")), r"loss returned shape \[2, 1\], expected a scalar"),
        ((SUM, SUM.replace("sum()", "sum().item()")), "loss returned float, expected a scalar"),
        ((SUM, "return batch['z']"), r"fit\.py, line 41, in loss: KeyError: 'z'"),
        ((BATCH, "return {'x': x}"), "collate returned a dict, expected a muster.Batch"),
        (
            (BATCH, BATCH.replace("units=len(x)", "")),
            "a Batch with units=0, expected a whole number",
        ),
        ((BATCH, BATCH.replace("units=len(x)", "units=1")), "gave 1 units for 2 samples and 1 for"),
        ((BATCH, BATCH.replace('{"x": x, "y"', '{"y"')), r"in the model's forward: RuntimeError"),
        (
            ("return muster.ListSource(list(points))", "return list(points)"),
            "wrap a list or a torch",
        ),
        (
            ("list(points))", "list(points), [1.0])"),
            "40 samples need as many lengths above 0, got 1",
        ),
        (with_score('muster.Score({"right": 1.0})'), "score counts right and no units"),
        (with_score("1.0"), "score returned 1.0, expected a muster.Score"),
        (
            (LIST, "a = muster.ListSource(points); a.lengths = [1.0] * 40; return a"),
            "must be a numpy array of float64, each above 0",
        ),
        (("return Net(", "return ("), "build_model returned a tuple, expected a torch.nn.Module"),
        (("points = torch.randn", "points = torch.rand_n"), r"fit\.py, line 33, in source: Attrib"),
        (
            (SUM, f"{SUM}\n\n    scores = {{'recall': 'max'}}"),
            "scores declares 'recall', which summarise does not return: it returned loss, units",
        ),
        (
            (
                "class Net(nn.Sequential):\n    pass",
                "class Net(nn.Sequential):\n    def get_extra_state(self):\n        return {'epoch': 1}\n\n"
                "    def set_extra_state(self, state):\n        pass",
            ),
            "the model's state has _extra_state, a dict; checkpoints keep tensors alone",
        ),
    ],
)
def test_a_mistake_in_a_method_is_one_sentence(tmp_path, change, words):
    with pytest.raises(MusterError, match=words):
        tried(own.write(tmp_path, change))


def test_a_task_without_mistakes_passes_and_keeps_the_random_state(tmp_path):
    recipe = own.write(tmp_path)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    task = build_task(load(str(recipe)))
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))
    torch.random.set_rng_state(before)
    source = task.source("train")
    engine: Any = SingleProcess(model)
    assert source is not None
    try_task(
        OwnTask("fit.py", "Fit"), task, engine, source, Mesh(0, 0, Layout(), CPU, None), nullcontext
    )
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("class Fit(muster.Task):", "class Fit(muster.Task)"), r"fit\.py, line 22: expected ':'"),
        (("import muster\n", "import muster, no_such\n"), r"line 6: ModuleNotFoundError"),
        (("class Fit(", "class Fitt("), r"has no class Fit; it has Fitt"),
        (("class Fit(muster.Task)", "class Fit"), "is not a subclass of muster.Task"),
        (("def collate", "def colate"), "has no method collate; a task needs build_model"),
        (
            ("depth: int = Field(2, gt=0)", "deep: int = 2"),
            "task_options.depth: no such key of Fit",
        ),
        (("gt=0", "gt=7"), r"task_options.depth: got 3; Input should be greater than 7"),
        (
            ("    class Options", "    scores = {'loss': 'low'}\n\n    class Options"),
            r"scores is \{'loss': 'low'\}, expected names with the direction that is better",
        ),
    ],
)
def test_a_mistake_in_the_class_is_refused_before_there_is_a_run(tmp_path, change, words):
    with pytest.raises(RecipeError, match=words):
        check_before_launch(load(str(own.write(tmp_path, change))), 1, 1)


def test_the_names_of_muster_s_own_assets_are_taken(tmp_path):
    taken = """
    def __init__(self, recipe, assets=None):
        super().__init__(recipe, assets)
        self.assets["data"] = 1
"""
    recipe = own.write(tmp_path, (SUM, f"{SUM}\n{taken}"))
    with pytest.raises(RecipeError, match="assets has 'data', a name that muster uses itself"):
        build_task(load(str(recipe)))


def test_a_file_beside_it_is_refused_with_the_cure(tmp_path):
    (tmp_path / "helper.py").write_text("x = 1\n")
    recipe = own.write(tmp_path, ("import muster\n", "import muster\nimport helper\n"))
    with pytest.raises(RecipeError, match="a task's file travels alone with its run"):
        check_before_launch(load(str(recipe)), 1, 1)


def test_options_are_checked_filled_in_and_overridden(tmp_path):
    recipe = str(own.write(tmp_path))
    settled = check_before_launch(load(recipe, ["task_options.noise=0.5"]), 1, 1)
    assert settled.task_options == {"depth": 3, "noise": 0.5}
    assert len(list(build_task(settled).build_model().children())) == 4
    named = own.write(tmp_path, ("noise: float = 0.1", "noise: float = Field(0.1, alias='sound')"))
    settled = check_before_launch(load(str(named), ["task_options.sound=0.5"]), 1, 1)
    assert settled == check_before_launch(settled, 1, 1)
    recipe = str(own.write(tmp_path))
    with pytest.raises(RecipeError, match=r"task_options\.dept: .* nearest is task_options\.depth"):
        check_before_launch(load(recipe, ["task_options.dept=4"]), 1, 1)
    with pytest.raises(RecipeError, match=r"task_options\.x: causal-lm takes no options"):
        check_before_launch(load("gpt-micro", ["task_options.x=1"]), 1, 1)


def test_a_file_is_found_beside_the_recipe_then_here_and_a_typed_one_here_first(
    tmp_path, monkeypatch
):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    recipe = own.write(there)
    shutil.copy(there / "fit.py", here / "fit.py")
    monkeypatch.chdir(here)
    assert load(str(recipe)).task == f"{there}/fit.py:Fit"
    assert load(str(recipe), ["task=fit.py:Fit"]).task == f"{here}/fit.py:Fit"
    (there / "fit.py").unlink()
    assert load(str(recipe)).task == f"{here}/fit.py:Fit"
    (here / "fit.py").unlink()
    with pytest.raises(RecipeError, match=f"task: no file fit.py in {there} or {here}"):
        load(str(recipe))
    with pytest.raises(RecipeError, match=r"task: got 'casual-lm'.*nearest is causal-lm"):
        load("gpt-micro", ["task=casual-lm"])


def test_a_class_of_a_module_is_found_from_here_and_recorded(tmp_path, monkeypatch):
    own.write(tmp_path)
    (tmp_path / "fit.py").rename(tmp_path / "fit_module_for_tests.py")
    monkeypatch.chdir(tmp_path)
    recipe = load(str(tmp_path / "fit.yaml"), ["task=fit_module_for_tests:Fit"])
    task = build_task(check_before_launch(recipe, 1, 1))
    assert task.assets["code"]["task"] == "fit_module_for_tests:Fit"
    assert "text" not in task.assets["code"]
    before = comparable(recipe.as_dict())
    with (tmp_path / "fit_module_for_tests.py").open("a") as file:
        file.write("# changed\n")
    assert comparable(recipe.as_dict()) != before
    with pytest.raises(RecipeError, match=r"no_module_here:Fit: .*install the package"):
        check_before_launch(load("gpt-micro", ["task=no_module_here:Fit"]), 1, 1)


def test_a_run_without_a_step_takes_the_file_as_it_was_mended(tmp_path, monkeypatch):
    """And its errors name that file, with the copy in brackets."""
    monkeypatch.chdir(tmp_path)
    recipe = own.write(tmp_path, (SUM, "return batch['z']"))
    run, claim, copied = open_run(load(str(recipe)), 1, 1, None, "mine")
    claim.close()
    copy = run.path / "task" / "fit.py"
    line = own.FILE.splitlines().index(f"        {SUM}") + 1
    with pytest.raises(RecipeError) as caught, named(parse(copied.task), "loss"):
        load_class(parse(copied.task)).loss(None, None, {})
    place = f"{tmp_path}/fit.py, line {line} (copied into the run: {copy.absolute()}), in loss: "
    assert str(caught.value) == f"{place}KeyError: 'z'"
    own.write(tmp_path)
    run.update(state="failed")
    again, claim, _ = open_run(from_resolved(run.path / "recipe.yaml"), 1, 1, run, None)
    claim.close()
    assert again.path == run.path
    assert copy.read_text() == own.FILE
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "fit.py").write_text(own.FILE + "# changed\n")
    open_run(from_resolved(run.path / "recipe.yaml"), 1, 1, run, None)[1].close()
    assert copy.read_text() == own.FILE, "steps were done with it"


@pytest.fixture(scope="module")
def travelled(tmp_path_factory):
    """A run started by torchrun on two ranks, whose file changed before one rank resumed it; what was said."""
    folder = tmp_path_factory.mktemp("own")
    own.write(folder)
    torchrun = ["torchrun", "--standalone", "--nproc_per_node=2", "-m", "--", "muster"]
    process = start([*torchrun, "train", "fit.yaml", "--run", "mine"], folder)
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 0, said
    (folder / "fit.py").write_text("this is no Python any more")
    again = muster("train", "runs/mine", "training.steps=6", "--gpus", "1", folder=folder)
    return folder, again.stdout


@pytest.mark.guides
def test_a_run_goes_on_with_its_own_copy_and_says_that_the_file_changed(travelled):
    folder, said = travelled
    assert "fit.py has changed since this run began; the run goes on with its own copy" in " ".join(
        said.split()
    )
    assert "resumed at step 4" in said
    run = runs.find("mine", folder / "runs")
    assert (run.path / "task" / "fit.py").read_text() == own.FILE
    assert "task: task/fit.py:Fit" in (run.path / "recipe.yaml").read_text()
    assert "noise: 0.1" in (run.path / "recipe.yaml").read_text()
    assert [line["step"] for line in read_lines(run.path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert run.info()["task"]["class"] == "Fit"


def test_a_checkpoint_alone_can_be_scored(travelled, tmp_path):
    """Its task comes from the checkpoint, whatever became of the file and the run."""
    folder, _ = travelled
    checkpoint = tmp_path / "alone"
    shutil.copytree(folder / "runs" / "mine" / "checkpoints" / "step-6", checkpoint)
    code = folder / "runs" / "mine" / "task"
    code.rename(tmp_path / "away")
    try:
        found = score(load_trained(checkpoint))
    finally:
        (tmp_path / "away").rename(code)
    recorded = runs.find("mine", folder / "runs").results()
    assert recorded is not None
    assert found.scores["loss"] == pytest.approx(recorded["scores"]["loss"], rel=1e-5)
    assert found.scores["units"] == 40


def test_a_run_whose_own_copy_was_changed_is_refused(travelled, tmp_path):
    folder, _ = travelled
    shutil.copytree(folder / "runs" / "mine", tmp_path / "mine", symlinks=True)
    run = runs.Run(tmp_path / "mine")
    recipe = from_resolved(run.path / "recipe.yaml")
    _check_same_maths(run, recipe)
    with (run.path / "task" / "fit.py").open("a") as file:
        file.write("\n# another loss\n")
    with pytest.raises(CheckpointError, match=r"fit\.py has changed since .* was trained with it"):
        _check_same_maths(run, recipe)


def test_a_module_that_changed_since_a_checkpoint_is_refused(tmp_path, monkeypatch):
    (tmp_path / "module_that_changes.py").write_text(own.FILE)
    monkeypatch.chdir(tmp_path)
    task = "module_that_changes:Fit"
    recipe = load(str(own.write(tmp_path)), [f"task={task}"])
    assets = build_task(recipe).assets
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    (tmp_path / "assets.json").write_text(json.dumps(assets))
    saved = Saved(tmp_path, {})
    refuse_other_recipe(saved, recipe.as_dict())
    (tmp_path / "module_that_changes.py").write_text(own.FILE + "# changed")
    with pytest.raises(CheckpointError, match=r"module_that_changes\.py has changed since"):
        refuse_other_recipe(saved, recipe.as_dict())
    with pytest.raises(CheckpointError, match="was trained with task="):
        refuse_other_recipe(saved, load("gpt-micro").as_dict())


def test_the_file_lies_beside_the_recipe_of_pods(tmp_path):
    job = ClusterJob(tmp_path, load(str(own.write(tmp_path))), 1, 1, False)
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    for name, text in kubernetes._config_map(job)["data"].items():
        (mounted / name).write_text(text)
    assert load(str(mounted / "recipe.yaml")).task == f"{mounted}/fit.py:Fit"


def test_ranks_with_other_code_are_refused(ranks, tmp_path):
    with pytest.raises(RankError, match="has another recipe than rank 0"):
        ranks(2)(agree, str(tmp_path))


def agree(mesh: Mesh, folder: str) -> None:
    mine = Path(folder, str(mesh.rank))
    mine.mkdir()
    change = [] if mesh.rank == 0 else [("square()", "abs()")]
    recipe = load(str(own.write(mine, *change)))
    (Path(folder) / "run.json").write_text("{}")
    mesh.barrier()
    _check_agreement(recipe, Path(folder), mesh)


def test_eval_names_the_scores_of_such_a_task(travelled, monkeypatch):
    folder, _ = travelled
    monkeypatch.chdir(folder)
    found = CliRunner().invoke(app, ["eval", "mine"])
    assert found.exit_code == 0
    assert found.output.splitlines()[-1].startswith("test: loss ")


def test_parity_of_a_file_is_a_table_and_a_mean_fails_it(tmp_path):
    own.write(tmp_path)
    table = muster(
        "check", "--parity", "--task", "fit.py", "--strategy", "ddp", folder=tmp_path
    ).stdout
    assert "ddp" in table
    assert "agrees" in table
    own.write(tmp_path, (SUM, SUM.replace("sum()", "mean()")))
    refused = muster("check", "--parity", "--task", "fit.py:Fit", folder=tmp_path, code=None)
    assert refused.returncode == 2
    assert "fit.py:Fit: loss is a mean" in refused.stderr


@pytest.mark.parametrize(
    ("loss", "norm", "words"),
    [
        (2.0, 2.0, "returns a mean over its micro-batch"),
        (1.7, 1.1, "a sample's loss depends on what else is in its micro-batch"),
        (1.0, 0.5, "part of the gradient is not summed over ranks"),
        (1.0, 1.0, "the first step agrees and later ones do not"),
    ],
)
def test_a_difference_is_told_with_its_likely_cause(loss, norm, words):
    alone, made = TrainingCurve([3.0], [4.0], {}), TrainingCurve([3.0 * loss], [4.0 * norm], {})
    assert words in cause(alone, made, 2)


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16)


class Pair(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_repeated_layers_are_the_blocks_of_a_model_that_names_none():
    stack = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)
    assert plan_of(stack).blocks == ("TransformerEncoderLayer",)
    stack.plan = "the user's own"  # type: ignore[assignment]
    assert plan_of(stack) is plan_of(stack)
    assert stack.plan == "the user's own"
    inner = nn.Sequential(Pair(nn.Linear(2, 2)), Pair(nn.Linear(2, 2)))
    assert plan_of(nn.Sequential(nn.Linear(2, 2), inner, inner)).blocks == ("Pair",)
    assert plan_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))).blocks == ()
    assert plan_of(nn.Sequential(layer(), Pair(nn.Linear(2, 2)))).blocks == ()
    assert plan_of(
        nn.Sequential(layer(), Pair(nn.Linear(2, 2))), SimpleNamespace(blocks=("Pair",))
    ).blocks == ("Pair",)
    mixed = nn.ModuleList([layer(), layer(), Pair(layer()), Pair(layer())])  # nested in the other
    assert plan_of(mixed).blocks == ("Pair",)
    given = nn.Linear(2, 2)
    given.plan = ParallelPlan(("Given",))  # type: ignore[assignment]
    assert plan_of(given, SimpleNamespace(blocks=("Other",))).blocks == ("Given",)


def test_compilation_and_graphs_are_off_unless_the_task_says_otherwise(tmp_path):
    recipe = load(str(own.write(tmp_path)), ["training.steps=1000"])
    task = build_task(recipe)
    chosen = choose(recipe, 40, on_gpu=True, compiles=task.facts.compiles)
    assert str(chosen).startswith("no: the task does not say that it pays (compiles = True)")
    assert "captures = True" in str(no_graphs(recipe, Layout(), task.facts.captures))
    own.write(
        tmp_path,
        ("class Fit(muster.Task):\n", "class Fit(muster.Task):\n    compiles = captures = True\n"),
    )
    task = build_task(recipe)
    assert choose(recipe, 40, on_gpu=True, compiles=task.facts.compiles).used
    assert no_graphs(recipe, Layout(), task.facts.captures) is None
    asked = load(str(tmp_path / "fit.yaml"), ["training.cuda_graphs=true"])
    refuse_conflicts(asked, Layout())  # the recipe's word is enough


def test_a_plan_takes_the_tasks_own_samples(tmp_path):
    recipe = load(str(own.write(tmp_path)))
    subject = open_subject(recipe)
    assert subject.batch(3, costliest=True)["x"].shape == (3, 4)
    assert (subject.plan.blocks, subject.parameters) == (("Block",), 3 * 20 + 5)
    own.write(tmp_path, ("return muster.ListSource(list(points))", "return None"))
    with pytest.raises(RecipeError, match="a plan needs the size of its samples"):
        open_subject(recipe).batch(3, costliest=True)


def test_a_model_that_computes_with_values_as_it_is_built_is_counted_too(tmp_path):
    late = "return Net(*(Block() for _ in range(int(torch.tensor(2.0).item()))))"
    lines = own.FILE.splitlines()
    (old,) = (line.strip() for line in lines if line.strip().startswith("return Net("))
    assert parameter_count(build_task(load(str(own.write(tmp_path, (old, late)))))) == 40


def test_a_list_is_a_source_and_an_empty_one_is_refused():
    source = public.ListSource(["a", "bcd"], len)
    assert (len(source), source.load(1), source.lengths.tolist()) == (2, "bcd", [1.0, 3.0])
    assert source.fingerprint() == b"" != public.ListSource(["a"], version="2").fingerprint()
    with pytest.raises(DataError, match="got no samples"):
        public.ListSource([])


def test_the_public_names_are_those_of_their_homes():
    assert public.Task is Task
    assert set(public.__all__) <= set(dir(public))
    with pytest.raises(AttributeError, match="has no attribute 'Tusk'"):
        _ = public.Tusk
