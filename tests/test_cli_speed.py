"""The command line answers at once, because it leaves torch alone until it trains."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

# As multiples of what a bare interpreter needs to import what every such command line imports.
LIBRARIES = ["-c", "import typer, rich.console"]
LIMIT = 5.0  # importing torch takes another 20
VERB_LIMIT = 7.0  # once a verb is named, typer imports pydantic to read its options
TRIES = 12
HEAVY = ("torch", "transformers", "pyarrow", "numpy", "hydra", "muster.recipe.schema")

MISTAKES = {
    "no such option": ["train", "--nonsense"],
    "no such verb": ["trian"],
    "not a number": ["train", "speech", "--nodes", "two"],
    "no such choice": ["train", "speech", "--on", "the-moon"],
    "no such run": ["watch", "nothing"],
}
HELP = {"help": ["--help"], "help of a verb": ["train", "--help"], "version": ["--version"]}


def run(arguments: list[str]) -> tuple[int, float]:
    """Exit code, and seconds of processor time, which other programs on the machine do not add to."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.returncode, sum(after[:2]) - sum(before[:2])


@pytest.mark.serial
@pytest.mark.parametrize("arguments", [*HELP.values(), *MISTAKES.values()], ids=[*HELP, *MISTAKES])
def test_help_and_mistakes_are_answered_at_once(arguments):
    """The best of several tries, beside the libraries in the same minute: nothing makes either quicker,
    but much makes both slower."""
    limit = VERB_LIMIT if len(arguments) > 1 else LIMIT
    best = libraries = float("inf")
    for _ in range(TRIES):
        code, took = run(["-m", "muster", *arguments])
        assert code == (0 if arguments in HELP.values() else 2)
        best, libraries = min(best, took), min(libraries, run(LIBRARIES)[1])
        if best < limit * libraries:
            return
    words = f"{best:.2f} s of processor time, {best / libraries:.1f} times the libraries' {libraries:.2f}"
    pytest.fail(f"muster {' '.join(arguments)}: {words}; limit {limit}, the best of {TRIES}")


BENCH = [
    ["bench", "--help"],
    ["bench", "devise"],
    ["bench", "device", "--seconds", "0"],
    ["bench", "collectives", "--min", "0"],
    ["bench", "collectives", "--only", "gossip"],
]


PLAN = [
    ["plan", "nothing", "--gpu", "h100"],
    ["plan", "gpt2", "--gpu", "h9000"],
    ["plan", "gpt2", "--gpu", "h100", "--gpus", "12"],
    ["plan", "gpt2", "--gpu", "h100", "model.preset=gpt3"],
    ["plan", "gpt2", "--gpu", "h100", "training.batch=3"],
    ["plan", "gpt2", "--gpu", "v100", "training.precision=bf16"],
]
TRAIN = [
    ["train", "llama-7b"],
    ["train", "gpt2", "distributed.strategy=fdsp"],
    ["train", "gpt2", "model.preset=whisper-small"],
]


def test_nothing_heavy_is_imported_for_them():
    check_imports([*HELP.values(), *MISTAKES.values(), *BENCH], HEAVY)


@pytest.mark.guides
def test_what_is_wrong_with_a_plan_or_a_recipe_is_said_before_torch_is_imported():
    check_imports([*PLAN, *TRAIN], ("torch", "transformers", "pyarrow"))


def check_imports(commands: list[list[str]], unwanted: tuple[str, ...]) -> None:
    """One interpreter answers all of them, so a name stays with whoever imported it first."""
    code = f"""
import json, sys, muster.cli
found = {{}}
for arguments in {commands!r}:
    sys.argv, code = ["muster", *arguments], 0
    try:
        muster.cli.main()
    except SystemExit as leaving:
        code = leaving.code
    heavy = [name for name in {unwanted!r} if name in sys.modules]
    found[" ".join(arguments)] = [code, heavy]
print("found", json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1].removeprefix("found "))
    for words, (exit_code, heavy) in found.items():
        assert heavy == [], words
        assert exit_code == (0 if "help" in words or "version" in words else 2), words
