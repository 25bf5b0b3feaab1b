"""The settings that a configuration model has, read from its fields."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headway.runtime.settings import Setting

FOLDERS = ("run_dir", "output_dir", "cache_dir", "root", "tokenizer")
FILES = ("path", "ledger", "python")
PLAIN = {int: "int", float: "float", bool: "bool", str: "text"}
BOOLEANS = ("true", "false")


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a model, or of a section of it."""

    path: str
    info: FieldInfo
    default: Any
    is_required: bool
    variants: tuple[str, ...]


def describe(
    model: type[BaseModel], prefix: str = "", defaults: BaseModel | None = None
) -> list[str]:
    """Flag, default and meaning of each setting, as the reference page reads them.

    Args:
        model: the section to describe.
        prefix: path of the section, with a dot at its end.
        defaults: what the section above holds here unless stated otherwise; None for a section that
            is required, whose own fields count then.
    """
    lines: list[str] = []
    for field in _fields(model, prefix, defaults):
        flag = f"--{field.path}".replace("_", "-")
        default = "required" if field.is_required else f"default {field.default}"
        lines.append(f"  {flag}  ({default})\n      {_text(field)}".rstrip())
    return lines


def list_settings(model: type[BaseModel]) -> list[Setting]:
    """The settings of a model, each path once for all variants that have it alike."""
    return list(_settings_of(model))


@cache
def _settings_of(model: type[BaseModel]) -> tuple[Setting, ...]:
    found: dict[tuple[str, str | None, str], Setting] = {}
    for field in _fields(model):
        setting = Setting(
            path=field.path,
            type=_type_of(field),
            default=None if field.is_required else _as_yaml(field.default),
            text=_text(field),
            choices=_choices(field.info.annotation),
            variants=field.variants,
        )
        is_type = field.path.endswith(".type") and bool(field.variants)
        key = (setting.path, None if is_type else setting.default, setting.text)
        known = found.get(key)
        if known is None:
            found[key] = replace(setting, variants=()) if is_type else setting
        else:
            choices = tuple(dict.fromkeys([*known.choices, *setting.choices]))
            variants = tuple(dict.fromkeys([*known.variants, *setting.variants]))
            found[key] = replace(known, choices=choices, variants=() if is_type else variants)
    return tuple(_without_full_variants(setting, found.values()) for setting in found.values())


def section_models(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field of this type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType):
        return [section for arm in get_args(annotation) for section in section_models(arm)]
    return []


def _fields(
    model: type[BaseModel],
    prefix: str = "",
    defaults: BaseModel | None = None,
    variants: tuple[str, ...] = (),
) -> Iterator[_Field]:
    """The fields of a model and its sections; a section itself only where it may be absent."""
    for name, info in model.model_fields.items():
        value = _default_of(info) if defaults is None else getattr(defaults, name)
        sections = section_models(info.annotation)
        if not sections or type(None) in get_args(info.annotation):
            is_required = defaults is None and info.is_required()
            yield _Field(f"{prefix}{name}", info, value, is_required, variants)
        for section in sections:
            known = value if isinstance(value, section) else None
            tag = section.model_fields.get("type")
            own = variants if len(sections) == 1 or tag is None else (str(tag.default),)
            yield from _fields(section, f"{prefix}{name}.", known, own)


def _without_full_variants(setting: Setting, others: Any) -> Setting:
    """Without the variants if all that its section has are among them."""
    types_of = {other.path: other.choices for other in others if other.type == "type"}
    section = setting.section
    while section and f"{section}.type" not in types_of:
        section = section.rpartition(".")[0]
    if set(types_of.get(f"{section}.type", ())) == set(setting.variants):
        return replace(setting, variants=())
    return setting


def _text(field: _Field) -> str:
    return " ".join((field.info.description or "").split())


def _type_of(field: _Field) -> str:
    """Return the kind of value, by the field's type and, for files and folders, by its name."""
    annotation = _bare(field.info.annotation)
    name = field.path.rpartition(".")[2]
    if name == "type" and field.variants:
        return "type"
    if annotation is str and (name in FOLDERS or field.path == "model"):
        return "folder"
    if annotation is str and (name in FILES or name.endswith("_file")):
        return "file"
    if get_origin(annotation) in (tuple, list):
        return "list"
    if get_origin(annotation) is dict or section_models(annotation):
        return "map"
    return PLAIN.get(annotation, "text")


def _choices(annotation: Any) -> tuple[str, ...]:
    bare = _bare(annotation)
    if bare is bool:
        return BOOLEANS
    return tuple(map(str, get_args(bare))) if get_origin(bare) is Literal else ()


def _bare(annotation: Any) -> Any:
    """A type without `None` and constraints."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        arms = [arm for arm in get_args(annotation) if arm is not type(None)]
        return _bare(arms[0]) if len(arms) == 1 else annotation
    return annotation


def _as_yaml(value: Any) -> str:
    """A default as it is written in a file."""
    if isinstance(value, BaseModel):
        return _as_yaml(value.model_dump(mode="json"))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_as_yaml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_as_yaml, value)) + "]"
    return "''" if value == "" else str(value)


def _default_of(field: FieldInfo) -> Any:
    return None if field.is_required() else field.get_default(call_default_factory=True)
