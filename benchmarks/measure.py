"""Output of every benchmark: one JSON line with the value, its spread, the commit and the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from typing import Any


def report(name: str, unit: str, values: Sequence[float], **more: Any) -> None:
    """Print the median of `values` and everything needed to interpret it."""
    print(
        json.dumps(
            {
                "name": name,
                "unit": unit,
                "value": round(statistics.median(values), 3),
                "repeats": len(values),
                "spread": [round(min(values), 3), round(max(values), 3)],
                **more,
                "commit": _commit(),
                "machine": f"{os.cpu_count()} x {_processor()}",
            }
        )
    )


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()
