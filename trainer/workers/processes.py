"""Workers as processes of this machine, each with a pipe to the driver.

A worker that dies ends its group: the others may wait for it in a collective for ever. Workers do not
outlive their driver, however it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, util
from multiprocessing.connection import Connection
from typing import Any, Literal

from headway.contracts.errors import ConfigError, WorkerError, WorkerLost
from headway.runtime.gpus import VISIBLE
from trainer.workers.dispatch import WorkerCall
from trainer.workers.executor import Replies, open_store
from trainer.workers.worker import WorkerHost, WorkerReply, WorkerSpec, describe, rank_environment

LOOPBACK = "127.0.0.1"
_START = "__init__"
_PROTOCOL = pickle.HIGHEST_PROTOCOL


class ProcessExecutor:
    """One process per rank, started here; they find one another on the loopback interface."""

    def __init__(
        self,
        spec: WorkerSpec,
        world_size: int,
        start_method: Literal["spawn", "forkserver"] = "spawn",
        start_timeout_s: float = 120.0,
        timeout_s: float | None = None,
        grace_s: float = 10.0,
        devices: Sequence[str] | None = None,
    ) -> None:
        """Start them, and wait until each has built its worker.

        Args:
            timeout_s: of every call; None waits as long as all workers live.
            grace_s: for the others, once a worker raised; and for all to close.
            devices: a GPU for each rank, as CUDA_VISIBLE_DEVICES names it; None lets every group begin
                with the first, so that groups of one machine share.
        Raises:
            ConfigError: there are not as many devices as ranks.
            ServiceError: what a worker raised when it was built.
            WorkerLost: a worker died, or was not built in time.
        """
        if devices is not None and len(devices) != world_size:
            raise ConfigError(f"{len(devices)} devices for {world_size} ranks; name one for each")
        self._spec = spec
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._store = open_store(LOOPBACK)
        context: Any = multiprocessing.get_context(start_method)
        self._pipes: list[Connection[Any, Any]] = []
        self._processes: list[Any] = []
        self._close = util.Finalize(
            self, _end, (self._processes, self._pipes, grace_s), exitpriority=100
        )
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            environment = rank_environment(rank, rank, world_size, (LOOPBACK, self._store.port))
            if devices is not None:
                environment[VISIBLE] = devices[rank]
            process = context.Process(
                target=_serve, args=(theirs, spec, environment), name=f"{spec.name}-{rank}"
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._started(start_timeout_s)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._processes)

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the workers, by rank."""
        return [process.pid for process in self._processes]

    def run(self, method: str, calls: Mapping[int, WorkerCall]) -> dict[int, WorkerReply]:
        if not self._close.still_active():
            raise WorkerLost(
                f"{method} came to a group of {self._spec.name} that was ended; start another one"
            )
        # Equal calls are written once.
        payloads = {id(call): _dump((method, call)) for call in calls.values()}
        replies = Replies(method, list(calls), self._timeout_s, self._grace_s)
        with _Watchdog(self._timeout_s, self._processes) as watchdog:
            for rank, call in calls.items():
                with suppress(OSError):  # it died, which is found below
                    self._pipes[rank].send_bytes(payloads[id(call)])
            return self._collect(replies, watchdog)

    def close(self) -> None:
        self._close()

    def _started(self, timeout_s: float) -> None:
        replies = Replies(_START, range(self.world_size), timeout_s, self._grace_s)
        for rank, reply in sorted(self._collect(replies).items()):
            if reply.failure is not None:
                self.close()
                raise reply.failure.error(rank, f"{self._spec.name}.{_START}")

    def _collect(
        self, replies: Replies, watchdog: _Watchdog | None = None
    ) -> dict[int, WorkerReply]:
        """Collect replies until all have come, or one of the processes has ended."""
        ends = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        while replies.pending:
            pipes = {self._pipes[rank]: rank for rank in replies.pending}
            ready = connection.wait([*pipes, *ends], replies.left_s)
            if not ready or (watchdog is not None and watchdog.has_fired):
                self._kill()
                return replies.late()
            for pipe in pipes.keys() & set(ready):
                with suppress(EOFError, OSError):  # its end comes with it
                    replies.add(pipes[pipe], pickle.loads(pipe.recv_bytes()))
            lost = sorted(ends[end] for end in ends.keys() & set(ready))
            if lost and replies.pending:
                owing = replies.pending & set(lost)
                ended = ", ".join(_how_it_ended(self._processes[rank]) for rank in lost)
                self._kill()
                if owing or not replies.has_failure:
                    raise replies.lost(ended)
                break
        return replies.of

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._close()


class _Watchdog:
    """Ends processes after a time, so that neither writing to one that is stopped nor reading half of
    what it said goes on for ever."""

    def __init__(self, timeout_s: float | None, processes: Sequence[Any]) -> None:
        self._processes = processes
        self._timer = None
        self.has_fired = False
        if timeout_s is not None:
            # Waiting for replies has the deadline; this one is for pipes.
            self._timer = threading.Timer(timeout_s + 1.0, self._fire)
            self._timer.daemon = True

    def __enter__(self) -> _Watchdog:
        if self._timer is not None:
            self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        self.has_fired = True
        for process in self._processes:
            process.kill()


def _end(processes: list[Any], pipes: list[Connection[Any, Any]], grace_s: float) -> None:
    """Workers leave once their pipe is closed; those that do not are killed."""
    for pipe in pipes:
        pipe.close()
    waiting = [process.sentinel for process in processes]
    replies = Replies("close", range(len(processes)), grace_s, grace_s)
    while waiting:
        done = connection.wait(waiting, replies.left_s)
        if not done:
            break
        waiting = [sentinel for sentinel in waiting if sentinel not in done]
    for process in processes:
        process.kill()
        process.join()


def _how_it_ended(process: Any) -> str:
    process.join(1.0)
    code = process.exitcode
    how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
    return f"worker {process.name} (pid {process.pid}) ended by {how}"


def _dump(content: Any) -> bytes:
    return pickle.dumps(content, _PROTOCOL)


def _serve(pipe: Connection[Any, Any], spec: WorkerSpec, environment: Mapping[str, str]) -> None:
    """A worker's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the driver ends its workers
    threading.Thread(target=_end_with_driver, daemon=True).start()
    try:
        host = WorkerHost(spec, environment)
    except Exception as error:  # noqa: BLE001 -- the driver raises it
        pipe.send_bytes(_dump(WorkerReply(failure=describe(error))))
        return
    pipe.send_bytes(_dump(WorkerReply()))
    while True:
        try:
            received = pipe.recv_bytes()
        except (EOFError, OSError):
            break
        pipe.send_bytes(_answer(host, received))
    host.worker.close()


def _answer(host: WorkerHost, received: bytes) -> bytes:
    try:
        method, call = pickle.loads(received)
    except Exception as error:  # noqa: BLE001 -- the driver raises it
        return _dump(WorkerReply(failure=describe(error)))
    reply = host.answer(method, call)
    try:
        return _dump(reply)
    except Exception as error:  # noqa: BLE001 -- the driver raises it
        unfit = WorkerError(f"what {method} returned cannot be sent: {error}")
        return _dump(WorkerReply(failure=describe(unfit)))


def _end_with_driver() -> None:
    """End the process when the driver ends, even from within a collective that waits for others."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        os._exit(1)
