"""Configuration from YAML files and flags: merged left to right, then checked as a whole.

`--config a.yaml --config b.yaml --rollout.max-staleness 2` deep-merges the files and then the
flags, whose values are read as YAML. The environment is no source: a stray variable must not train
a model. (Flags and files pass one validation, so an unknown flag is answered like an unknown key,
with its full path and the nearest name; that is why this is not pydantic-settings.)
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from headway.contracts.errors import ConfigError
from headway.runtime.model_settings import list_settings, section_models
from headway.runtime.problems import Place, by_weight, explain_unknown, explain_values
from headway.runtime.settings import FILLED_IN, required

ConfigT = TypeVar("ConfigT", bound=BaseModel)
CONFIG = "config"
_FLAG = re.compile(r"--[A-Za-z]")
RESOLVED_NAME = "config.resolved.yaml"


def load_config(model: type[ConfigT], argv: Sequence[str]) -> ConfigT:
    """Read `--config` files and dotted flags into a frozen configuration.

    Raises:
        ConfigError: unreadable file, unknown key or value out of bounds; every problem is listed.
    """
    return validate_config(model, merge_sources(argv))


def merge_sources(argv: Sequence[str]) -> dict[str, Any]:
    """The merged but unchecked tree of files and flags."""
    files, flags = _split_arguments(argv)
    merged: dict[str, Any] = {}
    for file in files:
        merged = deep_merge(merged, _read_yaml(Path(file)))
    for key, value in flags:
        merged = deep_merge(merged, _nested(key, value))
    return merged


def validate_config(
    model: type[ConfigT], tree: Mapping[str, Any], has_flags: bool = True
) -> ConfigT:
    """Check a tree; on failure name each key by its full path.

    Args:
        has_flags: whether a command line can set what is missing; arguments of parts come otherwise.
    """
    try:
        return model.model_validate(_settle_flags(tree, [model]))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(model, error, has_flags))) from error


def write_resolved(config: BaseModel, folder: Path) -> Path:
    """Write the whole configuration, defaults included, so that the run can be repeated."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESOLVED_NAME
    path.write_text(dump_yaml(config))
    return path


def dump_yaml(config: BaseModel) -> str:
    """The configuration as YAML that `load_config` reads back to an equal value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins; mappings are merged, everything else is replaced."""
    merged = dict(base)
    for key, given in over.items():
        below = merged.get(key)
        is_mapping = isinstance(given, FlagValue) and isinstance(given.value, Mapping)
        value = given.value if is_mapping and isinstance(below, Mapping) else given
        merged[key] = (
            deep_merge(below, value)
            if isinstance(below, Mapping) and isinstance(value, Mapping)
            else value
        )
    return merged


def _meant(argument: str) -> str:
    if argument.endswith((".yaml", ".yml")):
        return f"a file of settings is written --config {argument}"
    return "settings are written --section.key value"


def _split_arguments(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, Any]]]:
    files: list[str] = []
    flags: list[tuple[str, Any]] = []
    rest = list(argv)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise ConfigError(f"unexpected argument {flag!r}; {_meant(flag)}")
        name, has_value, text = flag[2:].partition("=")
        if not has_value:
            if not rest or _FLAG.match(rest[0]):
                raise ConfigError(_without_value(flag, rest[0] if rest else None))
            text = rest.pop(0)
        if name == CONFIG:
            files.append(text)
            continue
        flags.append((name.replace("-", "_"), _flag_value(text)))
    return files, flags


def _without_value(flag: str, following: str | None) -> str:
    if following is None:
        return f"{flag} has no value; write {flag} VALUE"
    return f"{flag} has no value before {following}; write {flag}={following} if that is its value"


@dataclass(frozen=True, slots=True)
class FlagValue:
    """A flag that YAML reads as something else than text: which it is, its setting decides."""

    text: str
    value: Any
    problem: str | None = None

    def __str__(self) -> str:
        return self.text


def _flag_value(text: str) -> str | FlagValue:
    """Numbers, booleans, null, [lists] and {mappings} may be meant as YAML; all else is text."""
    is_collection = text.lstrip().startswith(("{", "["))
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        return FlagValue(text, None, str(error)) if is_collection else text
    is_null = value is None and text.strip().lower() in ("null", "~")
    is_yaml = is_collection or is_null or isinstance(value, bool | int | float)
    return FlagValue(text, value) if is_yaml else text


def _settle_flags(tree: Any, models: Sequence[type[BaseModel]]) -> Any:
    """Replace every `FlagValue` by its text where the setting holds text, else by its value."""
    if not isinstance(tree, Mapping):
        return tree
    settled: dict[str, Any] = {}
    for key, value in tree.items():
        fields = [model.model_fields[key] for model in models if key in model.model_fields]
        if not isinstance(value, FlagValue):
            below = [section for field in fields for section in section_models(field.annotation)]
            settled[key] = _settle_flags(value, below)
        elif fields and all(_holds_text(field.annotation) for field in fields):
            settled[key] = None if value.value is None and value.problem is None else value.text
        elif value.problem is not None:
            raise ConfigError(f"{key}: {value.text!r} is not a YAML value: {value.problem}")
        else:
            settled[key] = value.value
    return settled


def _holds_text(annotation: Any) -> bool:
    """True if a setting of this type is text, or text or nothing."""
    if get_origin(annotation) is Literal:
        return all(isinstance(option, str) for option in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        arms = [arm for arm in get_args(annotation) if arm is not type(None)]
        return all(_holds_text(arm) for arm in arms)
    return annotation is str


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date that is none
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}; a mapping of settings is wanted")
    return tree


def _nested(key: str, value: Any) -> dict[str, Any]:
    *parents, last = key.split(".")
    tree: dict[str, Any] = {last: value}
    for part in reversed(parents):
        tree = {part: tree}
    return tree


def _explain(model: type[BaseModel], error: ValidationError, has_flags: bool) -> list[str]:
    problems = by_weight(error.errors())
    settings = [setting.path for setting in list_settings(model)]
    flags = (f"--{CONFIG}",) if has_flags else ()
    unknown = [
        explain_unknown(model, problem["loc"], settings, flags)
        for problem in problems
        if problem["type"] == "extra_forbidden"
    ]
    wrong = [each for each in problems if each["type"] not in ("extra_forbidden", "missing")]
    missing = [Place(model, each["loc"]) for each in problems if each["type"] == "missing"]
    return [
        *unknown,
        *explain_values(model, wrong),
        *(
            f"{place.path}: required, and not set{_how_to_set(place) if has_flags else ''}"
            for place in missing
        ),
    ]


def _how_to_set(place: Place) -> str:
    """Flags of a setting that is missing; of a section that is missing, of all that it needs."""
    inner = required(list_settings(place.sections[0])) if place.sections else []
    wanted = dict.fromkeys(f"{place.path}.{setting.path}" for setting in inner)
    names = [name for name in wanted if name not in FILLED_IN] or [place.path]
    flags = " ".join(f"--{name} VALUE".replace("_", "-") for name in names)
    return f"; give {flags}, or {', '.join(names)} in a file of --config"
