"""One version: every model says what it has to of the batch, the batch is judged, and models learn."""

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
from trainer.batching.sequences import batch_of_trajectories
from trainer.dataflow.call import Call
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.runner import Function, Moment, Runner, Said, function_of
from trainer.dataflow.trace import Trace
from trainer.interfaces.reward_verifier import with_rows


@dataclass(frozen=True, slots=True)
class Follower:
    """A model that moves towards another after each of its updates."""

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
        self._generated = frozenset(
            key for call in flow.calls if call.kind == "generate" for key in call.output_keys
        )
        self._follower = follower
        self._warmup_steps = critic_warmup_steps
        self._trace = Trace(trace_path, config.trace_steps)
        functions = {
            call.name: self._function(call, interfaces[call.name])
            for call in flow.calls
            if call.name in interfaces
        }
        self._runner = Runner(flow, functions, config.max_parallel, device, self._trace)

    def trains_policy(self, step: int) -> bool:
        """Whether the critic is warm by then."""
        return step >= self._warmup_steps

    def generating(self, step: int, version: PolicyVersion) -> AbstractContextManager[None]:
        """While a batch is waited for: the first call of a step, for the trace."""
        return self._trace.span("actor_gen", "generate", step=step, version=version)

    def train_step(
        self, trajectories: Sequence[Trajectory], version: PolicyVersion, step: int = 0
    ) -> dict[str, float]:
        """Learn from one batch; collective.

        Args:
            trajectories: whole groups, the same list on every rank.
            version: of the weights that the step starts from.
            step: counts from 0.
        Returns:
            Figures of the step: those of the judgement, the critic and the actor; `reward`, the mean
            score of the samples, where a call scored them.
        """
        batch = batch_of_trajectories(trajectories)
        if "row" in self._generated:
            batch = with_rows(batch, trajectories)
        if "dense_scores" in self._generated:
            batch = batch.with_columns(dense_scores=running_scores(trajectories))
        batch, figures = self._runner.run(batch, Moment(step, version))
        if "scores" not in self._generated:  # the rollouts brought none, or others
            counts = batch.per_sequence("is_sample")
            figures["reward"] = float(batch.per_sequence("scores")[counts].double().mean())
        self._trace.end_step()
        return figures

    def _function(self, call: Call, interface: Any) -> Function:
        function = function_of(call, interface)
        if call.name != "actor_train":
            return function

        def train_actor(batch: Any, moment: Moment) -> Said:
            if not self.trains_policy(moment.step):
                return Said({}, {})
            said = function(batch, moment)
            if self._follower is not None:
                self._follower.follow()
            return said

        return train_actor
