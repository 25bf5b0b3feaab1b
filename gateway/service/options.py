"""What a rollout service is made of besides its generator and its ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from gateway.components.shared_services import NoOutbound, NoSandbox, SharedServices
from gateway.ledger.observer import LedgerObserver
from gateway.publishing.updates import ABANDON_S
from gateway.sessions.sessions import Sessions
from headway.contracts.config.gateway import RetentionConfig


def no_shared_services() -> SharedServices:
    """Neither programs nor calls."""
    return SharedServices(NoSandbox(), NoOutbound())


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Parts of a service besides its generator; the defaults are those of one server alone."""

    services: SharedServices
    sessions: Sessions | None = None
    limit: Callable[[], int] | None = None
    """Maximum number of trajectories running at once; None takes `executor.max_concurrent`."""
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    abandon_s: float = ABANDON_S
    metrics: CollectorRegistry | None = None
    """Registry for the service's own metrics."""
    observers: Sequence[LedgerObserver] = ()
    """Observers of how attempts ended and of what was delivered."""
