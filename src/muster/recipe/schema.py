"""The recipe: every key that exists, its meaning, its default and its bounds.

The recipe is the maths. Nothing in it depends on the machine: `training.global_batch_size` clips go
into each of `training.steps` optimizer steps whether one process or sixty-four share the work. What
does depend on the machine (`distributed`, workers, `auto`) only decides where the work runs. One key
is an exception, for those who ask for it: `training.scale_with_ranks`, resolved once, when a run starts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeGuard

from pydantic import Field, model_validator

from muster.recipe.data import Data
from muster.recipe.distributed import Distributed
from muster.recipe.places import Kubernetes, Slurm
from muster.recipe.section import Auto, Beta, Count, Fraction, Positive, Section, fixed, free


class Lora(Section):
    """Low-rank adapters: the pretrained weights are frozen, two low-rank matrices per target are trained."""

    rank: Positive = Field(8, description="Rank of the adapters.")
    alpha: Annotated[float, Field(gt=0)] = Field(
        16.0, description="Adapters are scaled by alpha / rank."
    )
    dropout: Fraction = Field(0.0, description="On the adapters' input.")
    targets: list[str] = Field(
        ["q", "v"],
        description="Layers that get an adapter, by name: q k v o gate up down (Whisper: no gate).",
    )


class Model(Section):
    preset: str = fixed(
        "lmu-micro",
        description="A named architecture. Speech: lmu-micro, lmu-7m, their -causal forms, lmu-guide; for "
        "speech-seq2seq whisper-micro, whisper-tiny, -base, -small, -medium, -large-v3. "
        "Language: gpt2-micro, gpt2, gpt2-medium, -large, -xl, llama-micro, llama-1b, llama-3b, llama-7b, "
        "llama-3-8b, llama-70b. "
        "Images: mnist-net, resnet-18, resnet-50.",
    )
    pretrained: str | None = fixed(
        None,
        description="A Hugging Face folder, or a hub id, whose architecture and weights to start "
        "from (GPT-2, Llama, Mistral, Qwen2, Whisper); `preset` is then ignored.",
    )
    vocab_size: Positive | None = fixed(
        None,
        description="Rows of a language model's embedding. Default: as many as the tokenizer has.",
    )
    lora: Lora | None = fixed(None, description="Train low-rank adapters only.")
    freeze_encoder: bool = fixed(
        False, description="Whisper: train only the decoder; the encoder keeps no activations."
    )
    norm: Literal["layer", "batch"] = fixed(
        "layer",
        description="`batch` is masked batch normalisation, synchronised over all ranks. Its statistics "
        "come from one micro-batch at a time, so accumulation and world size change the result.",
    )
    dropout: Fraction = free(
        0.0,
        description="Dropout masks depend on the rank, so with it on, losses differ between world sizes.",
    )


def _count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class Training(Section):
    steps: Positive | None = free(None, description="Optimizer steps. Give this or `epochs`.")
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
    schedule: Literal["cosine", "linear", "constant"] = free(
        "cosine",
        description="Learning rate schedule after warm-up, by optimizer step.",
    )
    warmup_steps: Count = free(100, description="Steps from 0 to the peak.")
    final_lr_ratio: Fraction = free(
        0.0, description="Final learning rate, as a fraction of the peak."
    )
    weight_decay: Annotated[float, Field(ge=0)] = free(
        0.01, description="On matrices only, not on biases and norms."
    )
    betas: tuple[Beta, Beta] = free((0.9, 0.98), description="AdamW's two averages.")
    eps: Annotated[float, Field(gt=0)] = free(1e-8, description="AdamW's epsilon.")
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
        description="torch.compile each block, and the head of a language model. `auto`: language models and Whisper on GPUs, in "
        "runs of 200 steps or more, or with fp8; where compilation fails, the run goes on without.",
    )
    cuda_graphs: bool | Literal["auto"] = free(
        "auto",
        description="Capture a CUDA graph for each batch shape and replay it. `auto`: language models and "
        "Whisper on one GPU, if a trial before the first step is faster with it; `true` also under DDP. Ignored on CPUs.",
    )
    label_smoothing: Fraction = free(
        0.0, description="speech-seq2seq: label smoothing of the cross entropy."
    )
    on_oom: Literal["stop", "shrink"] = free(
        "stop",
        description="When a device runs out of memory: end with the reason, or halve the micro-batch on "
        "all ranks, double the accumulation and continue; the global batch does not change.",
    )
    max_bad_steps: Positive = free(
        3,
        description="The run ends at this many steps in a row with a non-finite loss or gradient.",
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


class Checkpoint(Section):
    every_steps: Positive | None = free(500, description="`null`: only at the end.")
    final: bool = free(
        True, description="Also at the end. A run that is stopped always saves first."
    )
    keep: Positive = free(3, description="Newest complete checkpoints kept.")
    resume: str = free(
        "auto",
        description="`auto`: the newest complete checkpoint of this run; or, for a new run, a checkpoint or run "
        "folder to start from.",
    )
    asynchronous: bool = free(True, description="Write in the background during training.")


class Evaluation(Section):
    every_steps: Positive | None = free(
        500, description="Steps between evaluations on the validation data; `null`: never."
    )
    batch_size: Positive | Auto = free(
        "auto",
        description="Samples per rank and evaluation batch. `auto`: as many as training holds at a "
        "time, at most 32.",
    )
    decoder: Literal["greedy", "beam"] = free(
        "greedy", description="`beam`: CTC prefix-beam search, or Whisper's beam search."
    )
    beam_width: Positive | Auto = free(
        "auto", description="Hypotheses kept by the beam. `auto`: 16 for CTC, 5 for Whisper."
    )
    window: Annotated[float, Field(gt=0, le=30)] | Literal["bucket", "auto"] = free(
        "auto", description="speech-seq2seq: as `data.window`, for scoring. `auto`: the same."
    )
    max_tokens: Positive = free(
        224, description="Whisper: maximum number of generated tokens per clip."
    )
    normalizer: Literal["auto", "whisper", "basic", "none"] = free(
        "auto",
        description="What is done to both texts before words are compared: Whisper's English rules, "
        "its rules for any language, or nothing. `auto`: `whisper` for speech-seq2seq in English, "
        "`basic` in other languages, `none` for speech-ctc.",
    )
    ngram: str | None = free(
        None,
        description="A word n-gram model for the beam: an ARPA file, or `train` for one built from "
        "the training transcripts.",
    )
    ngram_weight: Annotated[float, Field(ge=0)] = free(
        0.5, description="Weight of the n-gram model."
    )
    word_bonus: float = free(
        0.0, description="Added per word by the beam; an n-gram model alone favours short outputs."
    )
    known_words: bool = free(False, description="Restrict the beam to words of the n-gram model.")
    final: bool = free(
        True, description="Score the test data (else validation) when training ends."
    )

    @model_validator(mode="after")
    def _beam_for_ngram(self) -> Evaluation:
        if self.ngram is not None and self.decoder != "beam":
            raise ValueError("ngram needs the beam: set evaluation.decoder=beam")
        if self.known_words and self.ngram is None:
            raise ValueError("known_words needs an n-gram model: set evaluation.ngram")
        return self


class Logging(Section):
    dir: str = free("runs", description="Folder for run directories.")
    tensorboard: bool = free(True, description="Also write TensorBoard events.")
    every_steps: Positive = free(10, description="Steps between gathering step times of all ranks.")
    profile: Count = free(
        0,
        description="Steps to record with PyTorch's profiler, after 3 that are not: a trace per rank "
        "and a summary in the run's `profile/`. 0: none.",
    )


class Recipe(Section):
    """Everything a run needs to be repeated, apart from the data itself."""

    name: str = free(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Names the run directory."
    )
    description: str = free("", description="One line for `muster recipe list`.")
    task: Literal["speech-ctc", "speech-seq2seq", "causal-lm", "image-classification"] = fixed(
        "speech-ctc", description="The workload."
    )
    model: Model = Field(default_factory=lambda: Model())
    data: Data = Field(default_factory=lambda: Data())
    training: Training
    distributed: Distributed = Field(default_factory=lambda: Distributed())
    checkpoint: Checkpoint = Field(default_factory=lambda: Checkpoint())
    evaluation: Evaluation = Field(default_factory=lambda: Evaluation())
    logging: Logging = Field(default_factory=lambda: Logging())
    slurm: Slurm = Field(default_factory=lambda: Slurm())
    kubernetes: Kubernetes = Field(default_factory=lambda: Kubernetes())
    seed: Annotated[int, Field(ge=0, lt=2**31)] = fixed(
        42, description="Random seed of weights, data order and augmentation."
    )

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")
