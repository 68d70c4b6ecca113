"""Every configuration that the guides print, unchanged. What a guide leaves out ("existing settings") is
in a file that builds on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.recipe.batch import solve
from muster.recipe.load import load
from muster.recipe.schema import Recipe

SYSTEMS = Path(__file__).parents[2] / "systems"
TRAINING_CONFIG = """\
training:
  # ... existing settings ...

  # Distributed training configuration
  distributed_strategy: "ddp"  # Options: ddp, fsdp
  ddp_backend: "nccl"  # NCCL for NVIDIA GPUs
  ddp_find_unused_parameters: false  # Performance optimization

  # Optional FSDP config (for very large models)
  # fsdp_config:
  #   fsdp_transformer_layer_cls_to_wrap: "WhisperEncoderLayer"
  #   fsdp_backward_prefetch: "backward_pre"
  #   fsdp_state_dict_type: "full_state_dict"
"""
FSDP = """\
training:
  distributed_strategy: "fsdp"
  fsdp_config:
    fsdp_transformer_layer_cls_to_wrap: "WhisperEncoderLayer"
    fsdp_backward_prefetch: "backward_pre"
    fsdp_state_dict_type: "full_state_dict"
    fsdp_offload_params: false
"""
MULTI_GPU = """\
defaults:
  - base_config
  - distributed

training:
  batch_size: 32  # Will be divided across GPUs
  lr: 2e-3        # Scaled for 2 GPUs
"""
DISTRIBUTED = """\
distributed:
  enabled: true
  backend: "nccl"              # Best for GPU-to-GPU communication
  find_unused_parameters: false # Optimization for DDP
  sync_batchnorm: true         # Synchronize batch norm across GPUs
"""


def built_on(folder: Path, base: Path, **files: str) -> Recipe:
    """The first of `files`, on top of a configuration that ships."""
    (folder / base.name).write_text(base.read_text())
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    first = next(iter(files))
    if "defaults:" in files[first]:
        return load(str(folder / f"{first}.yaml"))
    (folder / "whole.yaml").write_text(f"defaults: [{base.stem}, {first}]\n")
    return load(str(folder / "whole.yaml"))


@pytest.mark.parametrize(
    ("text", "strategy", "wrap"),
    [(TRAINING_CONFIG, "ddp", None), (FSDP, "fsdp", ["WhisperEncoderLayer"])],
)
@pytest.mark.parametrize("base", ["training_config", "whisper_small"])
def test_the_configurations_of_the_asr_guide(tmp_path, base, text, strategy, wrap):
    recipe = built_on(tmp_path, SYSTEMS / "mwc-asr" / "config" / f"{base}.yaml", guide=text)
    options = recipe.distributed
    assert (options.strategy, options.backend) == (strategy, "nccl")
    assert (options.ddp.find_unused_parameters, options.fsdp.cpu_offload) == (False, False)
    if wrap:
        assert options.fsdp.wrap == wrap
        assert options.fsdp.backward_prefetch is True


def test_the_asr_guides_batch_is_64_on_its_machine(tmp_path):
    """4 per device, accumulation 4, no global batch: the guide's names, and its number."""
    (tmp_path / "guide.yaml").write_text(
        TRAINING_CONFIG + "  num_train_epochs: 3\n  learning_rate: 1.0e-5\n"
        "  per_device_train_batch_size: 4\n  gradient_accumulation_steps: 4\n"
        "  gradient_checkpointing: true\n"
    )
    recipe = load(str(tmp_path / "guide.yaml"))
    assert recipe.training.activation_checkpointing == "full"
    assert [solve(recipe.training, ranks).global_batch for ranks in (1, 4)] == [16, 64]


def test_the_configurations_of_the_lmu_guide(tmp_path):
    base = SYSTEMS / "lmu-asr" / "configs" / "base_config.yaml"
    recipe = built_on(tmp_path, base, multi_gpu=MULTI_GPU, distributed=DISTRIBUTED)
    assert (recipe.training.global_batch_size, recipe.training.lr) == (32, 2e-3)
    assert recipe.training.lr_scaling == "none", "the guide's 2e-3 is scaled already"
    options = recipe.distributed
    assert (options.backend, options.sync_batchnorm, options.devices) == ("nccl", True, "auto")


def test_the_batch_of_the_multi_gpu_guide():
    recipe = load(str(SYSTEMS / "multi-gpu" / "recipe.yaml"), ["training.per_device_batch_size=1"])
    sizes = solve(recipe.training, 8)
    assert (sizes.per_device, sizes.accumulation, sizes.global_batch) == (1, 8, 64)
    words = ["training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=16"]
    fewer = load(str(SYSTEMS / "multi-gpu" / "recipe.yaml"), words)
    assert solve(fewer.training, 4).global_batch == 64
