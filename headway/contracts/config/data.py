"""Which prompts, in which order."""

from __future__ import annotations

from pydantic import Field

from headway.contracts.config.base import Config


class DataConfig(Config):
    path: str = Field(min_length=1)
    """JSON Lines file (or a directory of *.jsonl, read in name order), one prompt per row."""
    prompt_template: str = "{prompt}"
    """Python format string over the row's fields that gives the prompt's text."""
    chat: bool = False
    """Render the text as one user message with the model's chat template."""
    system_prompt: str | None = None
    """System message in front of the chat; needs `chat`."""
    completion_template: str = "{completion}"
    """Python format string that gives the completion to imitate (supervised training only)."""
    max_new_tokens_key: str | None = None
    """Field of the row with its own `max_new_tokens`; None takes `sampling.max_new_tokens`."""
    batch_size: int = Field(32, ge=1)
    """Prompts per step (B is this times the group size; rows per step in supervised training)."""
    shuffle: bool = True
    """New order in every epoch, drawn from `seed`."""
    seed: int = Field(0, ge=0)
    """Seed of the order."""
