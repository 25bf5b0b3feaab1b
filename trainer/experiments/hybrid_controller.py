"""The loop of `ppo-hybrid`, on one screen: generate, score, learn, save. One controller runs it; all
models are in groups of workers, and every call here runs on all ranks of a group.
"""

from __future__ import annotations

from headway.contracts.config.ppo_hybrid import PPOHybridExperiment
from trainer.algorithms.kl import AdaptiveKL, FixedKL
from trainer.checkpoint import Checkpoints, RunState
from trainer.experiments.hybrid_steps import (
    StepTimer,
    StepWatcher,
    describe_rows,
    infer_columns,
    update_models,
)
from trainer.tracking.tracker import Tracker
from trainer.workers.prompt_batches import PromptBatches
from trainer.workers.resource_pools import RoleGroups
from trainer.workers.row_advantages import row_advantages


def train(
    state: RunState,
    config: PPOHybridExperiment,
    groups: RoleGroups,
    prompts: PromptBatches,
    kl: FixedKL | AdaptiveKL,
    checkpoints: Checkpoints,
    watcher: StepWatcher,
    metrics: Tracker,
) -> RunState:
    """Train from `state` until all steps are done."""
    total_steps, size = config.trainer.last_step, config.data.batch_size
    warmup_steps = 0 if config.critic is None else config.critic.warmup_steps
    while state.step < total_steps:
        watcher.begin(state.step)
        timer = StepTimer()
        batch = groups.actor_rollout.generate_sequences(prompts.batch(state.cursor, size))
        timer.generated()
        batch = infer_columns(groups, batch)
        stats = describe_rows(state, batch)
        batch, found = row_advantages(config.algorithm, batch, kl.coef)
        if config.algorithm.kl_in == "reward":
            kl.update(found["reference_kl"], len(batch))
        batch = batch.with_meta(mini_batch_size=config.mini_batch_rows)
        stats |= found | update_models(groups, batch, state.step >= warmup_steps)
        state = state.after_step(len(batch), state.cursor + size)
        timer.trained()
        if checkpoints.is_due(state.step, total_steps):
            checkpoints.save(watcher.contents, state)
        metrics.write(stats | watcher.end(state.step, stats["tokens"], timer))
    return state
