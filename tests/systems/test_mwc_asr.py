"""The commands of systems/mwc-asr/README.md, on CPU ranks and cut short, in a copy of the folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import psutil
import pytest
import torch

from muster.entrypoints import start_training as start
from muster.hardware.environment import variables
from muster.hardware.inventory import Cpus, Gpu, Inventory
from muster.observe.results import read_lines
from muster.parallel.layout import Layout
from muster.parallel.mesh import Mesh
from muster.recipe.batch import solve
from muster.recipe.load import load
from muster.worker import prepare
from processes import lives, run

SYSTEM = Path(__file__).parents[2] / "systems" / "mwc-asr"
README = (SYSTEM / "README.md").read_text()
CONFIGS = SYSTEM / "config"
SHORT = ["training.steps=3", "training.warmup_steps=1", "data.spec_augment=null"]
SHORT += ["evaluation.final=false"]
TORCHRUN = "torchrun --nproc_per_node=4 --standalone scripts/train_asr.py "
TORCHRUN += "--config config/training_config.yaml --max-parquet-files 10"
FEWER = TORCHRUN.replace("=4", "=2").removesuffix("0")  # two ranks, one file


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    """The folder as a fresh clone has it: no data, no logs."""
    folder = tmp_path_factory.mktemp("systems") / "mwc-asr"
    shutil.copytree(SYSTEM, folder, ignore=shutil.ignore_patterns("data", "logs", "__pycache__"))
    return folder


def call(
    system: Path,
    command: str,
    *more: str,
    stdin: str = "",
    of: str = "",
    real: bool = False,
    **variables: str,
):
    """A command as the README prints it, or a variant `of` that. `./start_training.sh` does nothing
    but start the program that is taken in its place."""
    assert (of or command) in README
    script = r"python \1/scripts/start_training.py"
    words = re.sub(r"^(\S+)/start_training\.sh", script, command).split()
    return run([*words, *more], system, code=None, stdin=stdin, env=variables, real=real)


def newest(system: Path) -> Path:
    return (system / "logs" / "training" / "latest").resolve()


def results(run: Path):
    return json.loads((run / "training_results.json").read_text())


@pytest.fixture(scope="module")
def by_torchrun(system):
    done = call(system, FEWER, *SHORT, of=TORCHRUN)
    assert done.returncode == 0, done.stdout + done.stderr
    return newest(system), done


@pytest.mark.guides
def test_torchrun_trains_on_the_first_file_and_each_rank_says_who_it_is(by_torchrun, system):
    run, done = by_torchrun
    assert "finished: 3 steps" in done.stdout
    for rank in (0, 1):
        words = f"Distributed Training Initialized: Rank: {rank}/2, Local Rank (GPU): {rank}"
        assert f"[Rank {rank}] {words}" in done.stderr
    found = results(run)
    assert (found["world_size"], found["global_batch_size"], found["strategy"]) == (2, 16, "ddp")
    assert found["planned"]["samples"] == 190, "a tenth of the corpus"
    assert len(list((system / "data" / "spoken-numbers").glob("train-*.parquet"))) == 10


@pytest.mark.full
def test_one_process_walks_the_same_path(by_torchrun, system):
    """Float32 sums in another order are all that differs."""
    done = call(system, "./start_training.sh --follow", "--1", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Mode: one CPU process" in done.stdout
    assert "4 per device × 4 accumulation × 1 device(s) = 16" in done.stdout
    alone, two = (read_lines(r / "metrics.jsonl") for r in (newest(system), by_torchrun[0]))
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in alone] == pytest.approx(
            [line[name] for line in two], rel=1e-4
        )
    assert results(newest(system))["world_size"] == 1


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_as_shipped_it_learns_to_recognise_unseen_voices(system):
    done = call(system, "./start_training.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    (pid,) = re.findall(r"Process ID: (\d+)", done.stdout)
    while lives(int(pid)):
        time.sleep(0.5)
    assert results(newest(system))["scores"]["wer"] <= 0.15


@pytest.mark.full
def test_fsdp_as_the_guide_configures_it_walks_it_too(by_torchrun, system):
    text = (CONFIGS / "training_config.yaml").read_text()
    text = text.replace('distributed_strategy: "ddp"', 'distributed_strategy: "fsdp"')
    text = re.sub(r"(?m)^  # (fsdp_config:|  fsdp_)", r"  \1", text)
    (system / "config" / "fsdp.yaml").write_text(text)
    command = FEWER.replace("training_config", "fsdp")
    done = call(system, command, *SHORT, of=TORCHRUN)
    assert done.returncode == 0, done.stdout + done.stderr
    run = newest(system)
    assert results(run)["strategy"] == "fsdp"
    sharded, two = (read_lines(r / "metrics.jsonl") for r in (run, by_torchrun[0]))
    assert [line["loss"] for line in sharded] == pytest.approx(
        [line["loss"] for line in two], rel=1e-4
    )


@pytest.mark.guides
def test_a_run_in_the_background_is_shown_lives_on_its_own_and_leaves_its_results(system):
    command = "./start_training.sh --distributed --gpus=2 --5"
    elsewhere, name = system.parent, system.name
    config = f"--config={name}/config/training_config.yaml"
    done = call(elsewhere, command.replace(".", name, 1), config, *SHORT, of=command)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = re.findall(r"muster watch (\S+)", done.stdout)
    assert (elsewhere / path).resolve() == newest(system), "it can be typed where the script was"
    assert "========== DISTRIBUTED TRAINING CONFIGURATION ==========" in done.stdout
    assert "Data: data/spoken-numbers, 5 of 10 parquet file(s)" in done.stdout
    assert "4 per device × 2 accumulation × 2 device(s) = 16" in done.stdout
    (pid,) = re.findall(r"Process ID: (\d+)", done.stdout)
    process = psutil.Process(int(pid))
    assert os.getsid(process.pid) == process.pid, "no terminal's end reaches it"
    assert "train_asr" in " ".join(process.cmdline()), "`ps aux | grep train_asr` finds it"
    for _ in range(1000):
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.1)
    found = json.loads((system / "logs" / "training" / "training_results.json").read_text())
    assert (found["status"], found["world_size"]) == ("finished", 2)
    assert found["planned"]["samples"] == 950
    assert found["total_time_s"] > found["epochs"][0]["time_s"] > 0
    words = "Distributed Training Initialized: Rank: 1/2, Local Rank (GPU): 1"
    assert words in (newest(system) / "ranks" / "1.log").read_text()
    assert list(newest(system).glob("tensorboard/events*"))


@pytest.mark.guides
def test_clean_lists_asks_and_removes(by_torchrun, system):
    root = system / "logs" / "training"
    names = [path.name for path in root.iterdir() if not path.is_symlink()]
    asked = call(system, "./start_training.sh --clean", stdin="n\n")
    assert asked.returncode == 1
    assert all(name in asked.stdout for name in names)
    assert (root / names[0]).is_dir()
    call(system, "./start_training.sh --clean --yes")
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--gpus=none"], "argument --gpus: got 'none', expected a whole number above 0"),
        (["--0"], "got '0', expected a whole number above 0"),
        (["--5", "--all"], "not allowed with argument"),
        (["steps"], "steps: expected a flag or key=value"),
        (["--clean", "--distributed"], "--clean trains nothing"),
        (["--config", "config/none.yaml"], "config/none.yaml: no such file"),
        (["training.stepz=3"], "training.stepz: no such key; nearest is training.steps"),
        (["--gpus=32"], "training.global_batch_size: 16 cannot feed 32 ranks"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(
    system, tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(system)  # both are put back afterwards
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        code = start.start_training([*arguments, f"logging.dir={tmp_path}"], system)
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "latest").exists()


def test_the_script_itself_refuses_with_the_same_code(system):
    done = call(system, "./start_training.sh", "--bogus")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unrecognized arguments: --bogus" in done.stderr


MISSING = "model.pretrained: the weights of openai/whisper-small are not on this machine; "
MISSING += "get them with: hf download openai/whisper-small"
NO_DATA = (
    "data.train: data/your-corpus does not exist; write it from a folder of audio files with: "
)
NO_DATA += "muster data make AUDIO_FOLDER data/your-corpus"


def test_absent_weights_and_data_are_named_with_the_command_that_gets_them(system, tmp_path):
    command = "./start_training.sh --config config/whisper_small.yaml"
    done = call(system, command, real=True, HF_HOME=str(tmp_path))
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first == f"error: {MISSING}"
    assert second.startswith(NO_DATA)
    done = call(system, "python scripts/train_asr.py --config config/whisper_small.yaml")
    assert done.returncode == 2
    assert MISSING in done.stderr.splitlines()[0]


@pytest.mark.guides
def test_weights_that_were_fetched_are_found(system, tmp_path):
    """Where and how `hf download` keeps them."""
    kept = tmp_path / "hub" / "models--openai--whisper-small"
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    (kept / "snapshots" / "abc" / "config.json").write_text("{}")
    command = "./start_training.sh --config config/whisper_small.yaml"
    done = call(system, command, real=True, HF_HOME=str(tmp_path))
    assert done.stderr.startswith(f"error: {MISSING}"), "a download that was cut short"
    (kept / "snapshots" / "abc" / "model.safetensors").touch()
    done = call(system, command, real=True, HF_HOME=str(tmp_path))
    assert done.stderr.startswith(f"error: {NO_DATA}")


@pytest.mark.full
def test_validation_shows_every_rank_and_a_verdict(system):
    command = "torchrun --nproc_per_node=4 --standalone validate_distributed.py"
    done = call(system, command.replace("=4", "=2"), of=command)
    # A test beside this one may really hold one rank, or the pair, up.
    for words in ("Rank: 0/2, ", "Rank: 1/2, ", "19 combinations of collective", "│ links "):
        assert words in done.stdout, done.stdout + done.stderr
    *_, verdict = done.stdout.splitlines()
    slow = verdict == "not fit to train on: balance"
    assert slow or verdict.startswith("fit to train on")
    assert done.returncode == int(slow)


@pytest.mark.parametrize(
    ("config", "ranks", "accumulation"),
    [
        ("training_config", 1, 4),
        ("training_config", 2, 2),
        ("training_config", 4, 1),
        ("whisper_small", 1, 16),
        ("whisper_small", 4, 4),
    ],
)
def test_the_batch_is_the_guides_on_any_number_of_gpus(config, ranks, accumulation):
    sizes = solve(load(str(CONFIGS / f"{config}.yaml")).training, ranks)
    assert (sizes.per_device, sizes.accumulation) == (4, accumulation)
    assert sizes.global_batch == {"training_config": 16, "whisper_small": 64}[config]


def test_the_guides_two_numbers_make_the_batch_of_the_machine(tmp_path):
    """4 per device × 4 accumulation, and no global batch: 16 on one GPU, 64 on four."""
    text = (CONFIGS / "training_config.yaml").read_text()
    text = re.sub(r"(?m)^  global_batch_size:.*\n", "", text)
    text = re.sub(r"(gradient_accumulation_steps:) auto", r"\1 4", text)
    (tmp_path / "guide.yaml").write_text(text)
    recipe = load(str(tmp_path / "guide.yaml"), ["data.train=embedded:spoken-numbers"])
    found = Inventory((), 64, 512.0, "host", (), False, ("eth0",))
    for ranks, total in ((1, 16), (4, 64)):
        assert solve(recipe.training, ranks).global_batch == total
        said = start.banner(recipe, found, ranks, [])
        assert (
            f"4 per device × 4 accumulation × {ranks} device(s) = {total}; another number" in said
        )


def test_the_banner_of_the_guides_machine(tmp_path, monkeypatch):
    """Four H100 NVL in two bridged pairs; no such machine is at hand, so it is written down."""
    gpus = tuple(Gpu(i, "NVIDIA H100 NVL", 93.6, f"GPU-{i}") for i in range(4))
    cpu = Cpus(tuple(range(64)), tuple(range(64)), quota=16.0)
    found = Inventory(gpus, 16, 512.0, "host", ((0, 1), (2, 3)), False, ("eth0",), cpu=cpu)
    data = "data.train=embedded:spoken-numbers"
    recipe = load(str(CONFIGS / "whisper_small.yaml"), [data])
    settings = variables(found, 4, "ddp", {"NCCL_DEBUG": "WARN"})
    text = start.banner(recipe, found, 4, settings)
    assert "Mode: DISTRIBUTED (4 GPUs)" in text
    assert "NVLink: GPU 0↔1, 2↔3" in text
    assert "Workers per GPU: 3\nCPU cores: 16" in text
    assert "  GPU 3: NVIDIA H100 NVL (94 GiB)\n" in text
    assert "4 per device × 4 accumulation × 4 device(s) = 64" in text
    assert "  NCCL_P2P_LEVEL=NVL   " in text
    assert "  NCCL_DEBUG=WARN   as you set it" in text
    assert "  NCCL_NVLS_ENABLE not set   needs NVSwitch" in text
    alone = start.banner(recipe, found, 1, variables(found, 1, "ddp", {}))
    assert "Mode: one GPU" in alone
    assert "Workers per GPU: 8\n" in alone, "one rank has the cores of four"
    assert "GPU 1: NVIDIA H100 NVL (94 GiB)  idle; --distributed uses it" in alone


def test_a_rank_decodes_on_as_many_threads_as_the_banner_says(monkeypatch):
    """A rank of the same machine, pinned to its share of the cores."""
    pinned = Cpus(tuple(range(16)), tuple(range(64)), quota=16.0)
    monkeypatch.setattr("muster.worker.prepare.cpus.find", lambda root: pinned)
    mesh = Mesh(0, 0, Layout(replicate=4), torch.device("cuda", 0), None, local_world=4)
    assert prepare._data_workers(mesh) == 3
