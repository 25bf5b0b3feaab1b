"""Padded prompts and responses <-> packed sequences.

    attention_mask   0 0 1 1 1 | 1 1 1 0        prompts [B, P] padded on the left,
    input_ids        . . a b c | x y z .        responses [B, R] on the right

A column of the responses has an entry per sampled token, [B, R]; packed it stands where the token is
predicted, one to the left (`trainer.batching.sequences`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headway.contracts.errors import DataError
from trainer.batching.sequences import SequenceBatch, shift_left
from trainer.workers.data_proto import DataProto

PACKED_NAMES = {
    "rollout_log_probs": "behaviour_logprobs",
    "old_log_probs": "proximal_logprobs",
    "ref_log_prob": "reference_logprobs",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "normalized_values": "normalized_values",
    "entropys": "entropy",
}
"""Columns of the responses -> what they are called where they are packed."""


def sequence_columns(
    prompts: Tensor, prompt_mask: Tensor, responses: Tensor, response_mask: Tensor
) -> dict[str, Tensor]:
    """The columns that every batch of sequences has.

    Args:
        prompts: [B, P] token ids, padded on the left.
        prompt_mask: [B, P], true on their tokens.
        responses: [B, R] token ids, padded on the right.
        response_mask: [B, R], true on their tokens.
    Returns:
        `prompts`, `responses`, `input_ids` [B, P + R], `attention_mask` and `position_ids` likewise, and
        `response_mask`.
    """
    attention = torch.cat([prompt_mask, response_mask], 1).to(torch.int64)
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": response_mask.to(torch.int64),
    }


def to_sequences(batch: DataProto) -> SequenceBatch:
    """Packed, padding tokens left out; padding rows have no token in the loss.

    Args:
        batch: `input_ids` and `attention_mask` [B, S], `response_mask` [B, R], whose columns are the last
            R of S; of `PACKED_NAMES` what is there.
    Returns:
        Columns `input_ids`, `labels`, `action_mask`, `loss_mask` (the same), and those of
        `PACKED_NAMES`.
    Raises:
        DataError: a shape does not fit, or a row begins with a token that was sampled.
    """
    attended = _attended(batch)
    lengths = tuple(attended.sum(1).tolist())
    ids = batch["input_ids"][attended].to(torch.int64)
    in_loss = batch["response_mask"].bool()
    if batch.num_padding:
        in_loss = in_loss.clone()
        in_loss[-batch.num_padding :] = False
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    mask = _spread(in_loss, attended)
    if bool(mask[starts].any()):
        row = int(mask[starts].nonzero()[0])
        raise DataError(f"row {row} begins with a response: nothing predicts its first token")
    shifted = shift_left(mask, lengths, False)
    columns = {
        "input_ids": ids,
        "labels": shift_left(ids, lengths, 0),
        "action_mask": shifted,
        "loss_mask": shifted,
    }
    for name, packed in PACKED_NAMES.items():
        if name in batch.tensors:
            column = batch[name]
            if column.shape != batch["response_mask"].shape:
                raise DataError(
                    f"column {name!r} is {tuple(column.shape)}, wanted is the shape of response_mask, "
                    f"{tuple(batch['response_mask'].shape)}"
                )
            columns[packed] = shift_left(_spread(column, attended), lengths, 0.0)
    if "values" in columns and "final_values" in batch.tensors:
        columns["values"][torch.tensor(lengths).cumsum(0) - 1] = batch["final_values"]
    return SequenceBatch(lengths, columns)


def to_responses(batch: DataProto, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """[T] columns of `to_sequences(batch)` -> [B, R], 0 outside of the response mask."""
    attended = _attended(batch)
    lengths = attended.sum(1)
    starts = lengths.cumsum(0) - lengths
    num_columns = batch["response_mask"].shape[1]
    mask = batch["response_mask"].bool()
    responses = {}
    for name, column in columns.items():
        moved = column.roll(1)
        moved[starts] = 0
        whole = torch.zeros(attended.shape, dtype=column.dtype)
        whole[attended] = moved
        tail = whole[:, whole.shape[1] - num_columns :]
        responses[name] = torch.where(mask, tail, torch.zeros_like(tail))
    return responses


def _attended(batch: DataProto) -> Tensor:
    """[B, S] bool."""
    ids, attention, responses = (
        batch[name] for name in ("input_ids", "attention_mask", "response_mask")
    )
    if ids.shape != attention.shape or responses.shape[1] > ids.shape[1]:
        raise DataError(
            f"input_ids {tuple(ids.shape)}, attention_mask {tuple(attention.shape)}, response_mask "
            f"{tuple(responses.shape)}: wanted are [B, S], [B, S] and [B, R] with R <= S"
        )
    attended = attention.bool()
    if not bool(attended.any(1).all()):
        raise DataError(f"row {int((~attended.any(1)).nonzero()[0])} has no token")
    if bool((responses.bool() & ~attended[:, ids.shape[1] - responses.shape[1] :]).any()):
        raise DataError("response_mask is true where attention_mask is 0")
    return attended


def _spread(column: Tensor, attended: Tensor) -> Tensor:
    """[B, R] of the responses -> [T] of all tokens, 0 on the prompts."""
    whole = column.new_zeros(attended.shape)
    whole[:, attended.shape[1] - column.shape[1] :] = column
    return whole[attended]
