"""Rows of a data set as prompts for workers: tokens padded on the left, one row for each response."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headway.contracts.config.data import DataConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.text.tokenizer import TextTokenizer
from trainer.data import PromptData
from trainer.workers.data_proto import DataProto
from trainer.workers.meta_keys import SAMPLING, TEMPERATURE
from trainer.workers.reward_worker import MESSAGES, ROW
from trainer.workers.row_advantages import GROUP


class PromptBatches:
    """Prompts in the order of the data set, from any position on."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: TextTokenizer,
        sampling: SamplingConfig,
        group_size: int,
        seed: int,
        pad_token_id: int,
    ) -> None:
        """
        Args:
            group_size: responses per prompt.
            seed: what is sampled follows from it and the position: a resumed run samples the same.
        """
        self._data = PromptData(data)
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._group_size = group_size
        self._seed = seed
        self._pad = pad_token_id

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, cursor: int, count: int) -> DataProto:
        """Return `count` prompts from a position on, each as often as it is answered, side by side.

        Returns:
            `prompts` [B, P], `prompt_mask` [B, P], `seeds` [B], `max_new_tokens` [B]; objects `uid`, the
            prompt's group, `row`, its data, and `messages`; notes `sampling` and `temperature`.
        """
        prompts = [self._data.prompt(at, self._group_size) for at in range(cursor, cursor + count)]
        ids, mask = self._padded([self._tokenizer.encode_prompt(prompt) for prompt in prompts])
        default = self._sampling.max_new_tokens
        limits = [self._data.max_new_tokens(at) or default for at in range(cursor, cursor + count)]
        chats = [
            prompt.messages and [m.model_dump() for m in prompt.messages] for prompt in prompts
        ]
        rows = DataProto.of(
            {SAMPLING: self._sampling, TEMPERATURE: self._sampling.temperature},
            prompts=ids,
            prompt_mask=mask,
            max_new_tokens=torch.tensor(limits),
            **{
                GROUP: [prompt.group_id for prompt in prompts],
                ROW: [prompt.data for prompt in prompts],
                MESSAGES: chats,
            },
        )
        return rows.repeat(self._group_size).with_columns(seeds=self._seeds(cursor, count))

    def _padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """[B, P] tokens, and [B, P] 1 on those of the prompts."""
        width = max(map(len, rows))
        ids = torch.tensor([[self._pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return ids, mask

    def _seeds(self, cursor: int, count: int) -> Tensor:
        """[B] int64, each response's own."""
        drawn = [
            np.random.SeedSequence((self._seed, at)).generate_state(self._group_size, np.uint64)
            >> 1
            for at in range(cursor, cursor + count)
        ]
        return torch.from_numpy(np.concatenate(drawn).astype(np.int64))
