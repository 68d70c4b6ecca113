"""Names from other trainers that are no keys here: what they are called, or that there is no such thing.

`aliases` holds older names that keep working; these do not, and the error says what to write instead. The
tables of docs/coming-from.md are written from this one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from muster.recipe.foreign_frameworks import FRAMEWORKS, Foreign

BEST = (
    "on by default; eval, export, generate and transcribe take the best, the run goes on to its end"
)
TRACKERS = "a list: [tensorboard, wandb, mlflow, trackio]"
UPLOADS = "nothing is uploaded; `muster export` writes a folder that transformers loads"
NO_FRACTION = "a number of steps, not a fraction of them"
FSDP2 = "sharding is PyTorch's fully_shard (FSDP2), which leaves nothing to choose here"
CHECKPOINTS = "checkpoints are always in shards, which any layout loads"
OWN_PART = "a rank builds and reads only the part of the weights that it holds"
QUANTIZED = "frozen weights are not quantized; training.precision=fp8 is about products"
PACKED = "text is always packed, and data.isolate_documents keeps attention inside a document"
REPLIES = "of text every token counts, of chat rows the replies alone"
KERNELS = "PyTorch's scaled_dot_product_attention takes the fastest kernel of the device"
REMAINDER = "what does not fill a last batch is left out of an epoch, which is shuffled anew"

TABLE: dict[str, tuple[Foreign, ...]] = {
    "TrainingArguments": (
        Foreign("output_dir", "logging.dir", "each run makes its own folder there"),
        Foreign("run_name", "name"),
        Foreign("max_steps", "training.steps"),
        Foreign("num_train_epochs", "training.epochs"),
        Foreign(
            "per_device_train_batch_size",
            "training.per_device_batch_size",
            "the maths is training.global_batch_size, on any number of devices",
        ),
        Foreign("gradient_accumulation_steps", "training.gradient_accumulation_steps"),
        Foreign("auto_find_batch_size", "training.on_oom", "shrink"),
        Foreign("learning_rate", "training.lr"),
        Foreign("lr_scheduler_type", "training.schedule"),
        Foreign("warmup_steps", "training.warmup_steps", NO_FRACTION),
        Foreign("optim", "training.optimizer"),
        Foreign(
            "optim_args optim_target_modules",
            note="an optimizer has keys of its own: training.betas, eps, momentum, weight_decay",
        ),
        Foreign("adam_beta1 adam_beta2", "training.betas"),
        Foreign("adam_epsilon", "training.eps"),
        Foreign("weight_decay", "training.weight_decay"),
        Foreign("max_grad_norm", "training.max_grad_norm"),
        Foreign("label_smoothing_factor", "training.label_smoothing", "speech-seq2seq only"),
        Foreign("bf16 fp16", "training.precision"),
        Foreign("gradient_checkpointing", "training.activation_checkpointing"),
        Foreign("torch_compile torch_compile_mode", "training.compile"),
        Foreign("use_liger_kernel", note="kernels are chosen for the device; there is no key"),
        Foreign("per_device_eval_batch_size", "evaluation.batch_size"),
        Foreign("eval_strategy eval_steps", "evaluation.every_steps"),
        Foreign("load_best_model_at_end", "checkpoint.best", BEST),
        Foreign("metric_for_best_model", "evaluation.metric"),
        Foreign("greater_is_better", note="a task knows which way each of its scores is better"),
        Foreign("save_strategy save_steps", "checkpoint.every_steps"),
        Foreign("save_total_limit", "checkpoint.keep"),
        Foreign("save_only_model", note="`muster export` writes the weights alone"),
        Foreign("resume_from_checkpoint", "checkpoint.resume"),
        Foreign("logging_steps logging_strategy", note="metrics.jsonl has a line for every step"),
        Foreign("report_to", "logging.to", TRACKERS),
        Foreign("push_to_hub hub_model_id", note=UPLOADS),
        Foreign("dataloader_num_workers", "data.workers"),
        Foreign("dataloader_prefetch_factor", "data.prefetch"),
        Foreign("dataloader_drop_last", note=REMAINDER),
        Foreign("data_seed", "seed", "the one seed of weights, data order and augmentation"),
        Foreign("train_sampling_strategy", "data.shuffle"),
        Foreign("neftune_noise_alpha", note="no noise is added to embeddings"),
        Foreign("ddp_backend", "distributed.backend"),
        Foreign("ddp_bucket_cap_mb", "distributed.ddp.bucket_mb"),
        Foreign("ddp_find_unused_parameters", "distributed.ddp.find_unused_parameters"),
        Foreign("ddp_static_graph", "distributed.ddp.static_graph"),
        Foreign("ddp_timeout", "distributed.timeout_s"),
        Foreign("fsdp", "distributed.strategy", "fsdp or hsdp; details in distributed.fsdp"),
        Foreign(
            "deepspeed", "distributed.deepspeed.config", "a JSON file; strategy zero1 to zero3"
        ),
    ),
    "accelerate": (
        Foreign("distributed_type", "distributed.strategy"),
        Foreign("mixed_precision", "training.precision"),
        Foreign("num_processes", "distributed.devices", "or --gpus; per machine"),
        Foreign("num_machines", note="`muster train --nodes N`"),
        Foreign("machine_rank", note="`muster train --nodes N --node-rank R`"),
        Foreign("main_process_ip", note="`muster train --nodes N --master-addr HOST`"),
        Foreign("main_process_port", note="`muster train --nodes N --master-port PORT`"),
        Foreign("gpu_ids", note="the environment variable CUDA_VISIBLE_DEVICES"),
        Foreign("dynamo_config", "training.compile"),
        Foreign("fsdp_sharding_strategy fsdp_reshard_after_forward", "distributed.fsdp.sharding"),
        Foreign(
            "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params",
            "distributed.fsdp.wrap",
            "the model's blocks, unless classes are named",
        ),
        Foreign("fsdp_offload_params", "distributed.fsdp.cpu_offload"),
        Foreign("fsdp_backward_prefetch", "distributed.fsdp.backward_prefetch"),
        Foreign("fsdp_forward_prefetch", "distributed.fsdp.forward_prefetch"),
        Foreign("fsdp_activation_checkpointing", "training.activation_checkpointing"),
        Foreign("fsdp_state_dict_type", note=CHECKPOINTS),
        Foreign("fsdp_version fsdp_use_orig_params", note=FSDP2),
        Foreign("fsdp_cpu_ram_efficient_loading fsdp_sync_module_states", note=OWN_PART),
        Foreign("fsdp_config", "distributed.fsdp"),
        Foreign("zero_stage", "distributed.strategy", "zero1, zero2 or zero3"),
        Foreign("deepspeed_config", "distributed.deepspeed"),
        Foreign("deepspeed_config_file", "distributed.deepspeed.config"),
        Foreign("offload_optimizer_device", "distributed.deepspeed.offload_optimizer"),
        Foreign("offload_param_device", "distributed.deepspeed.offload_param"),
        Foreign(
            "offload_optimizer_nvme_path offload_param_nvme_path", "distributed.deepspeed.nvme_path"
        ),
        Foreign("gradient_clipping", "training.max_grad_norm"),
        Foreign("zero3_init_flag", note=OWN_PART),
        Foreign("zero3_save_16bit_model", note="`muster export` writes whole weights"),
        Foreign("megatron_lm_config", note="tensor and pipeline parallelism are PyTorch's own"),
        Foreign("parallelism_config", "distributed"),
        Foreign("tpu_name tpu_zone tpu_env", note="there are no TPUs, only GPUs and CPUs"),
    ),
    "torchtitan": (
        Foreign("job.dump_folder", "logging.dir", "each run makes its own folder there"),
        Foreign("job.description", "description"),
        Foreign("model.name model.flavor", "model.preset", "and model.shape for any other size"),
        Foreign("model.hf_assets_path model.tokenizer_path", "data.tokenizer.path"),
        Foreign("optimizer.name", "training.optimizer"),
        Foreign("optimizer.lr", "training.lr"),
        Foreign("optimizer.eps", "training.eps"),
        Foreign("lr_scheduler.warmup_steps", "training.warmup_steps"),
        Foreign("lr_scheduler.decay_type", "training.schedule"),
        Foreign(
            "lr_scheduler.decay_ratio",
            "training.decay_steps",
            note="in steps, with training.schedule=wsd",
        ),
        Foreign("lr_scheduler.min_lr_factor", "training.final_lr_ratio"),
        Foreign("local_batch_size", "training.per_device_batch_size"),
        Foreign("seq_len", "data.sequence_length"),
        Foreign("max_norm", "training.max_grad_norm"),
        Foreign("dataset dataset_path", "data.train", "files of your own"),
        Foreign("mixed_precision_param", "training.precision"),
        Foreign("data_parallel_replicate_degree", "distributed.replicate"),
        Foreign("data_parallel_shard_degree", "distributed.shard"),
        Foreign("tensor_parallel_degree", "distributed.tensor"),
        Foreign("pipeline_parallel_degree", "distributed.pipeline"),
        Foreign("pipeline_parallel_schedule", "distributed.pipeline_options.schedule"),
        Foreign("context_parallel_degree", "distributed.context"),
        Foreign("expert_parallel_degree", note="there is no expert parallelism"),
        Foreign("enable_async_tensor_parallel", note="tensor parallelism is synchronous"),
        Foreign("checkpoint.interval", "checkpoint.every_steps"),
        Foreign("checkpoint.enable", "checkpoint.every_steps", "null, and checkpoint.final=false"),
        Foreign("checkpoint.folder", note="a run's own folder has its checkpoints"),
        Foreign("keep_latest_k", "checkpoint.keep"),
        Foreign("async_mode", "checkpoint.asynchronous"),
        Foreign(
            "last_save_model_only export_dtype", note="`muster export` writes the weights alone"
        ),
        Foreign("initial_load_path", "checkpoint.resume"),
        Foreign("activation_checkpoint.mode", "training.activation_checkpointing"),
        Foreign("compile.enable", "training.compile"),
        Foreign("enable_profiling profile_freq", "logging.profile"),
        Foreign("enable_tensorboard", "logging.to", TRACKERS),
        Foreign("enable_wandb", "logging.to", TRACKERS),
        Foreign("metrics.log_freq", note="metrics.jsonl has a line for every step"),
        Foreign("validation.freq", "evaluation.every_steps"),
        Foreign("validation.dataset", "data.validation"),
    ),
    "axolotl": (
        Foreign("base_model", "model.pretrained"),
        Foreign("model_type tokenizer_type", note="config.json of model.pretrained says it"),
        Foreign("tokenizer_config", "data.tokenizer.path"),
        Foreign("load_in_8bit load_in_4bit", note=QUANTIZED),
        Foreign("adapter", "model.lora"),
        Foreign("lora_r", "model.lora.rank"),
        Foreign("lora_alpha", "model.lora.alpha"),
        Foreign("lora_dropout", "model.lora.dropout"),
        Foreign("lora_target_modules", "model.lora.targets", "q_proj or, in short, q"),
        Foreign(
            "lora_target_linear", "model.lora.targets", "name them: q, k, v, o, gate, up, down"
        ),
        Foreign("datasets", "data.train", "files, without prompt formats"),
        Foreign("val_set_size", "data.validation", "files, not a fraction"),
        Foreign("dataset_prepared_path", note="the cache of tokens lies where XDG_CACHE_HOME says"),
        Foreign("sequence_len", "data.sequence_length"),
        Foreign("sample_packing", "data.pack_rows", f"of chat rows; {PACKED}"),
        Foreign("pad_to_sequence_len", note=PACKED),
        Foreign("chat_template", "data.chat_template"),
        Foreign("train_on_inputs special_tokens", note=REPLIES),
        Foreign("micro_batch_size", "training.per_device_batch_size"),
        Foreign("num_epochs", "training.epochs"),
        Foreign("optimizer", "training.optimizer"),
        Foreign("lr_scheduler", "training.schedule"),
        Foreign("warmup_ratio", "training.warmup_steps", NO_FRACTION),
        Foreign("evals_per_epoch", "evaluation.every_steps"),
        Foreign("saves_per_epoch", "checkpoint.every_steps"),
        Foreign("early_stopping_patience", "training.early_stopping.patience"),
        Foreign("group_by_length", "data.pool_batches", "speech: similar lengths, by default"),
        Foreign("flash_attention xformers_attention", note=KERNELS),
        Foreign("wandb_name", "name"),
        Foreign(
            "wandb_project wandb_entity wandb_mode",
            note="the environment variables WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE, with logging.to=[wandb]",
        ),
    ),
    "transformers' config.json": (
        Foreign("n_layer num_hidden_layers", "model.shape.layers"),
        Foreign("n_embd hidden_size d_model", "model.shape.width"),
        Foreign("n_head num_attention_heads", "model.shape.heads"),
        Foreign("num_key_value_heads", "model.shape.kv_heads"),
        Foreign("n_inner intermediate_size", "model.shape.hidden"),
        Foreign("n_positions max_position_embeddings", "model.shape.positions"),
    ),
    **FRAMEWORKS,
}


# What optimizers are called elsewhere, by pattern, and here; the first that matches.
OPTIMIZERS = (
    (r"(paged_)?adamw.*_8bit|adamw8bit", "adamw-8bit"),
    (
        r"adamw_(torch|hf|apex|torch_fused|torch_xla|torch_npu_fused|apex_fused|anyprecision)",
        "adamw",
    ),
    (r"adamw?|paged_adamw(_32bit)?|fusedadam|torchadamw", "adamw"),
    (r"adafactor|flax_adafactor", "adafactor"),
    (r"sgd", "sgd"),
    (r"muon", "muon"),
)


def answer(key: str, leaves: Mapping[str, Any], value: Any = None) -> str | None:
    """What to write instead of the unknown `key`, at whatever place in the recipe it stands, and of an
    optimizer's name as its `value`. `leaves` are the last words of the keys that exist: a section's foreign
    name says nothing about those."""
    parts = key.lower().split(".")
    tails = [".".join(parts[start:]) for start in range(len(parts))]
    heads = [] if parts[-1] in leaves else reversed(parts[:-1])
    for name in (*tails, *heads):
        for source, row in _rows(name):
            if row.key:
                more = f" ({row.note})" if row.note else ""
                more += _optimizer(value) if row.key == "training.optimizer" else ""
                return f"{name} of {source} is {row.key} here{more}"
            return f"nothing here is like {name} of {source}: {row.note}"
    return None


def _optimizer(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    for pattern, ours in OPTIMIZERS:
        if re.fullmatch(pattern, value.lower()):
            return f"; {value} is training.optimizer={ours}"
    return f"; there is no {value}, only adamw, adamw-8bit, adafactor, muon and sgd"


def _rows(name: str) -> Iterator[tuple[str, Foreign]]:
    for source, rows in TABLE.items():
        for row in rows:
            if name in row.names.split():
                yield source, row


def foreign_table(source: str) -> str:
    """The names of one trainer, as markdown."""
    lines = [f"| {source} | muster |", "|---|---|"]
    for row in TABLE[source]:
        names = ", ".join(f"`{name}`" for name in row.names.split())
        command = row.note.startswith("`muster ")  # which does it
        said = [f"`{row.key}`"] if row.key else [] if command else ["not there"]
        lines.append(f"| {names} | {': '.join([*said, *([row.note] if row.note else [])])} |")
    return "\n".join(lines)
