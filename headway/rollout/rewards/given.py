"""No verifier: whoever plays the session gives its reward."""

from __future__ import annotations

from headway.contracts.errors import RewardError
from headway.contracts.types import RewardResult
from headway.rollout.facilities import Facilities
from headway.rollout.rewards.base import Answer

GIVEN = "given"
"""Its registered name; what a session has that was submitted without a reward."""


class Given:
    """`AsyncReward` that judges nothing."""

    async def judge(self, answer: Answer, facilities: Facilities) -> float | RewardResult:
        raise RewardError(
            "nobody gave a reward, and none judges: end the session with one, or submit the rollout "
            "with a verifier"
        )
