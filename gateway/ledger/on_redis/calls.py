"""Script calls on one Redis connection: those that wait travel together, and are repeated on an outage.

A call has an id under which the server keeps its answer for a while, so that a repeated call changes
nothing and answers the same. When `RETRY_S` have passed without an answer, the caller gets `StateError`:
whether its call was done is not known then, and it may be made again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoScriptError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from gateway.ledger.on_redis.address import Address
from gateway.ledger.on_redis.connection import redis_client
from gateway.ledger.on_redis.keys import KEYS, SCHEMA
from gateway.ledger.on_redis.scripts import digest_of, source_of
from headway.contracts.errors import ConfigError, StateError, StoreUnusable

logger = logging.getLogger(__name__)

RETRY_S = 10.0
"""Less than the answers of calls are kept (`EX` in the prelude)."""
BACKOFF_S = (0.02, 0.25)
"""First and longest wait between two attempts."""
PAGE = 500
"""Rollouts that one script reads or forgets: others wait for it."""
MAX_CALLS = 256
MAX_BYTES = 8 << 20
"""Maximum bytes of one call: more would not pass within the socket's timeout on a slow network."""

Argument = str | int | float | bytes
"""Argument of a script."""
OUTAGES = (RedisConnectionError, RedisTimeoutError, OSError)


@dataclass(slots=True, eq=False)
class _ScriptCall:
    name: str
    args: tuple[Argument, ...]
    future: asyncio.Future[list[Any]]
    deadline: float = field(default_factory=lambda: time.monotonic() + RETRY_S)

    @property
    def num_bytes(self) -> int:
        return sum(len(arg) for arg in self.args if isinstance(arg, str | bytes))


class Calls:
    """Owned by the event loop that opened it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._client: Redis | None = None
        self._pump: asyncio.Task[None] | None = None
        self._waiting: deque[_ScriptCall] = deque()
        self._wake = asyncio.Event()

    async def start(self) -> None:
        """Connect, and check that this server keeps what is written."""
        if self._client is not None:
            raise StateError(f"ledger {self._address.shown} is open already")
        try:
            self._client = redis_client(self._address.url)
        except (ValueError, TypeError) as error:
            self._client = None
            raise ConfigError(f"ledger {self._address.shown}: {error}") from error
        try:
            await self._check(self._client)
        except (RedisError, *OUTAGES) as error:
            await self.stop()
            raise self._refused(error) from error
        except BaseException:
            await self.stop()
            raise
        self._pump = asyncio.create_task(self._run(self._client), name="ledger")

    async def stop(self) -> None:
        """Refuse what waits and disconnect."""
        if self._pump is not None:
            self._pump.cancel()
            with suppress(asyncio.CancelledError):
                await self._pump
            self._pump = None
        while self._waiting:
            self._fail(self._waiting.popleft(), "it was closed")
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def change(self, name: str, *args: Argument) -> list[Any]:
        """Run a script that may change something; its answer."""
        return await self._call(name, (uuid.uuid4().hex, *args))

    async def count(self, name: str, *args: Argument) -> int:
        """`change`, for scripts that answer a number."""
        return int((await self.change(name, *args))[1])

    async def read(self, name: str, *args: Argument) -> list[Any]:
        """Run a script that changes nothing, or knows by itself that it was run before."""
        return await self._call(name, ("", *args))

    async def get(self, name: str, field_name: str | None = None) -> bytes | None:
        """A single value, of a hash if a field is named; behind the calls that were made before."""
        key = f"{self._address.prefix}:{KEYS[name]}"
        command = ("GET", key) if field_name is None else ("HGET", key, field_name)
        answer: bytes | None = (await self._call("", command))[0]
        return answer

    async def _call(self, name: str, args: tuple[Argument, ...]) -> list[Any]:
        if self._pump is None:
            raise StateError(f"ledger {self._address.shown} is not open")
        call = _ScriptCall(name, args, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._wake.set()
        return await call.future

    async def _run(self, client: Redis) -> None:
        backoff_s, longest_s = BACKOFF_S
        while True:
            await self._wake.wait()
            calls = self._take()
            if not calls:
                continue
            try:
                outage = await self._send(client, calls)
            except asyncio.CancelledError:
                self._waiting.extendleft(reversed(calls))
                raise
            if outage is None:
                backoff_s = BACKOFF_S[0]
                continue
            self._put_back(calls, outage)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, longest_s)

    def _take(self) -> list[_ScriptCall]:
        """The next journey; its calls stay in the order in which they were made."""
        calls: list[_ScriptCall] = []
        num_bytes = 0
        while self._waiting and len(calls) < MAX_CALLS and num_bytes < MAX_BYTES:
            call = self._waiting.popleft()
            if not call.future.done():
                calls.append(call)
                num_bytes += call.num_bytes
        if not self._waiting:
            self._wake.clear()
        return calls

    async def _send(self, client: Redis, calls: list[_ScriptCall]) -> Exception | None:
        """Answer the calls, or those that were answered; why the others were not."""
        pipeline = client.pipeline(transaction=False)
        for call in calls:
            command = self._command(call)
            pipeline.execute_command(*command)
        try:
            answers = await pipeline.execute(raise_on_error=False)
        except OUTAGES as error:
            return error
        outage: Exception | None = None
        for call, answer in zip(calls, answers, strict=True):
            if isinstance(answer, (*OUTAGES, NoScriptError)):  # still loading its file, for example
                outage = answer
            elif isinstance(answer, Exception):
                self._fail(call, str(answer))
            elif not call.future.done():
                call.future.set_result(answer if call.name else [answer])
        if isinstance(outage, NoScriptError):
            return await self._load(client, {call.name for call in calls if call.name}) or outage
        return outage

    def _command(self, call: _ScriptCall) -> Sequence[Argument]:
        if not call.name:
            return call.args
        return ("EVALSHA", digest_of(call.name), 1, self._address.prefix, *call.args)

    async def _load(self, client: Redis, names: set[str]) -> Exception | None:
        try:
            await self._check_data(client)
            for name in sorted(names):
                await client.script_load(source_of(name))
        except (RedisError, *OUTAGES) as error:
            return error
        return None

    async def _check_data(self, client: Redis) -> None:
        """Log an error if a restarted server has lost its data."""
        if await client.set(f"{self._address.prefix}:{KEYS['schema']}", SCHEMA, nx=True):
            logger.error(
                "ledger %s: Redis came back without its data, rollouts and notes are gone; restore its "
                "append-only file, or submit them again",
                self._address.shown,
            )

    def _put_back(self, calls: list[_ScriptCall], outage: Exception) -> None:
        now = time.monotonic()
        for call in reversed(calls):
            if call.future.done():
                continue
            if now > call.deadline:
                self._fail(call, str(outage))
            else:
                self._waiting.appendleft(call)
        if self._waiting:
            self._wake.set()

    def _fail(self, call: _ScriptCall, reason: str) -> None:
        if not call.future.done():
            call.future.set_exception(self._outage(reason))

    def _outage(self, reason: object) -> StateError:
        return StateError(f"ledger {self._address.shown}: {reason}; check that Redis answers")

    def _refused(self, error: Exception) -> StateError:
        """Why it could not be opened: for good, if this server will not have this client."""
        is_passing = isinstance(error, OUTAGES) and not isinstance(error, AuthenticationError)
        if is_passing:
            return self._outage(error)
        return StoreUnusable(
            f"ledger {self._address.shown}: {error}; mend user, password or database of its URL"
        )

    async def _check(self, client: Redis) -> None:
        memory = await client.info("memory")
        policy = memory.get("maxmemory_policy")
        if policy != "noeviction":
            raise ConfigError(
                f"ledger {self._address.shown}: its maxmemory-policy is {policy}, which forgets rollouts "
                "silently; set noeviction"
            )
        persistence = await client.info("persistence")
        if not persistence.get("aof_enabled"):
            logger.warning(
                "ledger %s: Redis writes no append-only file, its rollouts end with its process; "
                "set appendonly yes",
                self._address.shown,
            )
        key = f"{self._address.prefix}:{KEYS['schema']}"
        await client.set(key, SCHEMA, nx=True)
        schema = await client.get(key)
        schema = schema.decode() if isinstance(schema, bytes) else schema
        if schema != SCHEMA:
            raise ConfigError(
                f"ledger {self._address.shown} has schema {schema}, this release reads {SCHEMA}: use the "
                "release that wrote it, or another ?prefix="
            )


class WithCalls:
    """A role of the ledger: its methods are calls."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls


def optional(value: float | None) -> Argument:
    """Convert a value for Lua: the empty string stands for None."""
    return "" if value is None else value
