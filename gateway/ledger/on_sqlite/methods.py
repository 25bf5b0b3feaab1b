"""Methods of a ledger that are one transaction each, made of the functions that run in it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from gateway.ledger.on_sqlite.transaction import Transaction
from gateway.ledger.on_sqlite.worker import Kind, SqliteThread

P = ParamSpec("P")
R = TypeVar("R")

Work: TypeAlias = Callable[Concatenate[Transaction, P], R]
"""Function that runs on the worker's thread."""


class WithWorker:
    """Has the worker that the methods run on."""

    def __init__(self, worker: SqliteThread) -> None:
        self._worker = worker


Method: TypeAlias = Callable[Concatenate[WithWorker, P], Coroutine[Any, Any, R]]


def read(work: Work[P, R]) -> Method[P, R]:
    """A method that changes nothing."""
    return _method(work, "read")


def write(work: Work[P, R]) -> Method[P, R]:
    """A method whose changes survive its process."""
    return _method(work, "write")


def write_through(work: Work[P, R]) -> Method[P, R]:
    """A method whose changes survive a power cut, too."""
    return _method(work, "note")


def _method(work: Work[P, R], kind: Kind) -> Method[P, R]:
    @wraps(work)
    async def method(ledger: WithWorker, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await ledger._worker.call(work, kind, *args, **kwargs)

    return method
