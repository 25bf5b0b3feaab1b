"""Version directories over HTTP, from a thread of its own beside the training thread.

Only regular files that a version may hold are served: no listing, no hidden file, nothing above the
root and nothing behind a link. The kernel copies (`sendfile`), so Python's lock is hardly ever taken.
A request with `Prefer: wait=SECONDS` (RFC 7240) for a file that is not there yet is answered when the
file or the version's manifest is there, or after that time; `Preference-Applied` says so.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from headway.contracts.errors import ConfigError
from headway.runtime.secret import is_authorized
from weight_sync.manifest import MANIFEST_NAME

ROUTE = r"/{version:v\d{8,18}}/{name:[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}}"
MAX_WAIT_S = 30.0
SHUTDOWN_S = 0.5
"""Time for answers under way when the server ends."""
ACCEPT_STEPS = 3
"""Steps of the event loop until the runner knows a connection that was accepted. It closes those that
it knows, and asyncio (3.11) forgets the others when it stops listening.
"""


class FileServer:
    """Serves from its construction to `close`; `changed` may be called by any thread."""

    def __init__(self, root: Path, host: str, port: int, token: str | None) -> None:
        self._root = root
        self._token = token
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        started: Future[int] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(host, port, started), name="weights-http", daemon=True
        )
        self._thread.start()
        try:
            self.port = started.result()
        except OSError as error:
            self._thread.join()
            raise ConfigError(
                f"cannot serve weights at {host}:{port}: {error.strerror or error}; set "
                "weight_sync.host to an address of this machine and weight_sync.port to a free port, "
                "or to 0"
            ) from error

    def changed(self) -> None:
        """Wake the requests that wait for a file."""
        self._call(self._wake)

    def close(self) -> None:
        """End, and with it the answers under way."""
        self._call(self._ended.set)
        self._thread.join()

    def _call(self, callback: object) -> None:
        with suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(callback)  # type: ignore[arg-type]

    def _run(self, host: str, port: int, started: Future[int]) -> None:
        try:
            self._loop.run_until_complete(self._serve(host, port, started))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _serve(self, host: str, port: int, started: Future[int]) -> None:
        app = web.Application()
        app.router.add_get(ROUTE, self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        assert runner.server is not None
        loop = asyncio.get_running_loop()
        try:
            listening = await loop.create_server(runner.server, host, port)
        except OSError as error:
            await runner.cleanup()
            started.set_exception(error)
            return
        started.set_result(listening.sockets[0].getsockname()[1])
        await self._ended.wait()
        self._wake()
        for accepting in listening.sockets:
            loop.remove_reader(accepting)
        for _ in range(ACCEPT_STEPS):
            await asyncio.sleep(0)
        listening.close()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("authorization", "").encode()
        if self._token is not None and not is_authorized(given, self._token):
            return web.Response(status=401, headers={"www-authenticate": "Bearer"})
        folder = self._root / request.match_info["version"]
        path = folder / request.match_info["name"]
        await self._wait(path, folder / MANIFEST_NAME, _wanted_wait(request))
        if not _is_servable(folder, path):
            return web.Response(status=404, headers={"preference-applied": "wait"})
        return _Blob(path)

    async def _wait(self, path: Path, manifest: Path, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._ended.is_set():
                    changed = self._changed  # taken before the look: nothing between is missed
                    if seconds == 0.0 or _is_there(path) or _is_there(manifest):
                        return
                    await changed.wait()

    def _wake(self) -> None:
        before, self._changed = self._changed, asyncio.Event()
        before.set()


class _Blob(web.FileResponse):
    """A file that is not written again while it is sent."""

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        with self._path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise web.HTTPNotFound from None
            return await super().prepare(request)


def _wanted_wait(request: web.Request) -> float:
    wait = request.headers.get("prefer", "").partition("wait=")[2]
    return min(float(wait), MAX_WAIT_S) if wait.isdecimal() else 0.0


def _is_there(path: Path) -> bool:
    return os.path.lexists(path)


def _is_servable(folder: Path, path: Path) -> bool:
    try:
        modes = os.lstat(folder).st_mode, os.lstat(path).st_mode
    except OSError:
        return False
    return stat.S_ISDIR(modes[0]) and stat.S_ISREG(modes[1])
