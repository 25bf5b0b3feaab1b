"""Batches of an interface that the configuration names for `actor_gen`, of exactly the step's prompts."""

from __future__ import annotations

import os
from collections.abc import Sequence

from headway.contracts.codec import decode_groups, encode_groups
from headway.contracts.config.rollout_experiments import PolicyLearner
from headway.contracts.engines import InferenceEngine
from headway.contracts.errors import DataError
from headway.contracts.types import PolicyVersion, RolloutRequest, TrajectoryBatch, TrajectoryGroup
from trainer.batch_source import BatchSource
from trainer.checkpoint import RunState
from trainer.data import PromptData
from trainer.interfaces.base import Generate
from trainer.prompt_filter import PromptFilter
from trainer.rollout_id import rollout_id_of
from trainer.topology import Topology


class GeneratedBatches(BatchSource):
    """Asks the interface of every rank for the next prompts, once a step is there; hands out what the
    first rank got. Nothing runs ahead, and no ledger counts what was consumed.
    """

    def __init__(
        self,
        interface: Generate,
        data: PromptData,
        topology: Topology,
        config: PolicyLearner,
        state: RunState,
        prompt_filter: PromptFilter | None = None,
    ) -> None:
        super().__init__(None, data, topology, config, state, prompt_filter)
        self._interface = interface
        # Ids are new in every process: the service may hold those of one that crashed.
        start = topology.broadcast_bytes(os.urandom(4).hex().encode() if topology.is_main else None)
        self._prefix = f"{state.run_id}-{start.decode()}"

    def top_up(self, step: int) -> None:
        """Do nothing: prompts are run when they are asked for."""

    def _receive(self, version: PolicyVersion) -> TrajectoryBatch:
        requests = self._next_requests()
        groups = self._interface.generate(requests)
        payload = None
        if self._topology.is_main:
            _check_asked(groups, requests)
            payload = encode_groups(groups)
        return TrajectoryBatch(decode_groups(self._topology.broadcast_bytes(payload)))

    def _next_requests(self) -> list[RolloutRequest]:
        end = self.cursor + self._batch_size
        positions: Sequence[int] = range(self.cursor, end)
        if self._filter is not None:
            positions, end = self._filter.take(self.cursor, self._batch_size)
        self.cursor = end
        return [self._request(position) for position in positions]

    def _request(self, cursor: int) -> RolloutRequest:
        request = super()._request(cursor)
        name = rollout_id_of(self._prefix, cursor)
        return request.model_copy(update={"rollout_id": name, "consumer": "default"})


def make_batch_source(
    generator: Generate | None,
    client: InferenceEngine | None,
    data: PromptData,
    topology: Topology,
    config: PolicyLearner,
    state: RunState,
    prompt_filter: PromptFilter | None,
) -> BatchSource:
    """Build the source of a run's batches.

    Args:
        generator: the interface of `actor_gen`; None takes the service, ahead of the steps.
        client: of the service; None on ranks other than the first.
    """
    shared = (data, topology, config, state, prompt_filter)
    if generator is None:
        return BatchSource(client, *shared)
    return GeneratedBatches(generator, *shared)


def _check_asked(groups: Sequence[TrajectoryGroup], requests: Sequence[RolloutRequest]) -> None:
    """Refuse groups that nobody asked for, or none.

    Raises:
        DataError: naming them.
    """
    asked = {request.rollout_id for request in requests}
    got = [group.rollout_id for group in groups]
    if not got or len(set(got)) != len(got) or not asked.issuperset(got):
        raise DataError(
            f"the interface of actor_gen generated the rollouts {got}; return one group for each of "
            f"{sorted(asked)}, or fewer, under these ids"
        )
