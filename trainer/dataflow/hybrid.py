"""The dataflow of `ppo-hybrid`, for drawings: its calls are methods of workers, and run in this order."""

from __future__ import annotations

from headway.contracts.config.ppo_hybrid import PPOHybridExperiment
from trainer.dataflow.call import Call
from trainer.dataflow.graph import Dataflow
from trainer.dataflow.policy import CRITIC, POLICY, REFERENCE

SEQUENCES = ("input_ids", "attention_mask", "response_mask")
GENERATED = (*SEQUENCES, "rollout_log_probs", "truncated", "uid", "row", "messages")


def hybrid_flow(config: PPOHybridExperiment) -> Dataflow:
    """Generation, what models add, advantages, and the updates."""
    actor, has_critic = "actor_rollout", config.critic is not None
    in_reward = config.has_reference and config.algorithm.kl_in == "reward"
    in_loss = config.has_reference and not in_reward
    kl = ("ref_log_prob",)
    is_rule = config.reward.rule is not None
    chats = () if config.reward.input_tokenizer is None else ("messages",)
    scored = (*SEQUENCES, "row") if is_rule else (*SEQUENCES, *chats)
    values = ("values", "normalized_values") if has_critic else ()
    credited = ("advantages", "returns") if has_critic else ("advantages",)
    reads = ("scores", "uid", "truncated", "old_log_probs", "rollout_log_probs", "entropys")
    reads = (*reads, *(kl if in_reward else ()), *values[:1])
    updated = (*SEQUENCES, "rollout_log_probs", "old_log_probs", "advantages")
    adds = ("old_log_probs", "entropys")
    calls = [
        Call("generate_sequences", "generate", actor, (), GENERATED, POLICY),
        Call("compute_rm_score", "inference", "reward", scored, ("scores",), _reward(is_rule)),
        Call("compute_log_prob", "inference", actor, SEQUENCES, adds, POLICY),
        Call("row_advantages", "compute", "controller", reads, credited),
    ]
    if config.has_reference:
        asked = POLICY if config.has_base_reference else REFERENCE
        calls.append(Call("compute_ref_log_prob", "inference", "ref", SEQUENCES, kl, asked))
    if has_critic:
        learned = (*SEQUENCES, "returns", *values)
        calls.append(Call("compute_values", "inference", "critic", SEQUENCES, values, CRITIC))
        calls.append(Call("update_critic", "train_step", "critic", learned, (), CRITIC))
    updated = (*updated, *(kl if in_loss else ()))
    calls.append(Call("update_actor", "train_step", actor, updated, (), POLICY))
    return Dataflow(calls)


def _reward(is_rule: bool) -> str | None:
    return None if is_rule else "reward_model"
