"""The loop of experiments on a fixed data set, on one screen: take rows, run the graph of calls on them,
evaluate, save."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headway.contracts.config.experiment import SupervisedExperiment
from headway.contracts.config.frequency import FrequencyConfig
from trainer.api import TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.checkpoint import CheckpointContents, Checkpoints, RunState
from trainer.data_supervised import SupervisedData
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.policy import POLICY
from trainer.dataflow.runner import DataflowRunner, StepInfo, function_of
from trainer.dataflow.supervised import ROWS
from trainer.dataflow.trace import TRACE_NAME, Trace
from trainer.exports import Exports
from trainer.interfaces.base import CanEvaluate
from trainer.meter import Meter
from trainer.steps import steps_per_epoch
from trainer.timetable import Timetable
from trainer.topology import Topology
from trainer.tracking.tracker import Tracker


def train(
    state: RunState,
    config: SupervisedExperiment,
    flow: Dataflow,
    interfaces: Mapping[str, Any],
    engine: TrainEngine,
    data: SupervisedData,
    held_out: SupervisedData | None,
    topology: Topology,
    checkpoints: Checkpoints,
    meter: Meter,
    metrics: Tracker,
    exports: Exports,
) -> RunState:
    """Train from `state` until all steps are done or the time is over; every rank runs it.

    Args:
        interfaces: by the name of the call.
        engine: of the model that is trained.
    """
    began, is_over = time.monotonic(), False
    total_steps, size = config.trainer.last_step, config.data.batch_size
    trace_path = Path(config.run_dir) / TRACE_NAME if topology.is_main else None
    trace = Trace(trace_path, config.dataflow.trace_steps)
    functions = {call.name: function_of(call, interfaces[call.name]) for call in flow.model_calls}
    runner = DataflowRunner(flow, functions, 1, topology.device, trace)
    held_out_batch = None if held_out is None else held_out.everything(topology)
    trained = {id(i): i for i in (interfaces[c.name] for c in flow.calls if c.trains(POLICY))}
    evaluations = Timetable(FrequencyConfig(), 1)
    if config.held_out is not None:
        evaluations = Timetable(config.held_out, steps_per_epoch(data, config), topology)
    while state.step < total_steps and not is_over:
        started = time.monotonic()
        meter.begin()
        with trace.span(ROWS, "data", step=state.step, version=state.version):
            batch = data.batch(state.cursor, size, topology)
        stats: dict[str, Any] = {"step": state.step, "time": time.time()}
        stats |= runner.run(batch, StepInfo(state.step, state.version))[1]
        trace.end_step()
        engine.step_lr_scheduler()
        state = state.after_step(size, state.cursor + size)
        stats["tokens"] = topology.data_parallel.sum([batch.num_tokens])[0]
        stats |= meter.take(stats["tokens"], 0.0, time.monotonic() - started, 0.0)
        limit_s = config.time_limit_s
        is_over = limit_s is not None and bool(topology.max(time.monotonic() - began > limit_s))
        is_last = is_over or state.step == total_steps
        is_due = evaluations.is_due(state.step)
        if held_out_batch is not None and (is_last or is_due):
            stats |= _evaluated(trained.values(), held_out_batch)
        metrics.write(stats)
        if checkpoints.is_due(state.step, total_steps) or is_last:
            checkpoints.save(CheckpointContents({"model": engine}), state)
        exports.after_step(state.step, {"model": engine})
    checkpoints.finish()
    return state


def _evaluated(interfaces: Iterable[Any], batch: SequenceBatch) -> dict[str, float]:
    """The metrics of rows that are not trained on, with `eval_` in front of their names."""
    metrics: dict[str, float] = {}
    for interface in interfaces:
        if isinstance(interface, CanEvaluate):
            metrics |= {f"eval_{name}": value for name, value in interface.evaluate(batch).items()}
    return metrics
