"""Rows keep what was written for their tokens, memory stays within the budget."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from inference_server.backends.embedded.kv_cache import KVShape
from inference_server.backends.embedded.slab_cache import (
    SMALLEST_ROW,
    SlabCache,
    SlabRow,
    row_capacities,
)

LAYERS, HEADS, DIM = 2, 2, 3
SHAPE = KVShape(LAYERS, HEADS, DIM, torch.float32, torch.device("cpu"))
CONTEXT = 600


def make_cache(budget_tokens: int, max_context: int = CONTEXT, max_kept: int = 128) -> SlabCache:
    return SlabCache(SHAPE, max_context, budget_tokens * SHAPE.token_bytes, max_kept)


def write(row: SlabRow, tokens: list[int]) -> None:
    """What a model would leave there: a value per layer and token, keys and values apart."""
    start = row.length
    row.tokens = tokens
    for layer in range(LAYERS):
        states = torch.tensor(tokens[start:], dtype=torch.float32)[:, None] + 1000 * layer
        row.slab.keys[layer][row.index, :, start : len(tokens)] = states
        row.slab.values[layer][row.index, :, start : len(tokens)] = -states
    row.length = len(tokens)


def holds(row: SlabRow, tokens: list[int]) -> bool:
    """Whether exactly these tokens are in the row, and zeros behind them."""
    expected = torch.zeros(row.slab.capacity)
    expected[: len(tokens)] = torch.tensor(tokens, dtype=torch.float32)
    mask = torch.arange(row.slab.capacity) < len(tokens)
    return row.length == len(tokens) and all(
        torch.equal(
            cache[layer][row.index],
            ((expected + 1000 * layer * mask) * sign).expand(DIM, -1).T.expand(HEADS, -1, -1),
        )
        for layer in range(LAYERS)
        for cache, sign in ((row.slab.keys, 1), (row.slab.values, -1))
    )


def check_bookkeeping(cache: SlabCache) -> None:
    """The bookkeeping that every operation must leave behind."""
    assert cache.allocated_tokens <= cache.budget_tokens
    for slab in cache.slabs:
        assert len(slab.rows) <= slab.num_allocated
        assert {len(caches) for caches in (slab.keys, slab.values)} == {LAYERS}
        assert {c.shape[0] for c in (*slab.keys, *slab.values)} == {slab.num_allocated}
        for index, row in enumerate(slab.rows):
            assert row.slab is slab
            assert row.index == index
            assert row.is_running == (index < slab.num_running)
            assert row.length <= slab.capacity
            assert row.is_running or row.length > 0
        for cache_tensor in (*slab.keys, *slab.values):
            assert not cache_tensor[len(slab.rows) :].any()  # free rows hold nothing


def tokens_of(length: int, salt: int = 0) -> list[int]:
    return [1 + (7 * i + salt) % 997 for i in range(length)]


def test_capacities_step_up_to_the_whole_context_by_at_most_a_half():
    assert [slab.capacity for slab in make_cache(2000, 300).slabs] == [64, 96, 128, 192, 256, 300]
    assert [slab.capacity for slab in make_cache(2000, 128).slabs] == [64, 96, 128]
    assert [slab.capacity for slab in make_cache(2000, 30).slabs] == [30]
    sizes = row_capacities(32768)
    assert sizes == sorted(set(sizes))
    assert all(bigger <= smaller * 3 / 2 for smaller, bigger in pairwise(sizes))


def test_no_more_rows_are_kept_than_asked_for_and_the_latest_stay():
    cache = make_cache(4000, max_kept=2)
    rows = [cache.allocate(10) for _ in range(3)]
    for row in rows:
        row.length = 5
        cache.release(row, keep=True)
    assert [row in list(cache) for row in rows] == [False, True, True]


def test_a_token_takes_its_keys_and_values_in_every_layer():
    assert SHAPE.token_bytes == 2 * LAYERS * HEADS * DIM * 4
    assert make_cache(700).budget_tokens == 700


def test_rows_keep_their_tokens_while_others_come_go_grow_and_are_kept():
    """Random operations against a dictionary of what each row should hold."""
    for seed in range(5):
        rng = random.Random(seed)
        cache = make_cache(rng.choice([700, 1500, 4000]))
        running: dict[SlabRow, list[int]] = {}
        for salt in range(120):
            action = rng.choice(["add", "add", "grow", "release", "write", "drop", "invalidate"])
            row = rng.choice(list(running)) if running else None
            if action == "add":
                tokens = tokens_of(rng.randint(1, CONTEXT), salt)
                new = cache.allocate(len(tokens))
                if new is not None:
                    write(new, tokens[: rng.randint(0, len(tokens))])
                    running[new] = list(new.tokens)
            elif action in ("grow", "write") and row is not None:
                wanted = min(CONTEXT, row.length + rng.randint(1, 200))
                if action == "write":
                    wanted = min(wanted, row.slab.capacity)
                bigger = cache.grow(row, wanted)
                if bigger is not None:
                    tokens = running.pop(row)
                    write(bigger, tokens + tokens_of(wanted - len(tokens), salt))
                    running[bigger] = list(bigger.tokens)
            elif action == "release" and row is not None:
                cache.release(row, keep=rng.random() < 0.6)
                del running[row]
            elif action == "drop":
                cache.drop_kept()
            elif action == "invalidate" and rng.random() < 0.2:
                cache.invalidate()
            check_bookkeeping(cache)
            assert {r for r in cache if r.is_running} == set(running), f"seed {seed}"
            for row, tokens in running.items():
                assert holds(row, tokens), f"seed {seed}, step {salt}"
            for row in cache:
                assert holds(row, list(row.tokens[: row.length])), f"seed {seed}, step {salt}"
        for row in list(running):
            cache.release(row, keep=False)
        cache.drop_kept()
        check_bookkeeping(cache)
        assert list(cache) == []
        assert cache.used_tokens == 0


def test_memory_is_refused_beyond_the_budget_and_given_again_when_a_row_ends():
    cache = make_cache(5 * SMALLEST_ROW)
    rows = []
    while (row := cache.allocate(10)) is not None:
        rows.append(row)
    assert len(rows) == 5
    assert cache.allocate(CONTEXT) is None
    cache.release(rows[2], keep=False)
    assert cache.allocate(10) is not None
    check_bookkeeping(cache)


def test_unused_memory_of_one_slab_serves_another():
    cache = make_cache(CONTEXT)
    small = [cache.allocate(10) for _ in range(4)]
    assert cache.allocate(CONTEXT) is None
    for row in small:
        write(row, tokens_of(10))
        cache.release(row, keep=True)
    big = cache.allocate(CONTEXT)
    assert big is not None
    assert list(cache) == [big]
    check_bookkeeping(cache)


def test_growth_that_memory_does_not_allow_leaves_the_row_as_it_was():
    cache = make_cache(SMALLEST_ROW + 512)
    row, other = cache.allocate(100), cache.allocate(300)
    write(row, tokens_of(100))
    write(other, tokens_of(300, 5))
    assert cache.grow(row, 300) is None
    assert holds(row, tokens_of(100))
    assert holds(other, tokens_of(300, 5))
    assert cache.grow(row, SMALLEST_ROW) is row
    check_bookkeeping(cache)


def test_the_kept_row_that_was_of_no_use_for_longest_is_evicted_first():
    cache = make_cache(4 * SMALLEST_ROW, SMALLEST_ROW)
    rows = [cache.allocate(20) for _ in range(4)]
    for salt, row in enumerate(rows):
        write(row, tokens_of(20, salt))
    for row in rows:
        cache.release(row, keep=True)
    cache.touch(rows[0])
    newcomer = cache.allocate(20)
    assert set(cache) == {rows[0], rows[2], rows[3], newcomer}
    cache.copy(rows[2], newcomer, 8)
    assert holds(newcomer, tokens_of(8, 2))
    second = cache.allocate(20)
    assert set(cache) == {rows[0], rows[2], newcomer, second}
    check_bookkeeping(cache)


def test_kept_rows_go_before_a_running_one_is_refused():
    cache = make_cache(2 * SMALLEST_ROW, SMALLEST_ROW)
    running, kept = cache.allocate(20), cache.allocate(20)
    write(running, tokens_of(20))
    write(kept, tokens_of(20, 1))
    cache.release(kept, keep=True)
    newcomer = cache.allocate(20)
    assert newcomer is not None
    assert kept not in set(cache)
    assert cache.allocate(20) is None
    assert holds(running, tokens_of(20))


@pytest.mark.parametrize(("is_pure", "length"), [(False, 5), (True, 0)])
def test_rows_that_no_prompt_may_copy_are_not_kept(is_pure, length):
    cache = make_cache(1000)
    row = cache.allocate(10)
    write(row, tokens_of(length))
    row.is_pure = is_pure
    cache.release(row, keep=True)
    assert list(cache) == []


def test_new_weights_take_kept_rows_away_and_mark_running_ones_for_good():
    cache = make_cache(4000)
    running, kept = cache.allocate(10), cache.allocate(10)
    for row in (running, kept):
        write(row, tokens_of(10))
    cache.release(kept, keep=True)
    cache.invalidate()
    assert list(cache) == [running]
    assert not running.is_pure
    bigger = cache.grow(running, SMALLEST_ROW + 1)
    assert not bigger.is_pure
    assert holds(bigger, tokens_of(10))
    assert cache.allocate(10).is_pure


def test_values_that_are_not_finite_leave_with_their_row():
    cache = make_cache(1000)
    rows = [cache.allocate(10) for _ in range(3)]
    for row in rows:
        write(row, tokens_of(10))
        for caches in (row.slab.keys, row.slab.values):
            for layer in caches:
                layer[row.index, :, :10] = float("nan")
    for row in rows:
        cache.release(row, keep=False)
    check_bookkeeping(cache)
