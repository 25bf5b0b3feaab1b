"""`ppo-hybrid`: synchronous PPO or GRPO, as verl runs it; parts are built here, the loop is
`trainer.experiments.hybrid_controller`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from headway.contracts.config.data import DataConfig
from headway.contracts.config.ppo_hybrid import PPOHybridExperiment
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import ConfigError
from headway.runtime.config import write_resolved
from headway.text.tokenizer import TextTokenizer
from trainer.algorithms.kl import AdaptiveKL
from trainer.checkpoint import CheckpointContents, Checkpoints, RunState, Stateful
from trainer.dataflow.hybrid import hybrid_flow
from trainer.experiments.base import Experiment
from trainer.experiments.hybrid_controller import train
from trainer.experiments.hybrid_steps import StepWatcher, mean_score
from trainer.exports import Exports
from trainer.interfaces.advantages import make_kl
from trainer.run_id import kept_run_id
from trainer.steps import steps_per_epoch, with_total_steps
from trainer.topology import Topology
from trainer.tracking.tracker import open_tracker
from trainer.workers.data_proto import DataProto
from trainer.workers.prompt_batches import PromptBatches
from trainer.workers.resource_pools import RoleGroups, open_groups
from trainer.workers.stored_group import StoredGroup


def run(config: PPOHybridExperiment) -> None:
    """Start the workers, and train to the end; if `recovery` resumes, from the newest checkpoint of the
    run folder.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "ppo-hybrid is one controller that starts its workers itself; start it without torchrun, and "
            "set workers.pools.*.num_workers"
        )
    alone = Topology(0, 1, torch.device("cpu"))
    run_dir = Path(config.run_dir).resolve()
    tokenizer = TextTokenizer(config.model.path)
    prompts = _prompts(config, tokenizer, config.data, config.sampling, config.group_size)
    config = with_total_steps(config, prompts)
    per_epoch = steps_per_epoch(prompts, config)
    kl = make_kl(config.algorithm)
    checkpoints = Checkpoints(run_dir, config.recovery, alone, per_epoch)
    state = RunState(kept_run_id(run_dir, config.recovery.resumes, alone))
    with ExitStack() as stack:
        groups = open_groups(config, stack)
        groups.init_models()
        states: dict[str, Stateful] = {"kl": kl} if isinstance(kl, AdaptiveKL) else {}
        models = {name: StoredGroup(group) for name, group in groups.trained.items()}
        contents = CheckpointContents(models, states=states)
        if config.recovery.resumes:
            state = checkpoints.resume(contents) or state
        else:
            checkpoints.refuse_leftovers()
        write_resolved(config, run_dir)
        exports = Exports(run_dir, config.export, alone, per_epoch)
        evaluate = _evaluation(config, tokenizer, groups)
        watcher = StepWatcher(config, groups, contents, exports, evaluate)
        metrics = open_tracker(config, alone, state.run_id, state.step)
        train(state, config, groups, prompts, kl, checkpoints, watcher, metrics)
        checkpoints.finish()
        for name, group in groups.trained.items():
            group.export_model(str(run_dir / name))
        metrics.close()


def _prompts(
    config: PPOHybridExperiment,
    tokenizer: TextTokenizer,
    data: DataConfig,
    sampling: SamplingConfig,
    group_size: int,
) -> PromptBatches:
    seed, pad = config.trainer.seed, config.generation.pad_token_id
    return PromptBatches(data, tokenizer, sampling, group_size, seed, pad)


def _evaluation(
    config: PPOHybridExperiment, tokenizer: TextTokenizer, groups: RoleGroups
) -> Callable[[], dict[str, float]] | None:
    """Return what scores the evaluation's prompts; None without one."""
    settings = config.evaluation
    if settings is None:
        return None
    data = settings.data_over(config.data)
    prompts = _prompts(config, tokenizer, data, settings.sampling_over(config.sampling), 1)
    count = len(prompts) if settings.limit is None else min(settings.limit, len(prompts))
    size = config.data.batch_size * config.group_size
    return partial(_evaluate, groups, prompts, count, size)


def _evaluate(
    groups: RoleGroups, prompts: PromptBatches, count: int, size: int
) -> dict[str, float]:
    """Score `count` prompts, `size` at a time."""
    names = ["scores", "response_mask"]
    parts = []
    for start in range(0, count, size):
        batch = prompts.batch(start, min(size, count - start))
        batch = groups.actor_rollout.generate_sequences(batch)
        parts.append(batch.union(groups.reward.compute_rm_score(batch)).select(names, []))
    return mean_score(DataProto.concat(parts))


PPO_HYBRID = Experiment(PPOHybridExperiment, run, hybrid_flow)
