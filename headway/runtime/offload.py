"""Work on what came from outside, kept off the event loop where there is much of it.

The threads hold the interpreter's lock as any others do: what is called must be Python, which gives way
every few milliseconds, or let go of the lock itself, as the tokenizer does. One long call in C, a regular
expression for example, belongs into a process. Nothing ends a thread, so what is called must be bounded
by its input.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel

P = ParamSpec("P")
T = TypeVar("T")

SMALL = 4096
"""Characters, tokens or numbers that are worked on where they are: at most a few milliseconds."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="offload")
"""Threads of their own: a wait for a name or a file holds up no prompt."""


async def offload(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`, in a thread if it has much to do, and return its result.

    Args:
        size: of its input, in characters, tokens or numbers.
        work: linear in it.
    """
    if size <= SMALL:
        return work(*args, **kwargs)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, lambda: work(*args, **kwargs))


def size_of(tree: Any, enough: int = SMALL + 1) -> int:
    """Characters and values in a record, or a tree of JSON's types; counted until there are `enough`."""
    if not tree:
        return 1
    size, left = 0, [tree]
    while left and size < enough:
        node = left.pop()
        size += 1
        if isinstance(node, str):
            size += len(node)
        elif isinstance(node, dict):
            left.extend(node)
            left.extend(node.values())
        elif isinstance(node, list | tuple):
            left.extend(node)
        elif isinstance(node, BaseModel):
            left.extend(node.__dict__.values())
    return size
