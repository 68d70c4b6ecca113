"""`distributed`: how a run is distributed. Nothing here changes what is computed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from muster.recipe.section import Auto, Count, Positive, Section, free


class DDP(Section):
    """DistributedDataParallel: each rank holds the whole model."""

    bucket_mb: Annotated[float, Field(gt=0)] = free(
        25.0, description="Size of a gradient bucket, in MB."
    )
    find_unused_parameters: bool = free(
        False, description="Search for parameters that did not contribute to the loss. Costs time."
    )
    static_graph: bool = free(
        False, description="Every step uses the same parameters in the same order."
    )
    compression: Literal["none", "bf16", "fp16"] = free(
        "none",
        description="All-reduce gradients in this precision. Halves the traffic, rounds the sum.",
    )


class FSDP(Section):
    """Fully sharded data parallel: parameters, gradients and optimizer state are sharded."""

    sharding: Literal["full_shard", "shard_grad_op"] = free(
        "full_shard",
        description="`shard_grad_op` keeps the gathered parameters from the forward to the backward "
        "pass: more memory, one all-gather less.",
    )
    wrap: list[str] = free(
        [],
        description="Classes whose instances are sharded as one unit each. Default: the model's blocks.",
    )

    @field_validator("wrap", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    forward_prefetch: bool = free(
        False,
        description="Start the all-gather of the next block's parameters before this block's forward pass, for "
        "hosts that launch kernels too slowly; one block more is in memory.",
    )
    backward_prefetch: bool = free(
        True,
        description="Overlap the all-gather of the next block's parameters with this block's backward pass.",
    )
    cpu_offload: bool = free(
        False, description="Keep shards in host memory and run the optimizer there."
    )
    reduce_each_micro_batch: bool = free(
        False,
        description="With gradient accumulation, reduce-scatter gradients after every micro-batch "
        "instead of keeping unsharded gradients until the last: less memory, more traffic.",
    )


class DeepSpeed(Section):
    """ZeRO through DeepSpeed. Its JSON is generated from the recipe."""

    config: str | None = free(
        None,
        description="A DeepSpeed JSON file: its other keys are kept, and what contradicts the recipe is refused.",
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] = free(
        "none", description="Offload the optimizer's state to; nvme needs zero3."
    )
    offload_param: Literal["none", "cpu", "nvme"] = free(
        "none", description="Offload parameters to; zero3 only."
    )
    nvme_path: str | None = free(None, description="A folder on the NVMe disk, for nvme.")


class TensorOptions(Section):
    """Tensor parallelism: each matrix is sharded, all ranks have the same batch."""

    sequence_parallel: bool = free(
        True, description="Shard activations along the sequence between the split matrices."
    )
    loss_parallel: bool = free(
        True, description="Compute the loss on logits sharded along the vocabulary."
    )


class PipelineOptions(Section):
    """Pipeline parallelism: each rank holds some layers, and micro-batches pass through the ranks."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = free(
        "1f1b", description="Order of the micro-batches' forward and backward passes."
    )
    stages_per_rank: Positive | Auto = free(
        "auto",
        description="Stages each rank holds. `auto`: 2 for interleaved and zero-bubble, else 1.",
    )
    microbatches: Positive | Auto = free(
        "auto",
        description="Number of micro-batches in the pipeline schedule. `auto`: up to 4 per pipeline rank.",
    )


class Distributed(Section):
    devices: Positive | Auto = free(
        "auto", description="Ranks on this machine; `--gpus N` sets it."
    )
    strategy: Literal[
        "auto",
        "ddp",
        "fsdp",
        "hsdp",
        "zero1",
        "zero2",
        "zero3",
        "tensor",
        "pipeline",
        "context",
        "hybrid",
    ] = free(
        "auto",
        description="Parallelism strategy. `auto` takes the fastest that fits by the planner's estimate, and of those within 8 % of it "
        "the simplest (on CPUs: ddp if the model fits, else fsdp); `hybrid` multiplies the sizes below.",
    )
    replicate: Positive | Auto = free(
        "auto",
        description="Replicas of the model (hsdp, hybrid). `auto` under hsdp: one on each machine; two on "
        "one machine.",
    )
    shard: Positive | Auto = free(
        "auto", description="Ranks that shard one replica (hsdp, hybrid)."
    )
    tensor: Positive | Auto = free(
        "auto", description="Ranks that split each matrix (tensor, hybrid)."
    )
    pipeline: Positive | Auto = free(
        "auto", description="Ranks that split the layers (pipeline, hybrid)."
    )
    context: Positive | Auto = free(
        "auto",
        description="Ranks that share every sequence, each with a part of its tokens (auto, ddp, fsdp, hsdp, "
        "context, hybrid). `auto`: all under `context`, else 1.",
    )
    backend: Literal["auto", "nccl", "gloo"] = free(
        "auto", description="nccl for GPUs, gloo for CPUs."
    )
    ddp: DDP = Field(default_factory=lambda: DDP())
    fsdp: FSDP = Field(default_factory=lambda: FSDP())
    deepspeed: DeepSpeed = Field(default_factory=lambda: DeepSpeed())
    tensor_options: TensorOptions = Field(default_factory=lambda: TensorOptions())
    pipeline_options: PipelineOptions = Field(default_factory=lambda: PipelineOptions())
    sync_batchnorm: bool = free(
        True,
        description="Synchronize the statistics of batch normalisation over all ranks (SyncBatchNorm).",
    )
    timeout_s: Annotated[float, Field(gt=0)] = free(
        600.0,
        description="Timeout of collectives, in seconds; the run then ends with a reason.",
    )
    stall_s: Annotated[float, Field(gt=0)] | Auto = free(
        "auto",
        description="Seconds without progress after which a rank is stalled: every rank writes its stack "
        "trace, and the run ends with the rank that blocked the others. `auto`: within a step 60 s, or 20 × the "
        "median step where that is longer; while data are loaded, a model compiles, is evaluated or saved "
        "0.9 × timeout_s, and no step has more; a rank without a heartbeat for 60 s.",
    )
    max_restarts: Count = free(
        3,
        description="Restarts in a row, without a new checkpoint, after a rank was killed.",
    )

    @property
    def stall_limit_s(self) -> float:
        """Of the slowest phases."""
        return 0.9 * self.timeout_s if self.stall_s == "auto" else self.stall_s
