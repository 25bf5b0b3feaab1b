"""Points at which a process stops itself (SIGSTOP), so that a test finds it in exactly that state.

The test sets a trap, waits until the process has stopped, and then kills it, lets it go on, or does
something to another process meanwhile. A trap works once: who is started again walks past it. A gate
stops only the thread that comes to it, for good.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

GATE = "gate"


class Traps:
    """Those of one process: files in a folder of its own."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def set(self, point: str) -> None:
        (self._folder / point).touch()

    def shut(self, gate: str) -> None:
        self._waiting(gate).unlink(missing_ok=True)  # somebody was killed there
        (self._folder / gate).write_text(GATE)

    def is_waited_at(self, gate: str) -> bool:
        return self._waiting(gate).exists()

    def is_set(self, point: str) -> bool:
        return (self._folder / point).exists()

    def reach(self, point: str) -> None:
        """Stop here if this trap is set, wait here if this gate is shut."""
        trap = self._folder / point
        with suppress(FileNotFoundError):
            if trap.read_text() == GATE:
                trap.rename(self._waiting(point))
                threading.Event().wait()
            else:
                trap.unlink()
                # To this thread: sent to the process, it would let this one run on for a moment.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def around(self, call: Callable[..., Any], before: str = "", after: str = "") -> Any:
        """A function with a trap on either side."""

        @wraps(call)
        def trapped(*args: Any, **named: Any) -> Any:
            self.reach(before or "nowhere")
            answer = call(*args, **named)
            self.reach(after or "nowhere")
            return answer

        return trapped

    def around_async(
        self, call: Callable[..., Awaitable[Any]], before: str = "", after: str = ""
    ) -> Any:
        """As `around`."""

        @wraps(call)
        async def trapped(*args: Any, **named: Any) -> Any:
            self.reach(before or "nowhere")
            answer = await call(*args, **named)
            self.reach(after or "nowhere")
            return answer

        return trapped

    def _waiting(self, gate: str) -> Path:
        return self._folder / f"{gate}.waiting"


def is_stopped(pid: int) -> bool:
    """Whether the whole process is stopped by a signal."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"
