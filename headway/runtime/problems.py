"""What is wrong with settings or with a request: where, what is wanted, what was seen, the nearest name.

The words are those of YAML and JSON, where pydantic's are those of Python.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from reprlib import Repr
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

MAX_SEEN = 60
"""Characters of a value or of a name that are shown."""
MAX_ELSEWHERE = 3
"""Keys of other sections that a wrong one is compared with; more of them say nothing."""
LIST = "a list [...]"
MAPPING = "a mapping {...}"
URL = "http://HOST:PORT"
URL_PATTERN = "^https?://"
WANTED = {
    "list_type": LIST,
    "tuple_type": LIST,
    "dict_type": MAPPING,
    "model_type": MAPPING,
    "model_attributes_type": MAPPING,
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
}
"""By the type of pydantic's error."""


class _Short(Repr):
    """Values, cut where they are long; `Repr` would count the characters of escapes."""

    def repr_str(self, x: str, level: int) -> str:
        return repr(x if len(x) <= MAX_SEEN else f"{x[:MAX_SEEN]}...")


_SHORT = _Short()
_SHORT.maxother = MAX_SEEN

Problem = Mapping[str, Any]
"""As `ValidationError.errors()` lists them."""


class Place:
    """A location of pydantic's in a model, as it was written."""

    def __init__(self, model: type[BaseModel], location: Sequence[Any]) -> None:
        self.keys: list[str] = []
        """Without the tags of unions, and without the names of their plain types."""
        self.sections: list[type[BaseModel]] = [model]
        """What may stand there."""
        self.others: list[type[BaseModel]] = []
        """What could stand there, had its `type` another value."""
        is_union = False
        for part in location:
            arms = [arm for arm in self.sections if part in (_tag(arm), arm.__name__)]
            if (is_union or len(self.sections) > 1) and not isinstance(part, int):
                is_union = False
                if arms:
                    self.others = [arm for arm in self.sections if arm not in arms]
                    self.sections = arms
                    continue
                if not self.sections:
                    continue  # the name of a plain type, for example `str`
            self.keys.append(str(part)[:MAX_SEEN])
            self.others = []
            if isinstance(part, int):  # an item is what its list may hold
                continue
            found = [arm.model_fields[part] for arm in self.sections if part in arm.model_fields]
            self.sections = [arm for field in found for arm in _models_in(field.annotation)]
            is_union = any(_is_union(field.annotation) for field in found)

    @property
    def path(self) -> str:
        return ".".join(self.keys)

    @property
    def known(self) -> list[str]:
        """Names of the fields here."""
        return sorted({name for section in self.sections for name in section.model_fields})


def by_weight(problems: Iterable[Problem]) -> list[Problem]:
    """Unknown keys first: what is missing may be what they were meant for. A list is not called too short
    for its wrong items."""
    found = list(problems)
    places = [tuple(each["loc"]) for each in found]
    messages = [
        each
        for each, place in zip(found, places, strict=True)
        if each["type"] != "too_short"
        or not any(len(place) < len(other) and other[: len(place)] == place for other in places)
    ]
    return sorted(messages, key=lambda each: each["type"] != "extra_forbidden")


def explain_unknown(
    model: type[BaseModel],
    location: Sequence[Any],
    elsewhere: Iterable[str] = (),
    flags: Sequence[str] = (),
) -> str:
    """A line on a key that is not there: whose it is, or the nearest one, or all.

    Args:
        elsewhere: paths of settings in other sections, one of which may be meant.
        flags: what may be meant on the outermost level, beside the settings.
    """
    *parents, last = location
    here, name = Place(model, parents), str(last)[:MAX_SEEN]
    line = f"unknown key {'.'.join([*here.keys, name])}; "
    known = f"known here: {', '.join(here.known)}"
    if owners := [_tag(other) for other in here.others if name in other.model_fields]:
        return (
            f"{line}it belongs to {' or '.join(owners)}, not to {_tag(here.sections[0])}; {known}"
        )
    if near := difflib.get_close_matches(name, [*here.known, *(() if parents else flags)], n=1):
        return f"{line}did you mean {near[0] if near[0] in flags else repr(near[0])}?"
    meant = dict.fromkeys(repr(path) for path in elsewhere if path.split(".")[-1] == name)
    if 0 < len(meant) <= MAX_ELSEWHERE:
        return f"{line}did you mean {' or '.join(meant)}?"
    return line + known


def explain_values(
    model: type[BaseModel], problems: Iterable[Problem], whole: str = "(whole)"
) -> list[str]:
    """One line for each wrong value; a value that fits no type of a union is one.

    Args:
        whole: name of all of it.
    """
    wanted: dict[str, list[str]] = {}
    seen: dict[str, str] = {}
    for problem in problems:
        place = Place(model, problem["loc"])
        path = place.path
        wanted.setdefault(path, []).append(_wanted(problem))
        value = problem.get("input")
        is_told = isinstance(value, BaseModel) or not place.keys
        is_told |= isinstance(value, Mapping) and bool(place.sections)
        seen[path] = "" if is_told else f" (got {_SHORT.repr(value)})"
    return [
        f"{path or whole}: {' or '.join(dict.fromkeys(texts))}{seen[path]}"
        for path, texts in wanted.items()
    ]


def _wanted(problem: Problem) -> str:
    kind = problem["type"]
    if kind == "string_pattern_mismatch" and problem["ctx"]["pattern"].startswith(URL_PATTERN):
        return f"{URL} is wanted"
    if kind in WANTED:
        return f"{WANTED[kind]} is wanted"
    return str(problem["msg"]).removeprefix("Value error, ")


def _tag(section: type[BaseModel]) -> Any:
    field = section.model_fields.get("type")
    return None if field is None else field.default


def _is_union(annotation: Any) -> bool:
    arms = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()
    return len([arm for arm in arms if arm is not type(None)]) > 1


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Models that a value of this type may be, or hold as items."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arm in get_args(annotation) for model in _models_in(arm)]
