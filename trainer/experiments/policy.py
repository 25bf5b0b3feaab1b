"""Asynchronous training of a policy on rollouts: parts are built here, the loop is `trainer.loop`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from headway.contracts.config.experiment import GRPOExperiment, PPOExperiment
from headway.contracts.config.ppo_code import PPOCodeExperiment, PPOMathExperiment
from headway.contracts.config.rollout_experiments import PolicyLearner
from headway.contracts.types import ConsumerSpec, FinetuneSpec, PolicyVersion
from headway.runtime.config import write_resolved
from headway.runtime.inference_client import RemoteInferenceEngine
from headway.runtime.secret import read_token
from trainer.checkpoint import Checkpoints, RunState
from trainer.data import PromptData
from trainer.dataflow.policy import policy_flow
from trainer.evaluation.evaluations import Evaluations
from trainer.evaluation.evaluator import Evaluator
from trainer.experiments.base import Experiment
from trainer.exports import Exports
from trainer.generated_batches import make_batch_source
from trainer.loop import train
from trainer.meter import Meter
from trainer.models import PolicyModels
from trainer.prompt_filter import make_prompt_filter, without_unfit
from trainer.run_id import kept_run_id
from trainer.steps import steps_per_epoch, with_total_steps
from trainer.topology import Topology
from trainer.tracking.tracker import open_tracker
from weight_sync.channel import WeightPublisher
from weight_sync.publication import Publication, next_version
from weight_sync.transports.base import make_publisher

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""Seconds between checks for the first server."""


def run(config: PolicyLearner) -> None:
    """Train to the end; if `recovery` resumes, from the newest checkpoint of the run folder."""
    waits_s = config.rollout.connect_timeout_s + config.rollout.wait_timeout_s
    topology = Topology.from_environment(config.trainer.device, waits_s)
    run_dir = Path(config.run_dir)
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    torch.manual_seed(config.trainer.seed)
    data = PromptData(config.data)
    config = with_total_steps(config, data)
    per_epoch = steps_per_epoch(data, config)
    publisher = make_publisher(config.weight_sync) if topology.is_main else None
    spec = FinetuneSpec(1, len(data), config.data.batch_size)
    meter = Meter(config.metrics, topology)
    with _connected(config, topology) as client:
        prompt_filter = make_prompt_filter(config, data)
        models = PolicyModels(config, topology, publisher, spec, meter, client, data, prompt_filter)
        checkpoints = Checkpoints(run_dir, config.recovery, topology, per_epoch)
        exports = Exports(run_dir, config.export, topology, per_epoch)
        state = RunState(kept_run_id(run_dir, config.recovery.resumes, topology))
        if config.recovery.resumes:
            state = checkpoints.resume(models.checkpoint_contents) or state
        else:
            checkpoints.refuse_leftovers()
        if client is not None:
            write_resolved(config, run_dir)
            client.initialize()
        limit = topology.max(0 if client is None else _context_of(client, config)) or None
        prompt_filter = without_unfit(prompt_filter, config, data, limit)
        evaluations = _make_evaluations(config, topology, state.run_id, per_epoch)
        may_lag = config.rollout.max_staleness > 0
        publication = Publication(models.policy, publisher, client, evaluations.versions, may_lag)
        state = _attach(config, state, topology, publication, publisher, client)
        metrics = open_tracker(config, topology, state.run_id, state.step)
        batch_source = make_batch_source(
            models.generator, client, data, topology, config, state, prompt_filter
        )
        with evaluations:
            evaluations.begin(state)
            state = train(
                state,
                config.trainer.last_step,
                batch_source,
                models,
                publication,
                checkpoints,
                meter,
                metrics,
                evaluations,
                exports,
            )
            models.export(run_dir)
            metrics.close()
            if client is not None:
                client.detach()
            evaluations.finish(state)
    if publisher is not None:
        publisher.close()
    models.destroy()


@contextmanager
def _connected(config: PolicyLearner, topology: Topology) -> Iterator[RemoteInferenceEngine | None]:
    """The client of the first rank; closed however the run ends, so that no call holds up its exit."""
    if not topology.is_main:
        yield None
        return
    client = _make_client(config)
    try:
        yield client
    finally:
        client.destroy()


def _make_client(config: PolicyLearner) -> RemoteInferenceEngine:
    """Connects once it is initialized."""
    rollout = config.rollout
    token = read_token(rollout.token_env)
    return RemoteInferenceEngine(rollout.url, rollout.connect_timeout_s, token=token)


def _context_of(client: RemoteInferenceEngine, config: PolicyLearner) -> int:
    """Tokens per sequence that a server can hold, once one has reported itself; 0 is not known."""
    deadline = time.monotonic() + config.rollout.connect_timeout_s
    while not (status := client.status()).servers and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return status.largest_context_tokens or 0


def _make_evaluations(
    config: PolicyLearner, topology: Topology, run_id: str, per_epoch: int
) -> Evaluations:
    evaluator = None
    if topology.is_main and config.evaluation is not None:
        evaluator = Evaluator(_make_client(config), config.evaluation, config)
    return Evaluations(evaluator, Path(config.run_dir), run_id, per_epoch)


def _attach(
    config: PolicyLearner,
    state: RunState,
    topology: Topology,
    publication: Publication,
    publisher: WeightPublisher | None,
    client: RemoteInferenceEngine | None,
) -> RunState:
    """Attach as the consumer, at a version number that was never used for other weights.

    That is 0 if nothing was ever published: servers start with these weights. Else it is the next free
    number, also for restored weights that the service has seen: it may have gone back to older ones, or
    know them at an address that is gone (another port, a process group), and its servers may have
    restarted meanwhile.
    """
    version = 0
    if client is not None and publisher is not None:
        version = next_version(publisher, client, state.version)
        if version == 1:
            version = 0
        else:
            _report_other_weights(client, state, version)
        client.attach(
            ConsumerSpec(
                consumer=state.run_id,
                batch_size=config.batch_trajectories,
                max_staleness=config.rollout.max_staleness,
                step=state.step - 1,
                version=version,
            )
        )
    version = topology.max(version)
    if version != state.version:
        publication.begin(version)
        publication.finish()
    return replace(state, version=version)


def _report_other_weights(
    client: RemoteInferenceEngine, state: RunState, version: PolicyVersion
) -> None:
    """Say whose weights serve until this run's own are published, before its first rollout."""
    committed = client.weights().committed
    log.warning(
        "servers have weights of before: this run publishes its own first",
        extra={
            "serving": 0 if committed is None else committed.version,
            "path": None if committed is None else committed.path,
            "restored": state.version,
            "publishes": version,
        },
    )


GRPO = Experiment(GRPOExperiment, run, policy_flow)
PPO = Experiment(PPOExperiment, run, policy_flow)
PPO_CODE = Experiment(PPOCodeExperiment, run, policy_flow)
PPO_MATH = Experiment(PPOMathExperiment, run, policy_flow)
