"""Verifiers run in processes that are killed when they hang.

A worker is READY, and has made the reward, before the clock of an answer starts, and the clock stands
still while the machine gives it no CPU; one that hung, died or
was interrupted is replaced by a fork of a template process. Covered: endless loops, crashes, memory,
what a verifier starts besides. Not covered: hostile code (a verifier is trusted; programs need a
sandbox).

Why not a library: pebble 5.2 takes 290 us of CPU per answer where this takes 165 (2 workers, 16 callers;
at one caller 370 against 180 us of latency), its clock runs while a fresh worker imports, and its
forkserver is one for the interpreter: math-verify would be loaded by every gateway or every worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from gateway.rewards.base import Answer
from gateway.rewards.worker_fork_server import PID_BYTES
from headway.contracts.errors import ErrorBody, RewardError, RewardOutage, ServiceError
from headway.runtime.fair_pool import FairPool

START_TIMEOUT_S = 60.0
"""Seconds for a worker to be READY, and for a reward to be imported and made."""
CALL_S = 5.0
"""Seconds for one call of a function of ours."""
SHORTEST_S = 0.001
"""Seconds below which the rest of a limit counts as nothing."""
INTERRUPTED = ("timeout", "memory")
"""Verdicts after which the state of the process is unknown."""


class WorkerTimeout(Exception):
    """An answer took longer than it may; its worker is killed."""

    def __init__(self, busy_s: float) -> None:
        super().__init__(f"after {busy_s:.2f} s of CPU")
        self.busy_s = busy_s


@dataclass(frozen=True, slots=True)
class RewardJob:
    """A reward as it is sent to a worker."""

    name: str
    reward: bytes
    """Pickle of factory, name and arguments."""
    modules: frozenset[str]


@dataclass(eq=False, slots=True)
class RewardProcess:
    """This end of a worker process."""

    pid: int
    modules: frozenset[str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    made: set[bytes] = field(default_factory=set)
    cpu_s: float = 0.0
    """CPU seconds that it had used by its last answer."""

    async def ask(self, payload: Any) -> dict[str, Any]:
        """One frame there, one back."""
        frame = pickle.dumps(payload, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            self.writer.write(len(frame).to_bytes(4, "big") + frame)
            reply: dict[str, Any] = json.loads(await self.read())
        except (OSError, EOFError) as error:
            raise RewardOutage(f"reward worker {self.pid} died") from error
        self.cpu_s = reply["cpu_s"]
        if "error" in reply:
            raise ServiceError.from_body(ErrorBody(**reply["error"]))
        return reply

    async def read(self) -> bytes:
        """The next frame."""
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        return await self.reader.readexactly(size)

    def busy_s(self) -> float:
        """CPU seconds since its last answer, as far as the system reports it."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                ticks = file.read().rpartition(")")[2].split()[11:13]
        except OSError:
            return 0.0
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") - self.cpu_s

    def cpu_wait_s(self) -> float:
        """Seconds in its life that it was ready to run and had no CPU, as far as the system reports
        it."""
        try:
            with open(f"/proc/{self.pid}/schedstat") as file:
                return int(file.read().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    @asynccontextmanager
    async def time_limit(self, timeout_s: float) -> AsyncIterator[None]:
        """End the block once the process could have run for `timeout_s`, however slow the machine is.

        Raises:
            TimeoutError: it was ended.
        """
        loop = asyncio.get_running_loop()
        began, cpu_wait_s = loop.time(), self.cpu_wait_s()
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal timer
            charged_s = loop.time() - began - (self.cpu_wait_s() - cpu_wait_s)
            if timeout_s - charged_s < SHORTEST_S:
                limit.reschedule(loop.time())
            else:
                timer = loop.call_later(timeout_s - charged_s, look)

        try:
            async with asyncio.timeout(None) as limit:
                timer = loop.call_later(timeout_s, look)
                yield
        finally:
            if timer is not None:
                timer.cancel()

    def kill(self) -> None:
        """End it, and what it started."""
        self.writer.transport.abort()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class WorkerForkServer:
    """This end of the template process."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        path = [folder or os.getcwd() for folder in sys.path]
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "gateway.rewards.worker_fork_server",
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what verifiers print is no output of the gateway
                start_new_session=True,
                env={**threads, **os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )

    async def fork(self, modules: frozenset[str], memory_bytes: int) -> RewardProcess:
        """A worker that is READY. What interrupts this leaves the template unusable."""
        request = json.dumps({"modules": sorted(modules), "memory_bytes": memory_bytes})
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [request.encode()], [theirs.fileno()])
            pid = await asyncio.get_running_loop().sock_recv(self._control, PID_BYTES)
            if not pid:
                raise EOFError("the template process ended")
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        worker = RewardProcess(int.from_bytes(pid, "big"), modules, reader, writer)
        try:
            await worker.read()
        except BaseException:
            worker.kill()
            raise
        return worker

    def kill(self) -> None:
        """End it at once; its workers live on."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """End it, and all its workers."""
        self._control.close()
        self._process.wait()


@dataclass(eq=False, slots=True)
class WorkerSlot:
    """Place of a worker; empty after it was killed, until the next caller forks another."""

    worker: RewardProcess | None = None

    def clear(self) -> None:
        """Kill the worker of this slot."""
        if self.worker is not None:
            self.worker.kill()
            self.worker = None


class WorkerPool:
    """Judges answers: of one caller in `num_workers` processes, of several in twice as many.

    `_forking` is held by the one who speaks with the template.
    """

    def __init__(self, num_workers: int, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._modules: frozenset[str] = frozenset()
        self._places = [WorkerSlot() for _ in range(num_workers)]
        self._spare = [WorkerSlot() for _ in range(num_workers)]
        self._turns = FairPool(self._places, self._spare)
        self._template: WorkerForkServer | None = None
        self._forking = asyncio.Lock()
        self._is_closed = False

    async def start(self) -> None:
        """Fork all workers but the spare ones, and wait until they are READY; answers are scored by those
        that are.

        Raises:
            RewardOutage: no process could be started.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in self._places:
                    group.create_task(self._start_one())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _start_one(self) -> None:
        async with self._turns.take() as place:
            await self._forked(place, frozenset())

    async def call(
        self, function: Callable[..., Any], args: Sequence[Any], timeout_s: float
    ) -> Any:
        """Call a function of ours in a worker, and return its result.

        Raises:
            WorkerTimeout: it took longer, and its worker was killed.
            RewardOutage: the worker was lost.
            ServiceError: what the function raised.
        """
        async with self._taken_slot() as place:
            worker = await self._forked(place, frozenset())
            async with _limited(worker, timeout_s):
                reply = await worker.ask((function, args))
            return reply["value"]

    async def make(self, job: RewardJob, timeout_s: float) -> None:
        """Have a worker make a reward, and check its arguments.

        Raises:
            WorkerTimeout: it took longer, and the worker was killed.
            RewardOutage: the worker was lost.
            ServiceError: what is wrong with it.
        """
        async with self._taken_slot() as place:
            worker = await self._forked(place, job.modules)
            async with _limited(worker, timeout_s):
                await worker.ask((job.reward, None))
            worker.made.add(job.reward)

    async def score(self, job: RewardJob, answer: Answer, timeout_s: float) -> dict[str, Any]:
        """Score, details and verdict.

        Raises:
            WorkerTimeout: it took longer, and its worker was killed.
            RewardOutage: the worker was lost.
            ServiceError: what the verifier raised; a `RewardError` unless it is one of ours.
        """
        given = (
            answer.prompt,
            answer.completion,
            dict(answer.data),
            answer.prompt_ids,
            answer.completion_ids,
            answer.messages,
        )
        async with self._taken_slot() as place:
            worker = await self._settled(place, job)
            async with _limited(worker, timeout_s):
                reply = await worker.ask((job.reward, given))
            if reply["verdict"] in INTERRUPTED:
                place.clear()
            return reply

    @asynccontextmanager
    async def _taken_slot(self) -> AsyncIterator[WorkerSlot]:
        """A slot for one call; its worker is killed if the call is aborted."""
        async with self._turns.take() as place:
            try:
                yield place
            except ServiceError as error:
                if isinstance(error, RewardOutage):
                    place.clear()
                raise
            except BaseException:  # out of time, or the caller is gone: it still computes
                place.clear()
                raise

    async def aclose(self) -> None:
        """End all processes at once."""
        self._is_closed = True
        for place in (*self._places, *self._spare):
            place.clear()
        if self._template is not None:
            await asyncio.to_thread(self._template.close)

    async def _forked(self, place: WorkerSlot, modules: frozenset[str]) -> RewardProcess:
        """The worker of a place, with the modules that a reward needs."""
        if place.worker is not None and not modules <= place.worker.modules:
            place.clear()
        if place.worker is None:
            place.worker = await self._fork(modules)
        return place.worker

    async def _settled(self, place: WorkerSlot, job: RewardJob) -> RewardProcess:
        """The worker of a place, once it has made the reward."""
        worker = await self._forked(place, job.modules)
        if job.reward not in worker.made:
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await worker.ask((job.reward, None))
            except TimeoutError as error:
                place.clear()
                raise RewardError(
                    f"reward {job.name!r} was not made within {START_TIMEOUT_S:g} s; "
                    "see what its module does when it is imported"
                ) from error
            worker.made.add(job.reward)
        return worker

    async def _fork(self, modules: frozenset[str]) -> RewardProcess:
        async with self._forking:
            if self._is_closed:
                raise RewardOutage("the verifiers were closed")
            self._modules |= modules
            is_forked = False
            try:
                if self._template is None:
                    self._template = WorkerForkServer()
                async with asyncio.timeout(START_TIMEOUT_S):
                    worker = await self._template.fork(self._modules, self._memory_bytes)
                is_forked = True
            except (OSError, EOFError) as error:  # TimeoutError is one
                raise RewardOutage(f"no reward worker could be started: {error!r}") from error
            finally:
                if not is_forked and self._template is not None:
                    self._template.kill()  # even if only cancelled: half a request may be under way
                    self._template = None
            return worker


class WorkerTaskPool:
    """`Bench` of a pool."""

    def __init__(self, pool: WorkerPool, timeout_s: float = CALL_S) -> None:
        self._pool = pool
        self._timeout_s = timeout_s

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return await self._pool.call(function, args, self._timeout_s)
        except WorkerTimeout as error:
            raise RewardError(
                f"{function.__name__} ran longer than {self._timeout_s:g} s and was killed"
            ) from error


@asynccontextmanager
async def _limited(worker: RewardProcess, timeout_s: float) -> AsyncIterator[None]:
    try:
        async with worker.time_limit(timeout_s):
            yield
    except TimeoutError as error:
        raise WorkerTimeout(worker.busy_s()) from error
