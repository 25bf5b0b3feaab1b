"""Choice of this service's sandbox: `make_sandbox`.

`auto` takes the first back-end that contains a probe program, and refuses programs where none does;
a back-end that is asked for by name and does not contain it keeps the service from starting.

| back-end | covers | a program can still |
| bubblewrap | files, network, processes, signals, memory, CPU, output, leftovers | read /usr; fill
kernel memory that no limit counts (locks, pipes) |
| landlock | content of files, network, processes (refused), signals, memory, CPU, output | see
names and sizes of files; fill the disk of the scratch folder |
| unsafe | memory of one process, CPU, size of one file, output | read and delete files, use the
network, start processes |
| remote | what the service at the other end covers | what that service lets it |

None covers flaws of the kernel. Only the standard library of Python is there to import.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Protocol

from gateway.components.shared_services import (
    NoSandbox,
    Outbound,
    Program,
    ProgramResult,
    Sandbox,
)
from gateway.sandbox.backends import BUBBLEWRAP, LANDLOCK, UNSAFE, Backend, Unavailable
from gateway.sandbox.cgroup import find_parent
from gateway.sandbox.pool import SandboxPool
from gateway.sandbox.probe import probe
from gateway.sandbox.remote import RemoteSandbox
from headway.contracts.config.gateway import SandboxConfig
from headway.contracts.errors import ConfigError
from headway.runtime.tasks import cancel_and_wait

CORES_PER_WORKER = 2

logger = logging.getLogger(__name__)


class ManagedSandbox(Sandbox, Protocol):
    """A sandbox with a beginning and an end."""

    async def start(self) -> None:
        """Raises ConfigError: it cannot hold programs on this machine."""

    async def aclose(self) -> None:
        """End everything that it started."""


class BackgroundSandbox:
    """A sandbox that starts while its service already serves; the first programs wait for it.

    For one whose start does not fail.
    """

    def __init__(self, sandbox: ManagedSandbox) -> None:
        self._sandbox = sandbox
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to start it."""
        self._starting = asyncio.create_task(self._sandbox.start(), name="start the sandbox")

    async def run(self, program: Program) -> ProgramResult:
        """See `shared_services.Sandbox`."""
        if self._starting is not None:
            await asyncio.shield(self._starting)
        return await self._sandbox.run(program)

    async def aclose(self) -> None:
        """End it, started or not."""
        await cancel_and_wait([self._starting])
        await self._sandbox.aclose()


def make_sandbox(config: SandboxConfig, outbound: Outbound) -> ManagedSandbox:
    """The sandbox that a config asks for, not started yet."""
    if config.type == "remote":
        return RemoteSandbox(str(config.url), outbound, config.wall_factor)
    return LocalSandbox(config)


class LocalSandbox:
    """Chooses among the back-ends of this machine when it starts."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._chosen: SandboxPool | NoSandbox = NoSandbox("the sandbox has not been started")

    async def start(self) -> None:
        """Choose, and start the workers."""
        if self._config.type == "none":
            self._chosen = NoSandbox("`sandbox.type` of the config is none")
            return
        reasons = []
        for backend in self._candidates():
            try:
                self._chosen = await self._open(backend)
            except Unavailable as reason:
                reasons.append(f"{backend.name}: {reason}")
                continue
            level = logging.WARNING if backend is UNSAFE else logging.INFO
            said = f"sandbox: {backend.name}, covers {backend.covers}; not {backend.lacks}"
            if self._chosen.cgroups is not None:
                said += f"; the kernel counts in {self._chosen.cgroups}"
            logger.log(level, "; ".join([said, *(f"passed over {r}" for r in reasons)]))
            return
        refusal = f"no sandbox holds programs here ({'; '.join(reasons)})"
        if self._config.type != "auto":
            raise ConfigError(f"sandbox.type={self._config.type}, but {refusal}")
        logger.warning("sandbox: %s; programs are refused", refusal)
        self._chosen = NoSandbox(f"{refusal}; install bubblewrap, or name a remote sandbox")

    async def run(self, program: Program) -> ProgramResult:
        """See `shared_services.Sandbox`."""
        return await self._chosen.run(program)

    async def aclose(self) -> None:
        """End the workers."""
        if isinstance(self._chosen, SandboxPool):
            await self._chosen.aclose()
        self._chosen = NoSandbox("the sandbox was closed")

    def _candidates(self) -> Sequence[Backend]:
        if self._config.type == "auto":
            return (BUBBLEWRAP, LANDLOCK, *((UNSAFE,) if self._config.allow_unsafe else ()))
        named = {backend.name: backend for backend in (BUBBLEWRAP, LANDLOCK, UNSAFE)}
        return (named[self._config.type],)

    async def _open(self, backend: Backend) -> SandboxPool:
        workers = self._config.workers or max(1, (os.cpu_count() or 1) // CORES_PER_WORKER)
        cgroups = find_parent(self._config.cgroup)
        pool = SandboxPool(backend, workers, self._config.wall_factor, cgroups)
        try:
            await pool.start()
            if backend is not UNSAFE:
                await probe(pool)
        except BaseException:
            await pool.aclose()
            raise
        return pool
