"""`DeliveryQueue` on Redis."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.ledger.on_redis.answers import check_consumed, delivery_of
from gateway.ledger.on_redis.calls import WithCalls, optional
from gateway.ledger.records import Delivery
from headway.contracts.types import PolicyVersion


class RedisDeliveryQueue(WithCalls):
    """`DeliveryQueue` on Redis: from a ready group to its consumption."""

    async def deliver(
        self,
        delivery_id: str,
        count: int,
        consumer: str,
        version: PolicyVersion,
        max_staleness: int | None,
        learner: PolicyVersion | None = None,
    ) -> Delivery:
        answer = await self._calls.read(
            "deliver",
            *(delivery_id, count, consumer),
            *(version, optional(max_staleness), max(version, learner or 0)),
        )
        return delivery_of(answer, delivery_id)

    async def deliver_exactly(
        self, delivery_id: str, rollout_ids: Sequence[str], version: PolicyVersion
    ) -> Delivery:
        answer = await self._calls.read("deliver_exactly", delivery_id, version, *rollout_ids)
        return delivery_of(answer, delivery_id)

    async def outstanding(self, consumer: str) -> int:
        _, *groups = await self._calls.read("outstanding", consumer)
        return sum(groups)

    async def consume(self, rollout_ids: Sequence[str], step: int, checkpoint_step: int) -> None:
        check_consumed(await self._calls.change("consume", step, checkpoint_step, *rollout_ids))

    async def give_back(self, consumer: str, step: int) -> int:
        return await self._calls.count("give_back", consumer, step)
