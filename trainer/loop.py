"""The loop, on one screen: submit, wait, train, publish, save.

Synchronous, one-step-off and fully asynchronous training are this loop with another `max_staleness`:
the service decides what may be generated ahead, and holds a batch back until it may be consumed.
"""

from __future__ import annotations

import time

from trainer.batch_source import BatchSource
from trainer.checkpoint import Checkpoints, RunState
from trainer.evaluation.evaluations import Evaluations
from trainer.exports import Exports
from trainer.meter import Meter
from trainer.models import PolicyModels
from trainer.step_metrics import describe_step
from trainer.tracking.tracker import Tracker
from weight_sync.publication import Publication


def train(
    state: RunState,
    total_steps: int,
    batch_source: BatchSource,
    models: PolicyModels,
    publication: Publication,
    checkpoints: Checkpoints,
    meter: Meter,
    metrics: Tracker,
    evaluations: Evaluations,
    exports: Exports,
) -> RunState:
    """Train from `state` until `total_steps` steps are done; every rank runs it."""
    while state.step < total_steps:
        started = time.monotonic()
        meter.begin()
        batch_source.top_up(state.step)
        with models.learner.generating(state.step, state.version):
            batch = batch_source.next_batch(state.version)
        received = time.monotonic()
        stats = describe_step(state, batch)
        stats |= models.learner.train_step(batch.trajectories, state.version, state.step)
        models.step_lr_schedulers(state.step)
        trained = time.monotonic()
        publication.begin(state.version + 1)
        # The ledger records the consumption before the checkpoint does: after a crash in
        # between, the batch is given back, and is trained on once.
        batch_source.consumed(batch, state.step, checkpoints.safe_step)
        state = state.after_step(len(batch.trajectories), batch_source.cursor)
        if checkpoints.is_due(state.step, total_steps):
            checkpoints.save(models.checkpoint_contents, state)
        exports.after_step(state.step, models.checkpoint_contents.models)
        if not publication.may_lag or evaluations.is_due(state.step):
            publication.finish()
        stats |= evaluations.after_step(state, total_steps)
        seconds = (received - started, trained - received, time.monotonic() - trained)
        stats |= meter.take(stats["tokens"], *seconds)
        metrics.write(stats)
    publication.finish()
    checkpoints.finish()
    return state
