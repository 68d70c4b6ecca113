"""The recipe: every key that exists, its meaning, its default and its bounds.

The recipe is the maths. Nothing in it depends on the machine: `training.global_batch_size` clips go
into each of `training.steps` optimizer steps whether one process or sixty-four share the work. What
does depend on the machine (`distributed`, workers, `auto`) only decides where the work runs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from muster.recipe.data import Data
from muster.recipe.distributed import Distributed
from muster.recipe.places import Kubernetes, Slurm
from muster.recipe.section import Auto, Beta, Count, Fraction, Positive, Section


class Lora(Section):
    """Low-rank adapters: the pretrained weights rest, two thin matrices beside each target learn."""

    rank: Positive = Field(8, description="Inner size of the adapters.")
    alpha: Annotated[float, Field(gt=0)] = Field(
        16.0, description="Adapters count with alpha / rank."
    )
    dropout: Fraction = Field(0.0, description="On the adapters' input.")
    targets: list[str] = Field(
        ["q", "v"],
        description="Layers that get an adapter, by name: q k v o gate up down (Whisper: no gate).",
    )


class Model(Section):
    preset: str = Field(
        "lmu-micro",
        description="A named architecture. Speech: lmu-micro, lmu-7m, their -causal forms, lmu-guide; for "
        "speech-seq2seq whisper-micro, whisper-tiny, -base, -small, -medium, -large-v3. "
        "Language: gpt2-micro, gpt2, gpt2-medium, -large, -xl, llama-micro, llama-1b, llama-3b, llama-7b, "
        "llama-3-8b, llama-70b. "
        "Images: mnist-net, resnet-18, resnet-50.",
    )
    pretrained: str | None = Field(
        None,
        description="A Hugging Face folder, or a hub id, whose architecture and weights to start "
        "from (GPT-2, Llama, Mistral, Qwen2, Whisper); `preset` is then not looked at.",
    )
    vocab_size: Positive | None = Field(
        None,
        description="Rows of a language model's embedding. Default: as many as the tokenizer has.",
    )
    lora: Lora | None = Field(None, description="Train low-rank adapters only.")
    freeze_encoder: bool = Field(
        False, description="Whisper: only the decoder learns; the encoder keeps no activations."
    )
    norm: Literal["layer", "batch"] = Field(
        "layer",
        description="`batch` is masked batch normalisation, synchronised over all ranks. Its statistics "
        "come from one micro-batch at a time, so accumulation and world size change the result.",
    )
    dropout: Fraction = Field(
        0.0,
        description="Dropout masks follow the rank, so with it on, losses differ between world sizes.",
    )


class Training(Section):
    steps: Positive | None = Field(None, description="Optimizer steps. Give this or `epochs`.")
    epochs: Positive | None = Field(None, description="Passes over the data. Give this or `steps`.")
    global_batch_size: Positive = Field(
        32, description="Clips or sequences per optimizer step, whatever the world size."
    )
    per_device_batch_size: Positive | Auto = Field(
        "auto", description="The most samples one device holds at a time."
    )
    gradient_accumulation_steps: Positive | Auto = Field(
        "auto", description="Micro-batches per device and optimizer step; solved when `auto`."
    )
    lr: Annotated[float, Field(gt=0)] = Field(
        1e-3, description="Peak learning rate, before `lr_scaling`."
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="Scale `lr` by global_batch_size / reference_batch_size, or by its square root.",
    )
    reference_batch_size: Positive | None = Field(
        None,
        description="The global batch at which `lr` is meant; needed when `lr_scaling` is not none.",
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine",
        description="How the learning rate falls after warm-up, on the clock of optimizer steps.",
    )
    warmup_steps: Count = Field(100, description="Steps from 0 to the peak.")
    final_lr_ratio: Fraction = Field(
        0.0, description="Where the schedule ends, as a share of the peak."
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.01, description="On matrices only; biases and norms are left alone."
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.98), description="AdamW's two averages.")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW's epsilon.")
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="Clip the global gradient norm to this; `null` measures without clipping."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="`auto`: bf16 on GPUs that have it, else fp32. fp16 uses a loss scaler."
    )
    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        "none",
        description="`full` keeps only each block's input and computes the rest again in the backward "
        "pass; `selective` keeps the products of matrices too.",
    )
    compile: bool = Field(False, description="torch.compile each block, and the loss.")
    cuda_graphs: bool = Field(
        False,
        description="Record the work of each batch shape and replay it with one call: faster where a "
        "GPU waits for the program that feeds it. One GPU only; a CPU does without.",
    )
    label_smoothing: Fraction = Field(
        0.0, description="speech-seq2seq: this share of each target is spread over all tokens."
    )
    on_oom: Literal["stop", "shrink"] = Field(
        "stop",
        description="When a device runs out of memory: end with the reason, or halve the micro-batch on "
        "all ranks, double the accumulation and go on; the global batch stays.",
    )
    max_bad_steps: Positive = Field(
        3,
        description="The run ends at this many steps in a row with a non-finite loss or gradient.",
    )

    @model_validator(mode="after")
    def _one_length(self) -> Training:
        if (self.steps is None) == (self.epochs is None):
            given = "neither" if self.steps is None else "both"
            raise ValueError(
                f"needs either steps or epochs, got {given}: give one, and set the other to null"
            )
        if self.lr_scaling != "none" and self.reference_batch_size is None:
            raise ValueError(
                f"lr_scaling is {self.lr_scaling!r} but nothing says relative to what: "
                "set training.reference_batch_size to the batch at which lr is right"
            )
        return self


class Checkpoint(Section):
    every_steps: Positive | None = Field(500, description="`null`: only at the end.")
    final: bool = Field(
        True, description="Also at the end. A run that is asked to stop always saves first."
    )
    keep: Positive = Field(3, description="Newest complete checkpoints kept.")
    resume: str = Field(
        "auto",
        description="`auto`: the newest complete checkpoint of this run; or, for a new run, a checkpoint or run "
        "folder to start from.",
    )
    asynchronous: bool = Field(True, description="Write in the background while training goes on.")


class Evaluation(Section):
    every_steps: Positive | None = Field(
        500, description="Score the validation data; `null`: never."
    )
    batch_size: Positive | Auto = Field(
        "auto",
        description="Samples per rank and evaluation batch. `auto`: as many as training holds at a "
        "time, at most 32.",
    )
    decoder: Literal["greedy", "beam"] = Field(
        "greedy", description="`beam`: CTC prefix-beam search, or Whisper's beam search."
    )
    beam_width: Positive | Auto = Field(
        "auto", description="Hypotheses kept by the beam. `auto`: 16 for CTC, 5 for Whisper."
    )
    window: Annotated[float, Field(gt=0, le=30)] | Literal["bucket", "auto"] = Field(
        "auto", description="speech-seq2seq: as `data.window`, for scoring. `auto`: the same."
    )
    max_tokens: Positive = Field(
        224, description="Whisper: the most tokens written for a clip, if its end does not come."
    )
    normalizer: Literal["auto", "whisper", "basic", "none"] = Field(
        "auto",
        description="What is done to both texts before words are compared: Whisper's English rules, "
        "its rules for any language, or nothing. `auto`: `whisper` for speech-seq2seq in English, "
        "`basic` in other languages, `none` for speech-ctc.",
    )
    ngram: str | None = Field(
        None,
        description="A word n-gram model for the beam: an ARPA file, or `train` for one made of "
        "the training transcripts.",
    )
    ngram_weight: Annotated[float, Field(ge=0)] = Field(
        0.5, description="Its weight beside the acoustics."
    )
    word_bonus: float = Field(
        0.0, description="Added per word by the beam; an n-gram model alone favours short outputs."
    )
    known_words: bool = Field(
        False, description="The beam says only words that the n-gram model knows."
    )
    final: bool = Field(
        True, description="Score the test data (else validation) when training ends."
    )

    @model_validator(mode="after")
    def _beam_for_ngram(self) -> Evaluation:
        if self.ngram is not None and self.decoder != "beam":
            raise ValueError("ngram needs the beam: set evaluation.decoder=beam")
        if self.known_words and self.ngram is None:
            raise ValueError("known_words needs a model that knows some: set evaluation.ngram")
        return self


class Logging(Section):
    dir: str = Field("runs", description="Where run directories are made.")
    tensorboard: bool = Field(True, description="Also write TensorBoard events.")
    every_steps: Positive = Field(
        10, description="How often ranks exchange their times, for the balance figures."
    )
    profile: Count = Field(
        0,
        description="Steps to record with PyTorch's profiler, after 3 that are not: a trace per rank "
        "and a summary in the run's `profile/`. 0: none.",
    )


class Recipe(Section):
    """Everything a run needs to be repeated, apart from the data itself."""

    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Names the run directory."
    )
    description: str = Field("", description="One line for `muster recipe list`.")
    task: Literal["speech-ctc", "speech-seq2seq", "causal-lm", "image-classification"] = Field(
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
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        42, description="Weights, order and augmentation follow it."
    )

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")
