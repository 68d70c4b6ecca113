"""Text from a checkpoint: the cache, the choice of tokens, the command line."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from muster.cli import use
from muster.errors import MusterError
from muster.inference.generate import Sampling, generate
from muster.inference.load import Trained, load_recogniser, load_trained
from muster.inference.score import score
from muster.observe.results import MANIFEST
from muster.recipe.load import load
from muster.tasks import build_task
from muster.training.manifest import FORMAT, Saved, digest


def trained(preset: str = "gpt2-micro", *overrides: str) -> Trained:
    """Weights large enough that the choice of tokens is not a coin toss."""
    recipe = load("gpt-micro", [f"model.preset={preset}", *overrides])
    task = build_task(recipe)
    torch.manual_seed(3)
    model = task.build_model()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2)
    return Trained(task, model.eval(), torch.device("cpu"), Saved(Path("here"), {}))


@pytest.fixture(
    scope="module", params=["gpt2-micro", pytest.param("llama-micro", marks=pytest.mark.guides)]
)
def model(request) -> Trained:
    return trained(request.param)


def only(model: Trained, prompt: str, **options) -> str:
    (stream,) = generate(model, prompt, **options)
    return "".join(stream)


def test_greedy_with_the_cache_equals_greedy_without(model):
    lengths = []
    for prompt in ("def main(", "x", "for i in", "return 0"):
        ids = [256, *prompt.encode()]
        with torch.no_grad():
            for _ in range(30):
                best = int(model.model(torch.tensor([ids]))[0, -1, :257].argmax())
                if best == 256:
                    break
                ids.append(best)
        written = ids[1 + len(prompt) :]
        found = only(model, prompt, temperature=0, max_tokens=30)
        assert found == bytes(written).decode(errors="replace")
        lengths.append(len(written))
    assert max(lengths) > 10, "ends so soon test nothing"


def test_a_seed_repeats_and_each_sample_is_its_own(model):
    options = {"temperature": 1.0, "max_tokens": 30}
    texts = ["".join(s) for s in generate(model, "x", samples=3, seed=7, **options)]
    assert len(set(texts)) == 3
    assert texts == ["".join(s) for s in generate(model, "x", samples=3, seed=7, **options)]
    assert texts[0] == only(model, "x", seed=7, **options)
    streams = list(generate(model, "x", samples=3, seed=7, **options))
    assert ["".join(s) for s in reversed(streams)] == texts[::-1]
    assert texts[0] != only(model, "x", seed=8, **options)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, None, 1.0),
        (0.5, None, 1.0),
        (2.0, 5, 1.0),
        (1.0, None, 0.6),
        (0.7, 12, 0.8),
        (1.0, 1, 1.0),
        (1.0, None, 1e-6),
        (1.0, 500, 0.999),
    ],
)
def test_the_distribution_is_that_of_transformers(temperature, top_k, top_p):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(200, generator=torch.Generator().manual_seed(5))
    scores = TemperatureLogitsWarper(temperature)(None, logits.double()[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    found = Sampling(temperature, top_k, top_p).distribution(logits)
    np.testing.assert_allclose(found, scores.softmax(-1)[0].numpy(), rtol=1e-9, atol=1e-12)


def test_tokens_are_drawn_as_often_as_their_chances_say():
    logits = torch.tensor([-torch.inf, 0.0, 1.0, -1.0, 2.0, -torch.inf])
    sampling, random = Sampling(1.0), np.random.default_rng(0)
    drawn = np.bincount([sampling.draw(logits, random) for _ in range(4000)], minlength=6) / 4000
    expected = logits.softmax(-1).numpy()
    assert drawn[0] == drawn[5] == 0
    assert np.abs(drawn - expected).max() < 4 * np.sqrt(0.25 / 4000)


class Fixed:
    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def test_the_ends_of_the_random_numbers_never_draw_what_is_impossible():
    logits = torch.tensor([-torch.inf, 0.0, 0.1, -torch.inf])
    assert Sampling(1.0).draw(logits, Fixed(0.0)) == 1
    assert Sampling(1.0).draw(logits, Fixed(1 - 2**-53)) == 2


def test_rows_without_a_token_are_never_drawn_and_the_end_ends():
    model = trained("gpt2-micro", "model.vocab_size=400")
    table = model.model.embed.tokens.weight
    with torch.no_grad():
        table[257:] = 100 * table[257:]
        text = only(model, "a", temperature=1.5, max_tokens=30)
        assert text
        table.zero_()
        model.model.norm.weight.zero_()
        model.model.norm.bias.fill_(1.0)
        table[256] = 1.0
    assert only(model, "a", temperature=0, max_tokens=5) == ""


def test_generation_stops_where_the_positions_end(caplog):
    model = trained("gpt2-micro", "data.sequence_length=16")
    prompt = "p" * 1020  # with the end before it, 1021 of 1024 positions
    found = only(model, prompt, temperature=0, max_tokens=50)
    assert len(found.encode(errors="replace")) <= 3 * 4
    assert "no position after its 1024 tokens" in caplog.text
    with pytest.raises(MusterError, match=r"the prompt has 1024 tokens.*1023 at most"):
        generate(model, "p" * 1024)
    assert only(model, "p" * 1023, temperature=0, max_tokens=1) is not None


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("max_tokens", 0, "--max-tokens: got 0, expected 1 or more"),
        ("temperature", -0.1, "--temperature: got -0.1"),
        ("temperature", float("nan"), "--temperature: got nan"),
        ("temperature", float("inf"), "--temperature: got inf"),
        ("top_k", 0, "--top-k: got 0"),
        ("top_p", 0.0, "--top-p: got 0.0"),
        ("top_p", 1.5, "--top-p: got 1.5, expected above 0, and 1 at most"),
        ("seed", -1, "--seed: got -1"),
        ("samples", 0, "--samples: got 0"),
    ],
)
def test_a_bad_value_is_refused_by_its_option(model, option, value, words):
    with pytest.raises(MusterError, match=words):
        generate(model, "x", **{option: value})


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run of a language model with a complete checkpoint, in runs/ of the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.txt").write_text("to be or not to be " * 20)
    (tmp_path / "text" / "validation.txt").write_text("that is the question")
    model = trained("gpt2-micro", f"data.train={tmp_path}/text", "data.sequence_length=16")
    return save(model, tmp_path)


def save(model: Trained, root: Path) -> Path:
    """The run `small-1`, the latest one in runs/ of `root`, with this model as its checkpoint."""
    folder = root / "runs" / "small-1"
    saved = folder / "checkpoints" / "step-5"
    saved.mkdir(parents=True)
    with warnings.catch_warnings():  # torch remarks that one process saves alone
        warnings.simplefilter("ignore", UserWarning)
        dcp.save({"model": model.model.state_dict()}, checkpoint_id=saved, no_dist=True)
    (saved / "recipe.json").write_text(json.dumps(model.task.recipe.as_dict()))
    (saved / "assets.json").write_text(json.dumps(model.task.assets))
    files = {p.name: {"bytes": p.stat().st_size, "sha256": digest(p)} for p in saved.iterdir()}
    manifest = {"format": FORMAT, "files": files, "trainer": {"step": 5}}
    (saved / MANIFEST).write_text(json.dumps(manifest))
    (folder / "run.json").write_text("{}")
    (root / "runs" / "latest").symlink_to("small-1")
    return folder


def test_a_failed_run_is_called_that_and_its_last_whole_checkpoint_is_taken(run, capsys):
    failure = {"what": "Rank 1 was killed by SIGKILL.\nmore"}
    (run / "run.json").write_text(json.dumps({"state": "failed", "failure": failure}))
    use.generate(Path("latest"), "to be", max_tokens=4, temperature=0.0)
    said = capsys.readouterr()
    assert said.err == (
        "small-1 failed: Rank 1 was killed by SIGKILL; it saved up to step 5\n"
        "checkpoint: step-5, the last\n"
    )
    assert said.out.startswith("to be")


def test_a_run_without_a_checkpoint_is_refused_with_the_newest_that_has_one(run):
    failed = Path("runs/small-2")
    (failed / "checkpoints" / "step-1").mkdir(parents=True)  # half written
    info = {"state": "failed", "created": 9.0, "failure": {"what": "Rank 0: [/red] broke."}}
    (failed / "run.json").write_text(json.dumps(info))
    words = r"small-2 failed: Rank 0: \[/red\] broke, and has no whole checkpoint; the newest run with one is small-1$"
    with pytest.raises(MusterError, match=words):
        use.generate(failed, "to be")
    with pytest.raises(MusterError, match=words):
        use.evaluate(failed)
    shutil.rmtree(run / "checkpoints")
    (run / "run.json").write_text(json.dumps({"state": "finished"}))
    with pytest.raises(MusterError, match=r"small-1 is finished, and has no whole .* neither has"):
        use.generate(run, "to be")


@pytest.mark.parametrize("name", ["latest", "small-1", "runs/small-1"])
def test_a_run_is_found_by_name_and_continues_a_prompt(run, capsys, name):
    expected = only(load_trained(run), "to be", temperature=0, max_tokens=12)
    use.generate(Path(name), "to be", max_tokens=12, temperature=0.0, samples=2)
    text = capsys.readouterr().out
    assert text == f"--- 1 of 2\nto be{expected}\n--- 2 of 2\nto be{expected}\n"


def test_eval_of_a_language_model_shows_its_rates(run, capsys):
    result = score(load_trained(run))
    assert result.split == "validation"
    assert result.scores["bytes"] == len("that is the question")
    use.evaluate(Path("latest"))
    shown = capsys.readouterr().out
    assert f"perplexity {result.scores['perplexity']:.3f}" in " ".join(shown.split())
    assert "bits per byte, 21 tokens" in " ".join(shown.split())
    (run.parents[1] / "text" / "test.txt").write_text("more")
    assert score(load_trained(run)).split == "test"
    assert score(load_trained(run), "validation").scores == result.scores
    (run.parents[1] / "text" / "test.txt").unlink()
    with pytest.raises(MusterError, match=r"has no test split; name some as data\.test"):
        score(load_trained(run), "test")


def test_other_verbs_say_which_task_they_need(run):
    with pytest.raises(MusterError, match="is of task causal-lm; transcribing needs speech-ctc"):
        load_recogniser(run)
    greedy = ["evaluation.decoder=greedy", "evaluation.ngram=null", "evaluation.known_words=false"]
    speech = load("speech", greedy)
    nothing = torch.nn.Identity()
    saved = Saved(Path("here"), {})
    other = Trained(build_task(speech), nothing, torch.device("cpu"), saved)
    with pytest.raises(MusterError, match="is of task speech-ctc; generating needs causal-lm"):
        generate(other, "x")
    with pytest.raises(MusterError, match="no checkpoint at nowhere"):
        load_trained(Path("nowhere"))
