"""Blocks: rows keep what was written for their tokens, share what is full, and give all of it back."""

from __future__ import annotations

import random

import pytest
import torch

from inference_server.backends.embedded.kv_cache import KVShape
from inference_server.backends.embedded.paged_cache import BLOCK_SIZE, PagedCache, PagedRow

SHAPE = KVShape(1, 1, 1, torch.float32, torch.device("cpu"))
CONTEXT = 1500
LARGEST = -(-CONTEXT // BLOCK_SIZE)


def make_cache(blocks: int, max_kept: int = 128) -> PagedCache:
    budget = (1 + blocks) * BLOCK_SIZE * SHAPE.token_bytes
    return PagedCache(SHAPE, CONTEXT, lambda: budget, max_kept)


def write(cache: PagedCache, row: PagedRow, tokens: list[int]) -> None:
    """What a model would leave there, at the places where a step puts it."""
    slots = [
        row.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for p in range(row.length, len(tokens))
    ]
    states = torch.tensor(tokens[row.length :], dtype=torch.float32)
    for which, sign in ((0, 1), (1, -1)):
        cache.store[which, 0].view(-1)[slots] = sign * states
    row.tokens, row.length = tokens, len(tokens)


def holds(cache: PagedCache, row: PagedRow) -> bool:
    """Whether its tokens are in its blocks."""
    keys, values = cache.store[:, 0, row.blocks].flatten(1)[:, : row.length]
    tokens = torch.tensor(row.tokens[: row.length], dtype=torch.float32)
    return torch.equal(keys, tokens) and torch.equal(values, -tokens)


def check_bookkeeping(cache: PagedCache) -> None:
    """Every block is free, or used as often as it is counted; nobody's block is nobody's."""
    all_blocks = list(range(1, cache.store.shape[2]))
    used = [block for row in cache for block in row.blocks]
    assert all(used.count(block) == count for block, count in cache._num_users.items())
    assert set(used) == set(cache._num_users)
    assert sorted([*set(used), *cache._free_blocks]) == all_blocks
    for row in cache:
        assert row.length <= row.capacity
        assert len(set(row.blocks)) == len(row.blocks)
        behind = row.blocks[row.length // BLOCK_SIZE :]
        assert all(cache._num_users[block] == 1 for block in behind), "nobody else's to write to"


def tokens_of(length: int, salt: int = 0) -> list[int]:
    return [1 + (7 * i + salt) % 997 for i in range(length)]


def test_rows_keep_their_tokens_while_others_come_go_share_grow_and_are_kept():
    for seed in range(6):
        rng = random.Random(seed)
        cache = make_cache(rng.choice([LARGEST, 12, 40]), max_kept=rng.choice([0, 2, 100]))
        running: list[PagedRow] = []
        for salt in range(150):
            action = rng.choice(["add", "share", "write", "write", "release", "drop", "cut"])
            row = rng.choice(running) if running else None
            if action == "add":
                tokens = tokens_of(rng.randint(1, CONTEXT), salt)
                new = cache.allocate(len(tokens))
                if new is not None:
                    write(cache, new, tokens[: rng.randint(0, len(tokens))])
                    running.append(new)
            elif action == "share" and list(cache):
                donor = rng.choice(list(cache))
                shared = rng.randint(0, donor.length)
                tokens = [*donor.tokens[:shared], *tokens_of(rng.randint(1, 300), salt)][:CONTEXT]
                new = cache.allocate(len(tokens), donor, min(shared, len(tokens)))
                if new is not None:
                    assert new.length <= shared
                    new.tokens = tokens
                    assert holds(cache, new), f"seed {seed}, step {salt}"
                    write(cache, new, tokens)
                    running.append(new)
            elif action == "write" and row is not None:
                wanted = min(CONTEXT, row.length + rng.randint(1, 400))
                if cache.grow(row, wanted) is not None:
                    write(cache, row, row.tokens[: row.length] + tokens_of(wanted - row.length))
            elif action == "release" and row is not None:
                running.remove(row)
                cache.release(row, keep=rng.random() < 0.7)
            elif action == "drop" and rng.random() < 0.2:
                cache.drop_kept()
            elif action == "cut" and row is not None and row.length % BLOCK_SIZE:
                cache.truncate(row, row.length - 1, row.length)  # what a step wrote, nobody shares
            check_bookkeeping(cache)
            assert {r for r in cache if r.is_running} == set(running)
            assert all(holds(cache, r) for r in cache), f"seed {seed}, step {salt}"
        for row in running:
            cache.release(row, keep=False)
        cache.drop_kept()
        check_bookkeeping(cache)
        assert cache.used_tokens == 0
        cache.clear()
        assert cache.allocated_tokens == 0


def test_a_shared_prefix_takes_no_blocks_but_the_one_that_is_not_full():
    cache = make_cache(8)
    donor = cache.allocate(700)
    write(cache, donor, tokens_of(700))
    row = cache.allocate(701, donor, 600)
    assert row.length == 600
    assert row.blocks[:2] == donor.blocks[:2]
    assert len(set(row.blocks) | set(donor.blocks)) == 4
    assert cache.reserved_tokens([donor, row]) == 4 * BLOCK_SIZE


def test_a_kept_donor_that_is_evicted_leaves_what_is_shared():
    cache = make_cache(LARGEST)
    donor = cache.allocate(700)
    write(cache, donor, tokens_of(700))
    cache.release(donor, keep=True)
    row = cache.allocate(CONTEXT, donor, 600)
    assert list(cache) == [row]
    assert row.length == 2 * BLOCK_SIZE
    row.tokens = tokens_of(CONTEXT)
    assert holds(cache, row)
    check_bookkeeping(cache)


def test_blocks_behind_the_tokens_of_a_kept_row_are_free_again():
    cache = make_cache(LARGEST)
    row = cache.allocate(CONTEXT)
    write(cache, row, tokens_of(10))
    cache.release(row, keep=True)
    assert len(row.blocks) == 1
    check_bookkeeping(cache)


def test_growth_that_memory_does_not_allow_leaves_the_row_as_it_was():
    cache = make_cache(LARGEST)
    row, other = cache.allocate(200), cache.allocate((LARGEST - 1) * BLOCK_SIZE)
    write(cache, row, tokens_of(200))
    write(cache, other, tokens_of(300))
    assert cache.grow(row, 257) is None
    assert cache.allocate(1) is None
    assert holds(cache, row)
    assert cache.grow(row, 256) is row
    check_bookkeeping(cache)


def test_a_pool_is_not_given_back_under_running_rows():
    cache = make_cache(LARGEST)
    row = cache.allocate(10)
    write(cache, row, tokens_of(10))
    cache.clear()
    assert holds(cache, row)


@pytest.mark.parametrize("length", [BLOCK_SIZE, BLOCK_SIZE + 1])
def test_new_weights_take_kept_rows_away_and_mark_running_ones(length):
    cache = make_cache(20)
    running, kept = cache.allocate(length), cache.allocate(length)
    for row in (running, kept):
        write(cache, row, tokens_of(length))
    cache.release(kept, keep=True)
    cache.invalidate()
    assert list(cache) == [running]
    assert not running.is_pure
    cache.release(running, keep=True)
    assert list(cache) == []
