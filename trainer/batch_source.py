"""Prompts out, batches in: the trainer's side of the rollout service.

Rank 0 talks to the service (`engine` is None elsewhere); the other ranks get its batches by
broadcast. Rollout ids follow from the run and the data cursor, so submitting again after a crash
submits nothing twice. Rollouts that failed or were dropped as stale are replaced by the next prompts.
"""

from __future__ import annotations

import logging
import math

from headway.contracts.codec import decode_groups, encode_groups
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.ppo_code import VerifiedPPOExperiment
from headway.contracts.config.rollout_experiments import PolicyLearner
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.engines import InferenceEngine
from headway.contracts.errors import NotEnoughWork
from headway.contracts.types import PolicyVersion, RolloutRequest, TrajectoryBatch
from headway.runtime.config import validate_config
from trainer.algorithms.selection import keep_best
from trainer.batching.checks import check_batch, check_experts
from trainer.checkpoint import RunState
from trainer.data import PromptData
from trainer.prompt_filter import PromptFilter
from trainer.rollout_id import rollout_id_of
from trainer.topology import Topology
from weight_sync.checkpoint import expert_counts

log = logging.getLogger(__name__)


class BatchSource:
    """Keeps the service supplied with prompts and hands out batches of whole groups."""

    def __init__(
        self,
        engine: InferenceEngine | None,
        data: PromptData,
        topology: Topology,
        config: PolicyLearner,
        state: RunState,
        prompt_filter: PromptFilter | None = None,
    ) -> None:
        self._engine = engine
        self._data = data
        self._topology = topology
        self._rollout = config.rollout
        self._sampling = config.sampling
        is_replaying = config.algorithm.routed_experts == "replay"
        self._experts = expert_counts(config.model.path) if is_replaying else None
        self._replays_mask = config.algorithm.sampling_mask == "replay"
        self._batch_size = config.data.batch_size
        self._run_id = state.run_id
        self._filter = prompt_filter
        is_later, reward = config.scores_rollouts_later, config.rollout.reward
        ppo = config.ppo if isinstance(config, VerifiedPPOExperiment) else None
        self._keep = None if ppo is None or ppo.num_samples == ppo.group_size else ppo.group_size
        """Samples per prompt that are learned from; None learns from all."""
        # To choose among samples they have to be scored as they come.
        self._reward = ComponentConfig(name="none") if is_later and self._keep is None else reward
        self.cursor = state.cursor
        # What was submitted in place of rollouts that failed, were dropped or passed over.
        self._replacements = max(0, state.cursor - self._target(state.step - 1))

    def top_up(self, step: int) -> None:
        """Submit prompts so far ahead of a step that the service never runs dry."""
        self._submit_to(self._target(step) + self._replacements)

    def next_batch(self, version: PolicyVersion) -> TrajectoryBatch:
        """The oldest finished batch, on every rank; refused there if it breaks the service's contract.

        Args:
            version: of the weights that will learn from it.
        Raises:
            DataError: a group is not whole, or holds a number that is not finite, or experts that the
                model does not have.
            StaleVersion: a trajectory is older than `rollout.max_staleness` allows.
        """
        batch = self._receive(version)
        check_batch(batch, version, self._rollout.group_size, self._rollout.max_staleness)
        if self._experts is not None:
            check_experts(batch, self._experts)
        return batch if self._keep is None else keep_best(batch, self._keep)

    def _receive(self, version: PolicyVersion) -> TrajectoryBatch:
        payload = None
        if self._engine is not None:
            batch = self._wait(self._engine, version)
            if self._topology.world_size == 1:
                return batch
            payload = encode_groups(batch.groups)
        return TrajectoryBatch(decode_groups(self._topology.broadcast_bytes(payload)))

    def _target(self, step: int) -> int:
        """The service admits up to η + 1 batches beyond what was consumed; one more waits there.

        With a filter, some of the submitted rollouts are dropped, so more of them are submitted.
        """
        batches = step + self._rollout.max_staleness + 2
        return math.ceil(batches * self._batch_size * self._rollout.oversampling)

    def _submit_to(self, target: int) -> None:
        wanted = target - self.cursor
        if wanted <= 0:
            return
        positions, end = list(range(self.cursor, target)), target
        if self._filter is not None:
            positions, end = self._filter.take(self.cursor, wanted)
            self._replacements += end - target
        if self._engine is not None:
            self._engine.submit([self._request(at) for at in positions])
        self.cursor = end

    def _wait(self, engine: InferenceEngine, version: PolicyVersion) -> TrajectoryBatch:
        while True:
            try:
                return engine.wait(self._batch_size, self._rollout.wait_timeout_s, version)
            except NotEnoughWork as error:
                log.warning("more prompts are submitted", extra={"reason": str(error)})
                self._replacements += self._batch_size
                self._submit_to(self.cursor + self._batch_size)

    def consumed(self, batch: TrajectoryBatch, step: int, checkpoint_step: int) -> None:
        """Tell the ledger which step trained on the batch."""
        if self._engine is not None:
            self._engine.consumed(batch.rollout_ids, step, checkpoint_step)

    def _request(self, cursor: int) -> RolloutRequest:
        limit = self._data.max_new_tokens(cursor)
        sampling = self._sampling.model_dump()
        if limit is not None:
            sampling["max_new_tokens"] = limit
        return RolloutRequest(
            rollout_id=rollout_id_of(self._run_id, cursor),
            consumer=self._run_id,
            prompt=self._data.prompt(cursor, self._rollout.group_size),
            workflow=self._rollout.workflow,
            reward=self._reward,
            filter=self._rollout.filter,
            gconfig=validate_config(SamplingConfig, sampling),
            sampling_mask=self._replays_mask,
            routed_experts=self._experts is not None,
        )
