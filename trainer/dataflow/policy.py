"""The dataflow of experiments that train a policy: which calls a configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.dataflow import CallConfig
from headway.contracts.config.ppo_code import VerifiedPPOExperiment
from headway.contracts.config.rollout_experiments import PolicyLearner, critic_of
from trainer.dataflow.call import Call
from trainer.dataflow.graph import Dataflow

POLICY, CRITIC, REFERENCE, TEACHER = "model", "critic", "reference", "teacher"
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
"""What every batch of trajectories holds besides their scores; see `batch_of_trajectories`."""
PROXIMAL = ("proximal_logprobs", "entropy")
"""What the policy says before it is updated."""


def policy_calls(config: PolicyLearner) -> tuple[Call, ...]:
    """The calls of one version, `dataflow.calls` among them; one of a known name takes its place."""
    algorithm, has_critic = config.algorithm, critic_of(config) is not None
    further = tuple(_further(call) for call in config.dataflow.calls)
    reads: tuple[str, ...]
    if scores_rollouts_later(config):
        reads = ("input_ids", "action_mask", "row")
        further = (Call("rew_inf", "inference", "verified_answers", reads, ("scores",)), *further)
    generated = GENERATED + _also_generated(algorithm, further)
    adds: tuple[str, ...]
    calls = [Call("actor_gen", "generate", "rollout", (), generated, POLICY)]
    is_asked = _asks_policy_first(algorithm, further)
    if is_asked:
        calls.append(Call("actor_inf", "inference", "ppo_actor", TOKENS, PROXIMAL, POLICY))
    if algorithm.kl_coef > 0:
        asked = POLICY if is_base_reference(config) else REFERENCE
        adds = ("reference_logprobs",)
        calls.append(Call("ref_inf", "inference", "reference", TOKENS, adds, asked))
    if config.teacher is not None:
        adds = ("teacher_logprobs",)
        calls.append(Call("teacher_inf", "inference", "teacher", TOKENS, adds, TEACHER))
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


def scores_rollouts_later(config: PolicyLearner) -> bool:
    """Whether the trainer has answers scored once it has received them, beside the models' inferences;
    otherwise the service scores each rollout as it ends."""
    is_replaced = any("scores" in call.output_keys for call in config.dataflow.calls)
    is_verified = isinstance(config, VerifiedPPOExperiment) and not config.ppo.use_dense_reward
    return is_verified and not is_replaced


def is_base_reference(config: PolicyLearner) -> bool:
    """Whether the reference is the policy without its adapters, so that no second copy is held."""
    reference = config.reference
    return config.model.lora is not None and reference.path is None and reference.ema_eta is None


def _also_generated(algorithm: AlgorithmConfig, further: Sequence[Call]) -> tuple[str, ...]:
    """What is brought only where it is read, or where nobody else brings it."""
    keys = [] if any("scores" in call.output_keys for call in further) else ["scores"]
    keys += ["row"] if any("row" in call.input_keys for call in further) else []
    return (*keys, *(["dense_scores"] if algorithm.dense_rewards != "none" else []))


def _asks_policy_first(algorithm: AlgorithmConfig, further: Sequence[Call]) -> bool:
    """Also where a call of one's own reads what it says, or takes its place."""
    is_wanted = any(
        call.name == "actor_inf" or not set(PROXIMAL).isdisjoint(call.input_keys)
        for call in further
    )
    is_recomputed = algorithm.decoupled and algorithm.proximal == "recompute"
    return algorithm.has_proximal_pass or (is_recomputed and is_wanted)


def _further(call: CallConfig) -> Call:
    interface = call.interface.name
    return Call(call.name, call.kind, interface, call.input_keys, call.output_keys, call.model)


def _advantages(
    algorithm: AlgorithmConfig, config: PolicyLearner, has_critic: bool, is_policy_asked: bool
) -> Call:
    reads = ["action_mask", "behaviour_logprobs", "group", "truncated", "is_sample", "scores"]
    adds = ["loss_mask", "advantages"]
    if algorithm.decoupled:
        reads.append("behaviour_versions")
        if is_policy_asked:
            reads += PROXIMAL
        elif algorithm.proximal == "interpolate":
            adds.append("proximal_shares")
        if algorithm.m2_threshold is not None:
            adds.append("near")
    if algorithm.kl_in == "reward" and algorithm.kl_coef > 0:
        reads.append("reference_logprobs")
    if config.teacher is not None:
        reads.append("teacher_logprobs")
    if algorithm.dense_rewards != "none":
        reads.append("dense_scores")
    if has_critic:
        reads.append("values")
        adds.append("returns")
    return Call("advantages", "compute", "advantages", tuple(reads), tuple(adds))


def _actor_reads(algorithm: AlgorithmConfig, is_policy_asked: bool) -> tuple[str, ...]:
    reads = ["input_ids", "labels", "group", "loss_mask", "advantages", "behaviour_logprobs"]
    if algorithm.decoupled:
        if is_policy_asked:
            reads.append("proximal_logprobs")
        elif algorithm.proximal == "interpolate":
            reads.append("proximal_shares")
        if algorithm.m2_threshold is not None:
            reads.append("near")
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss":
        reads.append("reference_logprobs")
    return tuple(reads)
