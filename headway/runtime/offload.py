"""Work on what came from outside, kept off the event loop where there is much of it.

The threads hold the interpreter's lock as any others do: what is called must be Python, which gives way
every few milliseconds, or let go of the lock itself, as the tokenizer does. One long call in C, a regular
expression for example, belongs into a process. Nothing ends a thread, so what is called must be bounded
by its input.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel

P = ParamSpec("P")
T = TypeVar("T")

SMALL = 4096
"""Characters, tokens or numbers that are worked on where they are: at most a few milliseconds."""
_VALUES = frozenset((int, float, bool, type(None)))
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="offload")
"""Threads of their own: a wait for a name or a file holds up no prompt."""
SWITCH_S = 0.0005
"""The event loop waits so long for the interpreter's lock, at each of its turns, while a thread computes.
With Python's own 5 ms a thread that checks large bodies cost others four tenths of their rollouts, with
this one in ten. Always, it would cost a gateway a tenth of its CPU: the ledger's thread then interrupts
the loop at each of its statements."""


class ShortTurns:
    """Makes threads take turns at the interpreter's lock every `SWITCH_S` while any is within."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_within = 0
        self._usual_s = sys.getswitchinterval()

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_within:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_S)
            self._num_within += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_within -= 1
            if not self._num_within:
                sys.setswitchinterval(self._usual_s)


short_turns = ShortTurns()
"""For whatever computes at length in a thread beside an event loop."""


async def offload(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`, in a thread if it has much to do, and return its result.

    Args:
        size: of its input, in characters, tokens or numbers.
        work: linear in it.
    """
    if size <= SMALL:
        return work(*args, **kwargs)
    loop = asyncio.get_running_loop()

    def run() -> T:
        with short_turns:
            return work(*args, **kwargs)

    return await loop.run_in_executor(_THREADS, run)


def size_of(tree: Any, enough: int = SMALL + 1) -> int:
    """Characters and values in a record, or a tree of JSON's types; counted until there are `enough`."""
    if not tree:
        return 1
    size, left = 0, [tree]
    while left and size < enough:
        node = left.pop()
        size += 1
        if type(node) in _VALUES:
            continue
        if isinstance(node, str):
            size += len(node)
        elif isinstance(node, dict):
            left.extend(node)
            left.extend(node.values())
        elif isinstance(node, list | tuple):
            if _VALUES.issuperset(map(type, node)):
                size += len(node)
            else:
                left.extend(node)
        elif isinstance(node, BaseModel):
            left.extend(node.__dict__.values())
    return size
