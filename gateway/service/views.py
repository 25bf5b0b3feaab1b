"""Contents of the ledger and the codec as JSON, for people and for clients without safetensors."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.ledger.records import Entry, Event, row_of
from gateway.rewards.batch_scorer import ScoreOutcome
from headway.contracts.codec import decode_groups
from headway.contracts.errors import ServiceError
from headway.contracts.http.rewards import ScoreFailure, ScoreView
from headway.contracts.http.rollouts import (
    EventView,
    GroupView,
    RolloutSummary,
    RolloutView,
    TrajectoryView,
    TurnView,
)
from headway.contracts.types import Trajectory, TrajectoryGroup
from headway.text.streaming import token_texts
from headway.text.tokenizer import TextTokenizer


def batch_json(payloads: Sequence[bytes], tokenizer: TextTokenizer | None) -> str:
    """Codec payloads as the text of a `BatchView`."""
    return f'{{"groups":[{",".join(group_texts(payloads, tokenizer))}]}}'


def group_texts(payloads: Sequence[bytes], tokenizer: TextTokenizer | None) -> list[str]:
    """A `GroupView` as text per group; with a tokenizer, also the text of each token.

    One after the other: to write all at once would be one long call.
    """
    groups = (group for payload in payloads for group in decode_groups(payload))
    return [group_view(group, tokenizer).model_dump_json() for group in groups]


def group_view(group: TrajectoryGroup, tokenizer: TextTokenizer | None) -> GroupView:
    """A group as JSON."""
    return GroupView(
        rollout_id=group.rollout_id,
        group_id=group.group_id,
        trajectories=[_trajectory_view(row, tokenizer) for row in group.trajectories],
    )


def summary(entry: Entry) -> RolloutSummary:
    """One line about a rollout."""
    return RolloutSummary(**row_of(entry))


def rollout_view(
    entry: Entry, events: Sequence[Event], tokenizer: TextTokenizer | None
) -> RolloutView:
    """Everything about a rollout."""
    groups = [] if entry.payload is None else decode_groups(entry.payload)
    return RolloutView(
        summary=summary(entry),
        request=entry.request,
        events=[EventView(event=e.event, detail=e.detail, at=e.at) for e in events],
        group=group_view(groups[0], tokenizer) if groups else None,
    )


def score_view(judged: ScoreOutcome) -> ScoreView | ScoreFailure:
    """Return the JSON view of a scored answer."""
    if isinstance(judged, ServiceError):
        return ScoreFailure(error=judged.to_body())
    return ScoreView(score=judged.score, verdict=judged.verdict, details=judged.details)


def _trajectory_view(row: Trajectory, tokenizer: TextTokenizer | None) -> TrajectoryView:
    ids = row.input_ids.tolist()
    return TrajectoryView(
        trajectory_id=row.trajectory_id,
        sample_index=row.sample_index,
        branch=row.branch,
        input_ids=ids,
        loss_mask=row.loss_mask.tolist(),
        logprobs=row.logprobs.tolist(),
        versions=row.versions.tolist(),
        tokens=tokenizer and token_texts(map(tokenizer.token_bytes, ids)),
        reward=row.reward,
        verdict=row.verdict,
        details=row.details,
        stop_reason=row.stop_reason,
        turns=[
            TurnView(
                start=t.start, end=t.end, stop_reason=t.stop_reason, reward=t.reward, note=t.note
            )
            for t in row.turns
        ],
        sampling_mask=row.sampling_mask,
        routed_experts=row.routed_experts,
    )
