"""The task of `against_trl.py`: write digits. It needs nothing but the standard library at import.

A completion's reward is the share of digits among its characters. A prompt is eight random printable
characters; there are as many tokens as those, and three special ones. A random model writes a digit in
one of ten places.
"""

from __future__ import annotations

import json
import random
import string
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CHARACTERS = string.digits + string.ascii_letters + string.punctuation
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
PAD, BOS, EOS = range(3)
PROMPT_CHARACTERS = 8
NUM_PROMPTS = 4096


@dataclass(frozen=True)
class Setting:
    """Settings that both sides share."""

    hidden: int
    layers: int
    prompts: int
    """Number of prompts per step."""
    group_size: int
    max_new_tokens: int
    steps: int
    lr: float
    beta2: float
    schedule: str
    max_grad_norm: float
    eps_clip: float
    seed: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setting:
        return cls(**json.loads(text))


def share_of_digits(text: str) -> float:
    """0 of an empty one."""
    return sum(character.isdigit() for character in text) / len(text) if text else 0.0


def write_prompts(path: Path, seed: int) -> None:
    """Write prompts as JSON Lines."""
    rng = random.Random(seed)
    rows = ("".join(rng.choices(CHARACTERS, k=PROMPT_CHARACTERS)) for _ in range(NUM_PROMPTS))
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))


def write_model(folder: Path, setting: Setting) -> int:
    """A random Llama with tied embeddings and its tokenizer; the number of its parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(setting.seed)
    heads = max(4, setting.hidden // 64)
    config = LlamaConfig(
        vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS),
        hidden_size=setting.hidden,
        intermediate_size=setting.hidden * 2,
        num_hidden_layers=setting.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return int(model.num_parameters())


def make_tokenizer() -> Any:
    """A token for each character; <bos> in front."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
