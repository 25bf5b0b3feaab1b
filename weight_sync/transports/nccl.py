"""NCCL for a group beside the trainer's own: what fails in it raises here, and ends no process.

Torch watches a group of NCCL with a thread. On an error it ends the process: it rethrows the error
(`TORCH_NCCL_ASYNC_ERROR_HANDLING`), or tells the monitor of the process's first group, which aborts. A
receiver that was killed is such an error. In blocking-wait mode there is no such thread, and errors show
where a broadcast is polled. Torch reads the mode when a group is made, so it stands in the environment
for that moment. Another thread that makes a group of NCCL in that moment gets the same mode.

Communicators are made without blocking. Torch cannot abort one that blocks in `ncclCommInitRank`: its
thread would be lost. It can abort one whose making is only waited for, as soon as that wait ends
(`TORCH_NCCL_NONBLOCKING_TIMEOUT`, which is set to the group's timeout unless it is in use).

NCCL refuses peers of any other build ("Mismatched NCCL version"), so `Build` is compared before.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch._C._distributed_c10d import Store

from headway.contracts.config.base import Config
from headway.contracts.errors import SyncError
from weight_sync.transports.daemon_calls import held_at_exit

MODE = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""No watchdog; where an older torch starts one, it handles no errors."""
INIT_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
NONBLOCKING = "TORCH_NCCL_USE_COMM_NONBLOCKING"
ASK_S = 120.0
"""Seconds for another Python to import its torch."""
_ASK = (
    "import json, torch\n"
    "nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()\n"
    "print(json.dumps({'nccl': '.'.join(map(str, nccl)), 'torch': torch.__version__}))"
)
_environment = threading.Lock()


class Build(Config):
    """The NCCL of one end, and the torch that brings it."""

    nccl: str
    """Version, for example `2.29.7`; empty if there is none."""
    torch: str

    def __str__(self) -> str:
        return f"NCCL {self.nccl or 'none'} (torch {self.torch})"


def own_build() -> Build:
    """Return what this process would use."""
    version = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
    return Build(nccl=".".join(map(str, version)), torch=torch.__version__)


@cache
def build_of(python: str) -> Build:
    """Return what another Python would use, for example an engine's.

    Raises:
        SyncError: it has no torch, or does not run.
    """
    try:
        printed = subprocess.run(
            [python, "-c", _ASK], capture_output=True, check=True, timeout=ASK_S, text=True
        ).stdout
        return Build.model_validate(json.loads(printed.strip().rpartition("\n")[2]))
    except (OSError, subprocess.SubprocessError, ValueError, ValidationError) as error:
        raise SyncError(f"cannot ask {python} for its NCCL: {error}") from error


def check_same(trainer: Build, here: Build) -> None:
    """Raises:
    SyncError: the two form no group.
    """
    if trainer.nccl != here.nccl:
        raise SyncError(
            f"the trainer has {trainer}, this server {here}, and only equal versions of NCCL form a "
            "group; install the same torch for both, or publish over disk, shared_memory or http"
        )


def make_nccl_group(store: Store, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return a group whose errors end no process; communicators are made by the first broadcast."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * timeout_s)  # ours comes first
    options.config.blocking = 0
    with _environment:
        if NONBLOCKING not in os.environ:  # nothing else uses the variable
            os.environ.setdefault(INIT_TIMEOUT, str(math.ceil(timeout_s)))
        with _set(MODE):
            return dist.ProcessGroupNCCL(store, rank, world_size, options)


def failure_of(work: Any) -> Exception | None:
    """Return what ended a broadcast that says it is completed; None if it went well.

    An NCCL broadcast is also completed when it has failed, and then its `wait` may say nothing.
    """
    failure = work.exception()
    return failure if failure is None or isinstance(failure, Exception) else RuntimeError(failure)


def abort(group: Any) -> None:
    """End all that waits in a group; may wait for a communicator that is being made."""
    with (
        held_at_exit(),
        suppress(RuntimeError),
    ):  # it takes no part any more, and its errors do not matter
        group.abort()


@contextmanager
def _set(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
