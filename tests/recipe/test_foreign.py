"""Names from other trainers, and what counts as near."""

from __future__ import annotations

import dataclasses
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from muster.cli import app
from muster.errors import RecipeError
from muster.recipe import aliases, foreign
from muster.recipe.describe import foreign_tables, instead, keys, nearest, update_manual
from muster.recipe.load import load

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"
ROWS = [row for rows in foreign.TABLE.values() for row in rows]


def test_every_key_in_the_table_exists_and_every_row_says_something():
    assert [row.key for row in ROWS if row.key and row.key not in keys()] == []
    assert all(row.key or row.note for row in ROWS)
    quoted = [word for row in ROWS for word in re.findall(r"[a-z]+\.[a-z_]+", row.note)]
    unknown = {word for word in quoted if word not in keys()}
    assert unknown == {"metrics.jsonl", "config.json"}


def test_no_name_stands_twice():
    names = [name for row in ROWS for name in row.names.split()]
    assert sorted(names) == sorted(set(names))


def test_the_names_of_training_arguments_exist():
    pytest.importorskip("transformers")
    from transformers.training_args import TrainingArguments

    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    newer = {"train_sampling_strategy"}  # group_by_length before
    ours = {name for row in foreign.TABLE["TrainingArguments"] for name in row.names.split()}
    assert ours - newer <= theirs


def test_the_names_of_accelerate_exist():
    pytest.importorskip("accelerate")
    from accelerate.commands.config import cluster, config_args

    asked = Path(cluster.__file__).read_text()
    theirs = {field.name for field in dataclasses.fields(config_args.ClusterConfig)}
    theirs |= set(re.findall(r"_config\[\"(\w+)\"\]", asked))
    ours = {name for row in foreign.TABLE["accelerate"] for name in row.names.split()}
    assert ours - theirs <= {"fsdp_sharding_strategy"}  # FSDP 1


def test_the_names_of_deepspeed_exist():
    found = find_spec("deepspeed")
    if found is None:
        pytest.skip("deepspeed is not installed")
    (folder,) = found.submodule_search_locations
    runtime = Path(folder) / "runtime"
    sources = [*runtime.rglob("config.py"), runtime / "lr_schedules.py"]
    sources += Path(folder).rglob("constants.py")
    words = {word for path in sources for word in re.findall(r"\w+", path.read_text())}
    ours = {name for row in foreign.TABLE["DeepSpeed"] for name in row.names.split()}
    assert {part for name in ours for part in name.split(".")} - words == set()


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("optim", "optim of TrainingArguments is training.optimizer here"),
        (
            "training.report_to",
            "report_to of TrainingArguments is logging.to here (a list: [tensorboard, ",
        ),
        ("greater_is_better", "nothing here is like greater_is_better"),
        ("per_device_eval_batch_size", "is evaluation.batch_size here"),
        ("learning_rate", "is training.lr here"),
        ("model.learning_rate", "is training.lr here"),
        ("num_train_epochs", "is training.epochs here"),
        ("bf16", "is training.precision here"),
        ("distributed.fsdp.gradient_checkpointing", "is training.activation_checkpointing here"),
        ("micro_batch_size", "is training.per_device_batch_size here"),
        ("deepspeed", "is distributed.deepspeed.config here"),
        ("deepspeed.zero_optimization.stage", "of DeepSpeed is distributed.strategy here"),
        ("fsdp", "is distributed.strategy here"),
        ("optimizer.name", "optimizer.name of torchtitan is training.optimizer here"),
        ("optimizer.betas", "nearest is training.betas"),
        ("compile.enable", "is training.compile here"),
        ("TRAINING.Bf16", "is training.precision here"),
        ("model.hidden_size", "is model.shape.width here"),
        ("model.layers", "nearest is model.shape.layers"),
    ],
)
def test_a_name_from_elsewhere_is_answered_at_any_place(key, words):
    assert words in instead(key)
    with pytest.raises(RecipeError) as caught:
        load("gpt-micro", [f"{key}=1"])
    assert str(caught.value) == f"{key}: no such key; {instead(key)}"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("adamw_torch", "adamw"),
        ("adamw_torch_fused", "adamw"),
        ("paged_adamw_32bit", "adamw"),
        ("AdamW", "adamw"),
        ("adamw_bnb_8bit", "adamw-8bit"),
        ("paged_adamw_8bit", "adamw-8bit"),
        ("adafactor", "adafactor"),
        ("sgd", "sgd"),
    ],
)
def test_the_name_of_an_optimizer_is_answered_with_ours(theirs: str, ours: str):
    assert instead("optim", theirs).endswith(f"; {theirs} is training.optimizer={ours}")
    assert ours in keys()["training.optimizer"].choices


def test_every_key_of_a_file_from_elsewhere_is_answered(tmp_path):
    assert instead("optim", "lion_8bit").endswith(
        "; there is no lion_8bit, only adamw, adamw-8bit, adafactor, muon and sgd"
    )
    file = tmp_path / "theirs.yaml"
    file.write_text(
        "task: causal-lm\noptim: adamw_torch\nnum_train_epochs: 3\ntraining: {lr: fast}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load(str(file))
    assert str(caught.value).splitlines() == [
        "optim: no such key; optim of TrainingArguments is training.optimizer here; adamw_torch is "
        "training.optimizer=adamw (and 1 more: training.lr)",
        "num_train_epochs: no such key; num_train_epochs of TrainingArguments is training.epochs here",
    ]


TYPOS = """training.learn_rate=training.lr training.stpes=training.steps training.step=training.steps
trainning.steps=training.steps training.globl_batch_size=training.global_batch_size
training.batchsize=training.global_batch_size training.warmup=training.warmup_steps
training.warmup-steps=training.warmup_steps training.precison=training.precision
training.wieght_decay=training.weight_decay training.compiled=training.compile
training.epoch=training.epochs data.seq_length=data.sequence_length data.tran=data.train
data.valid=data.validation data.tokeniser.kind=data.tokenizer.kind
data.tokenizer.paht=data.tokenizer.path data.num_worker=data.workers
data.specaugment=data.spec_augment distributed.stategy=distributed.strategy
distributed.tensor_parallel=distributed.tensor distributed.pipelines=distributed.pipeline
distributed.fsdp.offload=distributed.fsdp.cpu_offload checkpoint.every_step=checkpoint.every_steps
checkpoint.async=checkpoint.asynchronous evaluation.every=evaluation.every_steps
logging.directory=logging.dir logging.tensorbord=logging.to model.presets=model.preset
model.pretraind=model.pretrained model.heads=model.shape.heads model.lora.target=model.lora.targets
lr=training.lr steps=training.steps strategy=distributed.strategy seeds=seed
batch_size=training.global_batch_size global_batch=training.global_batch_size
training.strategy=distributed.strategy data.langauge=data.language
slurm.partitions=slurm.partition distributed.timeout=distributed.timeout_s model.droput=model.dropout"""
UNRELATED = """zzz model.experts model.activation data.prompt training.ema
training.curriculum training.sam training.lookahead model.rope_scaling data.mixture training.loss_scale
model.quantization data.url training.teacher model.adapter_path callbacks plugins hydra.run
tokenizer_fast foo.bar training.swa logging.mlflow logging.wandb
data.augment_noise rlhf.reward model.moe_top_k data.collator kubernetes.helm slurm.array notes author
project experiment image_processor gpu machine evaluation.rouge distributed.elastic
checkpoint.s3_bucket checkpoint.upload training.gan model.vae reward_model training.noise
training.mixup model.attention model.backbone evaluation.bleu logging.email data.cutmix"""


def test_typing_errors_are_near_and_unrelated_words_are_not():
    pairs = (word.split("=") for word in TYPOS.split())
    missed = {name: nearest(name) for name, meant in pairs if nearest(name) != meant}
    assert missed == {}
    assert {name: nearest(name) for name in UNRELATED.split() if nearest(name)} == {}


def test_the_page_has_the_tables_and_says_what_is_said(tmp_path, monkeypatch):
    page = PAGE.read_text(encoding="utf-8")
    hint = "run: python -m muster.recipe.describe docs/coming-from.md"
    assert update_manual(page, foreign_tables()) == page, hint
    shown = re.findall(r"^\$ muster train (.*)\n(.*)$", page, flags=re.MULTILINE)
    assert len(shown) == 4
    for arguments, message in shown:
        name, *overrides = shlex.split(arguments)
        with pytest.raises(RecipeError) as caught:
            load(name, overrides)
        assert str(caught.value) == message


@pytest.mark.guides
def test_every_command_and_key_of_the_page_exists():
    page = PAGE.read_text(encoding="utf-8")
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    commands = [shlex.split(span)[1:] for span in spans if span.startswith("muster ")]
    assert len(commands) > 15
    assert [found for words in commands if (found := unknown(words))] == []
    elsewhere = {name for row in ROWS for name in row.names.split()}
    sections = {key.partition(".")[0] for key in keys() if "." in key}
    named = {span for span in spans if re.fullmatch(rf"({'|'.join(sections)})\.[\w.]+", span)}
    older = {row.old for row in aliases.TABLE}
    assert named - elsewhere - older <= set(keys())


def unknown(words: list[str]) -> list[str]:
    """Words of a command that muster's command line does not have: the verb, its options, keys."""
    command = typer.main.get_command(app)
    words = list(words)
    while isinstance(command, typer.core.TyperGroup):
        if not words or words[0] not in command.commands:
            return words[:1] or ["no verb"]
        command = command.commands[words.pop(0)]
    options = {name for parameter in command.params for name in parameter.opts}
    given = [word.partition("=")[0] for word in words]
    keyed = [word.partition("=")[0] for word in words if re.match(r"[\w.]+=", word)]
    return [word for word in given if word.startswith("-") and word not in options] + [
        key for key in keyed if key not in keys()
    ]


def test_a_command_that_does_not_exist_is_found():
    assert unknown(["fly"]) == ["fly"]
    assert unknown(["bench", "collective"]) == ["collective"]
    assert unknown(["train", "R", "--gpu", "2", "training.step=3"]) == ["--gpu", "training.step"]
