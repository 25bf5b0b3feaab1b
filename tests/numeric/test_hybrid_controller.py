"""The loop of `ppo-hybrid` with all roles in this process: what a step computes, and what it tells."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.contracts.config.ppo_hybrid import PPOHybridExperiment
from headway.runtime.config import validate_config
from headway.runtime.journal import METRICS_NAME, MetricsJournal, read_steps
from headway.text.tokenizer import TextTokenizer
from tests.numeric.models import save_model, write_char_tokenizer
from trainer.checkpoint import CheckpointContents, Checkpoints, RunState
from trainer.experiments.hybrid_controller import train
from trainer.experiments.hybrid_steps import StepWatcher
from trainer.exports import Exports
from trainer.interfaces.advantages import make_kl
from trainer.topology import Topology
from trainer.tracking.tracker import Tracker
from trainer.workers.dispatch import WorkerCall
from trainer.workers.prompt_batches import PromptBatches
from trainer.workers.resource_pools import open_groups
from trainer.workers.stored_group import StoredGroup
from trainer.workers.worker import WorkerHost, WorkerReply, WorkerSpec

STEPS = 3
ALONE = Topology(0, 1, torch.device("cpu"))


class InProcess:
    """`WorkerExecutor` with one worker, in this process."""

    world_size = 1
    pids: Sequence[int] = (0,)

    def __init__(self, spec: WorkerSpec) -> None:
        self._host = WorkerHost(spec, {})

    def run(self, method: str, calls: Mapping[int, WorkerCall]) -> dict[int, WorkerReply]:
        return {rank: self._host.answer(method, call) for rank, call in calls.items()}

    def close(self) -> None:
        self._host.worker.close()


class Started:
    """A run in this process."""

    def __init__(self, root: Path, out: Path, stack: ExitStack, **changes: Any) -> None:
        tree: dict[str, Any] = {
            "run_dir": str(out),
            "model": {"path": str(root / "model")},
            "data": {"path": str(root / "rows.jsonl"), "batch_size": 3},
            "group_size": 4,
            "sampling": {"max_new_tokens": 3},
            "reward": {"rule": {"name": "exact"}},
            "generation": {"args": {"backend": {"max_context": 64}}},
            "trainer": {"device": "cpu", "total_steps": STEPS},
            "recovery": {"every_steps": STEPS},
        }
        self.config = validate_config(PPOHybridExperiment, tree | changes)
        self.groups = open_groups(self.config, stack, lambda _, spec: InProcess(spec))
        self.groups.init_models()
        models = {name: StoredGroup(group) for name, group in self.groups.trained.items()}
        self.contents = CheckpointContents(models)
        self.checkpoints = Checkpoints(out, self.config.recovery, ALONE)
        self.exports = Exports(out, self.config.export, ALONE, 1)
        self._out = out

    def train(self, state: RunState) -> tuple[RunState, list[dict[str, Any]]]:
        config = self.config
        tokenizer = TextTokenizer(config.model.path)
        prompts = PromptBatches(config.data, tokenizer, config.sampling, config.group_size, 0, 0)
        watcher = StepWatcher(config, self.groups, self.contents, self.exports, None)
        tracker = Tracker(MetricsJournal(self._out / METRICS_NAME))
        kl = make_kl(config.algorithm)
        args = (self.groups, prompts, kl, self.checkpoints, watcher, tracker)
        state = train(state, config, *args)
        tracker.close()
        return state, read_steps(self._out / METRICS_NAME)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("start")
    write_char_tokenizer(save_model(root / "model", "llama"))
    rows = [{"prompt": "ab" * (n + 1), "answer": "A"} for n in range(5)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_step_tells_what_other_experiments_tell(root: Path, tmp_path: Path, stack: ExitStack):
    state, steps = Started(root, tmp_path, stack).train(RunState("run"))
    assert (state.step, state.version, state.cursor, state.trajectories) == (3, 3, 9, 36)
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps:
        assert step["trajectories"] == 12
        assert step["staleness_trajectories"] == [12]
        assert step["logprob_diff_max"] < 1e-4
        assert step["weight_transfer_copied_bytes"] == 0
        assert step["tokens"] > 36
        assert step["train_tokens_per_s"] > 0


def test_a_critic_learns_first(root: Path, tmp_path: Path, stack: ExitStack):
    ppo = {
        "critic": {"warmup_steps": 2},
        "algorithm": {"advantage": {"type": "gae"}, "kl_coef": 0.1},
    }
    started = Started(root, tmp_path, stack, **ppo)
    assert started.groups.ref is started.groups.actor_rollout
    _, steps = started.train(RunState("run"))
    assert ["loss" in step for step in steps] == [False, False, True]
    assert all("value_loss" in step for step in steps)
    assert steps[-1]["reference_kl"] == pytest.approx(0.0, abs=1e-6)  # nothing has moved before


def test_a_checkpoint_brings_all_models_back(root: Path, tmp_path: Path, stack: ExitStack):
    ppo = {"critic": {}, "algorithm": {"advantage": {"type": "gae"}}}
    first = Started(root, tmp_path, stack, **ppo)
    state, _ = first.train(RunState("run"))
    second = Started(root, tmp_path, stack, **ppo)
    assert second.checkpoints.load_newest(second.contents) == state
    config = first.config
    tokenizer = TextTokenizer(config.model.path)
    prompts = PromptBatches(config.data, tokenizer, config.sampling, 4, 0, 0)
    batches = [
        started.groups.actor_rollout.generate_sequences(prompts.batch(state.cursor, 3))
        for started in (first, second)
    ]
    assert torch.equal(batches[0]["responses"], batches[1]["responses"])
    values = [
        started.groups.critic.compute_values(batch)["values"]
        for started, batch in zip((first, second), batches, strict=True)
    ]
    assert torch.equal(*values)
