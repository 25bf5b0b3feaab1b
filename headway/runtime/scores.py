"""Answers to be scored, in chunks, and what became of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.contracts.errors import ErrorBody, ServiceError
from headway.contracts.http.rewards import AnswerToScore, ScoreFailure, ScoreView
from headway.contracts.types import RewardResult

SCORE_CHUNK = 64
"""Maximum answers of one request: they are scored again when it breaks off."""
SCORE_CHUNK_BYTES = 8 << 20


def settle_score(
    judged: ScoreView | ScoreFailure, place: int, failed_score: float | None
) -> RewardResult:
    """The result of an answer.

    Args:
        place: of the answer, for the message.
        failed_score: as of `InferenceEngine.score`.
    Raises:
        ServiceError: there is none; the error that the service reported.
    """
    if isinstance(judged, ScoreView):
        return RewardResult(judged.score, judged.details, judged.verdict)
    body = judged.error
    if failed_score is None:
        failure = ErrorBody(
            code=body.code, message=f"answer {place}: {body.message}", retryable=body.retryable
        )
        raise ServiceError.from_body(failure)
    return RewardResult(failed_score, {"error": body.message})


def chunks_of(answers: Sequence[AnswerToScore]) -> Iterator[tuple[AnswerToScore, ...]]:
    """Bounded in number and in bytes, except for an answer that is larger by itself."""
    chunk: list[AnswerToScore] = []
    size = 0
    for answer in answers:
        own = len(answer.model_dump_json())
        if chunk and (len(chunk) == SCORE_CHUNK or size + own > SCORE_CHUNK_BYTES):
            yield tuple(chunk)
            chunk, size = [], 0
        chunk.append(answer)
        size += own
    if chunk:
        yield tuple(chunk)
