"""The loop, on one screen: submit, wait, train, publish, save.

Synchronous, one-step-off and fully asynchronous training are this loop with another `max_staleness`:
the service decides what may be generated ahead, and holds a batch back until it may be consumed.
"""

from __future__ import annotations

import time

from trainer.api import TrainEngine
from trainer.checkpoint import Checkpoints, RunState
from trainer.feed import Feed
from trainer.interfaces.ppo_actor import PPOActor
from trainer.meter import Meter
from trainer.publication import Publication
from trainer.step_metrics import describe_step
from trainer.tracking.tracker import Tracker


def train(
    state: RunState,
    total_steps: int,
    feed: Feed,
    actor: PPOActor,
    engine: TrainEngine,
    publication: Publication,
    checkpoints: Checkpoints,
    meter: Meter,
    metrics: Tracker,
) -> RunState:
    """Train from `state` until `total_steps` steps are done; every rank runs it."""
    safe_step = state.step - 1  # the last step whose consumption a checkpoint holds
    while state.step < total_steps:
        started = time.monotonic()
        feed.top_up(state.step)
        batch = feed.next_batch()
        received = time.monotonic()
        stats = describe_step(state, batch)
        stats |= actor.train_step(batch.trajectories, state.version)
        engine.step_lr_scheduler()
        trained = time.monotonic()
        publication.begin(state.version + 1)
        # The ledger hears of the consumption before the checkpoint holds it: after a crash in
        # between, the batch is given back, and is trained on once.
        feed.consumed(batch, state.step, safe_step)
        state = state.after_step(len(batch.trajectories), feed.cursor)
        if checkpoints.is_due(state.step, total_steps):
            checkpoints.save(engine, state)
            safe_step = state.step - 1
        publication.finish()
        seconds = (received - started, trained - received, time.monotonic() - trained)
        stats |= meter.take(stats["tokens"], *seconds)
        metrics.write(stats)
    return state
