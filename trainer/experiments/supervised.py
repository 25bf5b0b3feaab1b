"""What experiments on a fixed data set have in common: parts are built here, the loop is
`trainer.supervised`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headway.contracts.config.base import PartConfig
from headway.contracts.config.experiment import SupervisedExperiment
from headway.contracts.types import FinetuneSpec
from headway.runtime.config import write_resolved
from trainer.api import MicroBatchSpec, SaveLoadMeta
from trainer.backends.base import make_engine
from trainer.checkpoint import Checkpoints, Parts, RunState
from trainer.data_supervised import Encoder, SupervisedData
from trainer.dataflow.graph import Dataflow
from trainer.interfaces.base import InterfaceContext, make_interface
from trainer.meter import Meter
from trainer.run_id import kept_run_id
from trainer.supervised import train
from trainer.topology import Topology
from trainer.tracking.tracker import open_tracker

Read = Callable[[Any, Encoder], SupervisedData]
"""`(a section like data, encoder) -> examples`."""


def run_supervised(
    config: SupervisedExperiment, flow: Dataflow, encoder: Encoder, read: Read
) -> None:
    """Train, and write a Hugging Face directory to `output_dir`; with `recovery.resume`, from the
    newest checkpoint of the run folder.

    Args:
        flow: `rows`, and calls on one interface, which has a `SupervisedInterface`'s parts.
    """
    topology = Topology.from_environment()
    run_dir = Path(config.run_dir)
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    torch.manual_seed(config.trainer.seed)
    data, held_out = _read(config, encoder, read)
    meter = Meter(config.metrics, topology)
    engine = meter.around(make_engine(config, topology, None), config.model)
    engine.initialize(None, FinetuneSpec(1, len(data), config.data.batch_size))
    mb_spec = MicroBatchSpec(config.trainer.max_tokens_per_mb)
    context = InterfaceContext(config, topology, mb_spec, meter, engine)
    interface = make_interface(PartConfig(name=flow.model_calls[0].interface), context)
    checkpoints = Checkpoints(run_dir, config.recovery, topology)
    state = RunState(kept_run_id(run_dir, config.recovery.resume, topology))
    if config.recovery.resume:
        state = checkpoints.load_newest(Parts({"model": engine})) or state
    else:
        checkpoints.refuse_leftovers()
    if topology.is_main:
        write_resolved(config, run_dir)
    metrics = open_tracker(config, topology, state.run_id, state.step)
    train(state, config, flow, interface, data, held_out, topology, checkpoints, meter, metrics)
    engine.save(SaveLoadMeta(config.output_dir, weight_format="hf"))
    metrics.close()
    engine.destroy()


def _read(
    config: SupervisedExperiment, encoder: Encoder, read: Read
) -> tuple[SupervisedData, SupervisedData | None]:
    """What is trained on, and what is not."""
    data, held_out = read(config.data, encoder), None
    if config.held_out is not None:
        section = config.data.model_copy(update={"path": config.held_out.path})
        held_out = read(section, encoder)
        held_out.refuse_above(config.trainer.max_tokens_per_mb)
    data.refuse_above(config.trainer.max_tokens_per_mb)
    return data, held_out
