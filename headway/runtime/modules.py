"""Modules that an operator names, imported for what they register."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from headway.contracts.errors import ConfigError


def import_modules(names: Sequence[str]) -> None:
    """Import what a configuration allows to add parts.

    Raises:
        ConfigError: a module cannot be imported.
    """
    for name in names:
        try:
            import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"modules names {name!r}, which cannot be imported: {error}; install it, or add its "
                "folder to PYTHONPATH"
            ) from error
