"""Rollouts of a step by the rollout service, when the step asks for them.

The call `actor_gen` of every experiment has this interface. There, prompts are submitted ahead of the
step (`trainer.batch_source`); named in a configuration, it runs exactly the step's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.contracts.config.rollout_experiments import PolicyLearner
from headway.contracts.engines import InferenceEngine
from headway.contracts.types import RolloutRequest, TrajectoryGroup
from trainer.interfaces.base import InterfaceContext


class Rollout:
    """The service of the first rank."""

    def __init__(self, service: InferenceEngine | None, timeout_s: float) -> None:
        """
        Args:
            service: None on ranks other than the first.
            timeout_s: for the rollouts of a step.
        """
        self._service = service
        self._timeout_s = timeout_s

    def generate(self, requests: Sequence[RolloutRequest]) -> Sequence[TrajectoryGroup]:
        """Run these prompt groups.

        Raises:
            WaitTimeout: not all of them ended in time.
        """
        if self._service is None:
            return ()
        return self._service.rollout(requests, self._timeout_s).groups


def make(context: InterfaceContext[PolicyLearner]) -> Rollout:
    """Build it as the experiment is configured."""
    return Rollout(context.service, context.config.rollout.wait_timeout_s)
