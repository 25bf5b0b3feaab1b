"""Untrusted programs on a fixed number of pre-forked workers.

Who waits: `run`, for a free worker. A worker that fails under a program is replaced, and the program
is run once more; so is one that spent its wall time with little CPU time, since a machine under load
is no fault of the program. What fails again is an outage, never a verdict.
"""

from __future__ import annotations

import asyncio

from headway.contracts.errors import RewardOutage
from headway.rollout.facilities import Outcome, Program
from headway.rollout.sandbox.backends import Backend, Unavailable
from headway.rollout.sandbox.verdict import judge_ending
from headway.rollout.sandbox.worker_handle import WorkerHandle, WorkerLost

IDLE_SHARE = 0.5
"""A program that was stopped by the clock with less than this share of its CPU time is run again."""


class SandboxPool:
    """Runs programs in one back-end, `num_workers` at a time."""

    def __init__(self, backend: Backend, num_workers: int, wall_factor: float) -> None:
        self.backend = backend
        self._wall_factor = wall_factor
        self._workers = [WorkerHandle(backend) for _ in range(num_workers)]
        self._free: asyncio.LifoQueue[WorkerHandle] = asyncio.LifoQueue()

    @property
    def pids(self) -> list[int]:
        """Of the workers that are there."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    async def start(self) -> None:
        """Start all workers.

        Raises:
            Unavailable: one did not start, with the reason.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(worker.start())
        except* (WorkerLost, OSError, Unavailable) as failures:
            await self.aclose()
            raise Unavailable(str(failures.exceptions[0])) from failures
        for worker in self._workers:
            self._free.put_nowait(worker)

    async def run(self, program: Program) -> Outcome:
        """See `facilities.Sandbox`."""
        outcome, is_starved = await self._judge(program)
        if is_starved:
            outcome, _ = await self._judge(program)
        return outcome

    async def aclose(self) -> None:
        """End the workers and what they run."""
        for worker in self._workers:
            worker.kill()

    async def _judge(self, program: Program) -> tuple[Outcome, bool]:
        try:
            return await self._run_once(program)
        except WorkerLost:
            pass
        try:
            return await self._run_once(program)
        except WorkerLost as error:
            raise RewardOutage(
                f"the sandbox lost its worker twice under a program: {error}"
            ) from error

    async def _run_once(self, program: Program) -> tuple[Outcome, bool]:
        """The outcome, and whether the clock stopped a program that hardly ran."""
        wall_s = self._wall_factor * program.cpu_s
        worker = await self._free.get()
        try:
            await worker.start()
            frame = await worker.run(_job(program, wall_s), wall_s)
        except (OSError, Unavailable) as error:
            raise WorkerLost(str(error)) from error
        finally:
            self._free.put_nowait(worker)
        try:
            outcome = judge_ending(program, frame)
            is_starved = frame["stopped"] == "wall" and outcome.cpu_s < IDLE_SHARE * program.cpu_s
        except (KeyError, TypeError, ValueError) as error:
            worker.kill()
            raise WorkerLost(f"the worker answered with {error!r}") from error
        return outcome, is_starved


def _job(program: Program, wall_s: float) -> dict[str, object]:
    return {
        "source": program.source,
        "stdin": program.stdin,
        "calls": list(program.calls),
        "cpu_s": program.cpu_s,
        "wall_s": wall_s,
        "memory_bytes": program.memory_bytes,
        "max_output_chars": program.max_output_chars,
    }
