"""Lineage of a run: one line in `run_dir/lineage.jsonl` for each of its starts."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

import headway
from headway.runtime.config import dump_yaml

LINEAGE_NAME = "lineage.jsonl"
PACKAGES = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "pydantic", "peft")
GIT_TIMEOUT_S = 10.0
_SOURCE = Path(headway.__file__).resolve().parents[1]


def record_lineage(config: BaseModel, folder: Path, run_id: str, first_step: int) -> dict[str, Any]:
    """Append the lineage of this start of the run, and return it.

    Returns:
        `config_sha256` is of `config.resolved.yaml`; `git_commit` is of the checkout that headway runs
        from, with `git_dirty` where it was changed since: both None without one.
    """
    on_cuda = torch.cuda.is_initialized()  # by `choose_device`; a machine may have GPUs beside
    lineage = {
        "run_id": run_id,
        "first_step": first_step,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "config_sha256": hashlib.sha256(dump_yaml(config).encode()).hexdigest(),
        "git_commit": git_commit(_SOURCE),
        "git_dirty": is_dirty(_SOURCE),
        "python": platform.python_version(),
        "packages": {"headway-rl": headway.__version__, **_versions()},
        "cuda": torch.version.cuda if on_cuda else None,
        "device": torch.cuda.get_device_name() if on_cuda else platform.machine(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LINEAGE_NAME).open("a") as file:
        file.write(json.dumps(lineage) + "\n")
    return lineage


def git_commit(source: Path) -> str | None:
    """Return the commit of a checkout; None outside of one, as for an installed package."""
    if _git(source, "ls-files", "--error-unmatch", "headway/__init__.py") is None:
        return None
    return _git(source, "rev-parse", "HEAD")


def is_dirty(source: Path) -> bool | None:
    """True if files that git tracks differ from the commit; None outside of a repository."""
    if git_commit(source) is None:
        return None
    return bool(_git(source, "status", "--porcelain", "--untracked-files=no"))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
