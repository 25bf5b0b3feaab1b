from __future__ import annotations

import pytest
import torch

from headway.contracts.errors import DataError
from tests.numeric.worker_rows import random_rows
from trainer.workers.data_proto import DataProto
from trainer.workers.padding import sequence_columns, to_responses, to_sequences


def small(**columns: torch.Tensor) -> DataProto:
    """`. a | x y` and `a b | x .`, numbered by row and column."""
    made = sequence_columns(
        torch.tensor([[90, 11], [20, 21]]),
        torch.tensor([[0, 1], [1, 1]]),
        torch.tensor([[12, 13], [22, 93]]),
        torch.tensor([[1, 1], [1, 0]]),
    )
    return DataProto.of(**(made | columns))


def test_packed_columns_stand_where_tokens_are_predicted():
    packed = to_sequences(small(advantages=torch.tensor([[1.0, 2.0], [3.0, 9.0]])))
    assert packed.lengths == (3, 3)
    assert packed["input_ids"].tolist() == [11, 12, 13, 20, 21, 22]
    assert packed["labels"].tolist() == [12, 13, 0, 21, 22, 0]
    assert packed["loss_mask"].int().tolist() == [1, 1, 0, 0, 1, 0]
    assert packed["advantages"].tolist() == [1.0, 2.0, 0.0, 0.0, 3.0, 0.0]


def test_padding_rows_have_no_token_in_the_loss():
    packed = to_sequences(small().pad_to(3))
    assert packed["loss_mask"].int().tolist() == [1, 1, 0, 0, 1, 0, 0, 0, 0]


def test_there_and_back():
    batch = random_rows(6)
    packed = to_sequences(batch)
    mask = batch["response_mask"].bool()
    back = to_responses(batch, {"advantages": packed["advantages"]})["advantages"]
    assert torch.equal(back, torch.where(mask, batch["advantages"], 0.0))


def test_the_value_after_the_last_token_has_its_own_column():
    values, final = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([7.0, 8.0])
    packed = to_sequences(small(values=values, final_values=final))
    assert packed["values"].tolist() == [1.0, 2.0, 7.0, 0.0, 3.0, 8.0]


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match="begins with a response"):
        to_sequences(small(attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])))
    with pytest.raises(DataError, match="true where attention_mask is 0"):
        to_sequences(small(response_mask=torch.ones(2, 2)))
    with pytest.raises(DataError, match="wanted is the shape of response_mask"):
        to_sequences(small(advantages=torch.zeros(2, 3)))
    with pytest.raises(DataError, match="row 1 has no token"):
        attention = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0]])
        to_sequences(small(attention_mask=attention, response_mask=torch.tensor([[1, 1], [0, 0]])))
