"""Random models for runs whose numbers are not looked at, but their speed and their agreement."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from headway.launch.quickstart import task

SHARED_MODELS = "HEADWAY_DAY_MODELS"
"""Variable with the folder of what the steps of one day share."""
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {},
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "max_position_embeddings": 4096,
    },
}
"""Changes to the quick start's model; `1.5b` is as large as Qwen2.5-1.5B."""


def write_model(folder: Path, size: str) -> None:
    """Put a model with its tokenizer there, in bfloat16; the steps of one day share its files."""
    shared = os.environ.get(SHARED_MODELS)
    if shared is None:
        _write(folder, size)
        return
    kept, done = Path(shared) / size, Path(shared) / f"{size}.done"
    with (Path(shared) / f"{size}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _write(kept, size)
            done.touch()
    folder.symlink_to(kept)


def _write(folder: Path, size: str) -> None:
    import torch  # seconds, which only the first step of a day has to wait
    from transformers import AutoConfig, AutoModelForCausalLM

    task.write_model(folder, SHAPES[size])
    config = AutoConfig.from_pretrained(folder)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a CPU takes a minute
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
