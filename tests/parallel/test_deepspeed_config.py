"""DeepSpeed's JSON agrees with the recipe, or the run does not start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from muster.errors import RecipeError
from muster.parallel.deepspeed_config import config_for
from parallel.models import make_recipe


def made(
    stage: int = 2,
    world: int = 4,
    precision: str = "fp32",
    deepspeed: dict[str, Any] | None = None,
    **training: Any,
) -> dict[str, Any]:
    recipe = make_recipe({"strategy": f"zero{stage}", "deepspeed": deepspeed or {}}, **training)
    return config_for(recipe, stage, world, precision)


@pytest.fixture
def written(tmp_path: Path):
    """`config_for` with a user's file."""

    def build(document: Any, **others: Any) -> dict[str, Any]:
        path = tmp_path / "ds.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        given = others.pop("deepspeed", {})
        return made(deepspeed={"config": str(path), **given}, **others)

    return build


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_generated_says_what_the_recipe_says(stage):
    config = made(
        stage,
        precision="bf16",
        global_batch_size=64,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
    )
    assert config["zero_optimization"]["stage"] == stage
    assert config["bf16"] == {"enabled": True}
    assert config["gradient_clipping"] == 0.5
    assert config["gradient_accumulation_steps"] == 2
    assert config["train_micro_batch_size_per_gpu"] == 64 // (4 * 2)
    assert "train_batch_size" not in config
    assert not {"optimizer", "scheduler"} & set(config)  # muster's own objects
    assert json.loads(json.dumps(config)) == config
    small = config["zero_optimization"].get("stage3_param_persistence_threshold")
    assert small == (0 if stage == 3 else None)


def test_sizes_left_open_are_those_that_the_run_uses():
    assert made(global_batch_size=10)["train_micro_batch_size_per_gpu"] == 3  # 3 3 2 2
    assert (
        made(global_batch_size=64, per_device_batch_size=8)["train_micro_batch_size_per_gpu"] == 8
    )
    assert made(max_grad_norm=None)["gradient_clipping"] == 0.0
    assert made()["bf16"] == {"enabled": False}


@pytest.mark.parametrize(
    ("stage", "options", "expected"),
    [
        (2, {"offload_optimizer": "cpu"}, {"offload_optimizer": {"device": "cpu"}}),
        (
            3,
            {"offload_optimizer": "cpu", "offload_param": "cpu"},
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        ),
        (
            3,
            {"offload_param": "nvme", "nvme_path": "/nvme"},
            {"offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
        ),
    ],
)
def test_offloading_is_handed_on(stage, options, expected):
    zero = made(stage, deepspeed=options)["zero_optimization"]
    assert {k: v for k, v in zero.items() if k.startswith("offload")} == expected


@pytest.mark.parametrize(
    ("stage", "options", "words"),
    [
        (2, {"offload_param": "cpu"}, r"deepspeed\.offload_param: cpu needs zero3.*is zero2"),
        (1, {"offload_optimizer": "nvme"}, r"offload_optimizer: nvme needs zero3.*zero1; use cpu"),
        (3, {"offload_optimizer": "nvme"}, r"deepspeed\.nvme_path: name a folder"),
        (3, {"offload_param": "nvme"}, r"deepspeed\.nvme_path: name a folder"),
    ],
)
def test_offloading_that_cannot_be_is_refused(stage, options, words):
    with pytest.raises(RecipeError, match=words):
        made(stage, deepspeed=options)


def test_float16_is_refused():
    with pytest.raises(RecipeError, match=r"training\.precision: fp16 under zero.*use bf16"):
        made(precision="fp16")


def test_a_file_that_agrees_is_taken_with_its_other_keys(written):
    """As people write them for Hugging Face's Trainer: half "auto", half tuned."""
    document = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False, "loss_scale": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.98]}},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 5000,
            "allgather_bucket_size": "auto",
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": False},
        "steps_per_print": 3,
    }
    options = {"offload_optimizer": "cpu"}
    config, alone = written(document, deepspeed=options), made(deepspeed=options)
    assert config["wall_clock_breakdown"] is True
    assert config["flops_profiler"] == {"enabled": False}
    zero = config["zero_optimization"]
    assert zero["reduce_bucket_size"] == 5000
    assert "allgather_bucket_size" not in zero
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "auto" not in json.dumps(config)
    assert "optimizer" not in config
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16"):
        assert config[key] == alone[key]


def test_auto_deep_inside_leaves_what_the_recipe_says(written):
    inner = {"device": "auto", "pin_memory": "auto", "buffer_count": 5}
    document = {
        "zero_optimization": {"offload_optimizer": inner},
        "comms_logger": {"debug": "auto"},
    }
    config = written(document, deepspeed={"offload_optimizer": "cpu"})
    found = config["zero_optimization"]["offload_optimizer"]
    assert found == {"device": "cpu", "buffer_count": 5}
    assert config["comms_logger"] == {}


def test_an_empty_file_adds_nothing(written):
    assert written({}) == made()


CONTRADICTIONS: list[tuple[dict[str, Any], str, Any, Any, str]] = [
    ({"train_batch_size": 9}, "train_batch_size", 9, 8, "training.global_batch_size"),
    (
        {"train_micro_batch_size_per_gpu": 7},
        "train_micro_batch_size_per_gpu",
        7,
        2,
        "training.per_device_batch_size",
    ),
    (
        {"gradient_accumulation_steps": 3},
        "gradient_accumulation_steps",
        3,
        1,
        "training.gradient_accumulation_steps",
    ),
    ({"gradient_clipping": 0.3}, "gradient_clipping", 0.3, 1.0, "training.max_grad_norm"),
    (
        {"zero_optimization": {"stage": 3}},
        "zero_optimization.stage",
        3,
        2,
        "distributed.strategy",
    ),
    ({"bf16": {"enabled": True}}, "bf16.enabled", True, False, "training.precision"),
    ({"fp16": {"enabled": True}}, "fp16.enabled", True, False, "training.precision"),
    (
        {"bf16": {"check_grad_overflow": False}},
        "bf16.check_grad_overflow",
        False,
        True,
        "training.max_bad_steps",
    ),
    (
        {"zero_optimization": {"compute_grad_norm": False}},
        "zero_optimization.compute_grad_norm",
        False,
        True,
        "training.max_bad_steps",
    ),
    ({"optimizer": {"params": {"lr": 0.5}}}, "optimizer.params.lr", 0.5, 1e-3, "training.lr"),
    (
        {"optimizer": {"params": {"betas": [0.8, 0.9]}}},
        "optimizer.params.betas",
        [0.8, 0.9],
        [0.9, 0.98],
        "training.betas",
    ),
    ({"optimizer": {"params": {"eps": 0.1}}}, "optimizer.params.eps", 0.1, 1e-8, "training.eps"),
    (
        {"optimizer": {"params": {"weight_decay": 0.2}}},
        "optimizer.params.weight_decay",
        0.2,
        0.01,
        "training.weight_decay",
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer.device",
        "cpu",
        "none",
        "distributed.deepspeed.offload_optimizer",
    ),
    (
        {"zero_optimization": {"offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device",
        "cpu",
        "none",
        "distributed.deepspeed.offload_param",
    ),
]


@pytest.mark.parametrize(
    ("document", "key", "there", "here", "name"), CONTRADICTIONS, ids=[c[1] for c in CONTRADICTIONS]
)
def test_a_contradiction_names_both_values_and_the_key(written, document, key, there, here, name):
    with pytest.raises(RecipeError) as caught:
        written(document)
    assert f"{key} is {there!r} there and {here!r} in the recipe ({name})" in str(caught.value)
    assert "ds.json contradicts the recipe" in str(caught.value)


def test_all_contradictions_are_told_at_once(written):
    with pytest.raises(RecipeError) as caught:
        written({"gradient_clipping": 3.0, "zero_optimization": {"stage": 1}})
    assert "gradient_clipping" in str(caught.value)
    assert "zero_optimization.stage" in str(caught.value)


def test_another_optimizer_or_a_scheduler_is_refused(written):
    with pytest.raises(
        RecipeError, match=r"optimizer\.type is 'Lamb' there and adamw in the recipe"
    ):
        written({"optimizer": {"type": "Lamb"}})
    with pytest.raises(RecipeError, match=r"schedule is the recipe's \(training\.schedule\)"):
        written({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}})


def test_a_file_that_is_none_is_an_error(written, tmp_path):
    with pytest.raises(RecipeError, match=r"deepspeed\.config: .*ds\.json, line 1: not valid JSON"):
        written("{stage: 2}")
    with pytest.raises(RecipeError, match=r"ds\.json: holds a list, expected an object of JSON"):
        written([1, 2])
    missing = {"config": str(tmp_path / "none.json")}
    with pytest.raises(RecipeError, match=r"deepspeed\.config: .*none\.json: No such file"):
        made(deepspeed=missing)
