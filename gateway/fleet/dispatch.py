"""One request on its way to a server, or to another one.

- Sent elsewhere, at no cost: what a server refused because it drains, is full or cannot be reached.
- Started over elsewhere, a few times: a request whose server was lost or quarantined. One that is
  streamed goes on from the tokens so far (`StreamProgress`). (To have all go on, each would have to be
  streamed here: measured, 35 us of CPU per token instead of 2, and as much on the server.)
- Failed for good: what was in flight when servers died, `max_deaths` times. It may have killed them, and
  must not kill them all; who shared a server with it twice is failed, too. Servers that die together
  count once.
- Never sent: what a server cannot hold (`max_context_tokens`) goes to one that can; what none could that
  was seen lately is refused, and of one that drains or was lost it waits for the return.
- Sent to one other server: what the first one refused. If that one answers it, the first had failed.
- Raised: what a server answered. The caller may try again; a server that fails too often is quarantined.

One that was aborted comes back as `interrupt` with the tokens so far, for who asked to go on from
(`resume.generate_whole`).
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import count

from gateway.fleet.member import Member
from gateway.fleet.members import LIES, Members
from gateway.fleet.routing import Router, choose, load_of
from gateway.fleet.stream_progress import StreamProgress
from gateway.versions.publication_state import PublicationState
from headway.contracts.config.gateway import FleetConfig
from headway.contracts.context import check_context
from headway.contracts.engines import OnDelta
from headway.contracts.errors import (
    BackendError,
    Draining,
    LethalRequest,
    QueueFull,
    RequestTooLong,
    ServiceError,
    StaleVersion,
)
from headway.contracts.http.generation import GenerationAbortRequest
from headway.contracts.http.paths import GENERATION_ABORT
from headway.contracts.http.weights import WeightRecord
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion
from headway.runtime.clock import running_clock
from headway.runtime.connections import NotConnected
from headway.runtime.tasks import cancel_and_wait

JITTER = 0.25
"""Share by which the wait for a full server varies."""
SAME_MOMENT_S = 1.0
"""Servers that end together, with their machine for example, are all known to be lost after so long."""
RID_CHARS = 110
"""Maximum length of a request's id, so that a suffix fits."""
SHORTEST_BUSY_S = 0.05
"""After a refusal a server has no room for so long, whatever it says: others are asked meanwhile."""
ABORT_TIMEOUT_S = 5.0
MAX_LOSSES = 2
"""Servers that a request may be lost with before that is its caller's to know."""


class Dispatcher:
    """Chooses a server for each request; used on one event loop."""

    def __init__(
        self,
        config: FleetConfig,
        members: Members,
        state: PublicationState,
        has: Callable[[PolicyVersion], bool],
        check_adapter: Callable[[str], None],
        ends: Collection[int] = (),
    ) -> None:
        """Args:
        has: whether a version serves, or servers stay at it.
        check_adapter: raises `DataError` for one that no server is to hold.
        ends: tokens that may end a sequence.
        """
        self._config = config
        self._members = members
        self._state = state
        self._has = has
        self._check_adapter = check_adapter
        self._ends = ends
        self._asked: dict[str, tuple[str, Member]] = {}
        """By the id that a request has at a server: its own one, and that server."""
        self.router = Router()
        self._routed: WeightRecord | None = None
        self._mark = uuid.uuid4().hex[:8]
        """Mark of this gateway: two may send the same request."""
        self._numbers = count()
        self._now = running_clock()

    async def abort(self, rid: str) -> bool:
        """End a request with the tokens so far; false if no server has it at the moment."""
        asked = [(member, sent) for sent, (own, member) in self._asked.items() if own == rid]
        for member, sent in asked:
            with suppress(ServiceError):
                await self._members.order(
                    member, GENERATION_ABORT, GenerationAbortRequest(rid=sent), ABORT_TIMEOUT_S
                )
        return bool(asked)

    async def agenerate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        """Generate one sequence, on whichever server.

        Args:
            on_delta: called with what each step added; it is never taken back.
        Raises:
            BackendError: a server failed it, or none had room for `server_wait_s`.
            DataError: its adapter is not loaded.
            LethalRequest: servers died with it.
            RequestTooLong: no server could hold it.
            StaleVersion: the version that it is for serves no more.
            ServiceError: whatever else a server answered.
        """
        progress = on_delta and StreamProgress(req, on_delta, self._ends)
        deadline = self._now() + self._config.server_wait_s
        losses = 0
        deaths: list[str] = []
        while True:
            if progress is not None:
                rest = progress.rest()
                if isinstance(rest, LLMResponse):
                    return rest
                req = rest
            member = await self._choose(req, deadline, deaths)
            try:
                response = await self._generate_on(member, req, progress)
            except BackendError as error:
                if progress is not None and isinstance(error.__cause__, LIES):
                    progress.is_doubtful = True
                deadline = self._now() + self._config.server_wait_s
                if member.state == "lost" and member.has_died:
                    deaths.append(member.name)
                    if len(deaths) >= self._config.max_deaths:
                        raise _lethal(req, deaths) from error
                    await asyncio.sleep(SAME_MOMENT_S)  # else the next one may be dying already
                else:
                    losses += 1
                    is_gone = member.state == "lost" or member.health.is_quarantined
                    if not is_gone or losses > MAX_LOSSES:
                        raise
            except ServiceError as error:
                if progress is not None:
                    raise
                return await self._appeal(member, req, error)
            else:
                if response is not None:
                    return response if progress is None else progress.whole(response)

    async def _generate_on(
        self, member: Member, req: LLMRequest, progress: StreamProgress | None
    ) -> LLMResponse | None:
        """On this server, and on a second one if it takes long; None if it refused."""
        hedge_after_s = self._config.hedge_after_s
        if hedge_after_s is None or progress is not None:
            return await self._ask(member, req, progress)
        attempts = {asyncio.create_task(self._ask(member, req))}
        try:
            done, _ = await asyncio.wait(attempts, timeout=hedge_after_s)
            other = None if done else self._second(req, member)
            if other is not None:
                attempts.add(asyncio.create_task(self._ask(other, req)))
            return await _first_answer(attempts)
        finally:
            await cancel_and_wait(attempts)

    async def _appeal(self, member: Member, req: LLMRequest, error: ServiceError) -> LLMResponse:
        """Send a request that one server refused to another one.

        Raises:
            ServiceError: the refusal; nobody else answered.
        """
        other = None if isinstance(error, StaleVersion) else self._second(req, member)
        if other is None:
            raise error
        try:
            response = await self._ask(other, req)
        except ServiceError:
            raise error from None
        if response is None:
            raise error
        # Servers may differ in what they hold, and what is an error of theirs was counted already.
        if not isinstance(error, RequestTooLong) and type(error) is not ServiceError:
            self._members.charge(member, f"{other.name} answered what it refused: {error}")
        return response

    async def _ask(
        self, member: Member, req: LLMRequest, progress: StreamProgress | None = None
    ) -> LLMResponse | None:
        """None: it did not take the request."""
        # An id of its own each time: a server may not have noticed yet that a request sent before
        # was given up.
        rid = f"{req.rid[:RID_CHARS]}.{self._mark}{next(self._numbers):x}"
        load = load_of(req)
        member.outstanding += load
        self._asked[rid] = (req.rid, member)
        try:
            on_delta = None if progress is None else progress.add
            response = await self._members.generate(member, req, rid, on_delta)
            self._members.note_room(member)
            return response
        except Draining:
            return None
        except BackendError as error:
            if isinstance(error.__cause__, NotConnected):
                return None
            raise
        except QueueFull as error:
            wait_s = max(error.retry_after_s, SHORTEST_BUSY_S) * random.uniform(1.0, 1.0 + JITTER)
            member.busy_until = self._now() + wait_s
            return None
        finally:
            member.outstanding -= load
            del self._asked[rid]

    async def _choose(self, req: LLMRequest, deadline: float, shunned: Collection[str]) -> Member:
        """The free server that the router names.

        Args:
            shunned: servers that get it only if there are no others.
        """
        while True:
            arrival, now = self._members.arrival.event(), self._now()
            ready = self._candidates(req)
            if not ready:
                gconfig, limits = req.gconfig, self._members.context_limits()
                check_context(len(req.input_ids), gconfig.max_new_tokens, limits.largest)
            if shunned:
                ready = [one for one in ready if one.name not in shunned] or ready
            free = [member for member in ready if member.is_free(now)]
            if free and now < deadline:
                return self._route(req, free)
            if now >= deadline:
                known = {status.server_id: status.state for status in self._members.statuses()}
                raise BackendError(
                    "no generation server was ready and had room for "
                    f"{self._config.server_wait_s:g} s, of those that hold {load_of(req)} tokens; "
                    f"known: {known}"
                )
            moments = [moment for member in ready if (moment := member.free_at()) > now]
            with suppress(TimeoutError):
                async with asyncio.timeout(min([deadline, *moments]) - now):
                    await arrival.wait()

    def _candidates(self, req: LLMRequest) -> list[Member]:
        """The servers that take such requests and can hold this one."""
        load = load_of(req)
        return [one for one in self._at_version(req) if one.holds(load)]

    def _at_version(self, req: LLMRequest) -> list[Member]:
        """Those that stay at its version, if there are any, else those that serve it.

        The version of a request for an adapter is the adapter's, and each server checks it.
        """
        if req.adapter is not None:
            self._check_adapter(req.adapter)
            return [one for one in self._members.ready() if req.adapter in one.adapters]
        if req.version is None:
            return self._members.ready()
        if not self._has(req.version):
            raise StaleVersion(
                f"version {req.version} serves no more; {self._state.version} does (no server is "
                "reserved for it)"
            )
        there = self._members.at(req.version)
        return [one for one in there if one.state == "reserved"] or there

    def _route(self, req: LLMRequest, free: Sequence[Member]) -> Member:
        if self._routed != self._state.committed:
            self._routed = self._state.committed
            self.router.forget()  # what was computed with other weights is useless
        lanes = {member.name: member for member in free}
        return lanes[self.router.choose(req, lanes)]

    def _second(self, req: LLMRequest, first: Member) -> Member | None:
        """The least loaded of the other servers."""
        now = self._now()
        free = [one for one in self._candidates(req) if one.is_free(now) and one is not first]
        lanes = {member.name: member for member in free}
        return lanes[choose(lanes, load_of(req))] if lanes else None


async def _first_answer(
    attempts: Collection[asyncio.Task[LLMResponse | None]],
) -> LLMResponse | None:
    """The first that is an answer; if none is, what came last.

    Raises:
        ServiceError: that was one.
    """
    left = set(attempts)
    while True:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for attempt in done:
            if attempt.exception() is None and attempt.result() is not None:
                return attempt.result()
        if not left:
            return done.pop().result()


def _lethal(req: LLMRequest, deaths: Sequence[str]) -> LethalRequest:
    settings = req.gconfig.model_dump(mode="json", exclude_defaults=True)
    return LethalRequest(
        f"a request with {len(req.input_ids)} prompt tokens and gconfig={settings} was in flight at "
        f"{', '.join(deaths)} when they died; no other server gets it. If others killed them, submit "
        "it again, or raise fleet.max_deaths"
    )
