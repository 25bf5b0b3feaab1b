"""The dataflow of experiments that train a policy: which calls a configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.dataflow import DataflowConfig
from headway.contracts.config.rollout_experiments import (
    PolicyLearner,
    critic_of,
    reward_model_of,
)
from trainer.algorithms.advantage_registry import chosen_estimator
from trainer.algorithms.policy_loss_registry import PREPARED, chosen_policy_loss
from trainer.dataflow.call import Call, further_calls
from trainer.dataflow.graph import Dataflow

ACTOR_GEN = "actor_gen"
"""The call that brings the rollouts."""
POLICY, CRITIC, REFERENCE, TEACHER = "model", "critic", "reference", "teacher"
REWARD = "reward"
"""Models; also the names of their folders."""
TOKENS = ("input_ids", "labels", "action_mask")
GENERATED = (
    *TOKENS,
    "behaviour_logprobs",
    "behaviour_versions",
    "sequence",
    "group",
    "truncated",
    "is_sample",
)
"""Columns that every batch of trajectories has besides their scores; see `batch_of_trajectories`."""
PROXIMAL = ("proximal_logprobs", "entropy")
"""Columns that the policy computes before it is updated."""


def policy_calls(config: PolicyLearner) -> tuple[Call, ...]:
    """The calls of one version, `dataflow.calls` among them; one of a known name takes its place."""
    algorithm, has_critic = config.algorithm, critic_of(config) is not None
    further = further_calls(config.dataflow.calls)
    reads: tuple[str, ...]
    if config.scores_rollouts_later:
        further = (_scoring(config), *further)
    generated = GENERATED + _also_generated(algorithm, further)
    adds: tuple[str, ...]
    generator = generator_of(config.dataflow).name
    calls = [Call(ACTOR_GEN, "generate", generator, (), generated, POLICY)]
    is_asked = _asks_policy_first(algorithm, further)
    if is_asked:
        calls.append(Call("actor_inf", "inference", "ppo_actor", TOKENS, PROXIMAL, POLICY))
    if algorithm.kl_coef > 0:
        asked = POLICY if config.has_base_reference else REFERENCE
        adds = ("reference_logprobs",)
        calls.append(Call("ref_inf", "inference", "reference", TOKENS, adds, asked))
    column = "teacher_top" if algorithm.distillation_top_k else "teacher_logprobs"
    if config.teacher is not None:
        adds = (column,)
        calls.append(Call("teacher_inf", "inference", "teacher", TOKENS, adds, TEACHER))
    if config.teacher_servers is not None:
        adds, reads = (column,), ("input_ids", "action_mask")
        calls.append(Call("teacher_inf", "inference", "teacher_servers", reads, adds))
    if has_critic:
        adds = ("values", "normalized_values")
        calls.append(Call("critic_inf", "inference", "ppo_critic", ("input_ids",), adds, CRITIC))
    calls.append(_advantages(algorithm, config, has_critic, is_asked))
    if has_critic:
        reads = ("input_ids", "group", "loss_mask", "returns", "values", "normalized_values")
        calls.append(Call("critic_train", "train_step", "ppo_critic", reads, (), CRITIC))
    eta = config.reference.ema_eta
    note = "" if eta is None else f"{REFERENCE} <- {eta:g} of {POLICY} + {1 - eta:g} of itself"
    reads = _actor_reads(algorithm, is_asked)
    calls.append(Call("actor_train", "train_step", "ppo_actor", reads, (), POLICY, note))
    names = {call.name for call in further}
    return (*(call for call in calls if call.name not in names), *further)


def policy_flow(config: PolicyLearner) -> Dataflow:
    """The graph of an experiment.

    Raises:
        ConfigError: it does not close.
    """
    return Dataflow(policy_calls(config))


def generator_of(config: DataflowConfig) -> ComponentConfig:
    """Return the interface of `actor_gen`; `rollout` unless the configuration names another."""
    named = (call.interface for call in config.calls if call.kind == "generate")
    return next(named, ComponentConfig(name="rollout"))


def _also_generated(algorithm: AlgorithmConfig, further: Sequence[Call]) -> tuple[str, ...]:
    """Return the generated columns that are added only if a call reads them, or if no other call adds
    them.
    """
    keys = [] if any("scores" in call.output_keys for call in further) else ["scores"]
    keys += ["row"] if any("row" in call.input_keys for call in further) else []
    is_scored = any("dense_scores" in call.output_keys for call in further)
    is_dense = algorithm.dense_rewards != "none" and not is_scored
    keys += ["dense_scores"] if is_dense else []
    return (*keys, *(["is_greedy"] if algorithm.advantage.type == "remax" else []))


def _scoring(config: PolicyLearner) -> Call:
    """The call that scores answers: by the verifier, by the reward model, or by both."""
    reads = ("input_ids", "action_mask", "row")
    if reward_model_of(config) is None:
        return Call("rew_inf", "inference", "verified_answers", reads, ("scores",))
    is_dense = config.algorithm.dense_rewards != "none"
    adds = ("scores", "dense_scores") if is_dense else ("scores",)
    return Call("rew_inf", "inference", "reward_role", reads, adds, REWARD)


def _asks_policy_first(algorithm: AlgorithmConfig, further: Sequence[Call]) -> bool:
    """True if the policy computes columns before its update; also if a custom call reads them or
    replaces the pass.
    """
    is_wanted = any(
        call.name == "actor_inf" or not set(PROXIMAL).isdisjoint(call.input_keys)
        for call in further
    )
    is_recomputed = algorithm.decoupled and algorithm.proximal == "recompute"
    return algorithm.has_proximal_pass or (is_recomputed and is_wanted)


def _advantages(
    algorithm: AlgorithmConfig, config: PolicyLearner, has_critic: bool, is_policy_asked: bool
) -> Call:
    reads = ["action_mask", "behaviour_logprobs", "group", "truncated", "is_sample", "scores"]
    adds = ["loss_mask", "advantages"]
    chosen_estimator(
        algorithm.advantage
    )  # settings that do not fit are refused before a model loads
    if chosen_policy_loss(algorithm.policy_loss)[0].prepare is not None:
        adds.append(PREPARED)
    if algorithm.decoupled:
        reads.append("behaviour_versions")
        if is_policy_asked:
            reads += PROXIMAL
        elif algorithm.proximal != "recompute":
            adds.append("proximal_shares")
        adds += _batch_corrections(algorithm)
    if algorithm.kl_in == "reward" and algorithm.kl_coef > 0:
        reads.append("reference_logprobs")
    if config.has_teacher and not algorithm.distillation_top_k:
        reads.append("teacher_logprobs")
    if algorithm.dense_rewards != "none":
        reads.append("dense_scores")
    if algorithm.advantage.type == "remax":
        reads.append("is_greedy")
    if has_critic:
        reads.append("values")
        adds.append("returns")
    return Call("advantages", "compute", "advantages", tuple(reads), tuple(adds))


def _batch_corrections(algorithm: AlgorithmConfig) -> list[str]:
    """Return the columns that corrections for the behaviour policy compute over a whole batch."""
    columns = {
        "near": algorithm.m2_threshold is not None,
        "weight_factor": algorithm.behaviour_weight_normalize,
    }
    return [name for name, is_asked in columns.items() if is_asked]


def _actor_reads(algorithm: AlgorithmConfig, is_policy_asked: bool) -> tuple[str, ...]:
    reads = ["input_ids", "labels", "group", "loss_mask", "advantages", "behaviour_logprobs"]
    if algorithm.decoupled:
        if is_policy_asked:
            reads.append("proximal_logprobs")
        elif algorithm.proximal != "recompute":
            reads.append("proximal_shares")
        reads += _batch_corrections(algorithm)
    if chosen_policy_loss(algorithm.policy_loss)[0].prepare is not None:
        reads.append(PREPARED)
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss":
        reads.append("reference_logprobs")
    if algorithm.distillation_top_k:
        reads.append("teacher_top")
    return tuple(reads)
