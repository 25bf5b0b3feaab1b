"""The sessions of one gateway, in its memory: opened by running rollouts, found by their clients.

A session lives as long as the workflow that opened it. If its gateway dies, the rollout is run again:
then the old id is unknown, and asking for a session with the same `rollout_id` finds the new one. What
ended is remembered for a while, so that a late request is answered with that.

Who waits: `until_open` for a rollout to start, `open` for a place; both on `_changed`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from gateway.sessions.chat import Chat
from gateway.sessions.session import Session
from gateway.sessions.session_directory import SessionDirectory
from gateway.trajectories.sample import Sample
from headway.contracts.config.gateway import SessionsConfig
from headway.contracts.errors import ConfigError, NotFound, QueueFull, Unauthorized
from headway.contracts.http import paths
from headway.contracts.http.sessions import SessionResponse
from headway.runtime.clock import monotonic
from headway.runtime.tasks import Signal

REMEMBERED = 4096
"""Ended sessions that are remembered; the one that ended first is forgotten."""
RETRY_AFTER_S = 5.0
LOOK_S = 0.2
"""Seconds between looks at what other gateways opened."""


class Sessions:
    """`SessionOpener`, and what the routes need of it."""

    def __init__(
        self,
        config: SessionsConfig,
        lifetime_s: float = 600.0,
        board: SessionDirectory | None = None,
    ) -> None:
        """Args:
        config: bounds.
        lifetime_s: seconds after which a running rollout fails (`executor.rollout_timeout_s`).
        board: sessions of gateways that share the ledger; None if no other does.
        """
        self.board = board
        self._config = config
        self._lifetime_s = lifetime_s
        self.address: str | None = None
        """Base URL that this gateway listens on, for agents that a workflow calls."""
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[str, Session] = OrderedDict()
        self._num_expected = 0
        self._changed = Signal()

    @property
    def num_open(self) -> int:
        """Sessions that are open."""
        return len(self._open)

    @asynccontextmanager
    async def open(self, sample: Sample, chat: Chat) -> AsyncIterator[Session]:
        """Let a client in until the block ends; it waits while too many are open."""
        while len(self._open) >= self._config.max_sessions:
            await self._changed.event().wait()
        session = Session(sample, chat, self._config)
        self._open[session.id] = session
        self._changed.notify()
        try:
            async with self._posted(session):
                yield session
        finally:
            del self._open[session.id]
            session.close("the session has ended; its rollout is not running any more")
            self._remember(session)
            self._changed.notify()

    @asynccontextmanager
    async def _posted(self, session: Session) -> AsyncIterator[None]:
        """Other gateways may be asked for it, unless it is one of several of its rollout."""
        if self.board is None or session.sample.prompt.group_size > 1:
            yield
            return
        response = self.describe(session)
        await self.board.post(response)
        try:
            yield
        finally:
            await self.board.take(response)

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Keep a place for a session that a client waits for.

        Raises:
            QueueFull: as many are open or waited for as `max_sessions` allows.
        """
        if len(self._open) + self._num_expected >= self._config.max_sessions:
            raise later(
                f"{len(self._open)} sessions are open and {self._num_expected} are waited for, "
                f"sessions.max_sessions={self._config.max_sessions}"
            )
        self._num_expected += 1
        try:
            yield
        finally:
            self._num_expected -= 1

    def of_rollout(self, rollout_id: str) -> Session | None:
        """The open session of a rollout with one sample."""
        for session in self._open.values():
            if session.sample.rollout_id == rollout_id and not session.is_over:
                return session
        return None

    async def until_open(
        self, rollout_id: str, base_url: str | None, timeout_s: float
    ) -> SessionResponse | None:
        """Wait until a rollout is running, and return its session; None if it is not within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    changed = self._changed.event()
                    if (session := self.of_rollout(rollout_id)) is not None:
                        return self.describe(session, base_url)
                    if self.board is None:
                        await changed.wait()
                    elif (response := await self.board.find(rollout_id)) is not None:
                        return response
                    else:
                        with suppress(TimeoutError):
                            async with asyncio.timeout(LOOK_S):
                                await changed.wait()
        except TimeoutError:
            return None

    def find(self, session_id: str, key: str) -> Session:
        """The session, open or ended lately, whose key this is.

        Raises:
            NotFound: it is unknown.
            Unauthorized: it is another key.
        """
        session = self._open.get(session_id) or self._ended.get(session_id)
        if session is None:
            raise NotFound(
                f"session {session_id[:64]!r} is not known here: it ended long ago, or its gateway "
                "started over; open it again with its rollout_id"
            )
        if not session.admits(key):
            raise Unauthorized("this is not the session's key; send the api_key that came with it")
        return session

    def describe(self, session: Session, base_url: str | None = None) -> SessionResponse:
        """Return what a client needs to run the session.

        Args:
            base_url: what the client reached this gateway by, if that is its name; None: `address`.
        Raises:
            ConfigError: the gateway's own URL is unknown.
        """
        base = self._config.public_url or base_url or self.address
        if base is None:
            raise ConfigError(
                "where agents reach this gateway is not known; set sessions.public_url"
            )
        base = base.rstrip("/")
        left_s = session.opened_at + self._lifetime_s - monotonic()
        return SessionResponse(
            session_id=session.id,
            rollout_id=session.sample.rollout_id,
            api_key=session.key,
            openai_url=base + paths.SESSION_OPENAI.format(session_id=session.id),
            anthropic_url=base + paths.SESSION_ANTHROPIC.format(session_id=session.id),
            end_url=base + paths.SESSION_END.format(session_id=session.id),
            expires_in_s=max(0.0, left_s),
        )

    def _remember(self, session: Session) -> None:
        self._ended[session.id] = session
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)


def later(message: str) -> QueueFull:
    """A refusal that holds for now only."""
    error = QueueFull(f"{message}; try again later")
    error.retry_after_s = RETRY_AFTER_S
    return error
