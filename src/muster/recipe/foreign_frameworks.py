"""Names from Lightning, DeepSpeed and SpeechBrain, and one row of such a table; `foreign` has the others."""

from __future__ import annotations

from typing import NamedTuple


class Foreign(NamedTuple):
    """`names`, separated by blanks, are `key` here; without a key `note` says how muster does it."""

    names: str
    key: str = ""
    note: str = ""


EVERY_STEP = "metrics.jsonl has a line for every step"
ONE_RATE = "one learning rate for all parameters"
PARQUET = "parquet, which `muster data make` makes from a folder of audio"
EQUAL_COST = "a global batch is cut into micro-batches of equal cost"
OWN_FILE = "what the file has stays, and distributed.deepspeed names the rest"

FRAMEWORKS: dict[str, tuple[Foreign, ...]] = {
    "Lightning": (
        Foreign("accelerator", note="GPUs are taken where there are any, else CPU cores"),
        Foreign("num_nodes", note="`muster train --nodes N`"),
        Foreign("max_epochs", "training.epochs"),
        Foreign("accumulate_grad_batches", "training.gradient_accumulation_steps"),
        Foreign("gradient_clip_val", "training.max_grad_norm"),
        Foreign("gradient_clip_algorithm", note="gradients are clipped by their norm"),
        Foreign("val_check_interval check_val_every_n_epoch", "evaluation.every_steps"),
        Foreign("limit_val_batches limit_test_batches", "evaluation.max_samples", "in samples"),
        Foreign("num_sanity_val_steps", note="what is known to fail is refused before a run"),
        Foreign("fast_dev_run", "training.steps", "a few"),
        Foreign("monitor", "evaluation.metric"),
        Foreign("save_top_k", "checkpoint.keep", "the newest, and beside them checkpoint.best"),
        Foreign("every_n_train_steps", "checkpoint.every_steps"),
        Foreign(
            "enable_checkpointing", "checkpoint.every_steps", "null, and checkpoint.final=false"
        ),
        Foreign("ckpt_path", "checkpoint.resume"),
        Foreign("default_root_dir", "logging.dir", "each run makes its own folder there"),
        Foreign("logger loggers", "logging.to"),
        Foreign("log_every_n_steps", note=EVERY_STEP),
        Foreign("profiler", "logging.profile"),
        Foreign("use_distributed_sampler", note="the batches of all ranks are planned together"),
        Foreign("callbacks plugins", note="there are none; a task of your own has methods instead"),
    ),
    "DeepSpeed": (
        Foreign("train_batch_size", "training.global_batch_size"),
        Foreign("train_micro_batch_size_per_gpu", "training.per_device_batch_size"),
        Foreign("zero_optimization.stage", "distributed.strategy", "zero1, zero2 or zero3"),
        Foreign("zero_optimization.offload_optimizer", "distributed.deepspeed.offload_optimizer"),
        Foreign("zero_optimization.offload_param", "distributed.deepspeed.offload_param"),
        Foreign("zero_optimization", "distributed.deepspeed.config", OWN_FILE),
        Foreign("tensor_parallel.autotp_size", "distributed.tensor"),
        Foreign("fp16.enabled bf16.enabled", "training.precision"),
        Foreign("optimizer.type", "training.optimizer"),
        Foreign("scheduler.type", "training.schedule"),
        Foreign("warmup_num_steps", "training.warmup_steps"),
        Foreign("warmup_max_lr", "training.lr"),
        Foreign("total_num_steps", "training.steps"),
        Foreign("steps_per_print", note=EVERY_STEP),
        Foreign("wall_clock_breakdown flops_profiler", "logging.profile"),
        Foreign("comms_logger", note="`muster bench collectives`, or of a run logging.profile"),
        Foreign(
            "elasticity",
            note="`muster train --nodes MIN:MAX` and `--gpus MIN:MAX`: the number of ranks changes while it runs, "
            "the global batch never",
        ),
        Foreign("autotuning", note="`muster plan` says which strategy fits and how fast it is"),
    ),
    "SpeechBrain": (
        Foreign("output_folder save_folder", "logging.dir", "each run makes its own folder there"),
        Foreign("data_folder train_csv train_annotation", "data.train", PARQUET),
        Foreign("valid_csv valid_annotation", "data.validation"),
        Foreign("test_csv test_annotation", "data.test"),
        Foreign("number_of_epochs", "training.epochs"),
        Foreign("optimizer_step_limit", "training.steps"),
        Foreign("grad_accumulation_factor", "training.gradient_accumulation_steps"),
        Foreign("lr_adam lr_wav2vec lr_whisper", "training.lr", ONE_RATE),
        Foreign("noam_annealing lr_annealing", "training.schedule"),
        Foreign("n_warmup_steps", "training.warmup_steps"),
        Foreign("auto_mix_prec bfloat16_mix_prec", "training.precision"),
        Foreign("distributed_launch data_parallel_backend", note="`muster train` starts the ranks"),
        Foreign("distributed_backend", "distributed.backend"),
        Foreign("ckpt_interval_minutes ckpt_interval_steps", "checkpoint.every_steps", "in steps"),
        Foreign("skip_nonfinite_grads nonfinite_patience", "training.max_bad_steps"),
        Foreign("sorting", "data.pool_batches", "clips of similar length share a batch"),
        Foreign("dynamic_batching max_batch_length num_buckets", note=EQUAL_COST),
        Foreign("avoid_if_longer_than", "data.max_seconds"),
        Foreign("n_mels", "data.mels"),
        Foreign("n_freq_mask", "data.spec_augment.freq_masks"),
        Foreign("n_time_mask", "data.spec_augment.time_masks"),
        Foreign("drop_freq drop_chunk", "data.spec_augment"),
        Foreign("speed_perturb", "data.spec_augment.warp", "of frequencies; speed stays"),
        Foreign("token_type", "data.tokenizer.kind"),
        Foreign("output_neurons", "data.tokenizer.vocabulary_size"),
        Foreign("wav2vec2_hub whisper_hub", "model.pretrained"),
        Foreign("freeze_wav2vec", "model.freeze_feature_encoder", "its convolutions alone"),
        Foreign("valid_beam_size test_beam_size", "evaluation.beam_width"),
        Foreign("kenlm_model_path", "evaluation.ngram", "an ARPA file"),
        Foreign("lm_weight", "evaluation.ngram_weight"),
        Foreign("ctc_weight_decode", "evaluation.ctc_weight"),
        Foreign("avg_checkpoints", note="`muster eval RUN --average N`"),
        Foreign("test_only", note="`muster eval RUN`"),
    ),
}
