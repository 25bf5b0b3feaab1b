"""A random two-layer Qwen2 model, so that an example runs on a laptop.

    python examples/gsm8k/make_tiny_model.py --output runs/gsm8k/model

It learns nothing worth having: it is there to see every process work before a real model is loaded. Its
tokenizer has one token per byte; `--tokenizer DIR` takes a real one.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MAX_CONTEXT = 2048
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and those of ChatML."""
    vocabulary = {name: number for number, name in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHATML,
    )


def make_tiny_model(tokenizer_dir: Path | None, output: Path, seed: int = 0) -> None:
    """Write model and tokenizer as one Hugging Face directory."""
    if tokenizer_dir is None:
        tokenizer = byte_tokenizer()
        tokenizer.save_pretrained(output)
    else:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32: vLLM takes no narrower ones
        num_key_value_heads=1,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(output)
    for name in TOKENIZER_FILES:
        if tokenizer_dir is not None and (tokenizer_dir / name).is_file():
            shutil.copyfile(tokenizer_dir / name, output / name)


def main() -> None:
    """Read the options and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, help="directory of a tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    options = parser.parse_args()
    make_tiny_model(options.tokenizer, options.output, options.seed)


if __name__ == "__main__":
    main()
