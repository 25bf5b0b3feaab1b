"""A run as it goes: steps, version, reward, staleness, tokens/s, and how idle each side is.

On a terminal it is a live table; elsewhere, a line every `LINE_EVERY_STEPS` steps. Both go to
standard error, so that standard output holds the result only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from headway.contracts.http.status import StatusResponse

LINE_EVERY_STEPS = 10
WINDOW = 10


@dataclass(frozen=True, slots=True)
class View:
    """State of the run that is shown."""

    step: int
    total_steps: int | None
    """None is not known before the data are counted."""
    version: int
    reward: float
    staleness_max: float
    tokens_per_s: float
    trainer_idle: float
    server_idle: float
    servers: str


class Progress:
    """Shows a run; a context manager."""

    def __init__(self, total_steps: int | None) -> None:
        """Args:
        total_steps: None is not known.
        """
        self._total_steps = total_steps
        self._console = Console(file=sys.stderr, soft_wrap=True)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._is_live = self._console.is_terminal
        self._shown_step = 0
        self._before: tuple[float, StatusResponse] | None = None
        self._tokens_per_s = self._server_idle = 0.0

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line above the display."""
        self._console.print(text, highlight=False)

    def show(self, steps: Sequence[Mapping[str, Any]], status: StatusResponse | None) -> None:
        """Update with the metrics so far and the gateway's status (None: it does not answer)."""
        if status is not None:
            self._measure(status)
        if not steps:
            return
        view = self._view(steps, status)
        if self._is_live:
            self._live.update(_table(view))
        elif self._is_worth_a_line(view.step):
            self._shown_step = view.step
            self.say(_line(view))

    def _is_worth_a_line(self, step: int) -> bool:
        is_last = step == self._total_steps and step != self._shown_step
        return is_last or step >= self._shown_step + LINE_EVERY_STEPS

    def _measure(self, status: StatusResponse) -> None:
        now = time.monotonic()
        if self._before is None:
            self._before = (now, status)
            return
        then, before = self._before
        elapsed_s = now - then
        if elapsed_s < 1.0:
            return
        tokens = status.generated_tokens - before.generated_tokens
        busy_before = {server.server_id: server.busy_s for server in before.servers}
        shares = [
            1.0 - (server.busy_s - busy_before[server.server_id]) / elapsed_s
            for server in status.servers
            if server.server_id in busy_before and server.state == "ready"
        ]
        self._tokens_per_s = max(0.0, tokens / elapsed_s)
        self._server_idle = min(1.0, max(0.0, sum(shares) / len(shares))) if shares else 0.0
        self._before = (now, status)

    def _view(self, steps: Sequence[Mapping[str, Any]], status: StatusResponse | None) -> View:
        recent = steps[-WINDOW:]
        spent = sum(s["wait_s"] + s["train_s"] + s["publish_s"] for s in recent)
        servers = [] if status is None else [f"{s.state} v{s.version}" for s in status.servers]
        return View(
            step=int(steps[-1]["step"]) + 1,
            total_steps=self._total_steps,
            version=int(steps[-1]["version"]) + 1,
            reward=sum(s["reward"] for s in recent) / len(recent),
            staleness_max=max(s["staleness_max"] for s in steps),
            tokens_per_s=self._tokens_per_s,
            trainer_idle=sum(s["wait_s"] for s in recent) / max(spent, 1e-9),
            server_idle=self._server_idle,
            servers=", ".join(servers) or "no answer",
        )


def _line(view: View) -> str:
    return (
        f"step {_of_total(view, '/')}  version {view.version}  reward {view.reward:.3f}  "
        f"staleness <= {view.staleness_max:.0f}  {view.tokens_per_s:.0f} tokens/s  "
        f"idle: trainer {view.trainer_idle:.0%}, servers {view.server_idle:.0%}"
    )


def _of_total(view: View, sign: str) -> str:
    return str(view.step) if view.total_steps is None else f"{view.step}{sign}{view.total_steps}"


def _table(view: View) -> Table:
    table = Table(title="headway", title_justify="left")
    rows = {
        "step": _of_total(view, " / "),
        "policy version": str(view.version),
        f"reward (last {WINDOW})": f"{view.reward:.3f}",
        "max staleness": f"{view.staleness_max:.0f}",
        "generated tokens/s": f"{view.tokens_per_s:.0f}",
        "trainer idle": f"{view.trainer_idle:.0%}",
        "servers idle": f"{view.server_idle:.0%}",
        "servers": view.servers,
    }
    for _ in range(2):
        table.add_column()
    table.show_header = False
    for name, value in rows.items():
        table.add_row(name, value)
    return table
