"""A random two-layer Qwen2 model around a real tokenizer, so that an example runs on a laptop.

    python examples/gsm8k/make_tiny_model.py --tokenizer DIR --output runs/gsm8k/model

It learns nothing worth having: it is there to see every process work before a real model is loaded.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MAX_CONTEXT = 2048


def make_tiny_model(tokenizer_dir: Path, output: Path, seed: int = 0) -> None:
    """Write model and tokenizer as one Hugging Face directory."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(output)
    for name in TOKENIZER_FILES:
        if (tokenizer_dir / name).is_file():
            shutil.copyfile(tokenizer_dir / name, output / name)


def main() -> None:
    """Read the options and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory of a tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    options = parser.parse_args()
    make_tiny_model(options.tokenizer, options.output, options.seed)


if __name__ == "__main__":
    main()
