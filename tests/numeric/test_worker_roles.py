"""What each role does, asked directly: a worker's methods are methods."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.contracts.config.model import LoraConfig, TrainedModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.config.workers import GenerationConfig, WorkerRewardConfig
from headway.contracts.errors import ConfigError, DataError
from tests.numeric.engines import TOTAL_STEPS, WIDE, assert_close
from tests.numeric.models import load_reference, reference_logprobs
from tests.numeric.worker_rows import random_rows, stored_weights, workers_config
from trainer.algorithms.advantages import group_advantages
from trainer.workers.data_proto import DataProto
from trainer.workers.reward_worker import RewardWorker
from trainer.workers.roles import ActorRolloutRefWorker, CriticWorker
from trainer.workers.row_advantages import row_advantages

LORA = LoraConfig(rank=2, alpha=4, target_modules=("q_proj", "v_proj"))


def ready(config, role="actor") -> ActorRolloutRefWorker:
    worker = ActorRolloutRefWorker(config, role)
    worker.init_model()
    return worker


def test_roles_refuse_what_is_not_theirs(llama_dir: Path):
    config, batch = workers_config(llama_dir), random_rows(2)
    with pytest.raises(ConfigError, match="no role 'actor_ref'"):
        ActorRolloutRefWorker(config, "actor_ref")
    with pytest.raises(ConfigError, match="compute_log_prob came before init_model"):
        ActorRolloutRefWorker(config, "actor").compute_log_prob(batch)
    actor = ready(config)
    for method, part in (("compute_ref_log_prob", "ref"), ("generate_sequences", "rollout")):
        with pytest.raises(ConfigError, match=f"{method} is asked of {part}.*role is actor"):
            getattr(actor, method)(batch)
    with pytest.raises(ConfigError, match="update_actor is asked of actor"):
        ready(config, "ref").update_actor([batch])
    with pytest.raises(ConfigError, match="compute_values came before init_model"):
        CriticWorker(config).compute_values(batch)
    with pytest.raises(ConfigError, match=r"set reward\.rule or \.model"):
        RewardWorker(workers_config(llama_dir, reward=WorkerRewardConfig())).init_model()


def test_bad_batches_are_named(llama_dir: Path):
    actor, batch = ready(workers_config(llama_dir)), random_rows(2)
    with pytest.raises(DataError, match=r"compute_log_prob wants meta\['temperature'\]"):
        actor.compute_log_prob(DataProto(batch.tensors))
    for missing in ("old_log_probs", "advantages", "rollout_log_probs"):
        rest = batch.select(sorted(batch.columns - {missing}))
        with pytest.raises(DataError, match=f"update_actor wants {missing} besides"):
            actor.update_actor([rest])
    with pytest.raises(DataError, match="no objects 'uid'"):
        row_advantages(WIDE, DataProto(batch.tensors))


def test_an_update_does_not_depend_on_the_micro_batches(llama_dir: Path, tmp_path: Path):
    metrics, weights = [], []
    for budget in (20, 1000):
        trainer = TrainerConfig(total_steps=TOTAL_STEPS, max_tokens_per_mb=budget)
        actor = ready(workers_config(llama_dir, trainer=trainer))
        metrics.append(actor.update_actor([random_rows(6)]))
        actor.export_model(str(tmp_path / str(budget)))
        weights.append(stored_weights(tmp_path / str(budget)))
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-6)
    assert_close(weights[0], weights[1], atol=1e-6)


def test_padding_rows_change_no_update(llama_dir: Path, tmp_path: Path):
    batch, weights = random_rows(3), []
    for name, rows in (("plain", batch), ("padded", batch.pad_to(8))):
        actor = ready(workers_config(llama_dir))
        actor.update_actor([rows])
        actor.export_model(str(tmp_path / name))
        weights.append(stored_weights(tmp_path / name))
    assert_close(weights[0], weights[1], atol=1e-6)


def test_the_reference_of_adapters_is_their_base(llama_dir: Path):
    model = TrainedModelConfig(path=str(llama_dir), lora=LORA)
    worker = ready(workers_config(llama_dir, model=model), "actor_rollout_ref")
    alone = ready(workers_config(llama_dir, model=model), "ref")
    batch = random_rows(5)
    first = worker.compute_log_prob(batch)["old_log_probs"]
    for _ in range(2):
        worker.update_actor([batch])
        reference = worker.compute_ref_log_prob(batch)["ref_log_prob"]
        assert torch.equal(reference, first)
    assert (worker.compute_log_prob(batch)["old_log_probs"] - first).abs().max() > 1e-4
    assert torch.equal(alone.compute_ref_log_prob(batch)["ref_log_prob"], first)


def test_checkpoints_of_actor_and_critic_come_back(llama_dir: Path, tmp_path: Path):
    config, batch = workers_config(llama_dir), random_rows(5)
    actor, critic = ready(config), CriticWorker(config)
    critic.init_model()
    judged = batch.union(critic.compute_values(batch))
    actor.update_actor([batch])
    critic.update_critic([judged])
    for name, worker in (("actor", actor), ("critic", critic)):
        worker.save_checkpoint(str(tmp_path / name))
    again, critic_again = ready(config), CriticWorker(config)
    critic_again.init_model()
    for name, worker in (("actor", again), ("critic", critic_again)):
        worker.load_checkpoint(str(tmp_path / name))
    expected, got = actor.compute_log_prob(batch), again.compute_log_prob(batch)
    assert torch.equal(got["old_log_probs"], expected["old_log_probs"])
    expected, got = critic.compute_values(batch), critic_again.compute_values(batch)
    assert torch.equal(got["values"], expected["values"])


def test_a_reward_stands_at_the_last_token(llama_dir: Path):
    worker = RewardWorker(workers_config(llama_dir))
    worker.init_model()
    batch = random_rows(6)
    said = worker.compute_rm_score(batch)
    lengths = batch["attention_mask"][:, -batch["responses"].shape[1] :].sum(1)
    assert (lengths == 0).any() or (lengths > 1).any()
    for row, length in enumerate(lengths.tolist()):
        expected = torch.zeros(batch["responses"].shape[1])
        if length:
            expected[length - 1] = said["scores"][row]
        assert torch.equal(said["rm_scores"][row], expected)


def test_what_is_generated_has_the_logprobs_of_the_model(llama_dir: Path):
    worker = ready(workers_config(llama_dir), "rollout")
    rows = random_rows(4)
    sampling = SamplingConfig(max_new_tokens=5, temperature=0.7, stop_token_ids=tuple(range(20)))
    prompts = DataProto.of(
        {"sampling": sampling, "temperature": 0.7},
        prompts=rows["prompts"],
        prompt_mask=rows["attention_mask"][:, :6],
        seeds=torch.arange(4),
    )
    batch = worker.generate_sequences(prompts)
    model = load_reference(llama_dir)
    assert batch["responses"].shape == (4, 5)
    for row in range(4):
        length = int(batch["response_mask"][row].sum())
        prompt = prompts["prompts"][row][prompts["prompt_mask"][row].bool()].tolist()
        response = batch["responses"][row, :length].tolist()
        assert bool(batch["truncated"][row]) == (response[-1] >= 20)
        expected = reference_logprobs(model, prompt, response, 0.7)
        got = batch["rollout_log_probs"][row, :length].double()
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
    recomputed = worker.compute_log_prob(batch)["old_log_probs"]
    torch.testing.assert_close(recomputed, batch["rollout_log_probs"], atol=2e-5, rtol=0)
    with pytest.raises(ConfigError, match=r"sampling.top_p: the rollout engine `forward`"):
        worker.generate_sequences(prompts.with_meta(sampling=SamplingConfig(top_p=0.5)))


def test_a_hybrid_engine_generates_with_what_the_worker_trains(llama_dir: Path):
    args = {"backend": {"max_context": 64}}
    generation = GenerationConfig(engine="hybrid", args=args)
    worker = ready(workers_config(llama_dir, generation=generation), "actor_rollout")
    rows = random_rows(4)
    prompts = DataProto.of(
        {"sampling": SamplingConfig(max_new_tokens=9, ignore_eos=True), "temperature": 1.0},
        prompts=rows["prompts"],
        prompt_mask=rows["attention_mask"][:, :6],
        seeds=torch.arange(4),
    )
    told = []
    for _ in range(2):
        batch = worker.generate_sequences(prompts)
        recomputed = worker.compute_log_prob(batch)["old_log_probs"]
        torch.testing.assert_close(recomputed, batch["rollout_log_probs"], atol=2e-5, rtol=0)
        told.append(worker.compute_log_prob(rows)["old_log_probs"])
        worker.update_actor([rows])
    assert not torch.allclose(*told, atol=1e-4)  # it has learned in between
    worker.close()


def test_rows_are_judged_as_sequences_are():
    batch = random_rows(6).with_columns(
        scores=torch.tensor([1.0, 0.0, 0.0, 3.0, 1.0, 1.0]),
        entropys=torch.zeros(6, 9),
        uid=["a", "b", "a", "a", "c", "c"],
    )
    judged, _ = row_advantages(WIDE, batch)
    groups = torch.tensor([0, 1, 0, 0, 2, 2])
    expected = group_advantages(batch["scores"], groups)[:, None] * batch["response_mask"]
    torch.testing.assert_close(judged["advantages"], expected)
    assert torch.equal(judged["response_mask"], batch["response_mask"])
