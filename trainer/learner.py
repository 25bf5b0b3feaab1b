"""One version: every model adds its columns to a batch, advantages are computed, and models learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.contracts.config.dataflow import DataflowConfig
from headway.contracts.types import PolicyVersion, Trajectory
from trainer.api import TrainEngine
from trainer.batching.running_scores import running_scores
from trainer.batching.sequences import batch_of_trajectories, with_greedy_samples
from trainer.dataflow.call import Call
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.policy import POLICY
from trainer.dataflow.runner import CallResult, DataflowRunner, Function, StepInfo, function_of
from trainer.dataflow.trace import Trace
from trainer.interfaces.reward_verifier import with_rows


@dataclass(frozen=True, slots=True)
class Follower:
    """A model that moves towards another once per step in which that one learns."""

    engine: TrainEngine
    source: TrainEngine
    eta: float

    def follow(self) -> None:
        """Take its share of the way; collective."""
        self.engine.move_towards(self.source, self.eta)


class Learner:
    """Runs the dataflow of an experiment on whole batches, the same on every rank."""

    def __init__(
        self,
        flow: Dataflow,
        interfaces: Mapping[str, Any],
        config: DataflowConfig,
        device: torch.device,
        follower: Follower | None = None,
        critic_warmup_steps: int = 0,
        trace_path: Path | None = None,
    ) -> None:
        """
        Args:
            interfaces: by the name of the call; that which generates has none.
            follower: the reference, if it follows the policy.
            critic_warmup_steps: first steps in which the policy does not learn.
            trace_path: where the first steps' calls are written; None writes none.
        """
        self._generation = next(call for call in flow.calls if call.kind == "generate")
        self._generated = frozenset(self._generation.output_keys)
        self._policy_updates = tuple(call for call in flow.calls if call.trains(POLICY))
        self._follower = follower
        self._warmup_steps = critic_warmup_steps
        self._trace = Trace(trace_path, config.trace_steps)
        functions = {
            call.name: self._function(call, interfaces[call.name])
            for call in flow.calls
            if call.name in interfaces
        }
        self._runner = DataflowRunner(flow, functions, config.max_parallel, device, self._trace)

    def trains_policy(self, step: int) -> bool:
        """True if the critic's warm-up is over by this step."""
        return step >= self._warmup_steps

    def generating(self, step: int, version: PolicyVersion) -> AbstractContextManager[None]:
        """While a batch is waited for: the first call of a step, for the trace."""
        call = self._generation
        return self._trace.span(call.name, call.kind, step=step, version=version)

    def train_step(
        self, trajectories: Sequence[Trajectory], version: PolicyVersion, step: int = 0
    ) -> dict[str, float]:
        """Learn from one batch; collective.

        Args:
            trajectories: whole groups, the same list on every rank.
            version: of the weights that the step starts from.
            step: counts from 0.
        Returns:
            Metrics of the step: those of the advantages, the critic and the actor; `reward`, the mean
            score of the samples, where a call scored them.
        """
        batch = batch_of_trajectories(trajectories)
        if "row" in self._generated:
            batch = with_rows(batch, trajectories)
        if "is_greedy" in self._generated:
            batch = with_greedy_samples(batch, trajectories)
        if "dense_scores" in self._generated:
            batch = batch.with_columns(dense_scores=running_scores(trajectories))
        batch, metrics = self._runner.run(batch, StepInfo(step, version))
        if "scores" not in self._generated:  # the rollouts brought none, or others
            counts = batch.per_sequence("is_sample")
            metrics["reward"] = float(batch.per_sequence("scores")[counts].double().mean())
        self._trace.end_step()
        return metrics

    def _function(self, call: Call, interface: Any) -> Function:
        function = function_of(call, interface)
        if call not in self._policy_updates:
            return function
        follows = self._follower if call == self._policy_updates[-1] else None

        def train_policy(batch: Any, info: StepInfo) -> CallResult:
            if not self.trains_policy(info.step):
                return CallResult({}, {})
            result = function(batch, info)
            if follows is not None:
                follows.follow()
            return result

        return train_policy
