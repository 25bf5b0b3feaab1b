"""The quick start's settings: a warm start of about half a minute, then two minutes of learning.

All of it runs on the CPU, GPUs or not: a model this small is no faster on one.
"""

from __future__ import annotations

from pathlib import Path

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.base import ComponentConfig
from headway.contracts.config.data import DataConfig, DemonstrationDataConfig
from headway.contracts.config.experiment import GRPOExperiment, SFTExperiment
from headway.contracts.config.gateway import ExecutorConfig, GatewayConfig, ServiceConfig
from headway.contracts.config.launch import LaunchConfig, shared_root
from headway.contracts.config.model import ModelConfig, TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.recovery import RecoveryConfig
from headway.contracts.config.rollout import RolloutConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import EmbeddedTorchConfig, ServerConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.config.weight_sync import SharedMemorySync
from headway.launch.quickstart.task import MAX_RESPONSE_TOKENS

PROMPTS_PER_STEP = 32
GROUP_SIZE = 8
SFT_ROWS = 12_800
SFT_STEPS = 400
MAX_CONTEXT = 256
SEED_OF_RL_ROWS = 1_000_000
"""Added to the seed, so that warm start and reinforcement learning draw different prompts."""


def warm_start(run_dir: Path, seed: int) -> SFTExperiment:
    """Supervised training on noisy demonstrations, from random weights."""
    return SFTExperiment(
        run_dir=str(run_dir / "warm_start"),
        output_dir=str(run_dir / "base.partial"),
        model=TrainedModelConfig(path=str(run_dir / "scratch"), init_from_scratch=True, seed=seed),
        data=DemonstrationDataConfig(
            path=str(run_dir / "data" / "sft.jsonl"), batch_size=SFT_ROWS // SFT_STEPS
        ),
        optimizer=OptimizerConfig(
            lr=2e-3,
            beta2=0.98,
            weight_decay=0.01,
            schedule="cosine",
            warmup_steps=30,
            min_lr_ratio=0.05,
        ),
        trainer=TrainerConfig(
            device="cpu",
            total_steps=SFT_STEPS,
            max_tokens_per_mb=2048,
            num_threads=2,
            seed=seed,
        ),
        recovery=RecoveryConfig(every_steps=SFT_STEPS, keep=1, mode="auto"),
    )


def reinforce(
    run_dir: Path, steps: int, seed: int, max_staleness: int, num_servers: int, resume: bool
) -> LaunchConfig:
    """Asynchronous GRPO across gateway, generation servers and trainer."""
    base = str(run_dir / "base")
    trainer = GRPOExperiment(
        run_dir=str(run_dir),
        model=TrainedModelConfig(path=base),
        data=DataConfig(
            path=str(run_dir / "data" / "rl.jsonl"), batch_size=PROMPTS_PER_STEP, seed=seed
        ),
        sampling=SamplingConfig(max_new_tokens=MAX_RESPONSE_TOKENS),
        rollout=RolloutConfig(
            reward=ComponentConfig(name="exact", args={"pattern": r"^\d+;(\d\d)$"}),
            group_size=GROUP_SIZE,
            max_staleness=max_staleness,
        ),
        algorithm=AlgorithmConfig(num_minibatches=2),
        optimizer=OptimizerConfig(
            lr=2.5e-4, beta2=0.98, schedule="linear", warmup_steps=5, min_lr_ratio=0.2
        ),
        weight_sync=SharedMemorySync(root=shared_root(str(run_dir)), keep=1),
        trainer=TrainerConfig(
            device="cpu", total_steps=steps, max_tokens_per_mb=1024, num_threads=1, seed=seed
        ),
        recovery=RecoveryConfig(every_steps=20, mode="auto" if resume else "disabled"),
    )
    free_port = ServiceConfig(port=0)
    concurrent = PROMPTS_PER_STEP * GROUP_SIZE
    return LaunchConfig(
        gateway=GatewayConfig(
            service=free_port,
            tokenizer=base,
            ledger=str(run_dir / "ledger.sqlite"),
            executor=ExecutorConfig(max_concurrent=concurrent * num_servers),
        ),
        server=ServerConfig(
            service=free_port,
            model=ModelConfig(path=base),
            backend=EmbeddedTorchConfig(
                device="cpu",
                max_sequences=concurrent,
                max_context=MAX_CONTEXT,
                num_threads=1,
                seed=seed,
            ),
        ),
        trainer=trainer,
        num_servers=num_servers,
        threads_per_process=1,
    )
