"""Rewards that raise, hang and fail, for a gateway that imports this module (`modules`)."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gateway.components.shared_services import SharedServices
from gateway.rewards.base import Answer, register_reward
from headway.contracts.errors import RewardOutage
from headway.contracts.types import RewardResult


def raises(answer: Answer) -> float:
    """Over every answer that says so."""
    if answer.completion == "raise":
        raise ZeroDivisionError("of no use")
    return 1.0


def hangs(answer: Answer) -> float:
    """Over every answer that names a file; leaves the id of its process there."""
    if answer.completion.startswith("/"):
        Path(answer.completion).write_text(str(os.getpid()))
        while True:
            time.sleep(0.01)
    return 1.0


async def out_while(answer: Answer, services: SharedServices, path: str = "") -> float:
    """An outage for as long as the file is there."""
    if _is_out(Path(path)):
        raise RewardOutage("out of order")
    return 1.0


def _is_out(path: Path) -> bool:
    with path.with_suffix(".calls").open("a") as calls:
        calls.write(".")
    return path.exists()


def tells(answer: Answer) -> RewardResult:
    """What it was shown."""
    shown = [answer.prompt, answer.completion, list(answer.prompt_ids), list(answer.completion_ids)]
    return RewardResult(0.5, {"shown": shown, "row": dict(answer.data)})


for function in (raises, hangs, out_while, tells):
    register_reward(f"trouble/{function.__name__}", function)
