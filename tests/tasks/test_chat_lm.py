"""Chat rows as a task: the loss of the replies, whatever rows share a sequence and whatever the ranks."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import muster
import processes
from chats import CHATML, write_model, write_rows
from muster import run_directory
from muster.checks.parity import distance, short_recipe, training_curve
from muster.data.loader import IGNORE
from muster.errors import RecipeError
from muster.models.huggingface.transformers_config import TransformersConfig
from muster.observe.results import read_lines
from muster.observe.results_table import results_table
from muster.parallel.materialise import materialise
from muster.recipe.load import load
from muster.tasks import build_task
from muster.tasks.causal_lm import CausalLM
from muster.tasks.chat import ChatLM
from muster.training.loop import train
from muster.worker.results import finish
from tasks.test_causal_lm import call, fill
from training import make_job

ROWS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model in `model`, rows in `rows`."""
    folder = tmp_path_factory.mktemp("chat")
    write_model(folder / "model")
    for split, count in (("train", ROWS), ("validation", 7)):
        write_rows(folder / "rows" / f"{split}.jsonl", count)
    return folder


def options(folder: Path, *more: str) -> list[str]:
    return [
        f"model.pretrained={folder / 'model'}",
        f"data.train={folder / 'rows'}",
        "data.sequence_length=256",
        *more,
    ]


def task_of(folder: Path, *more: str) -> ChatLM:
    task = build_task(load("llama-micro", options(folder, *more)))
    assert isinstance(task, ChatLM)
    return task


def test_a_checkpoint_of_chat_stays_one_without_its_data(folder):
    task = task_of(folder)
    recipe = load("llama-micro", ["data.train=/nowhere"])
    again = build_task(recipe, json.loads(json.dumps(task.assets)))
    assert isinstance(again, ChatLM)
    assert again.template == task.template
    plain = build_task(
        load("llama-micro", options(folder, "data.format=text", "data.text_column=x"))
    )
    assert type(plain) is CausalLM
    assert type(build_task(recipe, plain.assets)) is CausalLM


@pytest.mark.parametrize("pack", ["true", "false"])
def test_the_loss_is_that_of_transformers_on_each_row_alone(folder, pack):
    """Its own model, its own template, one row at a time, labels where its mask has replies."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from data.test_chat import MARKED

    theirs = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    total, count = 0.0, 0
    for line in (folder / "rows" / "validation.jsonl").read_text().splitlines():
        found = tokenizer.apply_chat_template(
            json.loads(line)["messages"],
            chat_template=MARKED,
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        ids, mask = torch.tensor(found["input_ids"]), torch.tensor(found["assistant_masks"]).bool()
        labels = ids.where(mask, torch.tensor(IGNORE))
        with torch.no_grad():
            mean = theirs(ids[None], labels=labels[None]).loss
        total, count = total + mean.item() * int(mask.sum()), count + int(mask.sum())
    task = task_of(folder, f"data.pack_rows={pack}")
    source = task.source("validation")
    assert (len(source) < 7) == (pack == "true")
    batch = task.collate([source.load(i) for i in range(len(source))], None)
    assert batch.units == count == (batch["targets"] != IGNORE).sum()
    assert batch.filled < batch.cells
    model = fill(task, task.build_model())
    with torch.no_grad():
        loss = task.loss(call(task, model, batch), batch)
        scores = task.summarise(task.score(call(task, model, batch), batch).counts)
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert scores["loss"] == pytest.approx(total / count, rel=1e-5)
    assert scores["tokens"] == count


def train_on_rows(mesh, place: str, folder: str, *more: str):
    """Every step sees all rows, packed or not, so that steps can be compared."""
    size = len(task_of(Path(folder), *more).source("train"))
    wanted = short_recipe([*options(Path(folder), *more), f"training.global_batch_size={size}"])
    made = training_curve(load("llama-micro", wanted), mesh, Path(place))
    return made if mesh.first else None


def test_packed_rows_train_as_rows_alone_on_two_ranks(ranks, folder, tmp_path):
    def run(world: int, name: str, *more: str):
        return ranks(world)(train_on_rows, str(tmp_path / name), str(folder), *more)[0]

    alone = run(1, "alone", "data.pack_rows=false")
    packed = run(2, "packed", "distributed.strategy=fsdp")
    found = distance(alone, packed)
    assert found.small, found


def train_to_the_end(
    mesh, place: str, words: list[str], perplexities: Sequence[float] = ()
) -> dict:
    """Really evaluated; `perplexities` are taken instead of the real ones, one after the other."""
    job = make_job(mesh, place, words, "chat")
    if perplexities:
        told, real = iter(perplexities), job.task.summarise
        job.task.summarise = lambda counts: real(counts) | {"perplexity": next(told)}
    run = run_directory.Run(Path(place))
    if mesh.first:
        run.update(created=0.0)
    results = finish(job, run, train(job))
    job.observer.close()
    return results


@pytest.mark.guides
def test_the_shipped_recipe_learns_replies_and_answers(ranks, folder, tmp_path):
    """On two ranks that share the weights; the answers are those that the checkpoint gives."""
    pytest.importorskip("peft")
    words = options(
        folder,
        "training.epochs=2",
        "training.global_batch_size=2",
        "training.lr=2e-2",
        "distributed.strategy=fsdp",
        "training.precision=fp32",
        "evaluation.answers=2",
        "evaluation.answer_tokens=12",
    )
    results = ranks(2)(train_to_the_end, str(tmp_path), words)[0]
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.05
    assert {name for name in lines[0] if "token" in name} == {"tokens_per_s"}
    assert set(results["scores"]) == {"loss", "perplexity", "tokens"}
    loaded = muster.load(tmp_path)
    rows = (folder / "rows" / "validation.jsonl").read_text().splitlines()
    assert [found["row"].rpartition(" ")[2] for found in results["answers"]] == ["0", "3"]
    for found in results["answers"]:
        messages = json.loads(rows[int(found["row"].rpartition(" ")[2])])["messages"]
        expected = loaded.answer(messages[:-1], max_tokens=12, temperature=0)
        assert found["answer"].rstrip("\ufffd") == expected.rstrip("\ufffd")
        assert found["expected"] == messages[-1]["content"]
        assert all(message["content"] in found["asked"] for message in messages[:-1])
    shown = "".join(str(c) for column in results_table(results, "x").columns for c in column.cells)
    assert results["answers"][0]["answer"][:20].strip() in shown


def test_answers_are_those_of_the_weights_that_are_scored(ranks, folder, tmp_path):
    """The best of step 2, whose scores are remembered, and not those that training ends with."""
    pytest.importorskip("peft")
    words = options(
        folder,
        "training.epochs=null",
        "training.steps=4",
        "training.global_batch_size=2",
        "training.lr=0.3",
        "training.warmup_steps=0",
        "training.precision=fp32",
        "evaluation.every_steps=2",
        "evaluation.answers=3",
        "evaluation.answer_tokens=8",
    )
    results = ranks(1)(train_to_the_end, str(tmp_path), words, (1.5, 2.5))[0]
    assert (results["scores"]["perplexity"], results["last_scores"]["perplexity"]) == (1.5, 2.5)
    rows = (folder / "rows" / "validation.jsonl").read_text().splitlines()
    said = {}
    for step in (2, 4):
        loaded = muster.load(tmp_path / "checkpoints" / f"step-{step}")
        said[step] = [
            loaded.answer(
                json.loads(rows[int(found["row"].rpartition(" ")[2])])["messages"][:-1],
                max_tokens=8,
                temperature=0,
            ).rstrip("\ufffd")
            for found in results["answers"]
        ]
    assert said[2] != said[4]
    assert [found["answer"].rstrip("\ufffd") for found in results["answers"]] == said[2]


def test_corpora_that_are_mixed_are_asked_from_the_first(ranks, folder, tmp_path):
    rows = folder / "rows"
    words = [
        f"model.pretrained={folder / 'model'}",
        f"data.train=[{{path: {rows / 'validation.jsonl'}, weight: 1}}, {{path: {rows / 'train.jsonl'}, weight: 2}}]",
        "data.sequence_length=256",
        "training.steps=1",
        "training.global_batch_size=2",
        "evaluation.answers=1",
        "evaluation.answer_tokens=2",
    ]
    results = ranks(2)(train_to_the_end, str(tmp_path), words)[0]
    assert [found["row"] for found in results["answers"]] == [f"{rows / 'validation.jsonl'} row 0"]
    assert results["scores"] == {}


def test_questions_that_leave_no_room_are_not_asked(folder):
    source = task_of(folder, "data.pack_rows=false").source("validation")
    every = source.questions(100, 255)
    assert len(every) == 7
    lengths = [len(question.asked) for question in every]
    some = sum(length <= 70 for length in lengths)
    assert 0 < some < 7
    assert len(source.questions(100, 70)) == some
    assert source.questions(3, 4) == []


def test_a_model_that_cannot_isolate_rows_says_which_key_to_change(folder, monkeypatch):
    monkeypatch.setattr("muster.models.huggingface.folder.FAMILIES", ())
    assert isinstance(task_of(folder).config, TransformersConfig)
    monkeypatch.setattr(TransformersConfig, "isolates_documents", lambda self: False)
    with pytest.raises(RecipeError, match=r"data\.pack_rows: transformers' model of llama cannot"):
        task_of(folder)
    assert task_of(folder, "data.pack_rows=false")


def test_a_module_of_transformers_keeps_rows_apart_too(folder, monkeypatch):
    ours = task_of(folder)
    monkeypatch.setattr("muster.models.huggingface.folder.FAMILIES", ())
    task = task_of(folder)
    assert isinstance(task.config, TransformersConfig)
    losses = []
    for made in (ours, task):
        source = made.source("validation")
        batch = made.collate([source.load(i) for i in range(len(source))], None)
        with torch.device("meta"):
            model = made.build_model()
        materialise(model, made.weights(), torch.device("cpu"))
        with torch.no_grad():
            losses.append(made.loss(call(made, model.eval(), batch), batch).item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_chat_rows_without_a_template_say_what_to_do(tmp_path):
    write_rows(tmp_path / "train.jsonl", 3)
    words = [f"data.train={tmp_path}", "data.tokenizer.kind=bytes"]
    with pytest.raises(RecipeError, match=r"data\.chat_template: .*`basic`"):
        build_task(load("gpt-micro", words))
    assert isinstance(build_task(load("gpt-micro", [*words, "data.chat_template=basic"])), ChatLM)
    (tmp_path / "own.jinja").write_text(CHATML)
    own = build_task(load("gpt-micro", [*words, f"data.chat_template={tmp_path / 'own.jinja'}"]))
    assert own.template.source == CHATML


@pytest.mark.full  # half a minute: ranks of their own
def test_the_manual_runs_as_written(folder, tmp_path):
    """Its commands in the folder that it speaks of, in which the model answers what it was taught."""
    pytest.importorskip("peft")
    page = (Path(__file__).parents[2] / "docs" / "chat.md").read_text()
    commands = [
        line.partition("  #")[0].strip()
        for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
        for line in block.splitlines()
    ]
    assert [command.split()[1] for command in commands] == ["train", "generate", "generate"]
    write_model(tmp_path / "my-model", max_position_embeddings=1024)
    for name, count in (("rows", 90), ("held-out", 9)):
        write_rows(tmp_path / f"{name}.jsonl", count)
    said = []
    for command in commands:
        words = shlex.split(command.removeprefix("muster "))
        ended = processes.run([*processes.MUSTER, *words], tmp_path, stdin="hello\nagain\n")
        said.append(ended.stdout)
    assert "validation data" in said[0]
    assert "answered" in said[0]
    assert len(said[1].splitlines()) >= 2
    assert said[2].strip()
