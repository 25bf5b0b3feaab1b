"""A followed store that is an object store: `followed_store` with a URL instead of a directory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from headway.contracts.checkpoint_store import INDEX_NAME, POINTER_NAME, named_version, number_of
from headway.contracts.errors import DataError, ServiceAway
from headway.runtime.object_stores import identity_of, listed, open_objects, os_errors

LOOK_TIMEOUT_S = 30.0
MAX_POINTER_BYTES = 512
Newest = tuple[str | None, object]


class FollowedObjects:
    """Finds the newest version; one look at a time, on a thread that need not be waited for."""

    def __init__(self, url: str, timeout_s: float = LOOK_TIMEOUT_S) -> None:
        """
        Raises:
            ConfigError: no package is installed that reads it.
        """
        self._url = url.rstrip("/")
        self._objects, self._base = open_objects(self._url)
        self._timeout_s = timeout_s
        self._look: Future[Newest | Exception] | None = None

    async def newest(self) -> Newest:
        """Return the URL of the version that is to serve, and its identity; None while there is none.

        Raises:
            DataError: `latest` names no version.
            ServiceAway: the store cannot be read, or did not answer in time.
        """
        if self._look is None:
            self._look = _started(self._find)
        await asyncio.wait([asyncio.wrap_future(self._look)], timeout=self._timeout_s)
        if not self._look.done():
            raise ServiceAway(f"{self._url} did not answer within {self._timeout_s:g} s")
        found, self._look = self._look.result(), None
        if isinstance(found, OSError):
            raise ServiceAway(f"{self._url} cannot be read: {found}") from found
        if isinstance(found, Exception):
            raise found
        return found

    def _find(self) -> Newest:
        """The version that `latest` names, else the complete one with the highest number."""
        pointer = self._pointer()
        if pointer is not None:
            name = named_version(pointer, f"{self._url}/{POINTER_NAME}")
            identity = self._identity(name)
            is_there = identity is not None or self._objects.isdir(f"{self._base}/{name}")
            return (f"{self._url}/{name}", identity) if is_there else (None, None)
        for name in self._versions():
            if identity := self._identity(name):
                return f"{self._url}/{name}", identity
        return None, None

    def _pointer(self) -> str | None:
        path = f"{self._base}/{POINTER_NAME}"
        try:
            size = self._objects.info(path)["size"]
            if size > MAX_POINTER_BYTES:
                raise DataError(f"{self._url}/{POINTER_NAME} has {size} bytes; wanted is one name")
            return bytes(self._objects.cat_file(path)).decode(errors="replace")
        except FileNotFoundError:
            return None

    def _versions(self) -> list[str]:
        """Names of the versions, newest first, complete or not."""
        names = listed(self._objects, self._base)
        numbers = {number: name for name in names if (number := number_of(name)) is not None}
        return [numbers[number] for number in sorted(numbers, reverse=True)]

    def _identity(self, name: str) -> str | None:
        try:
            info: dict[str, Any] = self._objects.info(f"{self._base}/{name}/{INDEX_NAME}")
        except FileNotFoundError:
            return None
        return identity_of(info)


def _started(work: Callable[[], Newest]) -> Future[Newest | Exception]:
    """Run it on a thread; the future has what it returns or raises."""
    answer: Future[Newest | Exception] = Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            with os_errors():
                answer.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            answer.set_result(error)

    threading.Thread(target=run, name="followed store", daemon=True).start()
    return answer
