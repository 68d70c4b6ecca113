"""The lessons of systems/distributed-training/03-deepspeed, each proving its own claim."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from course import COURSE, broken, devices, said, torchrun
from muster.parallel.deepspeed_config import config_for
from muster.recipe.load import load
from processes import free_port

CONFIGS = COURSE / "03-deepspeed" / "configs"
SMALL = ["--length", "32", "--steps", "2"]

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not Path(sys.executable).with_name("deepspeed").exists(),
        reason="DeepSpeed is not installed: pip install deepspeed",
    ),
]


def claims(words: str) -> list[str]:
    return [line for line in words.splitlines() if "rank(s)" in line]


@pytest.mark.guides
@pytest.mark.both
def test_every_stage_trains_as_one_process_and_cuts_what_it_promises():
    one, two, three = claims(torchrun("03-deepspeed/deepspeed_train.py", *SMALL))
    assert one.startswith("ZeRO-1 on 2 rank(s): losses and gradient norms within")
    assert one.endswith("optimizer 50%, gradients 100%, weights 100%")
    assert two.endswith("weights 100%")
    assert three.startswith("ZeRO-3")


@pytest.mark.full
def test_the_guides_command_works_without_gpus():
    """As printed, but on two ranks and a port that is surely free."""
    words = said(
        "deepspeed",
        "--num_gpus=2",
        f"--master_port={free_port()}",
        "03-deepspeed/deepspeed_train.py",
        "--deepspeed_config",
        "03-deepspeed/configs/zero2_config.json",
        *SMALL,
        **devices(2),
    )
    (claim,) = claims(words)
    assert claim.startswith("ZeRO-2 on 2 rank(s): losses and gradient norms within")


@pytest.mark.guides
def test_offload_to_host_memory_changes_nothing():
    (claim,) = claims(torchrun("03-deepspeed/zero_offload.py", *SMALL))
    assert claim.startswith("offload to cpu on 2 rank(s): losses and gradient norms within")


def test_nvme_without_libaio_says_what_is_missing(tmp_path):
    pytest.importorskip("deepspeed")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if AsyncIOBuilder().is_compatible():
        pytest.skip("libaio is here: nothing is missing")
    asked = ["--to", "nvme", "--nvme-path", str(tmp_path)]
    words = said(sys.executable, "03-deepspeed/zero_offload.py", *asked, fails=True)
    assert "not possible here: DeepSpeed cannot build async_io" in words
    assert "apt install libaio-dev" in words


@pytest.mark.guides
def test_a_model_in_pieces_answers_as_the_whole_one():
    (claim,) = claims(torchrun("03-deepspeed/deepspeed_inference.py", "--tokens", "2"))
    assert claim.startswith("2 rank(s): logits within")
    assert "each holds 50% of the blocks" in claim


@pytest.mark.parametrize(
    ("line", "instead", "complaint"),
    [
        ('"ranks": mesh.world', '"ranks": 2 * mesh.world', "apart"),
        ("stage >= first", "stage >= first - 1", "stage 1: gradients"),
    ],
    ids=["other data", "another promise"],
)
@pytest.mark.full
def test_a_broken_lesson_fails(tmp_path, line, instead, complaint):
    script = broken("03-deepspeed/deepspeed_train.py", line, instead, tmp_path)
    config = ["--deepspeed_config", CONFIGS / "zero1_config.json"]
    assert complaint in torchrun(script, *SMALL, *config, fails=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("world", "precision"), [(1, "fp32"), (4, "fp32"), (8, "bf16")])
def test_muster_train_takes_the_same_files(stage, world, precision):
    path = CONFIGS / f"zero{stage}_config.json"
    recipe = load("gpt-micro", [f"distributed.deepspeed.config={path}"])
    config = config_for(recipe, stage, world, precision)
    assert config["zero_optimization"]["stage"] == stage
    assert config["bf16"]["enabled"] == (precision == "bf16")
    given = json.loads(path.read_text())["zero_optimization"]
    assert config["zero_optimization"].items() >= given.items()
