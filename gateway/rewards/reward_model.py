"""A reward that another service gives."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from gateway.components.shared_services import SharedServices
from gateway.rewards.base import Answer
from headway.contracts.errors import BackendError, RewardError, RewardOutage
from headway.contracts.types import RewardResult, Verdict


class RewardModelResponse(BaseModel):
    """Response of the service; other fields are ignored."""

    score: float
    verdict: Verdict = "scored"
    details: dict[str, object] = {}


class RewardModel:
    """Posts `{prompt, completion, data}` to a service that answers `{score}`.

    It may add `verdict` and `details`. A service that does not answer is asked again; it never becomes
    a score.
    """

    def __init__(
        self,
        url: Annotated[
            str,
            Field(
                pattern=r"^https?://[^\s]+$",
                max_length=2048,
                description="Where to post; the service's config must allow it (`outbound.allow`).",
            ),
        ],
        timeout_s: Annotated[float, Field(gt=0.0, le=600.0, description="For one call.")] = 30.0,
    ) -> None:
        self._url = url
        self._timeout_s = timeout_s

    async def score(self, answer: Answer, services: SharedServices) -> RewardResult:
        body = {
            "prompt": answer.prompt,
            "completion": answer.completion,
            "data": dict(answer.data),
        }
        try:
            returned = await services.outbound.post(self._url, body, self._timeout_s)
        except BackendError as error:
            raise RewardOutage(f"the reward model did not answer: {error.message}") from error
        try:
            response = RewardModelResponse.model_validate(returned)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(str(part) for part in problem["loc"]) or "the body"
            raise RewardError(
                f"the reward model at {self._url} answered something else than "
                f'{{"score": number}}; {place}: {problem["msg"]}'
            ) from error
        return RewardResult(response.score, response.details, response.verdict)
