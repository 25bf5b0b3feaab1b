"""Updates that a trainer broadcasts to one server of the fleet, which offers the others what it received.

A process group of SGLang's has each engine in it under a rank of its own, and a gateway is one engine.
So one server takes part in all groups of a trainer. If it dies, what it received and had not offered to
the others is gone with it: the trainer is told, and joins again.
"""

from __future__ import annotations

from gateway.app.fleet import Fleet
from gateway.app.foreign_weights import ForeignWeights
from gateway.fleet.member import Member
from gateway.publishing.updates import WeightUpdates
from headway.contracts.errors import BackendError, Conflict, NotFound, SyncError
from headway.contracts.http.paths import WEIGHTS_RELAY
from headway.contracts.http.weights import held_root
from headway.contracts.types import WeightUpdateMeta
from headway.dialects.sglang.relay import RelayRequest, RelayResponse, Step
from headway.dialects.sglang.types import EmptyBody, SGLangBody

NOTHING = EmptyBody()


class RelayedUpdates:
    """The server that takes part in the groups, and what became of each step; used on one event loop."""

    def __init__(
        self, fleet: Fleet, weights: ForeignWeights, updates: WeightUpdates, timeout_s: float
    ) -> None:
        """
        Args:
            updates: where versions are published.
            timeout_s: of a step, in which a bucket is received or a whole version put together.
        """
        self._fleet = fleet
        self._weights = weights
        self._updates = updates
        self._timeout_s = timeout_s
        self._server: Member | None = None
        self.is_under_way = False
        """True in a session, and while the server keeps back what the fleet is to serve."""

    async def join(self, body: SGLangBody) -> RelayResponse:
        """Let a server join a group: the one that is in the others, if there are any.

        Raises:
            Conflict: no server takes traffic now.
            ServiceError: it could not.
        """
        if self._server is None or self._server.state == "lost":
            self.is_under_way = False
            self._server = self._pick()
        return await self.take("join", body)

    async def take(self, step: Step, body: SGLangBody = NOTHING) -> RelayResponse:
        """Take a step of an update, and publish the update if it is complete then.

        Raises:
            NotFound: no server is in a group.
            SyncError: the one that was is gone.
            ServiceError: it failed; nothing changed.
        """
        server = self._server
        if server is None:
            raise NotFound("no server is in a group; call init_weights_update_group first")
        order = RelayRequest(
            step=step,
            body=body.model_dump(mode="json", exclude_unset=True),
            version=self._fleet.version,
            head=self._fleet.head,
        )
        answer = await self._relay_to(server, order)
        offered = answer.offered
        if step == "begin" or answer.kept is not None:
            self.is_under_way = True
        elif step == "end" or offered is not None or answer.dropped:
            self.is_under_way = False
        if offered is not None:
            path = server.report.url + held_root(offered.version)
            meta = WeightUpdateMeta(offered.version, path, offered.digest, label=offered.label)
            await self._weights.publish_version(self._updates, meta, offered.aborts)
        if answer.renamed is not None:
            await self._fleet.state.rename(answer.renamed)
        return answer

    async def complete(self) -> None:
        """Publish what came without a session, as it is; nothing if there is nothing.

        Raises:
            ServiceError: as `take`.
        """
        if self.is_under_way:
            await self.take("complete")

    async def _relay_to(self, server: Member, order: RelayRequest) -> RelayResponse:
        try:
            if server.state == "lost":
                raise BackendError(server.reason)
            return await self._fleet.members.ask(
                server, WEIGHTS_RELAY, order, RelayResponse, self._timeout_s
            )
        except BackendError as error:
            if server.state != "lost":
                raise SyncError(
                    f"server {server.name}, which takes part in the group: {error}"
                ) from error
            self._server, self.is_under_way = None, False
            raise SyncError(
                f"server {server.name}, which took part in the group, is gone ({error}), and what it "
                "received with it; nothing changed. Call init_weights_update_group again, and send the "
                "update again"
            ) from error

    def _pick(self) -> Member:
        ready = self._fleet.members.ready()
        if not ready:
            raise Conflict("no server takes traffic now, so none can join a group; try again")
        return min(ready, key=lambda one: one.report.running)
