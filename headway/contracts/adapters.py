"""LoRA adapters beside a base model: what loads and serves them, one server or a whole fleet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from headway.contracts.errors import DataError, StaleVersion
from headway.contracts.types import PolicyVersion


class AdapterHost(Protocol):
    """Serves adapters under names; requests choose one by `LLMRequest.adapter`."""

    @property
    def versions(self) -> Mapping[str, PolicyVersion]:
        """Version of each loaded adapter, by name."""

    @property
    def max_adapters(self) -> int:
        """Maximum number of adapters that can be loaded; 0 if none can."""

    async def load(
        self, name: str, path: str, version: PolicyVersion | None = None
    ) -> PolicyVersion:
        """Serve an adapter, or another version of it, and return the version.

        Args:
            path: a directory as `peft` saves it.
            version: None takes the next one.
        Raises:
            StaleVersion: it is older than the one that serves.
            ServiceError: it cannot be served; what was served before still is.
        """

    async def unload(self, name: str) -> None:
        """Forget an adapter; its requests end with the tokens so far.

        Raises:
            DataError: it is not loaded.
        """


def not_loaded(adapter: str, loaded: Iterable[str]) -> DataError:
    """Return the error of a request for an adapter that is not there."""
    known = ", ".join(sorted(loaded)) or "none"
    return DataError(f"the adapter {adapter!r} is not loaded; loaded: {known}")


def next_adapter_version(
    name: str, serving: PolicyVersion, version: PolicyVersion | None
) -> PolicyVersion:
    """Return the version that is loaded next.

    Args:
        serving: version of the adapter now; 0 if it is not loaded.
        version: what was asked for; None is the next one.
    Raises:
        StaleVersion: it is older than the one that serves.
    """
    if version is None:
        return serving + 1
    if version < serving:
        raise StaleVersion(f"version {version} of {name} is older than {serving}")
    return version
