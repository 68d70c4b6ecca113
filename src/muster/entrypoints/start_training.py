"""What start_training.sh does once Python is installed: the repository's trains a recipe in the
terminal, a system's prints what will run where, starts it in the background, and prints how to follow it.

The run itself is `muster train`'s; nothing here imports torch, so that a mistyped flag fails at once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn

from muster import run_directory
from muster.data import corpus
from muster.data.speech.shards import write_shards
from muster.errors import DataError, MusterError
from muster.hardware import environment, inventory
from muster.hardware.affinity import cores_for
from muster.hardware.environment import Variable
from muster.hardware.inventory import Inventory
from muster.parallel.layout import layout_for
from muster.recipe.batch import BatchSizes, scaling_words, solve
from muster.recipe.load import load
from muster.recipe.schema import Recipe
from muster.workloads import workload

EXAMPLE = "spoken-numbers"  # the embedded corpus that a system's data/ is filled with
CPU_RANKS = 4  # at most, where neither --gpus nor distributed.devices is given
RESULTS = "training_results.json"


def start_training(arguments: Sequence[str], folder: Path) -> int:
    """`start_training.sh` of the system in `folder`; returns the exit code."""
    asked = _parse(arguments)
    config, overrides = _config(asked, folder)
    here = Path.cwd()
    os.chdir(folder)
    try:
        recipe = load(config, overrides)
        if asked.clean:
            return _clean(Path(recipe.logging.dir), asked.yes)
        provide(recipe, folder)
        found = inventory.detect()
        ranks = _ranks(asked, found)
        settings = environment.variables(found, ranks, recipe.distributed.strategy)
        print(banner(recipe, found, ranks, settings), flush=True)
    except MusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    environment.apply(settings)
    command = [*_muster(), "train", config, "--gpus", str(ranks), *overrides]
    if asked.follow:
        return subprocess.run(command).returncode
    before = set(run_directory.every(Path(recipe.logging.dir)))
    if code := subprocess.run([*command, "--detach"], stdout=subprocess.DEVNULL).returncode:
        return code
    run = next(r for r in run_directory.every(Path(recipe.logging.dir)) if r not in before)
    board = "tensorboard" in recipe.logging.to
    print(_started(run, _mode(found, ranks), _backend(recipe, found), here, board=board))
    return 0


def train_recipe(arguments: Sequence[str]) -> NoReturn:
    """The repository's start_training.sh: becomes `muster train` with the recipe `speech`, or that of
    --config; or `muster clean`."""
    asked = _parse(arguments, "")
    ranks = asked.gpus or ("all" if asked.distributed else 1)
    options = ["train", asked.config or "speech", "--gpus", str(ranks), *_changes(asked)]
    if asked.clean:
        options = ["clean", *["--yes"][: asked.yes]]
    command = [*_muster(), *options]
    os.execv(command[0], command)


def _parse(
    arguments: Sequence[str],
    epilog: str = "Paths in a configuration start at this script's folder.",
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="start_training.sh",
        allow_abbrev=False,
        description="Trains; without flags in one process.",
        epilog=epilog,
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help=f"one process per GPU; without a GPU one per CPU core, at most {CPU_RANKS}",
    )
    parser.add_argument(
        "--gpus", type=_ranks_asked, metavar="N|all", help="that many (means --distributed)"
    )
    files = parser.add_mutually_exclusive_group()
    files.add_argument(
        "--max-parquet-files", type=_count, metavar="N", help="the first N training files; also --N"
    )
    files.add_argument("--all", action="store_true", help="every training file")
    parser.add_argument("--config", metavar="FILE", help="instead of config/training_config.yaml")
    parser.add_argument("--follow", action="store_true", help="show the run until it ends")
    parser.add_argument(
        "--clean", action="store_true", help="list runs that ended, ask, remove them"
    )
    parser.add_argument("--yes", action="store_true", help="with --clean: do not ask")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="any key of the recipe")
    arguments = [re.sub(r"^--(\d+)$", r"--max-parquet-files=\1", word) for word in arguments]
    asked = parser.parse_intermixed_args(arguments)
    strange = [word for word in asked.overrides if "=" not in word and word[0] != "~"]
    if strange:
        parser.error(f"{strange[0]}: expected a flag or key=value")
    if asked.clean and (asked.distributed or asked.gpus or asked.all or asked.max_parquet_files):
        parser.error("--clean trains nothing; only --yes, --config and key=value go with it")
    return asked


def _ranks_asked(text: str) -> int | Literal["all"]:
    return "all" if text == "all" else _count(text)


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0")
    return int(text)


def _config(asked: argparse.Namespace, folder: Path) -> tuple[str, list[str]]:
    """The configuration's own path, because the run starts in `folder`, and what changes in it."""
    config = Path(asked.config).absolute() if asked.config else None
    return str(config or folder / "config" / "training_config.yaml"), _changes(asked)


def _changes(asked: argparse.Namespace) -> list[str]:
    changes = list(asked.overrides)
    if asked.all:
        changes.append("data.max_parquet_files=null")
    if asked.max_parquet_files:
        changes.append(f"data.max_parquet_files={asked.max_parquet_files}")
    return changes


def provide(recipe: Recipe, folder: Path) -> None:
    """Check that the weights and data of the system in `folder` are on this machine; the error says how to
    get them. Only the example is created here; nothing is downloaded, neither now nor by the run."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    example = folder / "data" / EXAMPLE
    if [Path(path).absolute() for path in recipe.data.sources] == [example]:
        write_shards(corpus.EMBEDDED + EXAMPLE, example)
    missing = [text for text in (_missing_weights(recipe), _missing_data(recipe)) if text]
    if missing:
        raise DataError(*missing)
    _link_results(Path(recipe.logging.dir))


def _missing_weights(recipe: Recipe) -> str | None:
    spec = recipe.model.pretrained
    if spec is None or Path(spec).expanduser().is_dir():
        return None
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", spec):
        return f"model.pretrained: there is no folder {spec}; give one that exists"
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        here = Path(snapshot_download(spec, local_files_only=True))
    except LocalEntryNotFoundError:
        here = Path("/nonexistent")
    if (here / "config.json").is_file() and list(here.glob("model*.safetensors")):
        return None
    return (
        f"model.pretrained: the weights of {spec} are not on this machine; get them with: "
        f"hf download {spec}"
    )


def _missing_data(recipe: Recipe) -> str | None:
    data = recipe.data
    try:
        corpus.check(recipe.task, data.sources, data.validation, data.test)
    except DataError as error:
        if "muster data make" in str(error):
            return str(error)
        return (
            f"{error}; write it from a folder of audio files with: muster data make AUDIO_FOLDER "
            f"{data.sources[0]} (or name a corpus that exists: data.train=FOLDER)"
        )
    return None


def _link_results(root: Path) -> None:
    """`training_results.json` beside the runs is the newest run's, once that has ended."""
    link = root / RESULTS
    if link.exists() and not link.is_symlink():
        return  # the user's own file
    try:
        root.mkdir(parents=True, exist_ok=True)
        fresh = root / f".{RESULTS}.{os.getpid()}"
        fresh.symlink_to(Path("latest", RESULTS))
        os.replace(fresh, link)
    except OSError as error:
        raise MusterError(f"logging.dir: cannot write to {root} ({error.strerror})") from None


def _clean(root: Path, yes: bool) -> int:
    code = subprocess.run([*_muster(), "clean", "--dir", str(root), *["--yes"][:yes]]).returncode
    link = root / RESULTS
    if link.is_symlink() and not (root / "latest").exists():
        link.unlink()
    return code


def _ranks(asked: argparse.Namespace, found: Inventory) -> int:
    if not (asked.gpus or asked.distributed):
        return 1
    return found.rank_count(asked.gpus, cpu_ranks=min(found.cpus, CPU_RANKS))


def banner(recipe: Recipe, found: Inventory, ranks: int, settings: list[Variable]) -> str:
    """What will run where, printed before the start."""
    sizes = solve(recipe.training, layout_for(recipe.distributed, ranks).data_ranks)
    lines = [
        _title("DISTRIBUTED TRAINING CONFIGURATION" if ranks > 1 else "TRAINING CONFIGURATION"),
        f"Mode: {_mode(found, ranks)}",
        f"Backend: {_backend(recipe, found)}",
        f"NVLink: {found.describe_links()}" if found.gpus else "NVLink: no GPU found",
        f"Workers per {'GPU' if found.gpus else 'rank'}: {_workers(recipe, found, ranks)}",
        f"CPU cores: {found.cpus}",
        *found.describe_hidden(),
    ]
    if found.gpus:
        lines.append("GPU information:")
        lines += [
            f"  GPU {gpu.index}: {gpu.name} ({gpu.memory_gib:.0f} GiB)"
            + ("" if gpu.index < ranks else "  idle; --distributed uses it")
            for gpu in found.gpus
        ]
    lines += [
        f"Data: {_data(recipe)}",
        _batch_line(sizes) + _scaled_words(recipe),
        "Environment:",
    ]
    lines += [f"  {v.name}={v.value}   {_why(v)}" for v in settings]
    left_out = environment.left_out(found, ranks, recipe.distributed.strategy)
    lines += [f"  {name} not set   {reason}" for name, reason in left_out.items()]
    return "\n".join(lines)


def _data(recipe: Recipe) -> str:
    if workload(recipe.task).content is None:
        return f"as {recipe.task} reads it"
    files = sum(
        len(corpus.files(spec, "data.train", "train", fetch=False)) for spec in recipe.data.sources
    )
    used = min(files, recipe.data.max_parquet_files or files)
    return f"{recipe.data.train_words}, {used} of {files} parquet file(s)"


def _batch_line(sizes: BatchSizes) -> str:
    product = f"{sizes.per_device} per device × {sizes.accumulation} accumulation × "
    product += f"{sizes.data_ranks} device(s)"
    uneven = sizes.per_device * sizes.accumulation * sizes.data_ranks != sizes.global_batch
    if uneven:
        return f"Effective batch size: {sizes.global_batch}, split over at most {product}"
    return f"Effective batch size: {product} = {sizes.global_batch}"


def _scaled_words(recipe: Recipe) -> str:
    if recipe.training.scale_with_ranks == "none":
        return ""
    return f"; another number of devices makes another batch, by {scaling_words(recipe.training)}"


def _why(variable: Variable) -> str:
    return "as you set it" if variable.set_by_user else variable.reason


def _title(text: str) -> str:
    return f"\n========== {text} ==========\n"


def _mode(found: Inventory, ranks: int) -> str:
    what = "GPU" if found.gpus else "CPU process"
    if ranks == 1:
        return f"one {what}"
    return f"DISTRIBUTED ({ranks} {what}{'s' if what == 'GPU' else 'es'})"


def _workers(recipe: Recipe, found: Inventory, ranks: int) -> str:
    """Decoding threads of each rank, on the cores that it will be pinned to."""
    if recipe.data.workers != "auto":
        return str(recipe.data.workers)
    quota, gpu = found.cpu.quota if found.cpu else None, bool(found.gpus)
    cores = [len(cores_for(rank, ranks, found, rank if gpu else None)) for rank in range(ranks)]
    counts = sorted({environment.data_workers(own, quota, ranks, gpu) for own in cores})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _backend(recipe: Recipe, found: Inventory) -> str:
    return "NCCL" if found.gpus and recipe.distributed.backend != "gloo" else "gloo"


def _started(run: run_directory.Run, mode: str, backend: str, here: Path, *, board: bool) -> str:
    """With commands and paths relative to `here`."""
    path, muster = os.path.relpath(run.path, here), _shown_muster(here)
    logs = os.path.dirname(path)
    return "\n".join(
        [
            _title("TRAINING INFO"),
            "Training has been started in the background; closing this terminal does not end it.\n",
            f"  Mode: {mode}",
            f"  Backend: {backend}",
            f"  Process ID: {run.info()['pid']}",
            f"  Run: {path}",
            f"  Follow it: {muster} watch {path}",
            f"  Stop it: {muster} stop {path}",
            f"  Logs: {path}/ranks/0.log (one per rank), {path}/launcher.log",
            f"  Results, when it has ended: {logs}/{RESULTS}",
            *([f"  Curves: tensorboard --logdir {logs}/"] if board else []),
        ]
    )


def _muster() -> list[str]:
    """The program beside this Python, or the package where it was not installed as one."""
    program = Path(sys.executable).with_name("muster")
    return [str(program)] if program.is_file() else [sys.executable, "-m", "muster"]


def _shown_muster(here: Path) -> str:
    program = Path(_muster()[0])
    on_path = shutil.which("muster")
    if on_path and program.name == "muster" and Path(on_path).samefile(program):
        return "muster"
    return " ".join([os.path.relpath(program, here), *_muster()[1:]])


if __name__ == "__main__":
    train_recipe(sys.argv[1:])
