"""`RolloutQueue` on Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.ledger.auditor import LedgerAuditor
from gateway.ledger.on_redis.answers import log_of, texts
from gateway.ledger.on_redis.calls import PAGE, Argument, WithCalls, optional
from gateway.ledger.refusals import other_content, queue_full
from headway.contracts.errors import QueueFull
from headway.contracts.types import RolloutRequest


class RedisRolloutQueue(WithCalls):
    """Submissions, ends before their time, second lives, and forgetting."""

    async def submit(
        self,
        requests: Sequence[RolloutRequest],
        max_queued: int,
        max_queued_per_consumer: int | None = None,
    ) -> list[bool]:
        known: dict[str, str] = {}
        while True:
            args: list[Argument] = [max_queued, optional(max_queued_per_consumer)]
            for request in requests:
                args += _fields(request)
                args.append(known.get(request.rollout_id) or request.model_dump_json())
            status, *answer = await self._calls.change("submit", *args)
            if status == b"ok":
                return [bool(flag) for flag in answer[0]]
            if status == b"full":
                raise _full(answer, max_queued, max_queued_per_consumer)
            rollout_id, text = texts(answer)
            _check_same(requests, rollout_id, text)
            known[rollout_id] = text

    async def cancel(self, rollout_ids: Sequence[str], reason: str) -> int:
        return await self._calls.count("cancel", reason, *rollout_ids)

    async def cancel_all(self, consumer: str, reason: str) -> int:
        return await self._calls.count("cancel_all", consumer, reason)

    async def revive(self, rollout_ids: Sequence[str]) -> int:
        return await self._calls.count("revive", *rollout_ids)

    async def compact(self, older_than_s: float) -> int:
        groups = 0
        while True:
            _, rows = await self._calls.read("read_ended", older_than_s, PAGE)
            if not rows:
                return groups
            args: list[Argument] = []
            for rollout_id, changed_at, *log in rows:
                proof = LedgerAuditor()
                proof.add(*log_of(log))
                found = proof.findings
                args += [rollout_id, changed_at, found.lost, found.duplicated, found.requeues]
                args.append(found.max_staleness)
            groups += await self._calls.count("forget", *args)


def _fields(request: RolloutRequest) -> list[Argument]:
    return [
        request.rollout_id,
        request.consumer,
        request.prompt.group_size,
        request.priority,
        request.versions.min_version or 0,
        optional(request.timeout_s),
    ]


def _check_same(requests: Sequence[RolloutRequest], rollout_id: str, known: str) -> None:
    """Parsed, since an older release may have written it with fewer fields."""
    stored = RolloutRequest.model_validate_json(known)
    if any(request.rollout_id == rollout_id and request != stored for request in requests):
        raise other_content(rollout_id)


def _full(answer: Sequence[Any], max_queued: int, max_queued_per_consumer: int | None) -> QueueFull:
    queued, consumer = answer
    if not consumer:
        return queue_full(queued, max_queued)
    return queue_full(queued, max_queued_per_consumer or 0, consumer.decode())
