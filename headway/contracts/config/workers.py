"""Workers of a group (`trainer.workers`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.base import ComponentConfig, Config, JsonObject
from headway.contracts.config.critic import CriticConfig, ValueModelConfig
from headway.contracts.config.metrics import MetricsConfig
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.reference import ReferenceConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import BackendConfig, EmbeddedTorchConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.config.weight_sync import WeightSyncConfig


class GenerationConfig(Config):
    """Generation by a worker with the role rollout."""

    engine: str = Field("hybrid", min_length=1)
    """Registered rollout engine: `hybrid` shares the weights that are trained, `server` starts a
    generation server beside each worker (SGLang, vLLM or another backend), `forward` runs a whole pass
    of the training engine per token, for tests."""
    args: JsonObject = {}
    """Keyword arguments of the engine: the fields of `HybridConfig` for `hybrid`, those of
    `ServedGenerationConfig` for `server`."""
    pad_token_id: int = Field(0, ge=0)
    """Token that pads a row."""


class ServedGenerationConfig(Config):
    """`generation.args` of the engine `server`: a generation server beside each worker."""

    backend: BackendConfig = EmbeddedTorchConfig()
    """What generates: the embedded engine, SGLang, vLLM, or a backend of a package."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights that generate; None takes `model.dtype`."""
    weight_sync: WeightSyncConfig | None = None
    """Transport of the weights, one that stores versions; None is shared memory, for workers of one
    host."""
    seeds: bool = True
    """Send a seed with each prompt, so that a resumed run samples what it would have sampled. SGLang
    refuses seeds unless it runs with `--enable-deterministic-inference`: set it to false there."""
    start_timeout_s: float = Field(600.0, gt=0.0)
    """Seconds until a server must have started."""

    @model_validator(mode="after")
    def _check(self) -> ServedGenerationConfig:
        if self.weight_sync is not None and self.weight_sync.type == "collective":
            raise ValueError(
                "weight_sync.type=collective sends to one group of servers, and each worker's is alone; "
                "choose shared_memory, disk or http"
            )
        return self


class WorkerRewardConfig(Config):
    """Reward of a worker with the role reward: a rule or a model."""

    rule: ComponentConfig | None = None
    """Registered reward, such as a verifier; it reads the text of prompt and response, and the row."""
    failed_score: float | None = None
    """Score of a response whose rule fails; None ends the run."""
    model: ValueModelConfig | None = None
    """Sequence classification model with one label."""
    input_tokenizer: str | None = Field(None, min_length=1)
    """Directory of the policy's tokenizer, if the reward model has another one: sequences are decoded
    with this, and encoded again with the reward model's. None gives the model the policy's tokens."""
    max_length: int = Field(4096, ge=1)
    """Tokens that the reward model reads of a sequence that was encoded again; the rest is cut off."""

    @model_validator(mode="after")
    def _check(self) -> WorkerRewardConfig:
        if self.rule is not None and self.model is not None:
            raise ValueError("reward.rule and reward.model both score; set one of them")
        if self.input_tokenizer is not None and self.model is None:
            raise ValueError("reward.input_tokenizer is read for reward.model; set that, too")
        return self


class OffloadConfig(Config):
    """State that models move to the CPU's memory while another one computes; nothing on the CPU."""

    parameters: bool = False
    """Offload parameters. Those of the policy stay while it generates."""
    optimizer: bool = False
    """Offload the state of optimizers, except during their updates."""


class WorkersConfig(Config):
    """One for all roles: each reads the sections that it needs."""

    model: TrainedModelConfig
    """Model of the policy."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW of the policy, and its schedule."""
    trainer: TrainerConfig = TrainerConfig()
    metrics: MetricsConfig = MetricsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of tokens; responses are as wide as its `max_new_tokens`."""
    critic: CriticConfig | None = None
    """The critic; None has none, or its defaults where a worker has that role."""
    reference: ReferenceConfig = ReferenceConfig()
    reward: WorkerRewardConfig = WorkerRewardConfig()
    generation: GenerationConfig = GenerationConfig()
    offload: OffloadConfig = OffloadConfig()

    @property
    def has_base_reference(self) -> bool:
        """True if the reference is the policy without its adapters, so that no second copy is held."""
        return self.model.lora is not None and self.reference.path is None

    @model_validator(mode="after")
    def _check(self) -> WorkersConfig:
        algorithm = self.algorithm
        wants_batch = (
            algorithm.m2_threshold is not None
            or algorithm.behaviour_weight_normalize
            or algorithm.policy_loss.asks_policy_first
        )
        if algorithm.proximal != "recompute" or wants_batch:
            raise ValueError(
                f"algorithm.proximal={algorithm.proximal}, m2_threshold, behaviour_weight_normalize and "
                f"policy_loss.type={algorithm.policy_loss.type} may want versions, or the whole batch, "
                "which workers do not have; unset them"
            )
        if self.sampling.cuts_distribution and algorithm.sampling_mask == "replay":
            raise ValueError(
                "sampling cuts the distribution (top_k, top_p or min_p), and workers pass on "
                "no sampling masks; cut nothing, or set algorithm.sampling_mask=ignore, which biases "
                "ratios"
            )
        if self.reference.ema_eta is not None:
            raise ValueError("reference.ema_eta: the reference of workers stays as it is; unset it")
        if self.trainer.cpu_offload and self.offload != OffloadConfig():
            raise ValueError(
                "trainer.cpu_offload keeps parameters and optimizer off the GPU for good; leave out "
                "offload"
            )
        return self

    @model_validator(mode="after")
    def _check_minibatches(self) -> WorkersConfig:
        if self.algorithm.num_minibatches != 1:
            raise ValueError(
                f"algorithm.num_minibatches={self.algorithm.num_minibatches} is for experiments; note "
                "mini_batch_size in the batch's meta"
            )
        return self
