"""Parts of installed packages that a section of a configuration chooses by `type: plugin`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from headway.contracts.config.base import PluginConfig
from headway.contracts.errors import ConfigError
from headway.contracts.registry import Registry
from headway.runtime.config import validate_config

ArgsT = TypeVar("ArgsT", bound=BaseModel)
PartT = TypeVar("PartT")


class _Tagged(Protocol):
    @property
    def type(self) -> str: ...


def chosen_part(registry: Registry[PartT], config: _Tagged) -> tuple[PartT, Any]:
    """Return the part that a section chooses by `type`, and its settings: the section itself for our own
    parts, and for a plug-in what its `Args` make of `args`.

    Raises:
        UnknownName: no part is registered under the name.
        ConfigError: the settings do not fit.
    """
    if not isinstance(config, PluginConfig):
        return registry.get(config.type), config
    part = registry.get(config.name)
    return part, plugin_args(part, config, BaseModel, {})


def plugin_args(
    part: Any, config: PluginConfig, base: type[ArgsT], shared: Mapping[str, Any]
) -> ArgsT:
    """Return a part's settings as an instance of its `Args`.

    Args:
        part: what the entry point names.
        base: what its `Args` must extend.
        shared: settings of the section that all parts of the kind have.
    Raises:
        ConfigError: the settings do not fit; or the part has no such `Args`, as one of this distribution.
    """
    model = getattr(part, "Args", None)
    if not (isinstance(model, type) and issubclass(model, base)):
        raise ConfigError(
            f"name={config.name}: {part!r} has no `Args`, a subclass of {base.__name__} that checks the "
            f"`args` of a plug-in; give it one (a part of Headway itself is chosen by type={config.name})"
        )
    return validate_config(model, {**shared, **config.args}, has_flags=False)
