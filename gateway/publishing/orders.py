"""The orders of a publication, as one server gets them: prepare, commit, abort."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence

from gateway.fleet.member import Member
from gateway.fleet.members import Members
from headway.contracts.config.gateway import FleetConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import Fenced, SyncError
from headway.contracts.http.paths import WEIGHTS_ABORT, WEIGHTS_COMMIT, WEIGHTS_PREPARE
from headway.contracts.http.weights import (
    GroupRankBody,
    WeightAbortRequest,
    WeightCommitRequest,
    WeightPrepareRequest,
    WeightPrepareResponse,
    WeightRecord,
    WeightUpdateResponse,
    held_root,
    is_group,
)
from headway.contracts.types import PolicyVersion

MAX_PEERS = 3
"""Maximum number of servers to fetch from when a version's path fails."""
ABORT_TIMEOUT_S = 5.0
"""Timeout of an abort: a server that does not receive it drops what it staged by itself, later."""


def group_ranks(members: Sequence[Member]) -> list[GroupRankBody]:
    """Return the ranks of servers in a process group, behind the trainer at rank 0."""
    world_size = 1 + sum(member.report.num_ranks for member in members)
    ranks = [1]
    for member in members:
        ranks.append(ranks[-1] + member.report.num_ranks)
    return [GroupRankBody(rank=rank, world_size=world_size) for rank in ranks[:-1]]


class WeightOrders:
    """Sends them, and notes in the table what they led to."""

    def __init__(self, config: FleetConfig, members: Members) -> None:
        self._config = config
        self._members = members

    async def prepare(
        self,
        member: Member,
        record: WeightRecord,
        epoch: int,
        group_rank: GroupRankBody | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Stage a version on one server; the digest of what it staged, empty if it cannot know.

        Raises:
            SyncError: it refused, or no place is left to fetch the version from.
            BackendError: it is gone, or too slow.
        """
        path, *fallbacks = self._sources(member, record, group_rank)
        staging_s = self._config.update_timeout_s if timeout_s is None else timeout_s
        order = WeightPrepareRequest(
            epoch=epoch,
            version=record.version,
            path=path,
            digest=record.digest or None,
            fallbacks=tuple(fallbacks),
            group_rank=group_rank,
            # What is staged must not expire while others commit before it.
            timeout_s=staging_s + self._config.commit_timeout_s * self._num_turns(),
        )
        try:
            staged = await self._members.ask(
                member, WEIGHTS_PREPARE, order, WeightPrepareResponse, staging_s
            )
        except Fenced:
            raise
        except SyncError as error:
            if group_rank is not None or not is_group(path):
                raise
            raise SyncError(
                f"version {record.version} came through a process group, and neither it nor a server "
                f"that serves holds it; publish it again ({error})"
            ) from error
        return staged.digest

    async def commit(
        self, member: Member, record: WeightRecord, epoch: int, policy: UpdatePolicy | None = None
    ) -> int:
        """Swap it in; returns the sequences that were running there at that moment.

        Raises:
            ServiceError: it has another version, or its version is unknown.
        """
        order = WeightCommitRequest(epoch=epoch, version=record.version, policy=policy)
        answer = await self._members.ask(
            member, WEIGHTS_COMMIT, order, WeightUpdateResponse, self._config.commit_timeout_s
        )
        self._members.note_version(member, answer.version, answer.digest)
        if answer.version != record.version:
            raise SyncError(
                f"it serves version {answer.version} after a commit of {record.version}"
            )
        return answer.running

    async def abort(self, members: Iterable[Member], version: PolicyVersion, epoch: int) -> None:
        """Let them forget it, if they can be reached."""
        order = WeightAbortRequest(epoch=epoch, version=version)
        await asyncio.gather(
            *(
                self._members.order(member, WEIGHTS_ABORT, order, ABORT_TIMEOUT_S)
                for member in members
                if not member.is_leaving
            ),
            return_exceptions=True,
        )

    def _sources(
        self, member: Member, record: WeightRecord, group_rank: GroupRankBody | None
    ) -> list[str]:
        """The path of a version, and then the servers that hold it."""
        peers = [
            other.report.url + held_root(record.version)
            for other in self._members.serving()
            if other is not member and other.report.version == record.version
        ]
        peers = random.sample(peers, min(MAX_PEERS, len(peers)))
        is_gone = group_rank is None and is_group(record.path)
        # Without peers, only this server itself can still have it: staged, when its gateway died.
        return peers if is_gone and peers else [record.path, *peers]

    def _num_turns(self) -> int:
        is_rolling = self._config.commit_order == "rolling"
        return max(1, len(self._members.ready())) if is_rolling else 1
