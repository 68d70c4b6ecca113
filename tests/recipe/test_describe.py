"""The recipe in words: shown, for editors, and in the manual."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from muster.errors import RecipeError
from muster.recipe.describe import describe, json_schema, keys, schema_table, update_manual
from muster.recipe.load import load

MANUAL = Path(__file__).parents[2] / "docs" / "recipe.md"


def line(text: str, key: str) -> str:
    return next(row for row in text.splitlines() if row.strip().startswith(f"{key}:"))


def test_the_description_is_the_recipe_itself(tmp_path: Path) -> None:
    recipe = load("speech", ["name='1e3'", "description='a: b # c'"])
    path = tmp_path / "shown.yaml"
    path.write_text(describe(recipe))
    assert load(str(path)) == recipe


def test_each_key_is_followed_by_its_meaning() -> None:
    text = describe(
        load(
            "speech",
            ["model.lora={rank: 4}", "model.shape={layers: 2}", "training.early_stopping={}"],
        )
    )
    for key in keys().values():
        assert key.description in text


def test_what_differs_from_the_default_is_marked_and_nothing_else() -> None:
    text = describe(load("speech", ["data.spec_augment=null"]))
    assert "# [default: 0.001] Peak learning rate" in line(text, "lr")
    assert "# [default: on]" in line(text, "spec_augment")
    assert "[default:" not in line(text, "warmup_steps")
    assert "[default:" not in line(text, "betas")
    assert "[default:" not in line(text, "mels")


def test_every_key_but_a_section_of_its_own_has_a_description() -> None:
    assert [key.name for key in keys().values() if not key.description and not key.is_section] == []


def test_the_schema_for_editors_knows_every_key_and_the_defaults_list() -> None:
    schema = json_schema()
    json.dumps(schema)
    assert "defaults" in schema["properties"]
    assert "required" not in schema
    assert schema["additionalProperties"] is False
    lr = schema["$defs"]["Training"]["properties"]["lr"]
    assert lr["description"].startswith("Peak learning rate")
    assert lr["exclusiveMinimum"] == 0


def test_the_key_table_has_one_row_for_each_key_with_a_value() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|", schema_table(), flags=re.MULTILINE)
    valued = [k.name for k in keys().values() if not k.is_section or "null" in k.kinds]
    assert rows == valued


def test_the_manual_is_in_step_with_the_code() -> None:
    page = MANUAL.read_text(encoding="utf-8")
    hint = "run: python -m muster.recipe.describe docs/recipe.md"
    assert update_manual(page) == page, hint


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="keys: generated"):
        update_manual("# nothing here")


def manual_errors() -> list[tuple[str, str]]:
    page = MANUAL.read_text(encoding="utf-8")
    return re.findall(r"^\$ muster train (.*)\n(.*)$", page, flags=re.MULTILINE)


def test_the_manual_shows_errors() -> None:
    assert len(manual_errors()) >= 10


@pytest.mark.parametrize(("arguments", "message"), manual_errors())
def test_the_manual_shows_errors_as_they_are(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *overrides = shlex.split(arguments)
    with pytest.raises(RecipeError) as caught:
        load(name, overrides)
    assert str(caught.value) == message


def test_the_files_in_the_manual_compose_as_it_says(tmp_path: Path) -> None:
    page = MANUAL.read_text(encoding="utf-8")
    for name, text in re.findall(r"```yaml\n# (\w+\.yaml)\n(.*?)```", page, flags=re.DOTALL):
        (tmp_path / name).write_text(text)
    shown = describe(load(str(tmp_path / "multi_gpu.yaml")))
    claim = page.partition("`muster recipe show multi_gpu.yaml` has")[2].partition(".\n\n")[0]
    values = re.findall(r"`([^`]+)`", claim)
    assert len(values) == 5
    for value in values:
        assert re.search(rf"^ *{re.escape(value)} *(#|$)", shown, flags=re.MULTILINE), value


def test_the_excerpt_in_the_manual_is_what_show_prints() -> None:
    page = MANUAL.read_text(encoding="utf-8")
    excerpt = re.search(r"```yaml\n(training:\n  steps: 750.*?)```", page, flags=re.DOTALL)
    assert excerpt is not None
    assert excerpt[1] in describe(load("speech"))


def test_the_overrides_in_the_manual_work() -> None:
    page = MANUAL.read_text(encoding="utf-8")
    section = page.partition("## Overrides")[2].partition("##")[0]
    overrides = re.findall(r"^\| `([^`]+=[^`]+|~[^`]+)` \|", section, flags=re.MULTILINE)
    assert len(overrides) == 5
    for override in overrides:
        load("speech", [override])


@pytest.mark.guides
def test_the_python_in_the_manual_runs(tmp_path: Path) -> None:
    page = MANUAL.read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert code is not None
    checked = re.sub(r"^(recipe\.\S+) +# (\d+)$", r"assert \1 == \2", code[1], flags=re.MULTILINE)
    checked = re.sub(r"^(from_resolved.*?) +# True.*$", r"assert \1", checked, flags=re.MULTILINE)
    assert checked.count("assert") == 2
    subprocess.run([sys.executable, "-c", checked], cwd=tmp_path, check=True)


def test_importing_muster_imports_none_of_the_recipe_libraries() -> None:
    code = (
        "import sys, muster, muster.recipe;"
        "heavy = {'hydra', 'omegaconf', 'pydantic', 'torch'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.guides
def test_the_whole_recipe_package_never_imports_torch() -> None:
    code = "import sys, muster.recipe.load as l; l.load('speech');sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


SECTIONS = ("model", "data", "training", "distributed", "checkpoint", "evaluation", "logging")
SECTIONS += ("slurm", "kubernetes", *(f"distributed.{name}" for name in ("ddp", "fsdp")))
SECTIONS += tuple(f"distributed.{n}" for n in ("deepspeed", "tensor_options", "pipeline_options"))


def test_every_key_says_whether_a_resumed_run_must_keep_it() -> None:
    sections = [key.name for key in keys().values() if key.resume and key.is_section]
    for key in keys().values():
        inside = any(key.name.startswith(f"{section}.") for section in sections)
        assert (key.resume in ("fixed", "free")) != (inside or key.name in SECTIONS), key.name
