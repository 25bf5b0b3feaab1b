"""The task of the quick start: continue a lagged sum until it reaches 0, then name its end.

A prompt is six digits. Each further digit is the last one plus the one six places back, modulo 10;
the sequence ends with its first 0, and the answer is the two digits before that. So `325288` is
continued `1380`, and the whole response is `1380;38`. How long a sequence gets depends on its
digits: about 13 tokens on average, 42 at the 99th percentile, at most 62, a long tail as the lengths
of real rollouts have.

The demonstrations for the warm start are noisy, as text from the web is: each written digit is wrong
with probability `NOISE`, and what follows continues from what was written. The warm-started model
knows the rule and samples with the demonstrations' error rate; reinforcement learning against the
verifier then sharpens it. There are 531,441 prompts, so they hardly ever repeat.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

LAG = 6
NOISE = 0.19
MAX_RESPONSE_CHARS = 61
MAX_RESPONSE_TOKENS = 64
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "0123456789;"

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 288,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": len(SPECIAL_TOKENS) + len(CHARACTERS),
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""A Llama of 0.5 M parameters."""


def respond(digits: list[int], noise: float = 0.0, rng: random.Random | None = None) -> str:
    """The continuation and the answer; with noise, each digit may be replaced by another one.

    Args:
        digits: [6] the prompt, each 1 to 9.
        noise: probability of a wrong digit; needs `rng`.
    """
    row = list(digits)
    while row[-1] != 0 and len(row) < LAG + 2 * MAX_RESPONSE_CHARS:
        digit = (row[-1] + row[-LAG]) % 10
        if rng is not None and rng.random() < noise:
            digit = (digit + rng.randrange(1, 10)) % 10
        row.append(digit)
    text = "".join(map(str, row))
    return f"{text[LAG:]};{text[-3:-1]}"


def make_rows(count: int, seed: int, noise: float = 0.0) -> Iterator[dict[str, str]]:
    """Rows with `prompt`, `completion` (a demonstration) and `answer`."""
    rng = random.Random(seed)
    while count:
        digits = [rng.randrange(1, 10) for _ in range(LAG)]
        truth = respond(digits)
        demonstration = respond(digits, noise, rng) if noise else truth
        if max(len(truth), len(demonstration)) <= MAX_RESPONSE_CHARS:
            count -= 1
            yield {
                "prompt": "".join(map(str, digits)),
                "completion": demonstration,
                "answer": truth.rpartition(";")[2],
            }


def write_rows(path: Path, rows: Iterable[Mapping[str, str | int]]) -> None:
    """Write the rows as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(folder: Path, changes: Mapping[str, int] | None = None) -> None:
    """config.json and a tokenizer of one token per character; weights are drawn by the trainer.

    Args:
        folder: where to write.
        changes: entries of the model's configuration that differ from `MODEL_CONFIG`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**MODEL_CONFIG, **(changes or {})}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": MODEL_CONFIG["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def with_lognormal_lengths(
    rows: Iterator[dict[str, str]],
    seed: int,
    median: float = 24.0,
    sigma: float = 0.8,
    cap: int = 192,
) -> Iterator[dict[str, str | int]]:
    """Rows with a field `max_new_tokens` drawn lognormal, the shape that response lengths have."""
    rng = random.Random(seed)
    for row in rows:
        drawn = round(rng.lognormvariate(math.log(median), sigma))
        yield {**row, "max_new_tokens": min(cap, max(1, drawn))}
