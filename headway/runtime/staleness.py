"""The one formula that admits, keeps or drops.

With batch size B in trajectories, bound η and version v of a sequence that starts now (AReaL,
arXiv:2505.24298, eq. 3):

    capacity = min(max_concurrent - running, (η + v + 1)·B - (accepted + running))

`accepted` counts every trajectory that was finished and kept since version 0, consumed or not; a
failed, filtered, requeued or dropped one is not in it, so a version consumes exactly B of them and the
bound does not drift. The counts are the ledger's, which holds them exactly for all gateways together:
with `base` = v·B - consumed at the moment a consumer attaches with version v,

    accepted + running = base + consumed + delivered + ready + leased

Admission alone bounds staleness only if groups are consumed in the order they were admitted. A long
generation is overtaken by short ones; so a batch is held back while one of the running groups, admitted
at `v - η` or before, can only be consumed by it. Then nothing is wasted and nothing is consumed staler
than η; what a crash let grow too old is dropped on delivery.

Only the attached consumer's rollouts are bounded; others share the concurrency.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.contracts.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """Bound on how far a consumer's rollouts may run ahead of it."""

    batch_size: int
    """Trajectories consumed per version (B)."""
    max_staleness: int
    """Versions between sampling and consumption, at most (η)."""
    base: int
    """Trajectories of versions that the ledger's counts do not hold: v·B - consumed at the attachment."""

    def budget(self, version: PolicyVersion) -> int:
        """Trajectories that may be leased, ready, delivered or consumed at a version, all in all."""
        return (self.max_staleness + version + 1) * self.batch_size - self.base

    @staticmethod
    def base_of(version: PolicyVersion, batch_size: int, consumed: int) -> int:
        """`base` for a consumer that attaches with a version after having consumed so much."""
        return version * batch_size - consumed
