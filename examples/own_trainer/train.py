"""A trainer of your own: plain PyTorch and transformers, with rollouts and weights through a gateway.

Stop it in any way and start it again: it goes on after its last checkpoint.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from headway import (
    ComponentConfig,
    ConsumerSpec,
    Prompt,
    RemoteInferenceEngine,
    RolloutRequest,
    SamplingConfig,
    TrajectoryBatch,
)
from weight_sync import DiskSync, make_publisher, next_version, publish_next

NAME, GROUPS, GROUP_SIZE, MAX_STALENESS = "own-trainer", 4, 16, 1
CLIP, LEARNING_RATE, SAVE_EVERY = 0.2, 3e-3, 5


def ask(name: str, number: int) -> RolloutRequest:
    """A prompt group whose answers should end in 4: 0 + 4 =, 1 + 3 =, ..."""
    text = f"{number} + {GROUPS - number} ="
    return RolloutRequest(
        rollout_id=name,
        consumer=NAME,
        prompt=Prompt(group_id=name, group_size=GROUP_SIZE, text=text, data={"answer": "4"}),
        reward=ComponentConfig(name="exact", args={"pattern": r"\d"}),  # its last digit
        gconfig=SamplingConfig(max_new_tokens=8),
    )


def loss_of(batch: TrajectoryBatch, model: torch.nn.Module) -> torch.Tensor:
    """PPO's clipped policy gradient, with advantages within each group."""
    rewards = torch.tensor([group.rewards for group in batch.groups])  # [groups, group size]
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)
    ids, mask, sampled = (
        pad_sequence([torch.from_numpy(getattr(row, name)) for row in batch.trajectories], True)
        for name in ("input_ids", "loss_mask", "logprobs")
    )  # [trajectories, T] each
    logprobs = model(ids[:, :-1].long()).logits.log_softmax(-1)
    logprobs = logprobs.gather(-1, ids[:, 1:, None].long())[..., 0]
    ratio = (logprobs - sampled[:, 1:]).exp()  # to the policy that sampled the token
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -gain[mask[:, 1:]].mean()


def train(servers: RemoteInferenceEngine, model_dir: str, run_dir: Path, steps: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    checkpoint, saved = run_dir / "checkpoint.pt", -1
    if checkpoint.exists():
        state = torch.load(checkpoint)
        saved = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    publisher = make_publisher(DiskSync(root=str(run_dir / "weights")))
    version = next_version(publisher, servers)
    spec = ConsumerSpec(NAME, GROUPS * GROUP_SIZE, MAX_STALENESS, step=saved, version=version)
    servers.attach(spec)  # what an earlier process had received after its checkpoint comes again
    try:
        version = publish_next(publisher, servers, model.named_parameters())
        batches = 1 + MAX_STALENESS  # the next one is sampled while we train on this one
        for step in range(saved + 1, steps):
            names = [f"{NAME}-{version}-{number}" for number in range(batches * GROUPS)]
            servers.submit([ask(name, n % GROUPS) for n, name in enumerate(names)])
            batch, batches = servers.wait(GROUPS, timeout=60.0), 1
            optimizer.zero_grad()
            loss_of(batch, model).backward()
            optimizer.step()
            servers.consumed(batch.rollout_ids, step, checkpoint_step=saved)
            oldest = min(group.oldest_version for group in batch.groups)
            reward = sum(group.mean_reward for group in batch.groups) / GROUPS
            print(f"step {step} reward {reward:.2f} staleness {version - oldest}", flush=True)
            version = publish_next(publisher, servers, model.named_parameters())
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
                saved = step
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({"step": step, **state}, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
    finally:
        servers.detach()  # cancels what was submitted and not trained on
        publisher.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateway", default="http://127.0.0.1:8000", help="URL")
    parser.add_argument("--model", required=True, help="Hugging Face folder, as of the servers")
    parser.add_argument("--run-dir", type=Path, required=True, help="for checkpoint and weights")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    engine = RemoteInferenceEngine(options.gateway)
    train(engine, options.model, options.run_dir, options.steps)
    engine.destroy()
