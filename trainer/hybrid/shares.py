"""Requests that every rank has -> what each rank generates of them, and back in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from pydantic import BaseModel

from headway.contracts.errors import BackendError, ErrorBody, ServiceError
from headway.contracts.types import LLMRequest, LLMResponse
from trainer.batching.balance import partition_by_tokens
from trainer.topology import Topology


class _Share(BaseModel):
    """Message of one rank to the others: its responses, or its error."""

    responses: list[LLMResponse] = []
    error: ErrorBody | None = None


def generate_shares(
    requests: Sequence[LLMRequest],
    topology: Topology,
    generate: Callable[[list[LLMRequest]], list[LLMResponse]],
) -> list[LLMResponse]:
    """All responses, on every rank; collective.

    Args:
        requests: the same on every rank.
        generate: this rank's share of them.
    Raises:
        ServiceError: what any rank raised; on every rank.
    """
    shares = _partition(requests, topology.world_size)
    mine = _Share()
    failure: Exception | None = None
    try:
        mine = _Share(responses=generate([requests[i] for i in shares[topology.rank]]))
    except ServiceError as error:
        failure, mine = error, _Share(error=error.to_body())
    except Exception as error:  # noqa: BLE001 - the others wait for it; raised below
        shared = BackendError(f"rank {topology.rank} failed: {type(error).__name__}: {error}")
        failure, mine = error, _Share(error=shared.to_body())
    answers = topology.gather_bytes(mine.model_dump_json().encode())
    if failure is not None:
        raise failure
    responses: dict[int, LLMResponse] = {}
    for share, answer in zip(shares, answers, strict=True):
        theirs = _Share.model_validate_json(answer)
        if theirs.error is not None:
            raise ServiceError.from_body(theirs.error)
        responses |= dict(zip(share, theirs.responses, strict=True))
    return [responses[i] for i in range(len(requests))]


def seeded(requests: Sequence[LLMRequest], *entropy: int) -> list[LLMRequest]:
    """Each request with a seed of its own, so that what is sampled does not depend on the rank.

    Args:
        entropy: other numbers, other seeds; requests that bring a seed keep it.
    """
    drawn = np.random.SeedSequence(entropy).generate_state(max(1, len(requests)), np.uint64)
    return [
        request
        if request.gconfig.seed is not None
        else request.model_copy(
            update={"gconfig": request.gconfig.model_copy(update={"seed": int(seed >> 1)})}
        )
        for request, seed in zip(requests, drawn, strict=False)
    ]


def _partition(requests: Sequence[LLMRequest], num_ranks: int) -> list[list[int]]:
    """Split requests by the most tokens that they may have; with fewer requests than ranks, some ranks
    get none.
    """
    if len(requests) < num_ranks:
        return [[rank] if rank < len(requests) else [] for rank in range(num_ranks)]
    tokens = [len(r.input_ids) + r.gconfig.max_new_tokens for r in requests]
    return partition_by_tokens(tokens, num_ranks)
