"""Untrusted programs on a fixed number of pre-forked workers.

Who waits: `run`, for a free worker, in turn with other callers; a caller that holds none may have a
spare one, which is started when it is first needed. A worker that fails under a program is replaced,
and the program is run once more; so is one that spent its wall time with little CPU time, since a
machine under load is no fault of the program. What fails again is an outage, never a verdict.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from secrets import token_hex

from gateway.components.shared_services import Program, ProgramResult
from gateway.sandbox.backends import Backend, Unavailable
from gateway.sandbox.cgroup import Cgroup
from gateway.sandbox.verdict import classify_ending
from gateway.sandbox.worker_handle import SandboxWorkerLost, WorkerHandle
from headway.contracts.errors import RewardOutage
from headway.runtime.fair_pool import FairPool

IDLE_SHARE = 0.5
"""A program that was stopped by the clock with less than this share of its CPU time is run again."""


class SandboxPool:
    """Runs programs in one back-end: `num_workers` of a caller at a time, twice as many of several."""

    def __init__(
        self, backend: Backend, num_workers: int, wall_factor: float, cgroups: Path | None = None
    ) -> None:
        """
        Args:
            cgroups: where each worker has a group for its programs; None lets it count by itself.
        """
        self.backend = backend
        self.cgroups = cgroups
        self._wall_factor = wall_factor
        workers = [WorkerHandle(backend, _group(cgroups)) for _ in range(2 * num_workers)]
        self._workers, self._spare = workers[:num_workers], workers[num_workers:]
        self._turns = FairPool(self._workers, self._spare)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that exist."""
        return [worker.pid for worker in (*self._workers, *self._spare) if worker.pid is not None]

    async def start(self) -> None:
        """Start all workers.

        Raises:
            Unavailable: one did not start, with the reason.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(worker.start())
        except* (SandboxWorkerLost, OSError, Unavailable) as failures:
            await self.aclose()
            raise Unavailable(str(failures.exceptions[0])) from failures

    async def run(self, program: Program) -> ProgramResult:
        """See `shared_services.Sandbox`."""
        outcome, is_starved = await self._judge(program)
        if is_starved:
            outcome, _ = await self._judge(program)
        return outcome

    async def aclose(self) -> None:
        """End the workers and what they run."""
        for worker in (*self._workers, *self._spare):
            worker.kill()

    async def _judge(self, program: Program) -> tuple[ProgramResult, bool]:
        try:
            return await self._run_once(program)
        except SandboxWorkerLost:
            pass
        try:
            return await self._run_once(program)
        except SandboxWorkerLost as error:
            raise RewardOutage(
                f"the sandbox lost its worker twice under a program: {error}"
            ) from error

    async def _run_once(self, program: Program) -> tuple[ProgramResult, bool]:
        """The outcome, and whether the clock stopped a program that hardly ran."""
        wall_s = self._wall_factor * program.cpu_s
        async with self._turns.take() as worker:
            try:
                await worker.start()
                frame = await worker.run(program, wall_s)
            except (OSError, Unavailable) as error:
                raise SandboxWorkerLost(str(error)) from error
        try:
            outcome = classify_ending(program, frame)
            is_starved = frame["stopped"] == "wall" and outcome.cpu_s < IDLE_SHARE * program.cpu_s
        except (KeyError, TypeError, ValueError) as error:
            worker.kill()
            raise SandboxWorkerLost(f"the worker answered with {error!r}") from error
        return outcome, is_starved


def _group(cgroups: Path | None) -> Cgroup | None:
    return None if cgroups is None else Cgroup(cgroups / f"headway-sandbox-{token_hex(8)}")
