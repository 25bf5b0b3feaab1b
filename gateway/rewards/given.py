"""No verifier: the client of the session gives its reward."""

from __future__ import annotations

from gateway.components.shared_services import SharedServices
from gateway.rewards.base import Answer
from headway.contracts.errors import RewardError
from headway.contracts.types import RewardResult

GIVEN = "given"
"""Registered name of this reward; a session that was submitted without a reward has it."""


class Given:
    """`AsyncReward` that scores nothing."""

    async def score(self, answer: Answer, services: SharedServices) -> float | RewardResult:
        raise RewardError(
            "nobody gave a reward, and none judges: end the session with one, or submit the rollout "
            "with a verifier"
        )
