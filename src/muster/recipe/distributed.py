"""`distributed`: where the work runs. Nothing here changes what is computed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from muster.recipe.section import Auto, Count, Positive, Section


class DDP(Section):
    """Distributed data parallel: each rank holds the whole model."""

    bucket_mb: Annotated[float, Field(gt=0)] = Field(
        25.0, description="Gradients travel in buckets of this size, in MB."
    )
    find_unused_parameters: bool = Field(
        False, description="Search for parameters that took no part in the loss. Costs time."
    )
    static_graph: bool = Field(
        False, description="Promise that every step uses the same parameters in the same order."
    )
    compression: Literal["none", "bf16", "fp16"] = Field(
        "none", description="Gradients travel as these numbers. Halves the traffic, rounds the sum."
    )


class FSDP(Section):
    """Fully sharded data parallel: parameters, gradients and optimizer in shards."""

    sharding: Literal["full_shard", "shard_grad_op"] = Field(
        "full_shard",
        description="`shard_grad_op` keeps the gathered parameters from the forward to the backward "
        "pass: more memory, one gathering less.",
    )
    wrap: list[str] = Field(
        [],
        description="Classes whose instances are gathered one at a time. Default: the model's blocks.",
    )

    @field_validator("wrap", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    forward_prefetch: bool = Field(
        False,
        description="Ask for the next block's parameters before this one computes forwards, for hosts "
        "too slow to run ahead of the GPU; one block more is in memory.",
    )
    backward_prefetch: bool = Field(
        True, description="Gather the next block's parameters while this one computes backwards."
    )
    cpu_offload: bool = Field(
        False, description="Shards rest in host memory, and the optimizer steps there."
    )
    reduce_each_micro_batch: bool = Field(
        False,
        description="With gradient accumulation, sum gradients among ranks after every micro-batch "
        "and keep shards, instead of whole gradients until the last: less memory, more traffic.",
    )


class DeepSpeed(Section):
    """ZeRO through DeepSpeed. Its JSON is generated from the recipe."""

    config: str | None = Field(
        None,
        description="A ready DeepSpeed JSON: its other keys are kept, and what contradicts the recipe is refused.",
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] = Field(
        "none", description="Where the optimizer's state rests; nvme needs zero3."
    )
    offload_param: Literal["none", "cpu", "nvme"] = Field(
        "none", description="Where parameters rest between uses; zero3 only."
    )
    nvme_path: str | None = Field(None, description="A folder on the NVMe disk, for nvme.")


class TensorOptions(Section):
    """Tensor parallelism: each matrix in pieces, one batch for all."""

    sequence_parallel: bool = Field(
        True, description="Between the split matrices, each rank keeps a stretch of the sequence."
    )
    loss_parallel: bool = Field(
        True, description="Each rank keeps its part of the vocabulary's logits up to the loss."
    )


class PipelineOptions(Section):
    """Pipeline parallelism: each rank holds some layers, micro-batches flow through."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = Field(
        "1f1b", description="In which order micro-batches go forwards and backwards."
    )
    stages_per_rank: Positive | Auto = Field(
        "auto",
        description="Stages each rank holds. `auto`: 2 for interleaved and zero-bubble, else 1.",
    )
    microbatches: Positive | Auto = Field(
        "auto",
        description="Pieces of each micro-batch that flow. `auto`: up to 4 per pipeline rank.",
    )


class Distributed(Section):
    devices: Positive | Auto = Field(
        "auto", description="Ranks on this machine; `--gpus N` sets it."
    )
    strategy: Literal[
        "auto", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "tensor", "pipeline", "hybrid"
    ] = Field(
        "auto",
        description="How the work is split. `auto` takes the simplest that fits; `hybrid` multiplies the four sizes below.",
    )
    replicate: Positive | Auto = Field("auto", description="Copies of the model (hsdp, hybrid).")
    shard: Positive | Auto = Field(
        "auto", description="Ranks that share one copy in shards (hsdp, hybrid)."
    )
    tensor: Positive | Auto = Field(
        "auto", description="Ranks that split each matrix (tensor, hybrid)."
    )
    pipeline: Positive | Auto = Field(
        "auto", description="Ranks that split the layers (pipeline, hybrid)."
    )
    backend: Literal["auto", "nccl", "gloo"] = Field(
        "auto", description="nccl for GPUs, gloo for CPUs."
    )
    ddp: DDP = Field(default_factory=lambda: DDP())
    fsdp: FSDP = Field(default_factory=lambda: FSDP())
    deepspeed: DeepSpeed = Field(default_factory=lambda: DeepSpeed())
    tensor_options: TensorOptions = Field(default_factory=lambda: TensorOptions())
    pipeline_options: PipelineOptions = Field(default_factory=lambda: PipelineOptions())
    sync_batchnorm: bool = Field(
        True,
        description="Where the model has batch normalisation, share its statistics among ranks.",
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0,
        description="The longest any rank waits for another before the run ends with a reason.",
    )
    stall_s: Annotated[float, Field(gt=0)] | Auto = Field(
        "auto",
        description="A rank that gets no further for so long is stalled: every rank writes down where "
        "it stands, and the run ends with the one that held the others up. `auto`: 0.9 × timeout_s.",
    )
    max_restarts: Count = Field(
        3,
        description="How often in a row, without a new checkpoint, a run whose rank was killed starts again.",
    )

    @property
    def stall_limit_s(self) -> float:
        return 0.9 * self.timeout_s if self.stall_s == "auto" else self.stall_s
