"""The roles, each a worker's class on top of train engines: what a driver can ask them for.

    actor, rollout, ref, actor_rollout, actor_rollout_ref    ActorRolloutRefWorker
    critic                                                   CriticWorker
    reward                                                   RewardWorker (`reward_worker`)

Batches are padded (`trainer.workers.padding`); a loss is the mean over the tokens of all ranks, whatever
rows a rank has and however they are packed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from headway.contracts.config.critic import CriticConfig, ValueModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.workers import WorkersConfig
from headway.contracts.errors import ConfigError, DataError
from headway.contracts.types import LLMRequest, LLMResponse
from trainer.api import SaveLoadMeta, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.hybrid.transfer_cost import TransferCost
from trainer.interfaces.frozen_model import FrozenModel
from trainer.interfaces.ppo_actor import PPOActor
from trainer.interfaces.ppo_critic import PPOCritic
from trainer.workers.data_proto import DataProto
from trainer.workers.dispatch import Dispatch, register
from trainer.workers.meta_keys import EPOCHS, SAMPLING, TEMPERATURE, meta_value
from trainer.workers.model_worker import ModelWorker, unwrapped
from trainer.workers.padding import sequence_columns, to_responses, to_sequences
from trainer.workers.rollouts import RolloutEngine, make_rollout_engine

Role = Literal["actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref"]
Metrics = dict[str, float]

_NUMBERS = "normalizer.json"


class ActorRolloutRefWorker(ModelWorker):
    """The policy that learns, generates, or stays as a reference; or several of these in one process."""

    def __init__(self, config: WorkersConfig, role: Role) -> None:
        """
        Raises:
            ConfigError: no such role.
        """
        super().__init__(config)
        if role not in get_args(Role):
            raise ConfigError(
                f"no role {role!r}; those of a policy are {', '.join(get_args(Role))}"
            )
        self._role = role
        self._parts = frozenset(role.split("_"))
        self._policy: TrainEngine | None = None
        self._reference: tuple[TrainEngine, bool] | None = None
        self._rollout: RolloutEngine | None = None

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load what the role needs.

        Raises:
            ConfigError: no such model, or one that these ranks cannot hold as configured.
        """
        config = self._config
        if self._parts & {"actor", "rollout"}:
            is_trained = "actor" in self._parts
            self._policy = self._load(config.model, config.optimizer if is_trained else None)
        if "ref" in self._parts:
            self._reference = self._make_reference()
        if "rollout" in self._parts and self._policy is not None:
            self._rollout = make_rollout_engine(config, unwrapped(self._policy), self.topology)

    @register()
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """A response to each row.

        Args:
            prompts: `prompts` [B, P] token ids padded on the left, `prompt_mask` [B, P]; if there,
                `seeds` [B], of each row's sampling, and `max_new_tokens` [B], at most the configured
                one. Note `sampling` replaces the configured one.
        Returns:
            Those of `sequence_columns`, with R = `max_new_tokens`, `rollout_log_probs` [B, R], and
            `truncated` [B] bool, it ran into a limit; the columns of the prompts besides.
        """
        if self._rollout is None:
            raise self._not_mine("generate_sequences", "rollout")
        sampling = prompts.meta.get(SAMPLING, self._config.sampling)
        ids, mask = prompts["prompts"], prompts["prompt_mask"].bool()
        requests = [
            LLMRequest(
                rid=f"row-{self.topology.rank}-{row}",
                input_ids=tuple(ids[row][mask[row]].tolist()),
                gconfig=sampling.model_copy(update=changes),
            )
            for row, changes in enumerate(_own_sampling(prompts, sampling))
        ]
        with self._on_device(self._generating()):
            responses = self._rollout.generate(requests)
        width, pad = sampling.max_new_tokens, self._config.generation.pad_token_id
        columns = _response_columns(ids, mask, responses, width, pad)
        return prompts.with_columns(**columns)

    @register()
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Compute the policy's logprobs of responses before it learns from them.

        Args:
            batch: of `to_sequences`; note `temperature`.
        Returns:
            `old_log_probs` and `entropys` [B, R], 0 outside of the response mask.
        """
        actor = self._actor(batch, "compute_log_prob")
        with self._on_device(self._generating()):
            logprobs, entropy = actor.infer(to_sequences(batch)).unbind(-1)
        return DataProto(to_responses(batch, {"old_log_probs": logprobs, "entropys": entropy}))

    @register()
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Compute the reference's logprobs of responses.

        Args:
            batch: of `to_sequences`; note `temperature`.
        Returns:
            `ref_log_prob` [B, R], 0 outside of the response mask.
        """
        if self._reference is None:
            raise self._not_mine("compute_ref_log_prob", "ref")
        engine, is_base = self._reference
        temperature = meta_value(batch, TEMPERATURE, "compute_ref_log_prob")
        reference = FrozenModel(engine, self.topology, self._mb_spec, temperature, "", is_base)
        with self._on_device(engine):
            logprobs = reference.infer(to_sequences(batch))
        return DataProto(to_responses(batch, {"ref_log_prob": logprobs}))

    @register(Dispatch.DP_COMPUTE_MINI_BATCHES)
    def update_actor(self, parts: Sequence[DataProto]) -> Metrics:
        """One optimizer step per mini-batch and epoch; the learning rate moves once.

        Args:
            parts: called through a group, one batch: of `to_sequences`, with `old_log_probs` and
                `advantages` [B, R]; `rollout_log_probs` where `algorithm.decoupled`, `ref_log_prob` where
                the KL is in the loss. Notes `temperature`; `mini_batch_size`, `shuffle_seed`, `epochs`.
        Returns:
            Metrics of `policy_loss` and of the optimizer: means over tokens in the loss, and over steps.
        """
        actor = self._actor(parts[0], "update_actor", is_update=True)
        shares = [self._policy_columns(part) for part in parts]
        epochs = parts[0].meta.get(EPOCHS, self._config.algorithm.num_epochs)
        engine = self._trained("update_actor")
        with self._on_device(engine, with_optimizer=True):
            metrics = actor.train_parts(shares * epochs)
            engine.step_lr_scheduler()
        return metrics

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def last_transfer(self) -> TransferCost | None:
        """Return the cost of the last transfer of weights to generation on this worker."""
        return None if self._rollout is None else self._rollout.last_transfer

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Store the policy with its optimizer in a folder that all ranks share."""
        engine = self._trained("save_checkpoint")
        with self._on_device(engine, with_optimizer=True):
            engine.save(SaveLoadMeta(folder)).result()

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Restore what `save_checkpoint` stored, on any number of ranks."""
        engine = self._trained("load_checkpoint")
        with self._on_device(engine, with_optimizer=True):
            engine.load(SaveLoadMeta(folder))

    @register(Dispatch.ONE_TO_ALL)
    def export_model(self, folder: str) -> None:
        """Write the policy as a Hugging Face directory."""
        engine = self._trained("export_model")
        with self._on_device(engine):
            engine.save(SaveLoadMeta(folder, weight_format="hf")).result()

    def close(self) -> None:
        if self._rollout is not None:
            self._rollout.close()
            self._rollout = None
        super().close()

    def _make_reference(self) -> tuple[TrainEngine, bool]:
        """An engine, and whether it is to be asked without its adapters."""
        config, path = self._config, self._config.reference.path
        if self._policy is not None and config.model.lora is not None and path is None:
            return self._policy, True
        changes: dict[str, object] = {"lora": None}
        if path is not None:
            changes |= {"path": path, "init_from_scratch": False}
        return self._load(config.model.model_copy(update=changes)), False

    def _actor(self, batch: DataProto, method: str, is_update: bool = False) -> PPOActor:
        wanted = {"actor"} if is_update else {"actor", "rollout"}
        if self._policy is None or not self._parts & wanted:
            raise self._not_mine(method, "actor")
        temperature = meta_value(batch, TEMPERATURE, method)
        config = self._config
        return PPOActor(
            self._policy,
            self.topology,
            config.algorithm,
            self._mb_spec,
            temperature,
            config.trainer.token_normalize_scope,
        )

    def _policy_columns(self, part: DataProto) -> SequenceBatch:
        algorithm = self._config.algorithm
        needed = ["old_log_probs", "advantages"]
        needed += ["rollout_log_probs"] if algorithm.decoupled else []
        is_in_loss = algorithm.kl_coef > 0 and algorithm.kl_in == "loss"
        needed += ["ref_log_prob"] if is_in_loss else []
        _check_there(part, needed, "update_actor")
        share = to_sequences(part)
        if "behaviour_logprobs" not in share.columns:
            share = share.with_columns(behaviour_logprobs=share["proximal_logprobs"])
        return share

    def _generating(self) -> TrainEngine:
        assert self._policy is not None  # the callers have refused workers without one
        return self._policy

    def _trained(self, method: str) -> TrainEngine:
        if self._policy is None or "actor" not in self._parts:
            raise self._not_mine(method, "actor")
        return self._policy

    def _not_mine(self, method: str, part: str) -> ConfigError:
        if part in self._parts:
            return ConfigError(f"{method} came before init_model; call that first")
        return ConfigError(f"{method} is asked of {part}, and this worker's role is {self._role}")


class CriticWorker(ModelWorker):
    """The model of returns."""

    def __init__(self, config: WorkersConfig) -> None:
        super().__init__(config)
        self._settings = config.critic or CriticConfig()
        self._engine: TrainEngine | None = None
        self._critic: PPOCritic | None = None

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the critic, or put a scalar head on the policy's model."""
        config, critic = self._config, self._settings
        model = critic.model
        if model is None:
            model = ValueModelConfig(**{**config.model.model_dump(), "head": "value"})
        self._engine = self._load(model, critic.optimizer)
        scope = config.trainer.token_normalize_scope
        self._critic = PPOCritic(self._engine, self.topology, critic, self._mb_spec, scope=scope)

    @register()
    def compute_values(self, batch: DataProto) -> DataProto:
        """Compute the value of each state.

        Args:
            batch: of `to_sequences`.
        Returns:
            `values` [B, R] of the states that tokens were sampled in, and `final_values` [B] of those
            after the last token, in units of the rewards; `normalized_values` [B, R] as
            computed.
        """
        engine, critic = self._ready("compute_values")
        packed = to_sequences(batch)
        with self._on_device(engine):
            normalized = critic.infer(packed)
        values = critic.denormalize(normalized)
        ends = torch.tensor(packed.lengths).cumsum(0) - 1
        columns = to_responses(batch, {"values": values, "normalized_values": normalized})
        return DataProto({**columns, "final_values": values[ends]})

    @register(Dispatch.DP_COMPUTE_MINI_BATCHES)
    def update_critic(self, parts: Sequence[DataProto]) -> Metrics:
        """One optimizer step per mini-batch and epoch; the learning rate moves once.

        Args:
            parts: called through a group, one batch: of `to_sequences`, with `returns` and the columns of
                `compute_values`. Notes `mini_batch_size`, `shuffle_seed`, `epochs`.
        Returns:
            Those of `PPOCritic.train_step`.
        """
        engine, critic = self._ready("update_critic")
        for part in parts:
            _check_there(part, ["returns", "values", "normalized_values"], "update_critic")
        shares = [to_sequences(part) for part in parts]
        with self._on_device(engine, with_optimizer=True):
            epochs = parts[0].meta.get(EPOCHS, self._settings.num_epochs)
            metrics = critic.train_parts(shares, epochs)
            engine.step_lr_scheduler()
        return metrics

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Store the critic with its optimizer and normaliser in a folder that all ranks share."""
        engine, critic = self._ready("save_checkpoint")
        with self._on_device(engine, with_optimizer=True):
            engine.save(SaveLoadMeta(folder)).result()
        if critic.normalizer is not None and self.topology.is_main:
            (Path(folder) / _NUMBERS).write_text(json.dumps(critic.normalizer.state_dict()))

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Restore what `save_checkpoint` stored, on any number of ranks."""
        engine, critic = self._ready("load_checkpoint")
        with self._on_device(engine, with_optimizer=True):
            engine.load(SaveLoadMeta(folder))
        if critic.normalizer is not None:
            critic.normalizer.load_state_dict(json.loads((Path(folder) / _NUMBERS).read_text()))

    @register(Dispatch.ONE_TO_ALL)
    def export_model(self, folder: str) -> None:
        """Write the critic as a Hugging Face directory."""
        engine, _ = self._ready("export_model")
        with self._on_device(engine):
            engine.save(SaveLoadMeta(folder, weight_format="hf")).result()

    def _ready(self, method: str) -> tuple[TrainEngine, PPOCritic]:
        if self._engine is None or self._critic is None:
            raise ConfigError(f"{method} came before init_model; call that first")
        return self._engine, self._critic


def _check_there(batch: DataProto, names: Sequence[str], method: str) -> None:
    missing = [name for name in names if name not in batch.tensors]
    if missing:
        raise DataError(
            f"{method} wants {', '.join(missing)} besides what the batch has: {sorted(batch.tensors)}"
        )


def _own_sampling(prompts: DataProto, sampling: SamplingConfig) -> list[dict[str, object]]:
    """Return for each row the sampling parameters that are its own."""
    count = len(prompts["prompts"])
    seeds, limits = [sampling.seed] * count, [sampling.max_new_tokens] * count
    if "seeds" in prompts.tensors:
        seeds = prompts["seeds"].tolist()
    if "max_new_tokens" in prompts.tensors:
        limits = prompts["max_new_tokens"].clamp(max=sampling.max_new_tokens).tolist()
    return [
        {"seed": seed, "max_new_tokens": limit} for seed, limit in zip(seeds, limits, strict=True)
    ]


def _response_columns(
    prompts: Tensor, mask: Tensor, responses: Sequence[LLMResponse], width: int, pad: int
) -> dict[str, Tensor]:
    """Return the columns of the generated responses, padded to `width`."""
    tokens = torch.full((len(prompts), width), pad, dtype=torch.int64)
    logprobs = torch.zeros(len(prompts), width)
    lengths = torch.tensor([len(response.output_tokens) for response in responses])
    for row, response in enumerate(responses):
        end = len(response.output_tokens)
        tokens[row, :end] = torch.tensor(response.output_tokens, dtype=torch.int64)
        logprobs[row, :end] = torch.tensor(response.output_logprobs)
    sampled = torch.arange(width) < lengths[:, None]
    truncated = torch.tensor([response.stop_reason == "length" for response in responses])
    columns = sequence_columns(prompts, mask, tokens, sampled)
    return columns | {"rollout_log_probs": logprobs, "truncated": truncated}
