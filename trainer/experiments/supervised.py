"""Shared parts of the experiments on a fixed data set: components are built here, the loop is
`trainer.supervised`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headway.contracts.config.experiment import DPOExperiment, SupervisedExperiment
from headway.contracts.errors import ConfigError
from headway.contracts.types import FinetuneSpec
from headway.runtime.config import write_resolved
from trainer.api import MicroBatchSpec
from trainer.backends.base import make_engine
from trainer.checkpoint import CheckpointContents, Checkpoints, RunState
from trainer.data_supervised import Encoder, SupervisedData
from trainer.dataflow.call import interface_of
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.policy import POLICY
from trainer.exports import Exports
from trainer.interfaces.base import CanEvaluate, InterfaceContext, make_interface, save_model
from trainer.memory import Planned, check_memory
from trainer.meter import Meter
from trainer.reference import reference_model
from trainer.run_id import kept_run_id
from trainer.steps import steps_per_epoch, with_total_steps
from trainer.supervised import train
from trainer.topology import Topology
from trainer.tracking.tracker import open_tracker

Read = Callable[[Any, Encoder], SupervisedData]
"""`(a section like data, encoder) -> examples`."""


def run_supervised(
    config: SupervisedExperiment, flow: Dataflow, encoder: Encoder, read: Read
) -> None:
    """Train, and write a Hugging Face directory to `output_dir`; if `recovery` resumes, from the newest
    checkpoint of the run folder.

    Args:
        flow: `rows`, and calls whose interfaces take a rank's share of them.
    Raises:
        ConfigError: rows are held out, and no interface that trains has `evaluate`.
    """
    topology = Topology.from_environment(config.trainer.device)
    run_dir = Path(config.run_dir)
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    torch.manual_seed(config.trainer.seed)
    data, held_out = _read(config, encoder, read)
    config = with_total_steps(config, data)
    per_epoch = steps_per_epoch(data, config)
    check_memory(_planned(config), config.trainer, topology)
    meter = Meter(config.metrics, topology)
    engine = meter.around(make_engine(config, topology, None), config.model)
    engine.initialize(None, FinetuneSpec(1, len(data), config.data.batch_size))
    mb_spec = MicroBatchSpec(config.trainer.max_tokens_per_mb)
    context = InterfaceContext(config, topology, mb_spec, meter, engine)
    interfaces = _make_interfaces(config, flow, context)
    trained = [interfaces[call.name] for call in flow.calls if call.trains(POLICY)]
    if held_out is not None and not any(isinstance(each, CanEvaluate) for each in trained):
        raise ConfigError(
            "held_out names rows, and no interface that trains has a method `evaluate`; give it one, or "
            "leave held_out out"
        )
    checkpoints = Checkpoints(run_dir, config.recovery, topology, per_epoch)
    exports = Exports(run_dir, config.export, topology, per_epoch)
    state = RunState(kept_run_id(run_dir, config.recovery.resumes, topology))
    if config.recovery.resumes:
        state = checkpoints.resume(CheckpointContents({"model": engine})) or state
    else:
        checkpoints.refuse_leftovers()
    if topology.is_main:
        write_resolved(config, run_dir)
    metrics = open_tracker(config, topology, state.run_id, state.step)
    train(
        state,
        config,
        flow,
        interfaces,
        engine,
        data,
        held_out,
        topology,
        checkpoints,
        meter,
        metrics,
        exports,
    )
    save_model(trained[-1] if trained else None, engine, Path(config.output_dir))
    metrics.close()
    engine.destroy()


def _make_interfaces(
    config: SupervisedExperiment, flow: Dataflow, context: InterfaceContext[Any]
) -> dict[str, Any]:
    """Return interfaces by the name of the call; calls on one interface share it."""
    made: dict[str, Any] = {}
    interfaces: dict[str, Any] = {}
    for call in flow.model_calls:
        part = interface_of(call, config.dataflow.calls)
        key = part.model_dump_json()
        if key not in made:
            made[key] = make_interface(part, context)
        interfaces[call.name] = made[key]
    return interfaces


def _planned(config: SupervisedExperiment) -> dict[str, Planned]:
    """The models of a rank: the one that learns, and what it may be compared with."""
    planned = {"model": Planned(config.model, is_trained=True)}
    if isinstance(config, DPOExperiment) and not config.has_base_reference:
        planned["reference"] = Planned(reference_model(config), is_trained=False)
    return planned


def _read(
    config: SupervisedExperiment, encoder: Encoder, read: Read
) -> tuple[SupervisedData, SupervisedData | None]:
    """Return the training data, and the data that is held out."""
    data, held_out = read(config.data, encoder), None
    if config.held_out is not None:
        section = config.data.model_copy(update={"path": config.held_out.path})
        held_out = read(section, encoder)
        held_out.refuse_above(config.trainer.max_tokens_per_mb)
    data.refuse_above(config.trainer.max_tokens_per_mb)
    return data, held_out
