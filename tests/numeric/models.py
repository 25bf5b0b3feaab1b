"""Tiny model directories with random weights, and the slow references made from them."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from weight_sync.model_dir import MAKING_MODELS

VOCAB_SIZE = 61
EOS = 1
CONTEXT = 256
# Wide enough for peaked distributions: with 0.02 all tokens are nearly equally likely.
SPREAD = 0.4


def save_model(
    folder: Path,
    kind: str,
    seed: int = 0,
    num_layers: int = 2,
    context: int = CONTEXT,
    spread: float = SPREAD,
) -> Path:
    """Write a random model of a kind: llama (grouped heads, untied), qwen3 (tied, q/k norms), sliding
    (qwen3 whose second layer reads the last 24 positions only), gpt2; qwen3_moe and mixtral (2 of 4
    experts for each token)."""
    torch.manual_seed(seed)
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "max_position_embeddings": context,
        "initializer_range": spread,
        "bos_token_id": 0,
        "eos_token_id": EOS,
    }
    grouped = {"num_key_value_heads": 2, "intermediate_size": 48}
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common, **grouped))
    elif kind == "qwen3":
        tied = {"head_dim": 16, "tie_word_embeddings": True}
        model = Qwen3ForCausalLM(Qwen3Config(**common, **grouped, **tied))
    elif kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        config = Qwen3MoeConfig(**common, **grouped, **experts, head_dim=16, norm_topk_prob=True)
        model = Qwen3MoeForCausalLM(config)
    elif kind == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        model = MixtralForCausalLM(MixtralConfig(**common, **grouped, **experts))
    elif kind == "sliding":
        types = ["full_attention", "sliding_attention"]
        window = {"layer_types": types, "use_sliding_window": True, "sliding_window": 24}
        model = Qwen3ForCausalLM(Qwen3Config(**common, **grouped, head_dim=16, **window))
    else:
        model = GPT2LMHeadModel(GPT2Config(**common))
    model.save_pretrained(folder)
    return folder


def save_wide_llama(folder: Path, seed: int = 0, num_layers: int = 2, context: int = 2048) -> None:
    """Write a random model that engines take as it is: heads are as wide as vLLM wants them, sizes are
    multiples of SGLang's blocks. Each of two ranks has one of the heads with keys and values."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_char_tokenizer(folder: Path) -> None:
    """A tokenizer with one token per character: 0 `<s>`, 1 `</s>`, then printable characters."""
    characters = [chr(code) for code in range(ord(" "), ord(" ") + VOCAB_SIZE - 2)]
    vocabulary = {"<s>": 0, "</s>": EOS, **{c: i + 2 for i, c in enumerate(characters)}}
    special = [
        {
            "id": vocabulary[name],
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for name in ("<s>", "</s>")
    ]
    split = {
        "type": "Split",
        "pattern": {"Regex": ""},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<s>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )


def load_reference(folder: Path) -> torch.nn.Module:
    """The model as transformers loads it, in evaluation mode."""
    with MAKING_MODELS:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # an expert at a time, in any type
    return model


def reference_logits(model: torch.nn.Module, ids: list[int]) -> Tensor:
    """[T, V] of one sequence alone, without cache or padding."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@torch.no_grad()
def extend_cache(model: torch.nn.Module, cache: Cache, ids: list[int]) -> Tensor:
    """Return logits over `ids` (tokens, vocabulary) after what `cache` holds, and append them to it."""
    taken = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in taken else "past_key_values"  # before transformers 5.24
    output = model(input_ids=torch.tensor([ids]), use_cache=True, **{name: cache})
    return output.logits[0]


def reference_logprobs(
    model: torch.nn.Module, prompt: list[int], response: list[int], temperature: float = 1.0
) -> Tensor:
    """[len(response)] logprob of each response token in one full forward, in float64."""
    logits = reference_logits(model, prompt + response).double() / temperature
    table = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    return table.gather(1, torch.tensor(response)[:, None])[:, 0]
