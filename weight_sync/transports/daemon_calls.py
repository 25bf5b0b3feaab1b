"""Blocking calls that cannot be interrupted, on a thread that need not be waited for."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
Watch = Callable[[], None]
"""Called every few milliseconds of waiting; raises `SyncError` to end it."""

LOOK_S = 0.005
EXIT_S = 10.0


def call_detached(
    work: Callable[[], T], watch: Watch, discard: Callable[[T], object] | None = None
) -> T:
    """Run `work`, and return or raise what it does.

    When `watch` raises, so does this, at once: the thread is a daemon and ends when `work` does. What it
    brings too late goes to `discard`.
    """
    answer = start_detached(work)
    while not answer.done():
        try:
            watch()
        except BaseException:
            answer.add_done_callback(lambda late: _discard(late, discard))
            raise
        wait([answer], LOOK_S)
    return answer.result()


def start_detached(work: Callable[[], T]) -> Future[T]:
    """Run `work`; the future is not cancellable."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - the caller handles it
            answer.set_exception(error)
        else:
            answer.set_result(result)

    threading.Thread(target=run, name="weights-collective", daemon=True).start()
    return answer


@contextmanager
def held_at_exit() -> Iterator[None]:
    """Within it the process does not exit, for `EXIT_S` at most.

    Torch's C++ aborts a process whose interpreter ends while it raises, or tears down, on a thread.
    """
    ended = threading.Event()
    _unfinished.add(ended)
    try:
        yield
    finally:
        _unfinished.discard(ended)
        ended.set()


_unfinished: set[threading.Event] = set()


@atexit.register
def _hold() -> None:
    deadline = time.monotonic() + EXIT_S
    for ended in list(_unfinished):
        ended.wait(max(0.0, deadline - time.monotonic()))


def _discard(late: Future[T], discard: Callable[[T], object] | None) -> None:
    if discard is not None and late.exception() is None:
        discard(late.result())
