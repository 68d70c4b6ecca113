"""Finding, composing and overriding a recipe."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from muster.errors import RecipeError
from muster.recipe.load import from_resolved, list_recipes, load, read, to_yaml
from muster.recipe.schema import Recipe

BASE = "name: base\ntraining: {steps: 5, batch_size: 16, lr: 1e-3}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def refusal(name: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(name, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_newer_omegaconf_is_not_heard_to_deprecate_what_hydra_does(folder, monkeypatch):
    register = OmegaConf.register_new_resolver

    def deprecated(*given: object, **options: object) -> None:
        """As in omegaconf 2.4."""
        words = "register_new_resolver() is deprecated and will be removed in a future release."
        warnings.warn(words, stacklevel=2)
        register(*given, **options)

    monkeypatch.setattr(OmegaConf, "register_new_resolver", deprecated)
    write(folder, base=BASE, mine="defaults: [base]\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load("mine.yaml").training.steps == 5
        with pytest.raises(UserWarning, match="deprecated"):  # of others
            OmegaConf.register_new_resolver("mine", str)


def test_a_shipped_recipe_loads_by_name_and_keeps_what_its_file_says() -> None:
    recipe = load("speech")
    assert (recipe.name, recipe.training.steps, recipe.training.lr) == ("speech", 750, 4e-3)


def test_every_shipped_recipe_loads_and_has_a_description() -> None:
    recipes = list_recipes()
    assert "speech" in [name for name, _ in recipes]
    for name, description in recipes:
        assert description, name
        # A recipe for the reader's own data or weights leaves them open.
        given = ["data.train=somewhere", "model.pretrained=somewhere"]
        assert load(name, given).description == description


def test_the_guides_multi_gpu_file_composes_and_its_own_keys_win(folder: Path) -> None:
    write(
        folder,
        base_config=BASE,
        distributed="distributed:\n  enabled: true\n  backend: nccl\n  sync_batchnorm: false\n",
        multi_gpu="defaults:\n  - base_config\n  - distributed\n"
        "training:\n  batch_size: 32\n  lr: 2e-3\n",
    )
    recipe = load("multi_gpu.yaml")
    assert recipe.name == "base"
    assert recipe.training.global_batch_size == 32
    assert recipe.training.lr == 2e-3
    assert recipe.distributed.backend == "nccl"
    assert recipe.distributed.sync_batchnorm is False


def test_self_placed_first_lets_the_defaults_win(folder: Path) -> None:
    write(folder, base=BASE, mine="defaults: [_self_, base]\nname: mine\nseed: 7\n")
    assert (load("mine.yaml").name, load("mine.yaml").seed) == ("base", 7)


def test_a_file_may_build_on_a_shipped_recipe(folder: Path) -> None:
    write(folder, mine="defaults: [speech]\nname: mine\n")
    assert (load("mine.yaml").name, load("mine.yaml").training.steps) == ("mine", 750)


def test_a_file_beside_the_recipe_goes_before_a_shipped_one(folder: Path) -> None:
    write(folder, speech=BASE, mine="defaults: [speech]\nseed: 7\n")
    assert load("mine.yaml").name == "base"


def test_a_group_of_files_fills_its_section(folder: Path) -> None:
    write(folder, model__small="preset: tiny\n", mine="defaults: [speech, {model: small}]\n")
    assert load("mine.yaml").model.preset == "tiny"


def test_composing_prints_no_warning_and_leaves_no_folder(folder: Path) -> None:
    write(folder, base=BASE, mine="defaults: [base]\nseed: 7\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load("mine.yaml")
    assert sorted(path.name for path in folder.iterdir()) == ["base.yaml", "mine.yaml"]


def test_loading_inside_another_hydra_application_leaves_it_as_it_was(folder: Path) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    write(folder, theirs="x: 1\n")
    with initialize_config_dir(str(folder), version_base="1.3"):
        load("speech")
        assert compose("theirs").x == 1
    assert not GlobalHydra.instance().is_initialized()
    with pytest.raises(RecipeError):
        load("speech", ["nonsense=1"])
    assert not GlobalHydra.instance().is_initialized()


def test_threads_may_load_at_the_same_time(folder: Path) -> None:
    loaded: list[int] = []

    def load_own(n: int) -> None:
        for _ in range(3):
            loaded.append(load(f"{n}/mine.yaml").seed)

    for n in range(8):
        write(folder, **{f"{n}__mine": f"{BASE}seed: {n}\n"})
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=load_own, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert sorted(loaded) == sorted(list(range(8)) * 3)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("training.steps=7", "training.steps", 7),
        ("+training.steps=7", "training.steps", 7),
        ("++training.steps=7", "training.steps", 7),
        ("training.eps=1e-6", "training.eps", 1e-6),
        ("training.max_grad_norm=null", "training.max_grad_norm", None),
        ("data.spec_augment=null", "data.spec_augment", None),
        ("training.betas=[0.8,0.9]", "training.betas", (0.8, 0.9)),
        ("data={tokenizer: {kind: subwords}}", "data.tokenizer.kind", "subwords"),
        ("data.train=/a/day=1/*.parquet", "data.train", "/a/day=1/*.parquet"),
        ("data.train='a,b.parquet'", "data.train", "a,b.parquet"),
        ("logging.dir=~/runs", "logging.dir", "~/runs"),
        ("data.tokenizer.characters=abcé", "data.tokenizer.characters", "abcé"),
        ("name='123'", "name", "123"),
        ("training.steps=${training.warmup_steps}", "training.steps", 100),
        ("~training.lr", "training.lr", 1e-3),
    ],
)
def test_an_override_sets_its_key(override: str, key: str, value: object) -> None:
    node: object = load("speech", [override])
    for part in key.split("."):
        node = getattr(node, part)
    assert node == value


def test_a_later_override_wins() -> None:
    assert load("speech", ["seed=1", "seed=2"]).seed == 2


def test_a_mapping_override_keeps_the_other_keys_of_the_section(folder: Path) -> None:
    write(folder, mine=BASE + "logging: {dir: here, to: []}\n")
    logging = load("mine.yaml", ["logging={dir: there}"]).logging
    assert (logging.dir, logging.to) == ("there", [])
    assert load("mine.yaml", ["logging={}"]).logging.to == []


def test_a_folder_named_like_a_key_does_not_change_what_an_override_means(folder: Path) -> None:
    write(folder, mine=BASE, name__other="x: 1\n")
    assert load("mine.yaml", ["name=other"]).name == "other"


def test_references_between_keys_and_to_the_environment_are_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORPUS", "/corpus")
    write(folder, mine=BASE + "seed: ${training.steps}\ndata: {train: '${oc.env:CORPUS}/a'}\n")
    assert (load("mine.yaml").seed, load("mine.yaml").data.train) == (5, "/corpus/a")


@pytest.mark.parametrize(
    ("name", "kind", "cure"),
    [
        ("hf/config.json", "llama", "llama-1b model.config=hf/config.json model.vocab_size=null"),
        ("hf", "whisper", "whisper-micro model.config=hf"),
        ("hf/config.json", "wavlm", "wav2vec2 model.pretrained=hf"),
    ],
)
def test_a_hugging_face_model_in_place_of_a_recipe_is_given_to_one(
    folder: Path, name: str, kind: str, cure: str
) -> None:
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    assert refusal(name) == f"{name}: is a Hugging Face model, not a recipe; give it to one: {cure}"
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    assert refusal(name).startswith(
        f"{name}: is a Hugging Face model of type bert that predicts no"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("speach", "speach: no such recipe; nearest is speech; `muster recipe list` lists them"),
        ("mine", "mine: no such recipe; nearest is mine.yaml; `muster recipe list` lists them"),
        ("zzz", "zzz: no such recipe; `muster recipe list` lists them"),
        ("mime.yaml", "mime.yaml: no such file; nearest is mine.yaml"),
        ("gone/a.yaml", "gone/a.yaml: no such file"),
        ("group/", "group/: is a folder, expected a recipe file that ends in .yaml"),
        ("old.yml", "old.yml: a recipe's file name must end in .yaml; rename it"),
    ],
)
def test_a_recipe_that_is_not_there_is_named_with_the_nearest(
    folder: Path, name: str, message: str
) -> None:
    write(folder, mine=BASE, group__a=BASE)
    (folder / "old.yml").write_text(BASE)
    assert refusal(name).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", "mine.yaml, line 2: not valid YAML: expected ',' or ']', but got ':'"),
        ("seed: 1\nseed: 2\n", "line 2: not valid YAML: found duplicate key seed"),
        ("- a\n- b\n", "mine.yaml: holds a list, expected keys such as `training:`"),
        ("hello\n", "mine.yaml: holds a single value, expected keys such as `training:`"),
        ("", "training: needs either steps or epochs, got neither"),
        ("defaults: [bas]\n", "mine.yaml: its `defaults:` name 'bas', which is neither a file "),
        ("defaults: [mine]\n", "mine.yaml: its `defaults:` lead back to itself"),
        ("defaults: {a: b}\n", "mine.yaml: cannot be composed: Invalid defaults list"),
        ("defaults: [broken]\n", "broken.yaml, line 1: not valid YAML"),
        ("hydra: {run: 1}\n", "hydra: no such key"),
        ("training: {steps: '${no.x}'}\n", "training.steps: Interpolation key 'no.x' not found"),
        (
            "training: {steps: '???'}\n",
            "training.steps: has no value yet; give it: training.steps=",
        ),
        (
            "training.steps: 3\n",
            "training.steps: a file nests its keys; write steps under training",
        ),
    ],
)
def test_a_broken_file_is_refused_in_one_line(folder: Path, text: str, message: str) -> None:
    write(folder, mine=text, base=BASE, broken="a: [1")
    assert message in refusal("mine.yaml")


def test_a_missing_default_is_named_with_the_nearest(folder: Path) -> None:
    write(folder, mine="defaults: [base_confg]\n", base_config=BASE)
    assert refusal("mine.yaml").endswith("nor a shipped recipe; nearest is base_config")


def test_a_resolved_recipe_reads_back_equal_and_needs_no_hydra(folder: Path) -> None:
    recipe = load("speech", ["training.eps=1e-9", "training.lr=0.00012", "data.spec_augment=null"])
    text = to_yaml(recipe)
    assert text == to_yaml(recipe)
    assert list(Recipe.model_fields) == [
        line.split(":")[0] for line in text.splitlines() if line[0] != " "
    ]
    assert "lr: 0.00012\n" in text
    assert "betas: [0.9, 0.98]\n" in text
    (folder / "recipe.yaml").write_text(text)
    assert from_resolved(folder / "recipe.yaml") == recipe
    assert load("recipe.yaml") == recipe
    code = (
        "import sys; from muster.recipe.load import from_resolved; from_resolved('recipe.yaml');"
        "sys.exit([name for name in ('torch', 'hydra') if name in sys.modules] or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["1e3", "2024-01-01", "null", "yes", "0x10", "1_000", "007"])
def test_text_that_looks_like_something_else_stays_text(folder: Path, name: str) -> None:
    recipe = load("speech", [f"name='{name}'"])
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    assert from_resolved("recipe.yaml").name == name
    assert load("recipe.yaml").name == name


def test_a_resolved_recipe_is_not_composed_again(folder: Path) -> None:
    write(folder, mine="defaults: [speech]\n")
    with pytest.raises(RecipeError, match="defaults"):
        from_resolved("mine.yaml")


def test_a_resolved_recipe_that_is_gone_says_so(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipe\.yaml: no such file"):
        from_resolved(folder / "recipe.yaml")


def test_read_tells_which_older_names_were_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="muster.recipe.load"):
        loaded = read("speech", ["training.learning_rate=0.1"])
    assert caplog.messages == ["training.learning_rate is read as training.lr"]
    assert loaded.recipe.training.lr == 0.1
    assert loaded.renamed == {"training.learning_rate": "training.lr"}


def test_an_override_does_not_stay():
    usual = load("gpt-micro").training.steps
    assert load("gpt-micro", [f"training.steps={usual + 1}"]).training.steps == usual + 1
    assert load("gpt-micro").training.steps == usual


def test_a_file_may_use_the_interpolations_of_hydra(folder):
    write(folder, dated="name: run-${now:%Y}\ntraining: {steps: 5}\n")
    assert load("dated.yaml").name.startswith("run-20")


def test_another_optimizer_leaves_out_the_keys_of_the_files():
    assert load("gpt-micro", ["training.optimizer=adafactor"]).training.optimizer == "adafactor"
    kept = load("gpt-micro", ["training.optimizer=muon"]).training.betas
    assert kept == load("gpt-micro").training.betas != load("speech").training.betas
    typed = ["training.betas=[0.8,0.9]", "training.optimizer=adafactor"]
    with pytest.raises(RecipeError, match=r"training: betas is set, .* \(~training.betas\)"):
        load("gpt-micro", typed)
