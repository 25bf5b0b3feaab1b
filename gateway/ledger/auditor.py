"""Replays event logs: what a ledger's tables say must follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from gateway.ledger.transitions import NEXT_STATE, EventName, counts_of
from headway.contracts.http.ledger import LedgerAudit
from headway.contracts.http.rollouts import RolloutState


@dataclass(slots=True)
class AuditFindings:
    """Result of auditing the logs of some rollouts; those of forgotten rollouts are kept as
    numbers."""

    lost: int = 0
    duplicated: int = 0
    requeues: int = 0
    max_staleness: int = 0

    def add(self, other: AuditFindings) -> None:
        """Take in what others amount to."""
        self.lost += other.lost
        self.duplicated += other.duplicated
        self.requeues += other.requeues
        self.max_staleness = max(self.max_staleness, other.max_staleness)


@dataclass(slots=True)
class LedgerAuditor:
    """Fed with every rollout, then compared with the running counts."""

    findings: AuditFindings = field(default_factory=AuditFindings)
    trajectories: Counter[RolloutState] = field(default_factory=Counter)
    _contradicted: int = 0

    def add(
        self, state: str | None, size: int, staleness: int | None, events: Iterable[str]
    ) -> None:
        """One rollout: the state and staleness in its row (None: it has none), and its log."""
        replayed: RolloutState | None = None
        for event in events:
            sources, target = NEXT_STATE.get(cast("EventName", event), ((), None))
            if replayed not in sources:
                if event in ("consume", "submit"):
                    self.findings.duplicated += size
                else:
                    self.findings.lost += size
            self.findings.requeues += size * (event == "requeue")
            replayed = target
        if replayed is not None and state is not None:
            self.trajectories[replayed] += size
        if replayed != state:
            self._contradicted += size
            self.findings.lost += size
        if state == "consumed" and staleness is not None:
            self.findings.max_staleness = max(self.findings.max_staleness, staleness)

    def compare(self, tallies: Mapping[RolloutState, int]) -> None:
        """Count differences between the running counts and the logs."""
        difference = {
            state: tallies.get(state, 0) - self.trajectories[state]
            for state in tallies.keys() | self.trajectories.keys()
        }
        more = sum(number for number in difference.values() if number > 0)
        fewer = -sum(number for number in difference.values() if number < 0)
        self.findings.lost += max(0, max(more, fewer) - self._contradicted)

    def audit(self) -> LedgerAudit:
        """Return the result of the audit."""
        return LedgerAudit(
            counts=counts_of(self.trajectories),
            lost=self.findings.lost,
            duplicated=self.findings.duplicated,
            max_staleness=self.findings.max_staleness,
            requeues=self.findings.requeues,
        )
