"""Lazy names for interchangeable parts: a name maps to a target written as text.

Listing the names loads nothing; `get` imports the one target that was asked for. Packages outside
this distribution add names through an entry-point group.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar, cast

from headway.contracts.errors import ConfigError, UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """Names of one kind of part, for example "reward" or "model interface"."""

    def __init__(
        self,
        kind: str,
        targets: Mapping[str, str] | None = None,
        entry_point_group: str | None = None,
    ) -> None:
        self.kind = kind
        self._targets: dict[str, str | T] = {}
        self._group = entry_point_group
        self._group_loaded = entry_point_group is None
        for name, target in (targets or {}).items():
            self.register(name, target)

    def register(self, name: str, target: str | T) -> None:
        """Add a name.

        Args:
            name: what a config writes.
            target: the part itself, or `"package.module:attribute"` to import it on first use.
        Raises:
            ConfigError: the name is taken.
        """
        if name in self._targets:
            raise ConfigError(
                f"{self.kind} {name!r} is registered already as {self._targets[name]!r}; "
                "choose another name"
            )
        self._targets[name] = target

    def names(self) -> list[str]:
        """All names, sorted; nothing is imported."""
        self._load_group()
        return sorted(self._targets)

    def get(self, name: str) -> T:
        """The part behind a name.

        Raises:
            UnknownName: with the known names and the nearest one.
            ConfigError: its module or attribute does not exist.
        """
        self._load_group()
        if name not in self._targets:
            near = difflib.get_close_matches(name, self._targets, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownName(
                f"no {self.kind} named {name!r}; known: {', '.join(self.names())}{hint}"
            )
        target = self._targets[name]
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            try:
                part = cast("T | None", getattr(import_module(module), attribute, None))
            except ModuleNotFoundError as error:
                if not f"{module}.".startswith(f"{error.name}."):
                    raise  # what it needs is missing
                part = None
            if part is None:
                raise ConfigError(
                    f"{self.kind} {name!r} is registered as {target}, which does not exist; correct the "
                    "entry point of its package, and install that again"
                )
            self._targets[name] = part
            return part
        return target

    def _load_group(self) -> None:
        if self._group_loaded:
            return
        self._group_loaded = True
        for point in entry_points(group=cast("str", self._group)):
            self.register(point.name, point.value)
