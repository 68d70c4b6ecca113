"""From a name or a file, and `key=value` overrides, to one validated recipe.

Hydra composes a file that builds on others. Overrides are read by Hydra's grammar but applied here, after the files:
a folder that happens to be called `name` beside a recipe then cannot turn `name=x` into a choice
of file, an older key name in one layer meets the newer one in the other, and a key that does not
exist gets our sentence rather than Hydra's. Hydra is imported only where files are composed,
because every rank reads its recipe and none of them composes.
"""

from __future__ import annotations

import copy
import itertools
import logging
import shlex
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from muster.errors import RecipeError, UnreadableError
from muster.reading import json_file, values, yaml_file
from muster.reading.files import expanded, is_file, is_folder
from muster.reading.text import in_one_line
from muster.recipe import aliases, defaults, length, own_task, references
from muster.recipe.describe import LISTED, closest, instead, keys, mismatch, to_yaml
from muster.recipe.overrides import parse, plain
from muster.recipe.recorded import as_recorded
from muster.recipe.schema import Recipe
from muster.recipe.training import unused_by

__all__ = ["Loaded", "from_resolved", "list_recipes", "load", "read", "to_yaml"]

MISSING = "???"  # Hydra's mark for a value that whoever builds on a file must give
SHIPPED = Path(__file__).resolve().parent.parent / "recipes"

# Hydra 1.3 does what omegaconf 2.4 warns of.
NEW_TO_HYDRA = (
    r"register_new_resolver\(\) is deprecated",
    "Implicit conversion from Version to str",
)

log = logging.getLogger(__name__)

CTC_TYPES = ("wav2vec2", "hubert", "wavlm", "wav2vec2-bert")  # of a config.json
UNKNOWN = "no such key; "
ANSWERED = 50  # unknown keys for which the nearest is sought
LINES = 12  # keys that are told one by one
SENTENCE = 600  # characters
_composing = threading.Lock()  # Hydra keeps its state in a global


class Loaded(NamedTuple):
    recipe: Recipe
    renamed: dict[str, str]  # older names that were used → the keys they stand for, or why none


Source = str | Mapping[str, Any]  # a shipped recipe's name, a YAML file, or the document itself


def load(recipe: Source, overrides: Sequence[str] = ()) -> Recipe:
    """The shipped recipe of that name, the YAML file, or the document, with `key=value` overrides."""
    return read(recipe, overrides).recipe


def read(recipe: Source, overrides: Sequence[str] = ()) -> Loaded:
    """Like `load`, and also says which older key names were used, so that a caller can tell."""
    if isinstance(recipe, str):
        file = _find(recipe)
        beside, config = [file.parent], _compose(file)
    else:
        beside, config = [], _from_document(recipe)
    _apply(config, overrides)
    loaded = _finish(config)
    folders = [Path(), *beside]
    if not any(
        text.startswith("task=") for text in overrides
    ):  # else it was typed in this directory
        folders.reverse()
    return loaded._replace(recipe=own_task.located(loaded.recipe, folders))


def from_resolved(path: str | Path) -> Recipe:
    """The recipe a run wrote into its directory. Nothing is composed; older names still work,
    because a run may be older than the muster that reads it."""
    config = OmegaConf.create(_parse(Path(path)))
    assert isinstance(config, DictConfig)
    found = as_recorded(_finish(config).recipe)
    return own_task.located(found, [Path(path).parent], must_exist=False)


def list_recipes() -> list[tuple[str, str]]:
    """Name and description of each recipe that ships."""
    found = []
    for path in sorted(SHIPPED.glob("*.yaml")):
        found.append((path.stem, str(_parse(path).get("description", ""))))
    return found


def _find(name_or_path: str) -> Path:
    path = expanded(name_or_path)
    if "/" not in name_or_path and path.suffix not in (".yaml", ".yml"):
        shipped = SHIPPED / f"{name_or_path}.yaml"
        if is_file(shipped):
            return shipped
        _refuse_model(name_or_path, path)
        names = [name for name, _ in list_recipes()]
        beside = Path(f"{name_or_path}.yaml")
        near = str(beside) if is_file(beside) else closest(name_or_path, names)
        hint = f"; nearest is {near}" if near else ""
        raise RecipeError(
            f"{in_one_line(name_or_path)}: no such recipe{hint}; `muster recipe list` lists them, "
            "and a file's name must end in .yaml"
        )
    _refuse_model(name_or_path, path)
    if is_folder(path):
        raise RecipeError(
            f"{in_one_line(name_or_path)}: is a folder, expected a recipe file that ends in .yaml"
        )
    if not is_file(path):
        near = closest(path.name, [other.name for other in path.parent.glob("*.yaml")])
        hint = f"; nearest is {path.parent / near}" if near else ""
        raise RecipeError(f"{in_one_line(name_or_path)}: no such file{hint}")
    if path.suffix != ".yaml":
        raise RecipeError(
            f"{in_one_line(name_or_path)}: a recipe's file name must end in .yaml; rename it"
        )
    return path


def _refuse_model(name: str, path: Path) -> None:
    """A Hugging Face config.json, or a folder with one."""
    file = path / "config.json" if is_folder(path) else path
    found: Mapping[str, Any] = {}
    if file.suffix == ".json":
        with suppress(OSError, UnreadableError):
            found = json_file.read(file)
    kind, classes = found.get("model_type"), found.get("architectures")
    if not isinstance(kind, str):
        return
    name, quoted = in_one_line(name), shlex.quote(in_one_line(name))
    if kind in CTC_TYPES:
        words = f"wav2vec2 model.pretrained={shlex.quote(in_one_line(str(file.parent)))}"
    elif kind == "whisper":
        words = f"whisper-micro model.config={quoted}"
    elif isinstance(classes, list) and not any(str(c).endswith("ForCausalLM") for c in classes):
        raise RecipeError(
            f"{name}: is a Hugging Face model of type {in_one_line(kind)} that predicts no next token, and "
            "no recipe takes it as it is"
        )
    else:
        words = f"llama-1b model.config={quoted} model.vocab_size=null"
    raise RecipeError(f"{name}: is a Hugging Face model, not a recipe; give it to one: {words}")


def _parse(path: Path) -> dict[Any, Any]:
    """The file as it stands, before any composition."""
    try:
        found = yaml_file.read(path)
    except UnreadableError as error:
        raise RecipeError(str(error)) from None
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        kind = "a list" if isinstance(found, list) else "a single value"
        raise RecipeError(f"{path}: holds {kind}, expected keys such as `training:`")
    return found


def _compose(path: Path) -> DictConfig:
    """The file on top of whatever its `defaults:` list names, before overrides."""
    if path.parent == SHIPPED:
        return copy.deepcopy(_composed_once(path))
    own = _parse(path)
    if "hydra" in own:
        raise RecipeError(f"{path}: hydra: no such key; muster only uses Hydra to compose files")
    if "defaults" in own or references.any_in(own):  # such as Hydra's ${now:%Y}
        for file in defaults.files_of(path, _parse, SHIPPED):  # Hydra reads them without any bounds
            references.check(_parse(file))
        return _composed(path)
    config = OmegaConf.create(own)
    assert isinstance(config, DictConfig)
    return config


def _from_document(document: Mapping[str, Any]) -> DictConfig:
    """A dict's own keys, on top of the recipes that its `defaults` list names."""
    if problem := values.first_problem(document):
        raise RecipeError(f"{in_one_line(problem.key) or 'recipe'}: {problem.words}")
    own = plain(document)
    names = own.pop("defaults", [])
    references.check(own)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RecipeError(
            f"defaults: got {names!r}, expected a list of recipes, such as ['gpt-micro']"
        )
    try:
        layers = [_compose(_find(name)) for name in names if name != "_self_"]
        config = OmegaConf.merge(*layers, OmegaConf.create(own))
    except OmegaConfBaseException as error:
        raise RecipeError(f"{error.full_key or 'recipe'}: {_one_line(error)}") from None
    assert isinstance(config, DictConfig)
    return config


@cache
def _composed_once(path: Path) -> DictConfig:
    """Of a shipped recipe, which does not change; Hydra takes a tenth of a second."""
    return _composed(path)


def _composed(path: Path) -> DictConfig:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException, MissingConfigException

    searchpath = str(SHIPPED).replace("\\", "\\\\").replace("'", "\\'")
    with _composing, warnings.catch_warnings():
        # Without `_self_` a file's own keys win over its defaults; Hydra would like that spelt out.
        warnings.filterwarnings("ignore", message=".*missing `_self_`")
        for words in NEW_TO_HYDRA:
            warnings.filterwarnings("ignore", message=words, module=r"hydra\.")
        outer = (
            GlobalHydra.instance().hydra
        )  # the caller may live inside a Hydra application of its own
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(
                str(path.parent.absolute()), job_name="muster", version_base="1.3"
            ):
                config = compose(path.stem, [f"hydra.searchpath=['file://{searchpath}']"])
        except MissingConfigException as error:
            _refuse_missing(error, path)
        except RecursionError:
            raise RecipeError(f"{path}: its `defaults:` lead back to itself") from None
        except (
            HydraException,
            OmegaConfBaseException,
            yaml.YAMLError,
            ValueError,
            OSError,
        ) as error:
            raise RecipeError(f"{path}: cannot be composed: {_one_line(error)}") from None
        finally:
            GlobalHydra.instance().hydra = outer  # a new instance by now
    OmegaConf.set_struct(config, False)
    length.replace_other(config, length.of_file(path, _parse, SHIPPED))
    return config


def _apply(config: DictConfig, overrides: Sequence[str]) -> None:
    given: dict[str, Any] = {}
    for text in overrides:
        key, value, delete = parse(text)
        try:
            if delete:
                aliases.delete(config, key)
                continue
            for leaf, leaf_value in _leaves(key, value):
                OmegaConf.update(config, leaf, leaf_value, merge=True, force_add=True)
                given[leaf] = leaf_value
                aliases.outrank(config, leaf, leaf_value, set(given))
        except OmegaConfBaseException as error:
            raise RecipeError(f"{key}: cannot be set: {_one_line(error)}") from None
        except (ValueError, TypeError, LookupError, AttributeError):  # of OmegaConf, about a list
            raise RecipeError(
                f"{key}: cannot be set: it would be a part of a list or of a single value; give that as a whole"
            ) from None
    length.replace_other(config, given)
    for name in (
        unused_by(str(given.get("training.optimizer", ""))) if "training.optimizer" in given else ()
    ):
        key = f"training.{name}"  # of the file's optimizer
        if key not in given and aliases.has(config, key):
            aliases.delete(config, key)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def _finish(config: DictConfig) -> Loaded:
    found = OmegaConf.to_container(config, resolve=False)
    assert isinstance(found, dict)
    references.check(found)
    try:
        document = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{error.full_key or 'recipe'}: {_one_line(error)}") from None
    assert isinstance(document, dict)
    if problem := values.first_problem(document):
        raise RecipeError(f"{in_one_line(problem.key) or 'recipe'}: {problem.words}")
    plain: dict[str, Any] = {str(key): value for key, value in document.items()}
    renamed = aliases.translate(plain)
    for old, new in renamed.items():
        log.info("%s is read as %s", old, new)
    return Loaded(_validate(plain, renamed), renamed)


def _validate(document: dict[str, Any], renamed: dict[str, str]) -> Recipe:
    """pydantic's errors in one line. It reports each branch of a union, in its own terms, so
    only the key is taken from it; what was given and what would be right come from the schema."""
    required = [name for name, field in Recipe.model_fields.items() if field.is_required()]
    document = {**{name: {} for name in required}, **document}
    problems = dict(_unseen(document, "", itertools.count()))
    try:
        recipe = Recipe.model_validate(document)
        if not problems:
            return recipe
    except ValidationError as error:
        for entry in error.errors():
            if entry["type"] in ("extra_forbidden", "invalid_key"):
                continue  # named by _unseen, with the nearest key
            key = _known(entry["loc"])
            if key in problems:  # each part of a long list is an error of its own
                continue
            if entry["type"] == "value_error" or not key:
                message = entry["msg"].removeprefix("Value error, ")
            else:
                message = mismatch(keys()[key], aliases.get(document, key)[1])
            problems.setdefault(key or "recipe", message)
    older = {new: old for old, new in renamed.items()}
    (first, message), *rest = problems.items()
    label = f"{older[first]} (now {first})" if first in older else first or "''"
    # A recipe from elsewhere has many keys that are none: what they are here is told, on a line of its own.
    told = [(key, words) for key, words in rest if _of_another_trainer(words)][:LINES]
    rest = [one for one in rest if one not in told]
    more = f" (and {_some(rest)})" if rest else ""
    lines = [in_one_line(f"{label}: {message}", SENTENCE) + more]
    lines += [in_one_line(f"{key}: {words}", SENTENCE) for key, words in told]
    raise RecipeError(*lines)


def _of_another_trainer(words: str) -> bool:
    return words.startswith(UNKNOWN) and not words.startswith(
        (UNKNOWN + LISTED, UNKNOWN + "nearest")
    )


def _some(problems: list[tuple[str, str]]) -> str:
    keys = [in_one_line(key) for key, _ in problems]
    return f"{len(keys)} more: {', '.join(keys[:LINES])}{', …' if len(keys) > LINES else ''}"


def _unseen(
    document: dict[Any, Any], prefix: str, answered: Iterator[int]
) -> Iterator[tuple[str, str]]:
    """What pydantic does not see or not say well: unknown keys, gaps, and `true` for a number."""
    for name, value in document.items():
        dotted = f"{prefix}{name}"
        key = keys().get(dotted)
        if key is not None and "." in str(name):
            section, _, leaf = dotted.rpartition(".")
            yield dotted, f"a file nests its keys; write {leaf} under {section}"
        elif key is None:
            for leaf, given in _leaves(dotted, value):
                known = next(answered) < ANSWERED  # to look for the nearest key takes a while
                yield leaf, f"{UNKNOWN}{instead(leaf, given) if known else LISTED}"
        elif value == MISSING:
            yield dotted, f"has no value yet; give it: {dotted}=VALUE"
        elif key.is_section and isinstance(value, dict):
            yield from _unseen(value, f"{dotted}.", answered)
        elif isinstance(value, bool) and "boolean" not in key.kinds:
            yield dotted, mismatch(key, value)


def _known(location: tuple[int | str, ...]) -> str:
    """The longest key in a pydantic location, whose tail may name a union's branch or an index."""
    for end in range(len(location), 0, -1):
        dotted = ".".join(str(part) for part in location[:end])
        if dotted in keys():
            return dotted
    return ""


def _refuse_missing(error: Any, path: Path) -> NoReturn:
    missing = str(error.missing_cfg_file)
    names = [other.stem for other in path.parent.glob("*.yaml") if other != path]
    near = closest(missing, names + [name for name, _ in list_recipes()])
    hint = f"; nearest is {near}" if near else ""
    raise RecipeError(
        f"{path}: its `defaults:` name {in_one_line(missing)!r}, which is neither a file beside it "
        f"nor a shipped recipe{hint}"
    ) from None


def _one_line(error: BaseException) -> str:
    """OmegaConf's and Hydra's messages carry their context in further lines."""
    return in_one_line(str(error).split("full_key:")[0], 400)
