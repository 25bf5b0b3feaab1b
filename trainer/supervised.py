"""The loop of experiments on a fixed data set, on one screen: take rows, run the graph of calls on them,
evaluate, save."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from headway.contracts.config.experiment import SupervisedExperiment
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.checkpoint import Checkpoints, Parts, RunState
from trainer.data_supervised import SupervisedData
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.runner import Moment, Runner, function_of
from trainer.dataflow.supervised import ROWS
from trainer.dataflow.trace import TRACE_NAME, Trace
from trainer.interfaces.supervised import Supervised, SupervisedInterface
from trainer.meter import Meter
from trainer.topology import Topology
from trainer.tracking.tracker import Tracker


def train(
    state: RunState,
    config: SupervisedExperiment,
    flow: Dataflow,
    interface: SupervisedInterface,
    data: SupervisedData,
    held_out: SupervisedData | None,
    topology: Topology,
    checkpoints: Checkpoints,
    meter: Meter,
    metrics: Tracker,
) -> RunState:
    """Train from `state` until all steps are done or the time is over; every rank runs it."""
    began, is_over = time.monotonic(), False
    total_steps, size = config.trainer.total_steps, config.data.batch_size
    engine, mb_spec, objective = interface.engine, interface.mb_spec, interface.objective
    trace_path = Path(config.run_dir) / TRACE_NAME if topology.is_main else None
    trace = Trace(trace_path, config.dataflow.trace_steps)
    functions = {call.name: function_of(call, interface) for call in flow.model_calls}
    runner = Runner(flow, functions, 1, topology.device, trace)
    judged = None
    if held_out is not None:
        judged = objective.prepare(held_out.everything(topology), mb_spec)
    while state.step < total_steps and not is_over:
        started = time.monotonic()
        meter.begin()
        with trace.span(ROWS, "data", step=state.step, version=state.version):
            batch = data.batch(state.cursor, size, topology)
        stats: dict[str, Any] = {"step": state.step, "time": time.time()}
        stats |= runner.run(batch, Moment(state.step, state.version))[1]
        trace.end_step()
        engine.step_lr_scheduler()
        state = state.after_step(size, state.cursor + size)
        stats["tokens"] = topology.sum([batch.num_tokens])[0]
        stats |= meter.take(stats["tokens"], 0.0, time.monotonic() - started, 0.0)
        limit_s = config.time_limit_s
        is_over = limit_s is not None and bool(topology.max(time.monotonic() - began > limit_s))
        is_last = is_over or state.step == total_steps
        every_steps = config.held_out.every_steps if config.held_out else 0
        if judged is not None and (is_last or state.step % every_steps == 0):
            stats |= evaluate(engine, judged, mb_spec, objective)
        metrics.write(stats)
        if is_last or checkpoints.is_due(state.step, total_steps):
            checkpoints.save(Parts({"model": engine}), state)
    checkpoints.finish()
    return state


def evaluate(
    engine: TrainEngine, batch: SequenceBatch, mb_spec: MicroBatchSpec, interface: Supervised
) -> dict[str, float]:
    """The loss and figures of rows that are not trained on, with `eval_` in front of their names."""
    names: list[str] = []

    def figures(output: ModelOutput, micro_batch: SequenceBatch) -> LossOutput:
        result = interface.loss(output, micro_batch)
        names[:] = ["eval_loss", *(f"eval_{name}" for name in result.stats)]
        return LossOutput(torch.stack([result.loss, *result.stats.values()]))

    means = engine.eval_batch(batch, mb_spec, figures, interface.weight)
    assert means is not None
    return dict(zip(names, means.tolist(), strict=True))
