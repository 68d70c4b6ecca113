"""Recipes and overrides that are damaged, or written to do harm: one sentence, soon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile import CHARACTERS, FEW, HOSTILE_TEXT
from muster.errors import RecipeError
from muster.reading.values import DEEPEST, LARGEST, MOST
from muster.recipe.load import from_resolved, load

BASE = "task: causal-lm\ntraining: {steps: 5}\n"
KEYS = st.sampled_from(
    ["name", "training.steps", "training.betas", "data.train", "training", "seed", "x.y"]
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes") / "mine.yaml"


def outcome(read: Callable[[], object]) -> str:
    """What a refusal says."""
    try:
        read()
    except RecipeError as error:
        return str(error)
    return "taken"


def refusal(file: Path, text: str, *overrides: str) -> str:
    file.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load(str(file), overrides)
    words = str(caught.value)
    assert words.isprintable()
    assert len(words) < 700
    return words


@FEW
@given(KEYS, HOSTILE_TEXT)
def test_any_override_is_taken_or_refused_in_one_line(key: str, text: str) -> None:
    assert outcome(lambda: load("gpt-micro", [f"{key}={text}"])).isprintable()


@FEW
@given(st.text(CHARACTERS.replace("~", "$"), max_size=30))
def test_any_value_of_a_file_is_taken_or_refused_in_one_line(file: Path, text: str) -> None:
    file.write_bytes((BASE + "name: " + text).encode("utf-8", "surrogatepass"))
    for read in (load, from_resolved):
        assert outcome(lambda read=read: read(str(file))).isprintable()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: ${b}\nb: ${a}\n", "its references lead back to itself"),
        ("data: {x: '${data}'}\n", "data: its references lead back to itself"),
        (
            "a0: x\n" + "".join(f"a{n}: '" + f"${{a{n - 1}}}" * 9 + "'\n" for n in range(1, 20)),
            "its references expand to more than",
        ),
        (
            "a0: [1]\n" + "".join(f"a{n}: [" + f"'${{a{n - 1}}}'," * 9 + "]\n" for n in range(1, 20)),
            "its references expand to more than",
        ),
        ("".join(f"a{n}: ${{a{n + 1}}}\n" for n in range(200)), "references refer to each other"),
        ("name: ${oc.create:'x'}\n", "name: ${oc.create:… is not read in a recipe"),
        ("x: env\nname: ${oc.${x}:HOME}\n", "name: ${oc.${… is not read in a recipe"),
        ("x: HOME\nname: ${oc.env:${x}}\n", "name: name the variable itself"),
        ("defaults: ['" + "x" * 5000 + "']\n", "cannot be composed: [Errno 36] File name too long"),
        ("defaults: [deep]\n", f"deep.yaml, line 1: lists and sections lie more than {DEEPEST} deep"),
        ('name: "\\0"\n', "mine.yaml: name: holds a NUL character"),
        (f"seed: {LARGEST + 1}\n", "seed: is a whole number beyond 2^53"),
        ("".join(f"k{n}: 1\n" for n in range(1000)), "k0: no such key; "),
        ('"a\\x1b[31m": 1\n', "a: no such key"),
    ],
)  # fmt: skip
def test_a_hostile_file_is_refused(file: Path, text: str, words: str) -> None:
    file.with_name("deep.yaml").write_text("[" * 100_000)
    assert words in refusal(file, BASE + text)


PARTS = """
slurm: {setup: ["$", "{oc.e", "nv:MY_SECRET}", "${slurm.setup.0}${slurm.setup.1}${slurm.setup.2}"]}
"""


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"{PARTS}description: '${{{resolver}${{slurm.setup.3}}}}'\n"
            for resolver in (
                "oc.decode :",
                "oc.decode\t:",
                "oc.create :",
                " oc.decode:",
                "oc.create:",
            )
        ),
        "description: '${hydra:runtime.cwd}'\n",
        "description: '${now:%999999999Y}'\n",
        "task_options: {'${oc.env:MY_SECRET}': 1}\ndata: {train: '${oc.dict.keys:task_options}'}\n",
        "task_options: {'a}${oc.env:MY_SECRET': 1}\ndata: {train: '${oc.dict.values:task_options}'}\n",
    ],
)
def test_no_other_resolver_is_read_nor_text_that_becomes_one(
    file: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    words = refusal(file, BASE + text)
    assert "is not read in a recipe" in words or "holds a reference; write the key itself" in words
    with pytest.raises(RecipeError):
        from_resolved(str(file))


@pytest.mark.parametrize(
    "reference",
    [
        *('${oc.select:"a0"}', "${ oc.select:a0}", "${ a0 }", "${oc.deprecated:a0}", "${a0,0}"),
        *("${\u00a0a0}", "${oc.select :a0}"),
    ],
)
def test_the_bound_on_what_references_expand_to_counts_every_way_to_write_one(
    file: Path, reference: str
) -> None:
    lines = "".join(
        f"a{n}: '" + reference.replace("a0", f"a{n - 1}") * 9 + "'\n" for n in range(1, 8)
    )
    words = refusal(file, BASE + "a0: x\n" + lines)
    assert "expand to more than" in words or "is not read in a recipe" in words


def test_files_that_double_with_each_other_are_refused_before_they_are_composed(file: Path) -> None:
    for n in range(1, 8):
        file.with_name(f"f{n}.yaml").write_text(f"defaults: ['f{n + 1}@a', 'f{n + 1}@b']\n")
    file.with_name("f8.yaml").write_text("x: 1\n")
    assert "lead to more than 100 files" in refusal(file, "defaults: [f1, _self_]\n" + BASE)


@pytest.mark.parametrize(
    "entry", ["'${name}'", "{'${name}': x}", "{x: '${name}'}", "{x: [a, '${name}']}", "'a@${name}'"]
)
def test_a_file_that_is_chosen_while_files_are_composed_is_refused(file: Path, entry: str) -> None:
    file.with_name("unread.yaml").write_text("description: '${oc.env:MY_SECRET}'\n")
    text = f"name: unread\ndefaults: [{entry}, _self_]\n" + BASE
    words = refusal(file, text)
    assert (
        "is only known while it is composed" in words
        or "holds a reference; write the key itself" in words
    )


def test_what_is_below_a_reference_and_from_the_end_of_a_list_counts(file: Path) -> None:
    below = "p0: {v: x}\nq0: ${p0}\n" + "".join(
        f"p{n}: {{v: '" + f"${{q{n - 1}.v}}" * 9 + f"'}}\nq{n}: ${{p{n}}}\n" for n in range(1, 8)
    )
    last = "a0: [x]\n" + "".join(
        f"a{n}: ['" + f"${{a{n - 1}[-1]}}" * 9 + "']\n" for n in range(1, 8)
    )
    beside = "t: {v0: x, " + ", ".join(
        f"'a.v{n}': '" + f"${{.v{n - 1}}}" * 9 + "'" for n in range(1, 8)
    )
    for text, words in (
        (below, "expand to more"),
        (last, "expand to more"),
        (beside + "}\n", "not read"),
    ):
        assert words in refusal(file, BASE + text)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("a\nb=1", "a b=1: not an override"),
        ("x\x1b[31m=1", "x=1: not an override"),
        ("name=\0", "name: holds a NUL character"),
        ("name='\ud800'", "name: holds half of a character"),
        ("seed=" + "9" * 5000, "seed: got a number of thousands of digits"),
        (f"seed={LARGEST + 1}", "seed: is a whole number beyond 2^53"),
        ("a" + ".a" * 5000 + "=1", "no such key"),
        ("training.betas=" + "[" * 5000 + "]" * 5000, "training.betas: lists and sections lie"),
        ("data.train=[" + "a," * 5000 + "a]", "data.train: got more than 2,000 values"),
        ("name=" + "x" * 100_000, "name: got 100,000 characters"),
        ("name=[1,\n2", "name: got [1, 2, which has no end or no meaning"),
    ],
)
def test_a_hostile_override_is_refused(file: Path, override: str, words: str) -> None:
    assert words in refusal(file, BASE, override)


def test_a_document_that_is_too_deep_or_too_long_is_refused() -> None:
    deep: dict[str, object] = {}
    inner = deep
    for _ in range(2000):
        inner["training"] = inner = {}
    for document in (deep, {"data": {"train": ["a"] * (MOST + 1)}}):
        with pytest.raises(RecipeError, match=r"deep in each other|one of more than"):
            load(document)


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("CORPUS", "/data/corpus", True),
        ("CORPUS", "s3://bucket/folder", True),
        ("CORPUS", "https://user:pass@host/x", False),
        ("CORPUS", "https://host/x?X-Amz-Signature=1", False),
        ("STEPS", "1e3", True),
        ("USER", "ada", True),
        ("PLAIN", "hunter2", False),
        ("API_KEY", "/data/corpus", False),
        ("MY_SECRET", "12345", False),
        ("DB_PASSWORD", "12345", False),
        ("SLACK_WEBHOOK", "https://hooks.slack.com/services/T0/B0/x", False),
    ],
)
def test_a_variable_that_may_be_a_secret_does_not_reach_a_recipe(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, taken: bool
) -> None:
    monkeypatch.setenv(name, value)
    text = BASE + f"description: ${{oc.env:{name}}}\n"
    if taken:
        file.write_text(text)
        assert load(str(file)).description == value
        return
    words = refusal(file, text)
    assert words.startswith(f"description: ${{oc.env:{name}}} is not put into a recipe")
    assert value not in words
    hidden = f"description: ${{oc.env:{name},x}}"
    assert "is not put into a recipe" in refusal(file, BASE, hidden.replace(": ", "=", 1))
    assert "is not put into a recipe" in refusal(file, BASE + f"defaults: ['${{oc.env:{name}}}']\n")
    for key in ('"a.b"', "1", "true", '"x.0.y"'):
        options = (
            f"task_options: {{{key}: '${{oc.env:{name}}}', x: {{{key}: ['${{oc.env:{name}}}']}}}}\n"
        )
        assert "is not put into a recipe" in refusal(file, BASE + options)


def test_a_number_may_come_from_the_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPS", "7")
    file.write_text("task: causal-lm\ntraining: {steps: '${oc.decode:${oc.env:STEPS}}'}\n")
    assert load(str(file)).training.steps == 7


def test_a_key_below_a_list_is_refused_by_its_name() -> None:
    words = outcome(lambda: load("gpt-micro", ["training.betas={a: 1}"]))
    assert words.startswith("training.betas: cannot be set: it would be a part of a list")


def test_a_variable_that_is_not_set_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOPE", raising=False)
    words = refusal(file, BASE + "data: {train: '${oc.env:NOPE}'}")
    assert words == (
        "data.train: the environment variable NOPE is not set; set it or give the value itself"
    )


def test_a_long_list_of_wrong_parts_is_described_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[str] = []
    monkeypatch.setattr(
        "muster.recipe.load.mismatch", lambda key, value: described.append("") or "wrong"
    )
    refusal(file, BASE + f"slurm: {{options: {list(range(50))}}}")
    assert len(described) == 1
