"""The recipe's section `training`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeGuard

from pydantic import Field, model_validator

from muster.recipe.section import Auto, Beta, Count, Fraction, Positive, Section, fixed, free

MOMENTUM = {"sgd": 0.9, "muon": 0.95}  # optimizers that have it, and its default
NO_AVERAGES = ("sgd", "adafactor")  # optimizers without AdamW's, and its epsilon


def unused_by(optimizer: str) -> list[str]:
    """Keys of `training` that this optimizer does not use."""
    averages = ["betas", "eps"] if optimizer in NO_AVERAGES else []
    return averages if optimizer in MOMENTUM else ["momentum", *averages]


def _count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class EarlyStopping(Section):
    """End training when the validation score has stopped improving; off unless given."""

    patience: Positive = Field(
        3,
        description="Evaluations in a row without a better `evaluation.metric`; then training ends.",
    )
    min_delta: Annotated[float, Field(ge=0)] = Field(
        0.0, description="A score must be better by more than this to count."
    )


class Training(Section):
    steps: Positive | None = free(
        None,
        description="Optimizer steps. Give this or `epochs`.",
    )
    epochs: Positive | None = free(None, description="Passes over the data. Give this or `steps`.")
    global_batch_size: Positive = fixed(
        32,
        description="Clips or sequences per optimizer step, whatever the world size. If left out while "
        "the next two keys are numbers: their product × the data ranks of the first start.",
    )
    per_device_batch_size: Positive | Auto = free(
        "auto", description="Largest micro-batch per device, in samples."
    )
    gradient_accumulation_steps: Positive | Auto = free(
        "auto", description="Micro-batches per device and optimizer step; `auto` computes it."
    )
    scale_with_ranks: Literal["none", "batch", "batch_and_lr"] = free(
        "none",
        description="Changes the maths with the number of GPUs: `batch` multiplies `global_batch_size` by "
        "the data ranks of the first start, `batch_and_lr` also `lr`. The run's recipe.yaml records the "
        "products and `none`, so a resumed run keeps them on any number of ranks.",
    )
    optimizer: Literal["adamw", "sgd", "adafactor", "muon", "adamw-8bit"] = fixed(
        "adamw",
        description="`muon`: for the matrices of the model's blocks, and AdamW for the rest, under one learning "
        "rate. `adafactor`: `lr` is relative to the size of each weight matrix. `adamw-8bit` needs torchao. "
        "zero1, zero2 and zero3 take adamw and sgd.",
    )
    momentum: Beta | None = fixed(
        None, description="Of sgd and muon. Default: 0.9 for sgd, 0.95 for muon."
    )
    lr: Annotated[float, Field(gt=0)] = free(
        1e-3, description="Peak learning rate, before `lr_scaling`."
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = free(
        "none",
        description="Scale `lr` by global_batch_size / reference_batch_size, or by its square root.",
    )
    reference_batch_size: Positive | None = free(
        None,
        description="The global batch that `lr` was chosen for; needed when `lr_scaling` is not none.",
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = free(
        "cosine",
        description="Learning rate schedule after warm-up, by optimizer step. `wsd` (warm-up, stable, decay): "
        "the peak, and in the last `decay_steps` a straight line down.",
    )
    decay_steps: Positive | None = free(
        None,
        description="schedule=wsd: steps of the decay at the end. Default: a tenth of all steps.",
    )
    warmup_steps: Count = free(100, description="Steps from 0 to the peak.")
    final_lr_ratio: Fraction = free(
        0.0, description="Final learning rate, as a fraction of the peak."
    )
    weight_decay: Annotated[float, Field(ge=0)] = free(
        0.01,
        description="On matrices only, not on biases and norms. sgd adds it to the gradient; the others "
        "subtract it from the weights.",
    )
    betas: tuple[Beta, Beta] = free(
        (0.9, 0.98), description="AdamW's two averages; also of adamw-8bit, and of muon's AdamW."
    )
    eps: Annotated[float, Field(gt=0)] = free(
        1e-8, description="AdamW's epsilon; also of adamw-8bit, and of muon's AdamW."
    )
    max_grad_norm: Annotated[float, Field(gt=0)] | None = free(
        1.0, description="Clip the global gradient norm to this; `null` measures without clipping."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = free(
        "auto",
        description="`auto`: bf16 if every GPU has it (V100 and T4 only emulate it), else fp32. fp16 uses a loss "
        "scaler. fp8: bf16, and float8 products in the large linear layers of causal-lm's blocks, on GPUs "
        "from Ada and Hopper on, under ddp, fsdp and hsdp; needs torchao.",
    )
    activation_checkpointing: Literal["none", "full", "selective"] = free(
        "none",
        description="`full` saves only each block's input and recomputes the rest in the backward "
        "pass; `selective` also saves the results of matrix products.",
    )
    compile: bool | Literal["auto"] = free(
        "auto",
        description="torch.compile each block, and the last norm, the head and Whisper's convolutions. `auto`: language models and "
        "Whisper on GPUs, in runs of 200 steps or more, or with fp8; where compilation fails, the run goes on without.",
    )
    cuda_graphs: bool | Literal["auto"] = free(
        "auto",
        description="Capture a CUDA graph for each batch shape and replay it. `auto`: language models and "
        "Whisper on one GPU, if a trial before the first step is faster with it; `true` also under DDP. Ignored on CPUs.",
    )
    label_smoothing: Fraction = free(
        0.0, description="speech-seq2seq: label smoothing of the cross entropy."
    )
    ctc_weight: Beta = fixed(
        0.0,
        description="speech-seq2seq: weight of a CTC loss on the encoder's output, of which the decoder's loss has "
        "the rest. For training from scratch: the encoder learns to listen before the decoder can tell it how. "
        "0: no CTC head.",
    )
    on_oom: Literal["stop", "shrink"] = free(
        "stop",
        description="When a device runs out of memory: end with the reason, or halve the micro-batch on "
        "all ranks, double the accumulation and continue; the global batch does not change.",
    )
    early_stopping: EarlyStopping | None = free(None)
    max_bad_steps: Positive = free(
        3,
        description="The run ends at this many steps in a row with a non-finite loss or gradient.",
    )
    on_spike: Literal["continue", "stop", "skip", "rewind"] = free(
        "continue",
        description="At a step whose loss or gradient norm is far above the steps before it, or is not finite: `continue` "
        "notes it (and skips the update where it is not finite), `stop` ends the run and names the rows, `skip` makes no "
        "update, `rewind` goes back to the last checkpoint and leaves that batch out.",
    )
    spike_deviations: Annotated[float, Field(gt=0)] = free(
        6.0,
        description="How far above: more than this many standard deviations over the mean of the last 128 steps.",
    )

    @model_validator(mode="before")
    @classmethod
    def _two_numbers_define_the_third(cls, given: Any) -> Any:
        """Without a global batch, the other two numbers are one rank's part of it."""
        if not isinstance(given, dict) or "global_batch_size" in given:
            return given
        each, steps = (
            given.get(k) for k in ("per_device_batch_size", "gradient_accumulation_steps")
        )
        scales = "scale_with_ranks" in given
        if not _count(each) or not (_count(steps) or (scales and steps in (None, "auto"))):
            return given
        if given.get("scale_with_ranks") == "none":
            raise ValueError(
                "global_batch_size is not given, and scale_with_ranks is none, as in the recipe.yaml of "
                "every run; give global_batch_size, or leave scale_with_ranks out "
                "(~training.scale_with_ranks): per_device_batch_size × gradient_accumulation_steps × ranks "
                "is it then"
            )
        part = each * (steps if _count(steps) else 1)
        return {"scale_with_ranks": "batch", **given, "global_batch_size": part}

    @model_validator(mode="after")
    def _scaled_once(self) -> Training:
        if self.scale_with_ranks == "none":
            return self
        each, steps = self.per_device_batch_size, self.gradient_accumulation_steps
        if _count(each) and _count(steps) and each * steps != self.global_batch_size:
            raise ValueError(
                f"scale_with_ranks multiplies the batch of one rank, and global_batch_size "
                f"{self.global_batch_size} is not per_device_batch_size {each} × "
                f"gradient_accumulation_steps {steps} (= {each * steps}); leave global_batch_size out"
            )
        if self.scale_with_ranks == "batch_and_lr" and self.lr_scaling != "none":
            raise ValueError(
                f"scale_with_ranks=batch_and_lr and lr_scaling={self.lr_scaling} would both scale lr; use "
                "scale_with_ranks=batch, with which lr_scaling follows the batch, or lr_scaling=none"
            )
        return self

    @model_validator(mode="after")
    def _keys_of_this_optimizer(self) -> Training:
        for key in unused_by(self.optimizer):
            if getattr(self, key) != type(self).model_fields[key].default:
                users = MOMENTUM if key == "momentum" else ("adamw", "adamw-8bit", "muon")
                raise ValueError(
                    f"{key} is set, which optimizer={self.optimizer} does not use; leave it out "
                    f"(~training.{key}), or use optimizer {' or '.join(users)}"
                )
        return self

    @model_validator(mode="after")
    def _decay_of_wsd(self) -> Training:
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ValueError(
                f"decay_steps is {self.decay_steps}, and schedule={self.schedule} has no such part; leave it "
                "out, or use schedule=wsd"
            )
        if self.steps is not None:
            self.refuse_long_decay(self.steps)
        return self

    def refuse_long_decay(self, steps: int) -> None:
        """Where a run of `steps` steps ends before its decay could begin. With `epochs` their number is
        known once the data are."""
        needed = self.warmup_steps + (self.decay_steps or 0)
        if self.decay_steps is not None and needed > steps:
            raise ValueError(
                f"decay_steps is {self.decay_steps} after warmup_steps={self.warmup_steps}, and the run has "
                f"{steps} steps; lower one of them, or train for {needed} steps"
            )

    @property
    def used_momentum(self) -> float:
        """Of sgd and muon; 0 for others."""
        return MOMENTUM.get(self.optimizer, 0.0) if self.momentum is None else self.momentum

    @model_validator(mode="after")
    def _one_length(self) -> Training:
        if (self.steps is None) == (self.epochs is None):
            given = "neither" if self.steps is None else "both"
            raise ValueError(
                f"needs either steps or epochs, got {given}: give one, and set the other to null"
            )
        if self.lr_scaling != "none" and self.reference_batch_size is None:
            raise ValueError(
                f"lr_scaling is {self.lr_scaling!r} without a reference: "
                "set training.reference_batch_size to the batch size that lr was chosen for"
            )
        return self
