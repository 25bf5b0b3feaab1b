"""Evaluation during training: which versions are scored, on what, and how."""

from __future__ import annotations

from pydantic import Field, field_validator

from headway.contracts.config.base import ComponentConfig, JsonObject, WorkflowRef
from headway.contracts.config.data import DataConfig
from headway.contracts.config.frequency import FrequencyConfig
from headway.contracts.config.sampling import SamplingConfig


class EvaluationConfig(FrequencyConfig):
    """An evaluation runs prompts of its own on servers that stay at one version meanwhile."""

    data: JsonObject
    """Fields of `data` that differ from those of training, at least `path`. Each prompt is run once,
    in the order that `shuffle` and `seed` give to all evaluations."""
    limit: int | None = Field(None, ge=1)
    """Number of prompts to run, from the first one; None runs every row."""
    every_steps: int | None = Field(10, ge=1)
    """Steps between evaluations; one that is due while another is open is missed. None does not count
    steps."""
    at_start: bool = False
    """Evaluate the weights that the run starts from."""
    at_end: bool = True
    """Evaluate the last version, whatever `every_steps` says; the run ends after it."""
    num_samples: int = Field(1, ge=1, le=1024)
    """Number of samples per prompt (n); with several, pass@k is reported for k = 1, 2, 4, … and n."""
    pass_score: float = 1.0
    """A sample with this score or more has passed."""
    sampling: JsonObject = {"temperature": 0.0}
    """Fields of `sampling` that differ from those of training; greedy unless it says otherwise."""
    workflow: WorkflowRef | None = None
    """Registered workflow; None takes that of training."""
    reward: ComponentConfig | None = None
    """Registered verifier; None takes that of training."""
    servers: int = Field(1, ge=1)
    """Maximum number of servers that stay at the version; one is always left to training."""
    max_concurrent: int = Field(64, ge=1)
    """Maximum number of samples running at once (or one prompt's); taken from training."""
    priority: int = Field(-1, ge=-1000, le=1000)
    """Priority of its rollouts; training's have 0."""
    timeout_s: float = Field(3600.0, gt=0.0, le=30 * 86_400)
    """Seconds after which an evaluation is missed."""
    server_wait_s: float = Field(60.0, gt=0.0)
    """Seconds without any server at the version after which it is missed, too."""

    def sampling_over(self, base: SamplingConfig) -> SamplingConfig:
        """Return the sampling configuration that it uses.

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
        """Return the data section of its prompts."""
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
