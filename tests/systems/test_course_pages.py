"""The course as a whole: the guide's tree, pages that name what is there, the benchmarks."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser

from course import COURSE, broken, torchrun
from muster.cli import app
from muster.planner.find_recipe import as_recipe
from muster.recipe.load import load

TREE = [
    "README.md",
    "01-ddp-basics/README.md",
    "01-ddp-basics/ddp_mnist.py",
    "01-ddp-basics/ddp_training.py",
    "01-ddp-basics/ddp_benchmark.py",
    "01-ddp-basics/launch_ddp.sh",
    "02-fsdp/README.md",
    "02-fsdp/fsdp_basics.py",
    "02-fsdp/fsdp_transformer.py",
    "02-fsdp/fsdp_checkpoint.py",
    "02-fsdp/sharding_strategies.md",
    "03-deepspeed/README.md",
    "03-deepspeed/configs/zero1_config.json",
    "03-deepspeed/configs/zero2_config.json",
    "03-deepspeed/configs/zero3_config.json",
    "03-deepspeed/deepspeed_train.py",
    "03-deepspeed/zero_offload.py",
    "03-deepspeed/deepspeed_inference.py",
    "04-nccl-operations/README.md",
    "04-nccl-operations/collective_ops.py",
    "04-nccl-operations/point_to_point.py",
    "04-nccl-operations/bandwidth_test.py",
    "04-nccl-operations/nccl_debugging.md",
    "05-advanced/README.md",
    "05-advanced/hybrid_parallelism.py",
    "05-advanced/pipeline_parallelism.py",
    "05-advanced/gradient_accumulation.py",
    "05-advanced/fp16_gradscaler.py",
    "05-advanced/communication_overlap.py",
    "benchmarks/README.md",
    "benchmarks/distributed_benchmarks.py",
]
PAGES = [name for name in TREE if name.endswith(".md")]
LESSONS = [name for name in TREE if name.endswith(".py")]


def test_every_file_of_the_guides_tree_is_there():
    assert [name for name in TREE if not (COURSE / name).is_file()] == []


@pytest.mark.parametrize("name", PAGES)
def test_commands_and_links_of_a_page_lead_somewhere(name):
    page = COURSE / name
    text = page.read_text()
    for file in re.findall(r"\b(?:0\d-[\w-]+|benchmarks)/[\w/]+\.(?:py|sh|json)", text):
        assert (COURSE / file).exists(), file
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), link


def test_the_index_names_every_lesson():
    index = (COURSE / "README.md").read_text()
    assert all(f"]({name})" in index for name in LESSONS)


def commands(text: str) -> list[list[str]]:
    """The words of each command in a page's bash blocks, or among a lesson's first lines."""
    text = re.sub(r"\\+\n", " ", text)
    if text.startswith('"""'):
        lines = re.findall(r"^    ((?:torchrun|srun) .*)$", text, re.MULTILINE)
    else:
        blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        lines = "".join(blocks).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def try_out(found: list[list[str]]) -> None:
    """Each command as its program reads it; nothing is started."""
    for words in found:
        if words[0] == "torchrun":
            get_args_parser().parse_args(words[1:])
        scripts = [i for i, word in enumerate(words) if word.endswith((".py", ".sh"))]
        if words[0] == "muster":
            try_muster(words[1:])
        elif scripts:
            try_lesson(Path(words[scripts[-1]]), words[scripts[-1] + 1 :])


def try_muster(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    asked = command.make_context("muster", words).params
    if asked.get("recipe"):
        name, changes = as_recipe(asked["recipe"])
        load(name, [*changes, *(asked["overrides"] or [])])


def try_lesson(script: Path, words: list[str]) -> None:
    name = "ddp_training.py" if script.suffix == ".sh" else script.name
    (lesson,) = COURSE.rglob(name)
    known = {
        argument.value
        for node in ast.walk(ast.parse(lesson.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - known
    assert not unknown, f"{name} takes no {', '.join(unknown)}"
    recipe = words[words.index("--recipe") + 1] if "--recipe" in words else "gpt-micro"
    load(recipe, [word for word in words if re.match(r"[\w.]+=", word)])


@pytest.mark.parametrize("name", PAGES + LESSONS)
def test_programs_take_the_commands_that_are_printed(name, monkeypatch):
    monkeypatch.chdir(COURSE)
    found = commands((COURSE / name).read_text())
    assert found or name.endswith("nccl_debugging.md")
    try_out(found)


@pytest.mark.parametrize(
    ("name", "right", "wrong", "complaint"),
    [
        ("01-ddp-basics/README.md", "--folder runs", "--dir runs", "takes no --dir"),
        pytest.param(
            "02-fsdp/README.md",
            "--no-proof",
            "--proofless",
            "takes no --proofless",
            marks=pytest.mark.full,
        ),
        ("02-fsdp/fsdp_basics.py", "--hidden 4096", "--width 4096", "takes no --width"),
        ("03-deepspeed/README.md", "gpt-micro --gpus", "gpt-micro --cards", "--cards"),
        ("README.md", "bench p2p   ", "bench pairs   ", "pairs"),
        ("README.md", "training.steps=10", "training.stops=10", "training.stops"),
        ("README.md", "overlap gpt-micro", "overlap gpt-tiny", "gpt-tiny"),
    ],
)
def test_a_command_that_no_program_takes_is_noticed(name, right, wrong, complaint, monkeypatch):
    monkeypatch.chdir(COURSE)
    text = (COURSE / name).read_text()
    assert text.count(right) == 1
    with pytest.raises(Exception, match=complaint):
        try_out(commands(text.replace(right, wrong)))


@pytest.mark.guides
@pytest.mark.timeout(300)
def test_the_benchmarks_prove_what_they_measure(tmp_path):
    kept = ["--dir", tmp_path, "--seconds", "0.05", "--largest", "1"]
    words = torchrun("benchmarks/distributed_benchmarks.py", *kept)
    assert re.search(r"all values right; DDP sends 3\.83 MB a step, FSDP 1\.9\d × that", words)
    assert len(list(tmp_path.glob("*.json"))) == 3


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_benchmarks_notice_weights_that_are_gathered_once(tmp_path):
    once = 'mesh, recipe, [*overrides, "distributed.fsdp.sharding=shard_grad_op"], ['
    lesson = "benchmarks/distributed_benchmarks.py"
    script = broken(lesson, "mesh, recipe, overrides, [", once, tmp_path)
    words = torchrun(script, "--seconds", "0.05", "--largest", "1", fails=True)
    assert "FSDP sends 10 messages, not 14" in words
