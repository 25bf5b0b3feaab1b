"""The ledger on Redis: several gateways share it, each transition is one Lua script.

Clocks are the server's. What survives its crash is what its append-only file holds: everything under
`appendfsync always`; under `everysec` a power cut may take the last second, notes too, a kill nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

from headway.contracts.codec import encode_groups
from headway.contracts.http.ledger import LedgerAudit, LedgerCounts
from headway.contracts.http.rollouts import RolloutState
from headway.contracts.types import PolicyVersion, RolloutRequest, TrajectoryGroup
from headway.rollout.ledger.base import Admission, Delivery, Entry, Event, Lease
from headway.rollout.ledger.on_redis.address import parse_address
from headway.rollout.ledger.on_redis.answers import (
    check_consumed,
    delivery_of,
    entry_of,
    event_of,
    lease_of,
    page_of,
    pairs,
    texts,
)
from headway.rollout.ledger.on_redis.calls import Argument, Calls
from headway.rollout.ledger.owner import place_of
from headway.rollout.ledger.proof import Findings, Proof
from headway.rollout.ledger.refusals import other_content, queue_full
from headway.rollout.ledger.transitions import NEXT_STATE, STATES, EventName, counts_of, fenced

PAGE = 500
"""Rollouts that one script reads or forgets: others wait for it."""
MAX_AUDITS = 5


class RedisLedger:
    """`Ledger` on Redis; see `on_redis.keys` for what lies there."""

    is_shared = True

    def __init__(self, url: str) -> None:
        self._address = parse_address(url)
        self._calls = Calls(self._address)
        self._owner = ""
        self._lease_s = 0.0

    async def connect(self) -> None:
        await self._calls.start()

    async def open(self, owner: str, lease_s: float) -> None:
        self._owner, self._lease_s = owner, lease_s
        await self.connect()
        try:
            await self._calls.change("inherit", place_of(owner), owner)
        except BaseException:
            await self.close()
            raise

    async def revision(self) -> int:
        return int(await self._calls.get("revision") or 0)

    async def submit(
        self,
        requests: Sequence[RolloutRequest],
        max_queued: int,
        max_queued_each: int | None = None,
    ) -> list[bool]:
        known: dict[str, str] = {}
        while True:
            args: list[Argument] = [max_queued, _text(max_queued_each)]
            for request in requests:
                args += _fields(request)
                args.append(known.get(request.rollout_id) or request.model_dump_json())
            status, *answer = await self._calls.change("submit", *args)
            if status == b"ok":
                return [bool(flag) for flag in answer[0]]
            if status == b"full":
                raise _full(answer, max_queued, max_queued_each)
            rollout_id, text = texts(answer)
            _check_same(requests, rollout_id, text)
            known[rollout_id] = text

    async def lease(self, admission: Admission) -> list[Lease]:
        _, rows = await self._calls.change(
            "lease",
            admission.version,
            admission.free,
            admission.consumer or "",
            _text(admission.budget),
            self._owner,
            self._lease_s,
        )
        return [lease_of(row) for row in rows]

    async def renew(self, keys: Collection[str]) -> set[str]:
        args = [part for key in keys for part in key.rsplit("#", 1)]
        _, lost = await self._calls.read("renew", self._lease_s, *args)
        return set(texts(lost))

    async def expire(self) -> int:
        return int((await self._calls.change("expire"))[1])

    async def complete(self, lease: Lease, group: TrajectoryGroup) -> None:
        oldest = group.oldest_version
        await self._report(
            lease,
            "complete",
            f"oldest_version={oldest}",
            "",
            group.mean_reward,
            oldest,
            encode_groups([group]),
        )

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
            _text(mean_reward),
            *result,
        )
        if answer[0] != b"ok":
            raise fenced(lease.rollout_id, lease.fence, answer[1].decode() or None)

    async def deliver(
        self,
        delivery_id: str,
        count: int,
        consumer: str,
        version: PolicyVersion,
        max_staleness: int | None,
    ) -> Delivery:
        answer = await self._calls.read(
            "deliver", delivery_id, count, consumer, version, _text(max_staleness)
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
        return int((await self._calls.change("give_back", consumer, step))[1])

    async def cancel(self, rollout_ids: Sequence[str], reason: str) -> int:
        return int((await self._calls.change("cancel", reason, *rollout_ids))[1])

    async def cancel_all(self, consumer: str, reason: str) -> int:
        return int((await self._calls.change("cancel_all", consumer, reason))[1])

    async def revive(self, rollout_ids: Sequence[str]) -> int:
        return int((await self._calls.change("revive", *rollout_ids))[1])

    async def get(self, rollout_id: str, with_payload: bool = False) -> Entry | None:
        _, flat, payload = await self._calls.read("get", rollout_id, int(with_payload))
        return entry_of(flat, payload or None) if flat else None

    async def find(
        self,
        state: RolloutState | None = None,
        consumer: str | None = None,
        limit: int = 100,
        before: str | None = None,
    ) -> list[Entry]:
        answer = await self._calls.read("find", state or "", consumer or "", limit, before or "")
        return page_of(answer, before)

    async def events(self, rollout_id: str) -> list[Event]:
        _, lines = await self._calls.read("events", rollout_id)
        return [event_of(line) for line in lines]

    async def counts(self, consumer: str | None = None) -> LedgerCounts:
        _, *trajectories = await self._calls.read("counts", consumer or "", *STATES)
        return counts_of(dict(zip(STATES, trajectories, strict=True)))

    async def audit(self) -> LedgerAudit:
        for _ in range(MAX_AUDITS):
            proof, tallies, is_still = await self._replay()
            if is_still:
                proof.compare(tallies)
                break
        else:
            # Others change it all the while: every log was compared with its rollout, their sum was not.
            proof.trajectories.clear()
            proof.trajectories.update(tallies)
        return proof.audit()

    async def _replay(self) -> tuple[Proof, dict[RolloutState, int], bool]:
        """Replay all logs; whether nothing changed meanwhile."""
        proof, after = Proof(), "-inf"
        before, _, _, _ = await self._read_tallies()
        while after:
            _, rows, last = await self._calls.read("read_logs", after, PAGE)
            for state, size, staleness, events in rows:
                proof.add(*_row(state, size, staleness), texts(events))
            after = last.decode()
        revision, tallies, forgotten, findings = await self._read_tallies()
        proof.trajectories.update(forgotten)
        proof.findings.add(findings)
        return proof, tallies, revision == before

    async def _read_tallies(
        self,
    ) -> tuple[int, dict[RolloutState, int], dict[RolloutState, int], Findings]:
        _, revision, trajectories, forgotten, findings = await self._calls.read("read_tallies")
        tallies = {
            field.rstrip(" "): int(number)
            for field, number in pairs(trajectories).items()
            if field.endswith(" ")
        }
        return (
            int(revision),
            cast("dict[RolloutState, int]", tallies),
            cast("dict[RolloutState, int]", _numbers(forgotten)),
            Findings(**_numbers(findings)),
        )

    async def compact(self, older_than_s: float) -> int:
        groups = 0
        while True:
            _, rows = await self._calls.read("read_ended", older_than_s, PAGE)
            if not rows:
                return groups
            args: list[Argument] = []
            for rollout_id, changed_at, state, size, staleness, events in rows:
                proof = Proof()
                proof.add(*_row(state, size, staleness), texts(events))
                found = proof.findings
                args += [rollout_id, changed_at, found.lost, found.duplicated, found.requeues]
                args.append(found.max_staleness)
            groups += (await self._calls.change("forget", *args))[1]

    async def get_note(self, key: str) -> str | None:
        value = await self._calls.get("notes", key)
        return None if value is None else value.decode()

    async def put_note(self, key: str, value: str) -> None:
        await self._calls.change("put_note", key, value)

    async def swap_note(self, key: str, old: str | None, new: str) -> bool:
        is_known = int(old is not None)
        answer = await self._calls.change("swap_note", key, is_known, old or "", new)
        return bool(answer[1])

    async def close(self) -> None:
        await self._calls.stop()


def _text(value: float | None) -> Argument:
    """For Lua: the empty string stands for None."""
    return "" if value is None else value


def _fields(request: RolloutRequest) -> list[Argument]:
    return [
        request.rollout_id,
        request.consumer,
        request.prompt.group_size,
        request.priority,
        request.versions.min_version or 0,
        _text(request.timeout_s),
    ]


def _check_same(requests: Sequence[RolloutRequest], rollout_id: str, known: str) -> None:
    """Parsed, since an older release may have written it with fewer fields."""
    stored = RolloutRequest.model_validate_json(known)
    if any(request.rollout_id == rollout_id and request != stored for request in requests):
        raise other_content(rollout_id)


def _full(answer: Sequence[Any], max_queued: int, max_queued_each: int | None) -> Exception:
    queued, consumer = answer
    if not consumer:
        return queue_full(queued, max_queued)
    return queue_full(queued, max_queued_each or 0, consumer.decode())


def _row(state: bytes, size: Any, staleness: bytes) -> tuple[str | None, int, int | None]:
    return state.decode() or None, int(size), int(staleness) if staleness else None


def _numbers(flat: Sequence[Any]) -> dict[str, int]:
    return {name: int(number) for name, number in pairs(flat).items()}
