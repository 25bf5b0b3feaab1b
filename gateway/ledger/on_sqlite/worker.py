"""The one thread that works on the database: takes all waiting calls and commits them together.

Callers await futures of their event loop. What a loop asks for in one turn is handed over together, and
it is woken once per commit. A call is answered after the commit that holds it.
"""

from __future__ import annotations

import asyncio
import errno
import queue
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from gateway.ledger.on_sqlite.schema import prepare
from gateway.ledger.on_sqlite.transaction import Transaction
from headway.contracts.errors import ServiceError, StateError, StoreUnusable

P = ParamSpec("P")
R = TypeVar("R")
Kind = Literal["read", "write", "note"]
"""A note is on the medium when its call returns; a write survives its process, not a power cut."""
MAX_CALLS = 512
PRIMARY_CODE = 0xFF
"""Mask of SQLite's primary error code; the other bits say where the error happened."""
OPEN_TRY_S = 0.5
"""Seconds that one try to open the file waits for the lock of another process."""
PAUSE_S = 0.02
BUSY_S = 5.0
"""Seconds that another process may hold the file."""


@dataclass(slots=True)
class _WorkerCall:
    work: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: Kind
    future: asyncio.Future[Any]
    answer: Any = None
    error: BaseException | None = None


class SqliteThread:
    """Runs calls in the order in which they were made."""

    def __init__(self, path: str, now: Callable[[], float] = time.time) -> None:
        """Args:
        path: of the file, or `:memory:`.
        now: seconds since the epoch.
        """
        self._path = path
        self._now = now
        self._turns: dict[asyncio.AbstractEventLoop, list[_WorkerCall]] = {}
        self._calls: queue.SimpleQueue[list[_WorkerCall] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self.owner = ""
        self.lease_s = 0.0

    async def start(self) -> None:
        """Open the file and bring its tables up to date."""
        if self._thread is not None:
            raise StateError(f"ledger {self._path} is open already")
        self._ending.clear()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()
        try:
            await self.call(lambda _: None, "read")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Work off what waits, close the file, end the thread, and refuse what came meanwhile."""
        if self._thread is None:
            return
        self._ending.set()
        self._calls.put(None)
        self._thread.join()
        self._thread = None
        while not self._calls.empty():
            self._refuse(self._calls.get() or [])

    def call(
        self,
        work: Callable[Concatenate[Transaction, P], R],
        kind: Kind,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> asyncio.Future[R]:
        """Have the thread run `work` within a transaction; await what it returned."""
        if self._thread is None:
            raise StateError(f"ledger {self._path} is not open")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        turn = self._turns.get(loop)
        if turn is None:
            turn = self._turns[loop] = []
            loop.call_soon(self._hand_over, loop)
        turn.append(_WorkerCall(work, args, kwargs, kind, future))
        return future

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        calls = self._turns.pop(loop)
        if self._thread is None:
            self._refuse(calls)
        else:
            self._calls.put(calls)

    def _refuse(self, calls: list[_WorkerCall]) -> None:
        for call in calls:
            call.error = StateError(f"ledger {self._path} is not open")
        _answer(calls)

    def _run(self) -> None:
        try:
            db = self._connect()
        except (sqlite3.Error, OSError) as error:
            self._refuse_all(self._outage(error) if _may_pass(error) else self._unusable(error))
            return
        except ServiceError as error:
            self._refuse_all(error)
            return
        while (calls := self._take()) is not None:
            waiting = [call for call in calls if not call.future.cancelled()]
            try:
                self._commit(db, waiting)
            except sqlite3.Error as error:
                for call in waiting:
                    call.error = self._outage(error)
            _answer(waiting)
        db.close()

    def _take(self) -> list[_WorkerCall] | None:
        """Everything that waits, at least one; None at the end."""
        calls: list[_WorkerCall] = []
        with suppress(queue.Empty):
            turn = self._calls.get()
            while turn is not None:
                calls += turn
                if len(calls) >= MAX_CALLS:
                    return calls
                turn = self._calls.get_nowait()
            if calls:
                self._calls.put(None)
        return calls or None

    def _connect(self) -> sqlite3.Connection:
        """Open the file; one that another process has locked is tried until `stop`."""
        deadline = time.monotonic() + BUSY_S
        while True:
            try:
                return self._open()
            except sqlite3.OperationalError as error:
                is_locked = error.sqlite_errorcode & PRIMARY_CODE == sqlite3.SQLITE_BUSY
                is_over = time.monotonic() > deadline or self._ending.wait(PAUSE_S)
                if not is_locked or is_over:
                    raise

    def _open(self) -> sqlite3.Connection:
        if self._path != ":memory:":
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(self._path, isolation_level=None, timeout=OPEN_TRY_S)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            prepare(db, self._path)
            db.execute("COMMIT")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000:.0f}")
        except BaseException:
            db.close()
            raise
        return db

    def _commit(self, db: sqlite3.Connection, calls: list[_WorkerCall]) -> None:
        kinds = {call.kind for call in calls}
        # Others are told next what a note says: it must be on the medium before that.
        if "note" in kinds:
            db.execute("PRAGMA synchronous = FULL")
        try:
            begin = "BEGIN" if kinds == {"read"} else "BEGIN IMMEDIATE"
            if not self._transact(db, begin, calls, _run_all):
                self._transact(db, begin, calls, _run_each)
        finally:
            if "note" in kinds:
                db.execute("PRAGMA synchronous = NORMAL")

    def _transact(
        self,
        db: sqlite3.Connection,
        begin: str,
        calls: list[_WorkerCall],
        run: Callable[[Transaction, list[_WorkerCall]], bool],
    ) -> bool:
        """Commit what `run` did, unless it says not to."""
        db.execute(begin)
        try:
            transaction = Transaction(db, self.owner, self.lease_s, self._now())
            is_done = run(transaction, calls)
            if is_done:
                transaction.flush()
                db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
        return is_done

    def _refuse_all(self, error: ServiceError) -> None:
        """The file could not be opened: say so to everyone until `stop`."""
        while (calls := self._take()) is not None:
            for call in calls:
                call.error = error
            _answer(calls)

    def _unusable(self, error: Exception) -> StoreUnusable:
        return StoreUnusable(
            f"ledger {self._path} cannot be opened: {error}; name a file that this process may write, "
            "or one that is not there yet"
        )

    def _outage(self, error: Exception) -> StateError:
        return StateError(f"ledger {self._path}: {error}; check free space and permissions")


def _may_pass(error: Exception) -> bool:
    """True if opening may succeed later: another process holds the file, or the disk is full."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOSPC
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & PRIMARY_CODE
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)


def _run_all(transaction: Transaction, calls: list[_WorkerCall]) -> bool:
    """Without savepoints, which cost as much as the calls; false if one failed, nothing counts then."""
    for call in calls:
        try:
            call.answer = _work(call, transaction)
        except sqlite3.Error:
            raise
        except Exception:  # noqa: BLE001 - it is raised again by `_run_each`, for its caller
            return False
    return True


def _run_each(transaction: Transaction, calls: list[_WorkerCall]) -> bool:
    """Each call in a savepoint of its own: one failure does not hurt the others."""
    for call in calls:
        try:
            with transaction.savepoint():
                call.answer = _work(call, transaction)
        except sqlite3.Error:
            raise
        except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it
            call.error = error
    return True


def _work(call: _WorkerCall, transaction: Transaction) -> Any:
    if call.kind == "read":
        transaction.flush()
    return call.work(transaction, *call.args, **call.kwargs)


def _answer(calls: list[_WorkerCall]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_WorkerCall]] = defaultdict(list)
    for call in calls:
        by_loop[call.future.get_loop()].append(call)
    for loop, of_loop in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed: no caller waits any more
            loop.call_soon_threadsafe(_settle, of_loop)


def _settle(calls: list[_WorkerCall]) -> None:
    for call in calls:
        if call.future.done():  # cancelled while the thread was at it
            continue
        if call.error is not None:
            call.future.set_exception(call.error)
        else:
            call.future.set_result(call.answer)
