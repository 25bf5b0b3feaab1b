"""`WorkQueue` on Redis."""

from __future__ import annotations

from collections.abc import Collection

from gateway.ledger.on_redis.answers import lease_of, texts
from gateway.ledger.on_redis.calls import Argument, WithCalls, optional
from gateway.ledger.records import Capacity, Lease
from gateway.ledger.transitions import NEXT_STATE, EventName, fenced
from headway.contracts.codec import encode_groups
from headway.contracts.types import TrajectoryGroup
from headway.runtime.offload import offload


class RedisWorkQueue(WithCalls):
    """`WorkQueue` on Redis: from the lease of a rollout to the end of that attempt."""

    _owner = ""
    _lease_s = 0.0

    async def lease(self, admission: Capacity) -> list[Lease]:
        _, rows = await self._calls.change(
            "lease",
            admission.version,
            admission.free,
            admission.consumer or "",
            optional(admission.budget),
            self._owner,
            self._lease_s,
        )
        return [lease_of(row) for row in rows]

    async def renew(self, keys: Collection[str]) -> set[str]:
        args = [part for key in keys for part in key.rsplit("#", 1)]
        _, lost = await self._calls.read("renew", self._lease_s, *args)
        return set(texts(lost))

    async def expire(self) -> int:
        return await self._calls.count("expire")

    async def complete(self, lease: Lease, group: TrajectoryGroup) -> None:
        oldest, size = group.oldest_version, sum(row.num_tokens for row in group.trajectories)
        payload = await offload(size, encode_groups, [group])
        detail = f"oldest_version={oldest}"
        await self._report(lease, "complete", detail, "", group.mean_reward, oldest, payload)

    async def drop_filtered(self, lease: Lease, reason: str, mean_reward: float) -> None:
        await self._report(lease, "filter", reason, reason, mean_reward)

    async def fail(self, lease: Lease, reason: str) -> None:
        await self._report(lease, "fail", reason, reason)

    async def requeue(self, lease: Lease, reason: str) -> None:
        await self._report(lease, "requeue", reason, reason)

    async def _report(
        self,
        lease: Lease,
        event: EventName,
        detail: str,
        reason: str,
        mean_reward: float | None = None,
        *result: Argument,
    ) -> None:
        _, target = NEXT_STATE[event]
        answer = await self._calls.change(
            "report",
            lease.rollout_id,
            lease.fence,
            event,
            target,
            detail,
            reason,
            optional(mean_reward),
            *result,
        )
        if answer[0] != b"ok":
            raise fenced(lease.rollout_id, lease.fence, answer[1].decode() or None)
