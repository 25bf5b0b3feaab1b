"""`LedgerReader` on Redis."""

from __future__ import annotations

from gateway.ledger.auditor import LedgerAuditor
from gateway.ledger.on_redis.answers import (
    Tallies,
    entry_of,
    event_of,
    log_of,
    page_of,
    tallies_of,
)
from gateway.ledger.on_redis.calls import PAGE, WithCalls
from gateway.ledger.records import Entry, Event
from gateway.ledger.transitions import STATES, counts_of
from headway.contracts.http.ledger import LedgerAudit, LedgerCounts
from headway.contracts.http.rollouts import RolloutState

MAX_AUDITS = 5


class RedisLedgerReader(WithCalls):
    """Queries to the ledger; an audit reads batch by batch, and others work meanwhile."""

    async def revision(self) -> int:
        return int(await self._calls.get("revision") or 0)

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
            proof, before, after = await self._replay()
            if after.revision == before.revision:
                proof.compare(after.trajectories)
                break
        else:
            # Others change it all the while: every log was compared with its rollout, their sum was not.
            proof.trajectories.clear()
            proof.trajectories.update(after.trajectories)
        return proof.audit()

    async def _replay(self) -> tuple[LedgerAuditor, Tallies, Tallies]:
        """Replay all logs; the tallies before and after it."""
        proof, last = LedgerAuditor(), "-inf"
        before = tallies_of(await self._calls.read("read_tallies"))
        while last:
            _, rows, end = await self._calls.read("read_logs", last, PAGE)
            for row in rows:
                proof.add(*log_of(row))
            last = end.decode()
        after = tallies_of(await self._calls.read("read_tallies"))
        proof.trajectories.update(after.forgotten)
        proof.findings.add(after.findings)
        return proof, before, after
