"""Rows of a data set: which ones, as what text, in which order."""

from __future__ import annotations

from pydantic import Field

from headway.contracts.config.base import Config
from headway.contracts.config.frequency import FrequencyConfig


class RowsConfig(Config):
    """Settings that every data set has."""

    path: str = Field(min_length=1)
    """JSON Lines file (or a directory of *.jsonl, read in name order), one prompt per row."""
    prompt_template: str = "{prompt}"
    """Python format string over the row's fields that gives the prompt's text."""
    chat: bool = False
    """Render the text as one user message with the model's chat template."""
    system_prompt: str | None = None
    """System message in front of the chat; needs `chat`."""
    batch_size: int = Field(32, ge=1)
    """Prompts per step (B is this times the group size; rows per step in supervised training)."""
    shuffle: bool = True
    """New order in every epoch, drawn from `seed`."""
    seed: int = Field(0, ge=0)
    """Seed of the order."""


class DataConfig(RowsConfig):
    """Prompts, to be answered by rollouts."""

    max_new_tokens_key: str | None = None
    """Field of the row with its own `max_new_tokens`; None takes `sampling.max_new_tokens`."""


class DemonstrationDataConfig(RowsConfig):
    """Prompts with the completion to imitate."""

    completion_template: str = "{completion}"
    """Python format string that gives the completion."""


class PairDataConfig(RowsConfig):
    """Prompts with two answers, one of them preferred."""

    chosen_template: str = "{chosen}"
    """Python format string that gives the preferred answer."""
    rejected_template: str = "{rejected}"
    """Python format string that gives the other one."""


class MarginPairDataConfig(PairDataConfig):
    """Pairs that may say by how much."""

    margin_key: str | None = None
    """Field of the row with the margin by which the scores shall differ at least (Llama 2,
    arXiv:2307.09288, eq. 2); None asks for none."""


class HeldOutConfig(FrequencyConfig):
    """Rows that are not trained on."""

    path: str = Field(min_length=1)
    """JSON Lines file or directory of rows that are read as those of `data` are."""
    every_steps: int | None = Field(50, ge=1)
    """Steps between evaluations; the last step has one, too. None does not count steps."""
