"""Hugging Face's own Trainer on a muster recipe, as a baseline.

Same initial weights, same samples in the same optimizer steps, same learning rates; the loop, the
optimizer and the data parallelism are the Trainer's.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, SequentialSampler
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from muster import run_directory
from muster.data.batches import BatchPlan
from muster.data.loader import Loader
from muster.data.mixture import mixture_of
from muster.data.text.packing import PackedSource
from muster.errors import RecipeError
from muster.launch.cluster import RankInfo
from muster.models.huggingface.folder import export, folder_weights
from muster.observe.observer import Observer, StepRecord
from muster.parallel import mesh as meshes
from muster.parallel.device_test import verify_device
from muster.parallel.engine import Engine
from muster.parallel.materialise import materialise
from muster.parallel.mesh import Mesh
from muster.planner.strategy import parameter_count
from muster.recipe.batch import BatchSizes, solve
from muster.recipe.schema import Recipe
from muster.recipe.training import Training
from muster.tasks.causal_lm import CausalLM
from muster.tasks.chat import ChatLM
from muster.training.checkpoint import Checkpoints
from muster.training.evaluate import SingleProcess
from muster.training.job import Job
from muster.training.optimizer import learning_rate, peak_lr
from muster.training.precision import shared_precision
from muster.worker.main import connect_ranks
from muster.worker.prepare import open_source, open_task
from muster.worker.results import final_scores, write_data, write_plan, write_results
from muster.writing import write_json

STRATEGY = "hf-ddp"


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
        """`shift_labels` too: our targets are already shifted by one token."""
        step, row = divmod(index, self.plan.batch_size)
        source = self.source.of_epoch(self.plan.epoch_of(step))
        batch = self.task.collate([source.load(int(self.plan.batch(step)[row]))], None)
        targets = batch["targets"][0]
        return {"input_ids": batch["tokens"][0], "labels": targets, "shift_labels": targets}


class PlannedTrainer(Trainer):
    """The Trainer, reading samples in order and following the recipe's learning rate."""

    def __init__(self, training: Training, steps: int, **options: Any) -> None:
        self.recipe_training, self.recipe_steps = training, steps
        self.data_wait_s = 0.0  # of the current step
        super().__init__(**options)

    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return SequentialSampler(cast(PlannedSequences, self.train_dataset))

    def get_batch_samples(self, *details: Any) -> Any:
        begin = time.perf_counter()
        samples = super().get_batch_samples(*details)
        self.data_wait_s = time.perf_counter() - begin
        return samples

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        training, steps = self.recipe_training, self.recipe_steps
        self.lr_scheduler = LambdaLR(
            optimizer or cast(Optimizer, self.optimizer),
            lambda step: learning_rate(training, step, steps) / peak_lr(training),
        )
        return self.lr_scheduler


def trainer_arguments(
    training: Training,
    sizes: BatchSizes,
    steps: int,
    precision: str,
    folder: Path,
    device: torch.device,
    **more: Any,
) -> TrainingArguments:
    """The recipe as TrainingArguments, on `device` alone. The Trainer saves and reports nothing by itself.

    In one process the Trainer would take every GPU that is visible, with nn.DataParallel and as many
    times the batch. In one of several it takes the GPU whose index is LOCAL_RANK.
    """
    if "LOCAL_RANK" in os.environ and device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)
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
        "use_cpu": device.type == "cpu",
        "torch_compile": training.compile is True,
        "gradient_checkpointing": training.activation_checkpointing != "none",
        "ddp_find_unused_parameters": False,
        "remove_unused_columns": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(**(options | more))
    arguments._n_gpu = min(1, arguments.n_gpu)  # as the Trainer itself does for a split model
    return arguments


class MetricsCallback(TrainerCallback):
    """Writes muster's metrics.jsonl from the Trainer's logs, and handles `muster stop`."""

    def __init__(self, observer: Observer, mesh: Mesh, plan: BatchPlan, tokens: int) -> None:
        self.observer, self.mesh, self.plan = observer, mesh, plan
        self.tokens = tokens  # of a global batch
        self.trainer: PlannedTrainer | None = None
        self.lr, self.last = 0.0, time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.last = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        self.lr = float(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.mesh.sum(everyone=self.observer.stop_requested())[-1] > 0:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not self.mesh.first or "loss" not in logs:
            return
        assert self.trainer is not None
        now = time.perf_counter()
        record = StepRecord(
            step=state.global_step,
            epoch=self.plan.epoch_of(state.global_step - 1),
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm", math.nan),
            lr=self.lr,
            samples=self.plan.batch_size,
            step_time_s=now - self.last,
            data_wait_s=self.trainer.data_wait_s,
            comm_wait_s=math.nan,  # the Trainer does not measure it
            compute_s=math.nan,
            filled=self.tokens,
            cells=self.tokens,
            amounts={"tokens": float(self.tokens)},
            skipped=False,
        )
        self.last = now
        with (self.observer.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record.metrics()) + "\n")


def run_rank(
    recipe: Recipe, rank_info: RankInfo, run: run_directory.Run | None = None
) -> dict[str, Any]:
    """What `muster.worker.main.run_rank` does, with the Trainer instead of muster's loop."""
    _sizes(recipe, rank_info.world)  # refuses before ranks wait for each other
    task = cast(CausalLM, open_task(recipe))
    if isinstance(task, ChatLM):
        raise RecipeError(
            "data.format: Hugging Face's Trainer runs here on text, not on chat rows; train with "
            "muster's own loop"
        )
    mesh, run, recipe = connect_ranks(recipe, rank_info, run)
    verify_device(mesh)
    sizes = _sizes(recipe, rank_info.world)
    source = cast(PackedSource, open_source(task, recipe, mesh))
    job = _job(recipe, task, source, mesh, run, sizes)
    trainer = _trainer(job, source, sizes, run.path / "trainer")
    trainer.train()
    done = int(trainer.state.global_step)
    folder = run.path / "model"
    if mesh.first:
        cast(PreTrainedModel, trainer.model).save_pretrained(folder)
    mesh.barrier()
    materialise(job.engine.parts[0], folder_weights(folder, task.config), mesh.device)
    final = final_scores(job, done)
    results: dict[str, Any] = {}
    if mesh.first:
        results = write_results(job, run, done, final, balance=None, checkpoint=str(folder))
    job.observer.close()
    meshes.leave()
    return results


def _sizes(recipe: Recipe, world: int) -> BatchSizes:
    """Refuses what the Trainer cannot do, or not in the same way; then solves the batch sizes."""
    allowed: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "task": (recipe.task, ("causal-lm",)),
        "distributed.strategy": (recipe.distributed.strategy, ("auto", "ddp")),
        "training.optimizer": (recipe.training.optimizer, ("adamw",)),
        "training.on_spike": (recipe.training.on_spike, ("continue",)),
        "model.lora": (recipe.model.lora, (None,)),
        "data.isolate_documents": (recipe.data.isolate_documents, (False,)),
        "training.precision": (recipe.training.precision, ("auto", "fp32", "bf16", "fp16")),
        "training.activation_checkpointing": (
            recipe.training.activation_checkpointing,
            ("none", "full"),
        ),
    }
    for key, (value, possible) in allowed.items():
        if value not in possible:
            raise RecipeError(
                f"{key}: Hugging Face's Trainer runs here with {' or '.join(map(str, possible))}, "
                f"not {value}; change it, or train with muster's own loop"
            )
    sizes = solve(recipe.training, world)
    if sizes.per_device * sizes.accumulation * world != sizes.global_batch:
        raise RecipeError(
            f"training.global_batch_size: Hugging Face's Trainer gives all ranks equal batches, and "
            f"{sizes.global_batch} is not {sizes.per_device} × {sizes.accumulation} accumulation "
            f"steps × {world} ranks; set it to a multiple of {sizes.accumulation * world}"
        )
    return sizes


def _job(
    recipe: Recipe,
    task: CausalLM,
    source: PackedSource,
    mesh: Mesh,
    run: run_directory.Run,
    sizes: BatchSizes,
) -> Job:
    """The job for muster's evaluation and results, with a model that has no weights yet."""
    plan = BatchPlan(
        source.lengths,
        sizes.global_batch,
        recipe.seed,
        recipe.data.pool_batches,
        mixture=mixture_of(source, recipe.data.weights),
    )
    steps = recipe.training.steps or plan.steps_per_epoch * (recipe.training.epochs or 1)
    precision = shared_precision(recipe.training.precision, mesh)
    write_plan(run, mesh, sizes, plan, steps, precision, parameter_count(task), {}, {})
    if mesh.first:
        planned = json.loads((run.path / "plan.json").read_text())
        write_json(run.path / "plan.json", planned | {"strategy": STRATEGY})
    observer = Observer(run.path, mesh.rank, every_steps=recipe.logging.every_steps, start=0)
    if mesh.first:
        observer.event("data", lines=write_data(run, task, recipe))
    observer.event("started", step=0, steps=steps, world=mesh.world)
    with torch.device("meta"):
        engine = cast(Engine, SingleProcess(task.build_model()))
    return Job(
        recipe,
        task,
        engine,
        mesh,
        Loader(source, plan, task.collate),
        Checkpoints(run.path / "checkpoints", mesh, {}, {}, keep=1, asynchronous=False),
        observer,
        precision,
        steps,
    )


def _trainer(job: Job, source: PackedSource, sizes: BatchSizes, folder: Path) -> PlannedTrainer:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    task, training, plan = cast(CausalLM, job.task), job.recipe.training, job.loader.plan
    tokens = sizes.global_batch * job.recipe.data.sequence_length
    callback = MetricsCallback(job.observer, job.mesh, plan, tokens)
    trainer = PlannedTrainer(
        training,
        job.steps,
        model=as_transformers(task, job.mesh.device),
        args=trainer_arguments(
            training,
            sizes,
            job.steps,
            job.precision,
            folder,
            job.mesh.device,
            logging_steps=1,
            logging_nan_inf_filter=False,
            seed=job.recipe.seed,
        ),
        train_dataset=PlannedSequences(task, source, plan, job.steps),
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)
    callback.trainer = trainer
    return trainer
