"""Which versions are scored while training goes on, on what, and how."""

from __future__ import annotations

from pydantic import Field, field_validator

from headway.contracts.config.base import Config, JsonObject, PartConfig
from headway.contracts.config.data import DataConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import WorkflowRef


class EvaluationConfig(Config):
    """An evaluation plays prompts of its own on servers that stay at one version meanwhile."""

    data: JsonObject
    """Fields of `data` that differ from those of training, at least `path`. Each prompt is played once,
    in the order that `shuffle` and `seed` give to all evaluations."""
    limit: int | None = Field(None, ge=1)
    """Prompts to play, from the first one; None plays every row."""
    every_steps: int = Field(10, ge=1)
    """Steps between evaluations; one that is due while another is open is missed."""
    at_start: bool = False
    """Evaluate the weights that the run starts from."""
    at_end: bool = True
    """Evaluate the last version, whatever `every_steps` says; the run ends after it."""
    num_samples: int = Field(1, ge=1, le=1024)
    """Samples per prompt (n); with several, pass@k is told for k = 1, 2, 4, … and n."""
    pass_score: float = 1.0
    """A sample with this score or more has passed."""
    sampling: JsonObject = {"temperature": 0.0}
    """Fields of `sampling` that differ from those of training; greedy unless it says otherwise."""
    workflow: WorkflowRef | None = None
    """Registered workflow; None takes that of training."""
    reward: PartConfig | None = None
    """Registered verifier; None takes that of training."""
    servers: int = Field(1, ge=1)
    """Servers that stay at the version, at most; one is always left to training."""
    max_concurrent: int = Field(64, ge=1)
    """Samples in play at once, at most (or one prompt's): what is taken from training."""
    priority: int = Field(-1, ge=-1000, le=1000)
    """Of its rollouts; training's have 0."""
    timeout_s: float = Field(3600.0, gt=0.0, le=30 * 86_400)
    """Seconds after which an evaluation is missed."""
    server_wait_s: float = Field(60.0, gt=0.0)
    """Seconds without any server at the version after which it is missed, too."""

    def sampling_over(self, base: SamplingConfig) -> SamplingConfig:
        """How it samples.

        Raises:
            ValueError: no sampling configuration, or equal samples of a prompt.
        """
        merged = SamplingConfig.model_validate({**base.model_dump(), **self.sampling})
        if merged.temperature == 0.0 and self.num_samples > 1:
            raise ValueError(
                f"evaluation.num_samples={self.num_samples} at temperature 0 gives equal samples; "
                "set evaluation.sampling.temperature above 0, or evaluation.num_samples=1"
            )
        return merged

    def data_over(self, base: DataConfig) -> DataConfig:
        """Its prompts."""
        return DataConfig.model_validate({**base.model_dump(), **self.data})

    @field_validator("data")
    @classmethod
    def _check_data(cls, data: JsonObject) -> JsonObject:
        DataConfig.model_validate(data)
        return data

    @field_validator("sampling")
    @classmethod
    def _check_sampling(cls, sampling: JsonObject) -> JsonObject:
        SamplingConfig.model_validate(sampling)
        return sampling
