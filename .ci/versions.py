"""Print the installed packages whose version is not one of the lock's: `versions.py UV PYTHON LOCK`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

MACHINES = re.compile(r"torch|triton|nvidia-(c|n[cv])|cuda-")
"""PyTorch and what it brings depend on the machine; no lock names them."""
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)


def read_pins(text: str) -> dict[str, set[str]]:
    """Return the versions of each package in the form of `pip freeze`, by its normalized name."""
    pins: dict[str, set[str]] = {}
    for name, version in PIN.findall(text):
        pins.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    return pins


def main(uv: str, python: str, lock: str) -> None:
    freeze = [uv, "pip", "freeze", "--quiet", "--python", python]
    installed = read_pins(subprocess.run(freeze, check=True, capture_output=True, text=True).stdout)
    locked = read_pins(Path(lock).read_text())
    # pip came with Python's venv.
    names = [name for name in installed if not MACHINES.match(name) and name != "pip"]
    others = [name for name in names if not installed[name] <= locked.get(name, set())]
    print(f"{len(names)} packages in {python}, {len(others)} of another version than in {lock}")
    for name in others:
        wanted = " or ".join(sorted(locked.get(name, ()))) or "nothing"
        print(f"  {name} {' '.join(installed[name])} (the lock has {wanted})")


if __name__ == "__main__":
    main(*sys.argv[1:])
