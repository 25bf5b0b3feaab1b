"""Slots keep their own keys and values."""

from __future__ import annotations

import pytest
import torch

from inference_server.backends.kv_cache import SlotCache

HEADS, DIM = 2, 3


@pytest.fixture
def cache():
    return SlotCache(1, 4, HEADS, 8, DIM, torch.float32, torch.device("cpu"))


def states(rows: int, width: int, start: float = 0.0) -> torch.Tensor:
    count = rows * HEADS * width * DIM
    return torch.arange(count, dtype=torch.float32).view(rows, HEADS, width, DIM) + start


def test_a_left_padded_prefill_lands_at_position_zero_and_one_row_may_fill_two_slots(cache):
    keys, values = states(2, 3), states(2, 3, 1000.0)
    # Row 0 has three tokens, row 1 two (column 0 is padding); slots 0 and 2 take row 0, slot 1 row 1.
    rows = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0])
    columns = torch.tensor([0, 1, 2, 1, 2, 0, 1, 2])
    slots = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    positions = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2])
    cache.plan_prefill(rows, columns, slots, positions)
    seen_keys, seen_values = cache.update(keys, values, 0)
    assert seen_keys is keys
    assert seen_values is values
    assert torch.equal(cache.keys[0][0, :, :3], keys[0])
    assert torch.equal(cache.keys[0][2, :, :3], keys[0])
    assert torch.equal(cache.keys[0][1, :, :2], keys[1][:, 1:])
    assert torch.equal(cache.values[0][1, :, :2], values[1][:, 1:])


def test_decode_appends_and_shows_the_first_rows_up_to_the_length(cache):
    cache.plan_decode(torch.arange(2), torch.tensor([4, 0]), 5)
    keys, _ = cache.update(states(2, 1), states(2, 1), 0)
    assert keys.shape == (2, HEADS, 5, DIM)
    assert torch.equal(keys[0, :, 4], states(2, 1)[0, :, 0])
    assert torch.equal(keys[1, :, 0], states(2, 1)[1, :, 0])


def test_move_copies_a_sequence_and_clear_forgets_a_slot(cache):
    cache.plan_decode(torch.arange(2), torch.tensor([0, 0]), 1)
    cache.update(states(2, 1, 1.0), states(2, 1, 1.0), 0)
    cache.move(1, 3, 1)
    assert torch.equal(cache.keys[0][3], cache.keys[0][1])
    cache.keys[0][1] = float("nan")
    cache.clear(1)
    assert not cache.keys[0][1].any()
    assert not cache.values[0][1].any()
    assert cache.keys[0][0].any()


def test_memory_starts_finite_and_a_forward_needs_a_plan(cache):
    assert not torch.cat([*cache.keys, *cache.values]).any()
    with pytest.raises(RuntimeError, match="without a plan"):
        cache.update(states(1, 1), states(1, 1), 0)
