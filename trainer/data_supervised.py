"""Rows -> tokens of prompts and answers: demonstrations, or pairs of a chosen and a rejected answer.

Everything is read and checked at the start: a row that is wrong does not end a run at step 1,000.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer

from headway.contracts.config.data import (
    DemonstrationDataConfig,
    MarginPairDataConfig,
    PairDataConfig,
)
from headway.contracts.errors import ConfigError, DataError
from trainer.batching.sequences import SequenceBatch, shift_left
from trainer.batching.shares import own_share
from trainer.data import Rows
from trainer.topology import Topology


@dataclass(frozen=True, slots=True)
class Example:
    """One row as tokens."""

    prompt: list[int]
    answers: tuple[list[int], ...]
    """The one to imitate, or the chosen and the rejected one."""
    margin: float | None = None
    """Margin by which the chosen answer is better, if the rows contain one."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all its sequences, each prompt + answer."""
        return sum(len(self.prompt) + len(answer) for answer in self.answers)


class Encoder:
    """Text -> tokens of one model."""

    def __init__(self, model_path: str) -> None:
        """
        Raises:
            ConfigError: there is no tokenizer.
            DataError: it has no end-of-sequence token.
        """
        self.path = model_path
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot load a tokenizer from {model_path}: {error}; set model.path"
            ) from error
        if self.tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer of {model_path} has no end-of-sequence token")
        self.end: list[int] = [self.tokenizer.eos_token_id]
        """Behind every answer."""

    def prompts(self, rows: Rows, chat: bool) -> list[list[int]]:
        """Return the prompt tokens of every row."""
        texts = [self._rendered(rows, i) if chat else rows.text_of(i) for i in range(len(rows))]
        # A template writes special tokens itself.
        encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=not chat)["input_ids"]
        for index, ids in enumerate(encoded):
            if not ids:
                raise DataError(
                    f"{rows.place(index)}: the prompt is empty, and this tokenizer begins with nothing"
                )
        return encoded

    def answers(self, rows: Rows, template: str) -> list[list[int]]:
        """Return the answer tokens of every row, with the end of sequence."""
        texts = [rows.fill(template, index) for index in range(len(rows))]
        for index, text in enumerate(texts):
            if not text.strip():
                raise DataError(f"{rows.place(index)}: {template!r} is empty; take the row out")
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [ids + self.end for ids in encoded]

    def _rendered(self, rows: Rows, index: int) -> str:
        if self.tokenizer.chat_template is None:
            raise DataError(
                f"the tokenizer of {self.path} has no chat template; set data.chat=false"
            )
        messages = [message.model_dump(exclude_none=True) for message in rows.messages_of(index)]
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text


class SupervisedData:
    """Examples in the order of their rows; `cursor` counts over all epochs."""

    def __init__(self, rows: Rows, examples: Sequence[Example]) -> None:
        self._rows = rows
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def refuse_above(self, max_tokens: int) -> None:
        """
        Raises:
            DataError: an example fits into no micro-batch.
        """
        for index, example in enumerate(self._examples):
            if example.num_tokens > max_tokens:
                raise DataError(
                    f"{self._rows.place(index)}: {len(example.answers)} x prompt and answer have "
                    f"{example.num_tokens} tokens, above the micro-batch budget of {max_tokens}; raise "
                    "trainer.max_tokens_per_mb or take the row out"
                )

    def batch(self, cursor: int, count: int, topology: Topology) -> SequenceBatch:
        """This rank's share of the next `count` rows."""
        indices = [self._rows.row_index(cursor + offset) for offset in range(count)]
        return share_of([self._examples[index] for index in indices], topology)

    def everything(self, topology: Topology) -> SequenceBatch:
        """This rank's share of all rows."""
        return share_of(self._examples, topology)


def demonstrations(config: DemonstrationDataConfig, encoder: Encoder) -> SupervisedData:
    """Prompts with a completion each."""
    rows = Rows(config)
    prompts = encoder.prompts(rows, config.chat)
    completions = encoder.answers(rows, config.completion_template)
    examples = [
        Example(prompt, (completion,))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return SupervisedData(rows, examples)


def pairs(config: PairDataConfig, encoder: Encoder) -> SupervisedData:
    """Prompts with a chosen and a rejected answer each.

    Raises:
        DataError: a field is missing or empty, the answers are equal, or a margin is no number.
    """
    rows = Rows(config)
    prompts = encoder.prompts(rows, config.chat)
    chosen = encoder.answers(rows, config.chosen_template)
    rejected = encoder.answers(rows, config.rejected_template)
    margin_key = config.margin_key if isinstance(config, MarginPairDataConfig) else None
    examples = []
    for index, answers in enumerate(zip(chosen, rejected, strict=True)):
        if answers[0] == answers[1]:
            raise DataError(
                f"{rows.place(index)}: the chosen and the rejected answer are equal as tokens; take "
                "the row out"
            )
        margin = None if margin_key is None else _margin_of(rows, index, margin_key)
        examples.append(Example(prompts[index], answers, margin))
    return SupervisedData(rows, examples)


def _margin_of(rows: Rows, index: int, key: str) -> float:
    value = rows.rows[index].get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(
            f"{rows.place(index)}: field {key!r} is {value!r}; data.margin_key wants the name of a "
            "field with numbers"
        )
    return float(value)


def share_of(examples: Sequence[Example], topology: Topology) -> SequenceBatch:
    """The examples of this rank, packed: shares of equal tokens, and whole examples."""
    sizes = [example.num_tokens for example in examples]
    return pack_examples([examples[index] for index in own_share(sizes, topology)])


def pack_examples(examples: Sequence[Example]) -> SequenceBatch:
    """Sequences prompt + answer; of a pair the chosen one, then the rejected one.

    Returns:
        Columns `input_ids`, and shifted to the predicted token `labels` and `loss_mask` (true on
        answers); `margin` where examples have one.
    """
    sequences = [(e, answer) for e in examples for answer in e.answers]
    lengths = tuple(len(e.prompt) + len(answer) for e, answer in sequences)
    input_ids = torch.tensor([token for e, answer in sequences for token in e.prompt + answer])
    mask = torch.cat(
        [torch.arange(n) >= len(e.prompt) for n, (e, _) in zip(lengths, sequences, strict=True)]
    )
    columns = {
        "input_ids": input_ids,
        "labels": shift_left(input_ids, lengths, 0),
        "loss_mask": shift_left(mask, lengths, False),
    }
    margins = [e.margin for e, _ in sequences if e.margin is not None]
    if margins:
        columns["margin"] = torch.tensor(margins).repeat_interleave(torch.tensor(lengths))
    return SequenceBatch(lengths, columns)
