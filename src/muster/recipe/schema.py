"""The recipe: every key that exists, its meaning, its default and its bounds.

The recipe is the maths. Nothing in it depends on the machine: `training.global_batch_size` clips go
into each of `training.steps` optimizer steps whether one process or sixty-four share the work. What
does depend on the machine (`distributed`, workers, `auto`) only decides where the work runs. One key
is an exception, for those who ask for it: `training.scale_with_ranks`, resolved once, when a run starts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from muster import urls
from muster.recipe.data import Data
from muster.recipe.distributed import Distributed
from muster.recipe.model import Model
from muster.recipe.places import Kubernetes, Slurm
from muster.recipe.section import Auto, Beta, Count, Positive, Section, fixed, free
from muster.recipe.training import Training
from muster.workloads import workload

OwnTaskName = Annotated[
    str,
    Field(
        pattern=r"^[^:]+:[A-Za-z_]\w*$",
        json_schema_extra={"words": "your own as FILE.py:CLASS or package.module:CLASS"},
    ),
]

OwnTrackerName = Annotated[
    str, Field(pattern=r"^[^:]+:[A-Za-z_]\w*$", json_schema_extra={"words": "FILE.py:CLASS"})
]


class Checkpoint(Section):
    every_steps: Positive | None = free(500, description="`null`: only at the end.")
    final: bool = free(
        True, description="Also at the end. A run that is stopped always saves first."
    )
    keep: Positive = free(3, description="Newest complete checkpoints kept, besides the best.")
    best: bool = free(
        True,
        description="Also save the step that scores best on the validation data, by `evaluation.metric`, and keep "
        "it; eval, export, generate and transcribe take it by default.",
    )
    resume: str = free(
        "auto",
        description="`auto`: the newest complete checkpoint of this run; or, for a new run, a checkpoint or run "
        "folder to start from, which may be in a bucket: s3://… or gs://….",
    )
    asynchronous: bool = free(True, description="Write in the background during training.")
    verify: bool = free(
        True,
        description="Read every checkpoint back from the disk, in the background, before older ones are removed; one "
        "that differs is set aside and written again.",
    )
    verify_replicas: bool = free(
        True,
        description="Before each save, ranks that hold the same weights compare a hash of them and of the optimizer's "
        "state; where one differs, the run ends and names it.",
    )
    verify_steps: Positive | None = free(
        None, description="Compare them also every so many steps. `null`: only before a save."
    )
    verify_device_steps: Positive | None = free(
        None,
        description="Every so many steps each rank's device computes matrix products whose results are known; one that "
        "computes wrong is named, and nothing is saved of that step. `null`: only at each start.",
    )
    mirror: str | None = free(
        None,
        description="`s3://bucket/folder` or `gs://…`: complete checkpoints are also copied there, in the background, "
        "into a folder named after the run. A run of that name (`--run`) without checkpoints starts from them.",
    )

    @model_validator(mode="after")
    def _replicas_to_verify(self) -> Checkpoint:
        if self.verify_steps is not None and not self.verify_replicas:
            raise ValueError(
                f"verify_steps: {self.verify_steps} needs verify_replicas; set checkpoint.verify_replicas=true, or "
                "leave checkpoint.verify_steps out"
            )
        return self

    @field_validator("mirror", "resume")
    @classmethod
    def _in_a_bucket(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or (info.field_name == "resume" and not urls.is_remote(value)):
            return value
        urls.refuse_secrets(value)
        if urls.scheme(value) not in urls.WRITABLE or not value.partition("://")[2].strip("/"):
            raise ValueError(f"got {value}, expected s3://BUCKET/FOLDER or gs://BUCKET/FOLDER")
        return value


class Evaluation(Section):
    every_steps: Positive | None = free(
        500, description="Steps between evaluations on the validation data; `null`: never."
    )
    metric: str = free(
        "auto",
        description="The score that chooses the best checkpoint: wer or cer; perplexity, bits_per_byte or loss; "
        "accuracy or loss; or one that a task of your own declares. `auto`: the first of them that the task has.",
    )
    batch_size: Positive | Auto = free(
        "auto",
        description="Samples per rank and evaluation batch. `auto`: as many as training holds at a "
        "time, at most 32.",
    )
    check_overlap: bool = free(
        True,
        description="Before the first step, look for text, audio and images of the validation and test data "
        "in the training data. Only what was compared is called unseen.",
    )
    max_samples: Positive | None = free(
        None,
        description="Score at most so many samples of a split, spread evenly over it. Default: all.",
    )
    answers: Count = free(
        3,
        description="Language models: of the scored data, so many questions of chat rows that the trained model "
        "answers in the results, or so many texts whose beginnings it continues; 0: none.",
    )
    answer_tokens: Positive = free(64, description="The most tokens of each.")
    recordings: Count = free(
        10,
        description="Speech: so many recordings of the worst mistakes are kept beside the results, for the page and "
        "the report to play; 0: none.",
    )
    decoder: Literal["greedy", "beam"] = free(
        "greedy", description="`beam`: CTC prefix-beam search, or Whisper's beam search."
    )
    beam_width: Positive | Auto = free(
        "auto", description="Hypotheses kept by the beam. `auto`: 16 for CTC, 5 for Whisper."
    )
    ctc_weight: Beta | Auto = free(
        "auto",
        description="speech-seq2seq with `training.ctc_weight`: joint decoding, the weight of the CTC head's score "
        "of each token, of which the decoder's has the rest. `auto`: 0.4; without the head, and with timestamps, 0.",
    )
    window: Annotated[float, Field(gt=0, le=30)] | Literal["bucket", "auto"] = free(
        "auto",
        description="speech-seq2seq: as `data.window`, for scoring. `auto`: the same, but with "
        "`model.pretrained` 30 s, in which any such weights end their output.",
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
    mode: Literal["private", "group", "umask"] = free(
        "private",
        description="Who may read a run directory: `private` only you (0700, files 0600), `group` your group too "
        "(0750, 0640), `umask` whom the umask of the process that starts it lets.",
    )
    to: list[Literal["tensorboard", "wandb", "mlflow", "trackio"] | OwnTrackerName] = free(
        ["tensorboard"],
        description="Trackers that show the metrics elsewhere; your own is `FILE.py:CLASS` or "
        "`package.module:CLASS`. What they do or fail to do never stops or slows training (docs/trackers.md).",
    )
    prometheus: Annotated[int, Field(ge=1, le=65535)] | None = free(
        None,
        description="Port of each node at which Prometheus reads the metrics of its ranks (docs/trackers.md). "
        "`null`: none.",
    )
    prometheus_host: str = free(
        "127.0.0.1",
        description="Address that `logging.prometheus` listens at; `0.0.0.0` for a Prometheus on another machine.",
    )
    report: bool = free(True, description="Write the run's page as `report.html` when it ends.")
    every_steps: Positive = free(10, description="Steps between gathering step times of all ranks.")
    profile: Count = free(
        0,
        description="Steps to record with PyTorch's profiler, after 3 that are not: a trace per rank "
        "and a summary in the run's `profile/`. 0: none.",
    )

    @field_validator("to")
    @classmethod
    def _each_once(cls, to: list[str]) -> list[str]:
        if twice := sorted({name for name in to if to.count(name) > 1}):
            raise ValueError(f"{twice[0]} is there twice; name it once")
        return to


class Recipe(Section):
    """Everything a run needs to be repeated, apart from the data itself."""

    name: str = free(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Names the run directory."
    )
    description: str = free("", description="One line for `muster recipe list`.")
    task: (
        Literal["speech-ctc", "speech-seq2seq", "causal-lm", "image-classification"] | OwnTaskName
    ) = fixed(
        "speech-ctc",
        description="The workload: a built-in one, or a class of your own, `FILE.py:CLASS` (beside the "
        "recipe, else in the current directory) or `package.module:CLASS`.",
    )
    task_options: dict[str, Any] = fixed(
        {}, description="Keys of a task of your own, which its class checks by its `Options`."
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

    @model_validator(mode="after")
    def _ctc_head_of_whisper(self) -> Recipe:
        if not self.training.ctc_weight:
            if self.evaluation.ctc_weight not in ("auto", 0):
                raise ValueError(
                    f"evaluation.ctc_weight: {self.evaluation.ctc_weight:g} needs the CTC head of a "
                    "speech-seq2seq model trained with training.ctc_weight; leave it out"
                )
            return self
        given = f"training.ctc_weight: {self.training.ctc_weight:g}"
        if self.task != "speech-seq2seq":
            raise ValueError(
                f"{given} adds a CTC head to the encoder of speech-seq2seq, and this is {self.task}; leave it out"
            )
        if self.model.lora is not None:
            raise ValueError(
                f"{given} adds a new head, and with model.lora only adapters are trained; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _known_metric(self) -> Recipe:
        metric, scores = self.evaluation.metric, workload(self.task).scores
        if metric != "auto" and scores and metric not in scores:
            raise ValueError(
                f"evaluation.metric is {metric!r}, which is no score of {self.task}; choose "
                f"{' or '.join(scores)}"
            )
        if self.training.early_stopping and self.evaluation.every_steps is None:
            raise ValueError(
                "training.early_stopping counts evaluations, and evaluation.every_steps is null; set "
                "evaluation.every_steps, or leave training.early_stopping out"
            )
        return self

    @model_validator(mode="after")
    def _one_corpus_of_images(self) -> Recipe:
        if self.task == "image-classification" and not isinstance(self.data.train, str):
            raise ValueError(
                "data.train: image-classification takes one folder, file or glob, not a list"
            )
        return self

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")
