"""An engine with a server of its own: started and ended by us, or reached at a URL; watched either way.

`EngineProcess` owns the child, the connections to it and two watches: one on the child's exit, one on
signs of life (new tokens, or an answer on the liveness path). Whichever fires first writes `failure`
and ends every call in flight with `BackendError`; a managed engine is then ended with its whole process
group. All of it runs on one event loop; the child must be started there, since it is signalled to
end when the thread that started it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from headway.contracts.config.server import EngineProcessConfig
from headway.contracts.errors import BackendError, ConfigError
from headway.runtime.process import Process, ProcessSpec
from headway.runtime.tasks import cancel_and_wait
from headway.runtime.wait_notice import WaitNotice
from inference_server.backends.engine_command_line import (
    LOOPBACK,
    PORT_FLAG,
    EngineCommand,
    engine_command_line,
    engine_environment,
    is_served,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.25
STOP_GRACE_S = 15.0
"""Seconds from SIGTERM to SIGKILL."""
START_GRACE_S = 0.5
"""The same for an engine that is not up: it has nothing to put in order."""


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """Response of the engine."""

    status: int
    content: bytes

    @property
    def is_ok(self) -> bool:
        return self.status < 400

    def json(self) -> Any:
        """The body; None if it is no JSON."""
        try:
            return json.loads(self.content)
        except ValueError:
            return None

    def text(self) -> str:
        """The start of the body, for messages."""
        return self.content[:500].decode(errors="replace")


class EngineProcess:
    """One engine behind HTTP, watched for failure.

    Args:
        config: managed or attached, flags, deadlines.
        command: how to start this kind of engine.
        progress: tokens generated so far; any change is a sign of life.
        live_path: path to ask when there was no progress; called before each question.
    """

    def __init__(
        self,
        config: EngineProcessConfig,
        command: EngineCommand,
        progress: Callable[[], int],
        live_path: Callable[[], str],
    ) -> None:
        self._config = config
        self._command = command
        self._progress = progress
        self._live_path = live_path
        self._process: Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._pidfd: int | None = None
        self._watch: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[None] | None = None
        self.url = config.url or ""
        self.failure: str | None = None

    @property
    def is_managed(self) -> bool:
        """True if we start and end the engine."""
        return self._config.url is None

    @property
    def pid(self) -> int | None:
        """Process id of the managed engine."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start or reach the engine; returns once it answers.

        Raises:
            ConfigError: the flags cannot be passed on, or the engine is not installed.
            BackendError: it ended, or did not answer in `start_timeout_s`; nothing is left running.
        """
        self._session = aiohttp.ClientSession(
            # A connection for each request. An engine closes kept ones when it will: after an error, or
            # when it was too busy to read the next request in time, which is then lost.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.health_timeout_s),
            read_bufsize=1 << 20,
        )
        try:
            for is_last in (False, False, True):
                if await self._is_started(is_last):
                    break
                log.warning(
                    "another process took the engine's port while it loaded; it gets a new one"
                )
        except BaseException:
            await self.aclose()
            raise
        self._watch = asyncio.create_task(self._watch_life(), name="engine health")

    async def aclose(self) -> None:
        """End the managed engine and every call; an attached engine goes on."""
        await cancel_and_wait([self._watch])
        self._unwatch_exit()
        self.fail("the backend was closed")
        if self._process is not None:
            grace_s = START_GRACE_S if self._watch is None else STOP_GRACE_S
            await asyncio.to_thread(self._process.stop, grace_s)
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, timeout_s: float | None = None) -> EngineResponse:
        """See `call`."""
        return await self.call("GET", path, None, timeout_s)

    async def post(self, path: str, body: Any, timeout_s: float | None = None) -> EngineResponse:
        """See `call`."""
        return await self.call("POST", path, body, timeout_s)

    async def call(
        self, method: str, path: str, body: Any, timeout_s: float | None
    ) -> EngineResponse:
        """One exchange, whatever its status.

        Raises:
            BackendError: no answer came: the engine failed, was lost, or took too long.
        """

        async def exchange() -> EngineResponse:
            async with self._exchange(method, path, body, timeout_s) as response:
                return EngineResponse(response.status, await response.read())

        return await self.guard(exchange())

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, body: Any
    ) -> AsyncIterator[EngineResponse | AsyncIterator[bytes]]:
        """POST, and the lines of the answer as they come, or an `EngineResponse` if it was refused.

        Put a `guard` around the whole use: the stream itself does not notice a failure.

        Raises:
            BackendError: the connection broke, also from the lines.
        """
        async with self._exchange("POST", path, body, None) as response:
            if response.status >= 400:
                yield EngineResponse(response.status, await response.read())
            else:
                yield _lines(response.content)

    async def guard(self, work: Awaitable[T]) -> T:
        """Await `work` while the engine lives.

        Raises:
            BackendError: the engine failed; `work` is cancelled.
        """
        if self._failed is None:
            raise BackendError(f"{self._command.name} was not started")
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
            raise BackendError(self.failure or f"{self._command.name} failed")
        finally:
            if not task.done():
                await cancel_and_wait([task])

    def fail(self, reason: str) -> None:
        """Give the engine up: its state is lost or wrong, and every call ends."""
        if self.failure is None:
            self.failure = reason
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(None)

    def log_tail(self) -> str:
        """The last lines that the managed engine wrote."""
        return "" if self._process is None else self._process.log_tail()

    async def _is_started(self, is_last: bool) -> bool:
        """Start or reach it once; false if it ended since another process has its port.

        Args:
            is_last: that, too, is an error.
        Raises:
            BackendError: it ended, or did not answer in time.
        """
        self._failed, self.failure = asyncio.get_running_loop().create_future(), None
        if self.is_managed:
            self._launch()
        try:
            await self.guard(self._until_ready())
        except BackendError:
            has_ended = self._process is not None and self._process.exit_code() is not None
            if (
                is_last
                or not has_ended
                or PORT_FLAG in self._config.args
                or not is_served(self.url)
            ):
                raise
            return False
        return True

    def _launch(self) -> None:
        argv, port = engine_command_line(self._config, self._command)
        self.url = f"http://{LOOPBACK}:{port}"
        spec = ProcessSpec(
            name=self._command.name,
            argv=argv,
            log=None if self._config.log_file is None else Path(self._config.log_file),
            env=engine_environment(self._config, self._command),
        )
        try:
            self._process = Process(spec)
        except OSError as error:
            raise ConfigError(
                f"cannot start {argv[0]}: {error.strerror}; set backend.python to an interpreter that "
                f"has {self._command.name}"
            ) from error
        pid = self._process.pid  # and not its flags, which may hold secrets
        log.info(
            "engine started", extra={"engine": self._command.name, "pid": pid, "url": self.url}
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    def _on_exit(self) -> None:
        """Handle the end of the child; called as soon as the kernel reports it."""
        self._unwatch_exit()
        process = self._process
        if process is None:
            return
        code = process.wait(STOP_GRACE_S)  # it has ended already: this only collects the status
        self.fail(
            f"{self._command.name} (pid {process.pid}) ended with status {code}:\n"
            f"{process.log_tail()}"
        )
        process.stop(0.0)  # what it started may live on

    def _unwatch_exit(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    async def _until_ready(self) -> None:
        timeout_s = self._config.start_timeout_s
        notice = WaitNotice(f"the engine, {self._command.name} at {self.url}")
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._answers(self._command.ready_path, timeout_s):
                    notice.log_if_due()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise BackendError(
                f"{self._command.name} at {self.url} did not answer {self._command.ready_path} "
                f"within start_timeout_s={timeout_s:g}:\n{self.log_tail()}"
            ) from None

    async def _watch_life(self) -> None:
        """Ends with a failure once there was no sign of life for `health_timeout_s`."""
        timeout_s = self._config.health_timeout_s
        seen, last_sign = self._progress(), time.monotonic()
        while time.monotonic() - last_sign < timeout_s:
            await asyncio.sleep(self._config.health_interval_s)
            is_alive = self._progress() != seen or await self._answers(self._live_path(), timeout_s)
            if is_alive or self._progress() != seen:
                seen, last_sign = self._progress(), time.monotonic()
        self.fail(
            f"{self._command.name} at {self.url} is hung: no new token and no answer on "
            f"{self._live_path()} for health_timeout_s={timeout_s:g}:\n{self.log_tail()}"
        )
        if self._process is not None:
            self._unwatch_exit()
            await asyncio.to_thread(self._process.stop, 0.0)

    async def _answers(self, path: str, timeout_s: float) -> bool:
        try:
            return (await self.get(path, timeout_s)).is_ok
        except BackendError:
            return False

    @contextlib.asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: Any, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self.failure is not None or self._session is None:
            raise BackendError(self.failure or f"{self._command.name} was not started")
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=timeout
            ) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            detail = f"{type(error).__name__}: {error}".rstrip(": ")
            raise BackendError(
                f"{self._command.name} at {self.url}{path} gave no answer: {detail}"
            ) from error


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of whatever length (the reader's own have a limit)."""
    rest = b""
    while chunk := await content.readany():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest
