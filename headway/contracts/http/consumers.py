"""Consumers of rollouts."""

from __future__ import annotations

from pydantic import Field

from headway.contracts.config.base import MAX_COUNT, Config, Identifier
from headway.contracts.types import ConsumerSpec, PolicyVersion


class ConsumerRequest(Config):
    """`POST /v1/consumer`: see `ConsumerSpec`."""

    consumer: Identifier
    batch_size: int = Field(ge=1, lt=MAX_COUNT)
    max_staleness: int = Field(ge=0, lt=MAX_COUNT)
    step: int = Field(ge=-1, lt=MAX_COUNT)
    version: PolicyVersion = Field(ge=0)

    @classmethod
    def of(cls, spec: ConsumerSpec) -> ConsumerRequest:
        """Return the request that attaches this consumer."""
        return cls(
            consumer=spec.consumer,
            batch_size=spec.batch_size,
            max_staleness=spec.max_staleness,
            step=spec.step,
            version=spec.version,
        )


class ConsumerResponse(Config):
    given_back: int
    """Groups that a former incarnation had received but not kept."""
    version: PolicyVersion
    """Committed version on the serving side."""
    term: int
    """Number of this attachment: what the consumer waits for, consumes and publishes carries it, and an
    older incarnation of the same consumer is refused."""


class DetachRequest(Config):
    """`DELETE /v1/consumer`: what the consumer has not consumed is cancelled, attached or not."""

    consumer: Identifier


class DetachResponse(Config):
    cancelled: int
    """Trajectories that were queued, running or unconsumed."""
