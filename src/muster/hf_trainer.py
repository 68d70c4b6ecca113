"""Hugging Face's own Trainer on a muster recipe: the baseline people know, on equal terms.

Same weights to start from, same samples in the same optimizer steps, same learning rates; the loop,
the optimizer and the way ranks share the work are the Trainer's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, SequentialSampler
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from muster.data.batches import BatchPlan
from muster.data.packing import PackedSource
from muster.models.huggingface import export
from muster.parallel.materialise import materialise
from muster.plan.batch import BatchSizes
from muster.recipe.schema import Training
from muster.tasks.causal_lm import CausalLM
from muster.train.optimizer import learning_rate, peak_lr


def as_transformers(task: CausalLM, device: torch.device) -> PreTrainedModel:
    """transformers' model with the weights that muster would start from on `device`."""
    with torch.device("meta"):
        model = task.build_model()
    materialise(model, task.weights(), device)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        export(folder, task.config, model.state_dict(), family=task.family)
        found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return found


class PlannedSequences(Dataset[dict[str, Tensor]]):
    """The samples of every optimizer step, one step after the other.

    Ranks that take micro-batches from it in turn see muster's global batches.
    """

    def __init__(self, task: CausalLM, source: PackedSource, plan: BatchPlan, steps: int) -> None:
        self.task, self.source, self.plan, self.steps = task, source, plan, steps

    def __len__(self) -> int:
        return self.steps * self.plan.batch_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, row = divmod(index, self.plan.batch_size)
        return as_inputs(self.task, self.source, int(self.plan.batch(step)[row]))


class Sequences(Dataset[dict[str, Tensor]]):
    """All of a source, in its order."""

    def __init__(self, task: CausalLM, source: PackedSource) -> None:
        self.task, self.source = task, source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return as_inputs(self.task, self.source, index)


def as_inputs(task: CausalLM, source: PackedSource, index: int) -> dict[str, Tensor]:
    """`shift_labels` because the targets already stand one token ahead of the inputs."""
    batch = task.collate([source.load(index)], None)
    targets = batch["targets"][0]
    return {"input_ids": batch["tokens"][0], "labels": targets, "shift_labels": targets}


class PlannedTrainer(Trainer):
    """The Trainer, reading samples in order and following the recipe's learning rate."""

    def __init__(self, training: Training, steps: int, **options: Any) -> None:
        self.recipe_training, self.recipe_steps = training, steps
        super().__init__(**options)

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        training, steps = self.recipe_training, self.recipe_steps
        self.lr_scheduler = LambdaLR(
            optimizer or self.optimizer,
            lambda step: learning_rate(training, step, steps) / peak_lr(training),
        )
        return self.lr_scheduler


def trainer_arguments(
    training: Training, sizes: BatchSizes, steps: int, precision: str, folder: Path, **more: Any
) -> TrainingArguments:
    """What the recipe says, in the Trainer's words. It saves and reports nothing by itself."""
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": sizes.per_device,
        "gradient_accumulation_steps": sizes.accumulation,
        "learning_rate": peak_lr(training),
        "weight_decay": training.weight_decay,
        "adam_beta1": training.betas[0],
        "adam_beta2": training.betas[1],
        "adam_epsilon": training.eps,
        "max_grad_norm": training.max_grad_norm or 0.0,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "use_cpu": not torch.cuda.is_available(),
        "torch_compile": training.compile,
        "gradient_checkpointing": training.activation_checkpointing != "none",
        "remove_unused_columns": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TrainingArguments(**(options | more))
