"""Which tokens run in a step, over a real cache and a model that only counts."""

from __future__ import annotations

import asyncio
import random
from zlib import crc32

import pytest
import torch

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.types import LLMRequest
from inference_server.backends.embedded.kv_cache import KVShape
from inference_server.backends.embedded.scheduler import SCORED_CHUNK, SHORTEST_SHARED, Scheduler
from inference_server.backends.embedded.sequence import Caller, Sequence
from inference_server.backends.embedded.slab_cache import SlabCache

SHAPE = KVShape(1, 1, 1, torch.float32, torch.device("cpu"))
CONTEXT = 600
VOCAB_SIZE = 97


def prompt_of(length: int, salt: int) -> list[int]:
    rng = random.Random(salt)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def next_token(tokens: list[int]) -> int:
    return 1 + crc32(repr(tokens).encode()) % (VOCAB_SIZE - 1)


def expected_output(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Engine:
    """A scheduler whose model writes tokens as their own keys and reads all of them back."""

    def __init__(
        self, *, budget: int = 20_000, max_sequences: int = 64, max_prefill: int = 2048
    ) -> None:
        self.cache = SlabCache(SHAPE, CONTEXT, budget * SHAPE.token_bytes)
        self.scheduler = Scheduler(self.cache, max_sequences, max_prefill)
        self.finished: list[str] = []
        self.admitted: list[str] = []
        self.prefilled = 0

    def submit(
        self,
        name: str,
        prompt: list[int],
        max_new_tokens: int = 5,
        logprob_start: int | None = None,
    ) -> Sequence:
        gconfig = SamplingConfig(max_new_tokens=max_new_tokens)
        asked = LLMRequest(
            rid=name, input_ids=tuple(prompt), gconfig=gconfig, logprob_start=logprob_start
        )
        caller = Caller(asyncio.AbstractEventLoop(), None, None)
        sequence = Sequence(
            asked, frozenset(), None, random.Random(0), 0.0, caller, tokens=list(prompt)
        )
        self.scheduler.waiting.append(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """Tokens of each sequence in this step."""
        works = self.scheduler.schedule()
        self.admitted += [
            s.request.rid for s in self.scheduler.running if s.request.rid not in self.admitted
        ]
        assert self.cache.allocated_tokens <= self.cache.budget_tokens
        assert {w.sequence.row for w in works} <= {r for r in self.cache if r.is_running}
        assert sum(r.is_running for r in self.cache) == len(self.scheduler.running)
        first = 0
        for work in works:
            span, sequence = work.span, work.sequence
            assert (span.first, span.start) == (first, sequence.computed)
            first += span.end - span.start
            keys = span.row.slab.keys[0][span.row.index, 0, :, 0]
            keys[span.start : span.end] = torch.tensor(sequence.tokens[span.start : span.end])
            span.row.length = span.end
            assert keys[: span.end].tolist() == sequence.tokens[: span.end]
            if not sequence.num_output:
                self.prefilled += span.end - span.start
        rows = {row: row.index for row in self.cache}
        self.scheduler.follow(works)  # as an engine does whose device computes behind it
        assert {row: row.index for row in self.cache} == rows
        for work in works:
            for position in range(work.span.start + 1, work.span.end + 1):
                if work.sequence.request.logprob_start is not None:
                    work.sequence.prompt_logprobs[position] = 0.0
        for work in [work for work in works if work.is_last]:
            sequence = work.sequence
            sequence.append(next_token(sequence.tokens), 0.0, 0, None, 0.0)
            if sequence.end() is not None:
                self.scheduler.finish(sequence)
                self.finished.append(sequence.request.rid)
        return {w.sequence.request.rid: w.span.end - w.span.start for w in works}

    def run(self, most: int = 3000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"{len(self.scheduler.sequences)} sequences did not end")


def outputs_are_right(sequences: list[Sequence]) -> bool:
    return all(
        s.output == expected_output(list(s.request.input_ids), s.request.gconfig.max_new_tokens)
        for s in sequences
    )


@pytest.mark.parametrize("max_prefill", [64, 2048])
def test_siblings_that_arrive_together_are_computed_once(max_prefill):
    engine = Engine(max_prefill=max_prefill)
    prompt = prompt_of(512, 1)
    siblings = [engine.submit(f"s{i}", prompt) for i in range(8)]
    engine.run()
    assert outputs_are_right(siblings)
    assert engine.prefilled == 512 + 7
    assert [s.cached_tokens for s in siblings] == [0] + [511] * 7


@pytest.mark.parametrize("steps_between", [1, 3, 12])
def test_siblings_that_arrive_one_after_another_are_computed_once(steps_between):
    """While the first is being computed, while it decodes, and after it has ended."""
    engine = Engine(max_prefill=100)
    prompt = prompt_of(512, 1)
    siblings = []
    for index in range(8):
        siblings.append(engine.submit(f"s{index}", prompt))
        for _ in range(steps_between):
            engine.step()
    engine.run()
    assert outputs_are_right(siblings)
    assert engine.prefilled == 512 + 7


def test_a_longer_prompt_takes_what_it_shares_from_the_row_that_shares_most():
    engine = Engine()
    stem = prompt_of(100, 1)
    for name, extra in (("short", 0), ("long", 60), ("other", 0)):
        engine.submit(name, stem[:50] if name == "other" else stem + prompt_of(extra, 2))
        engine.run()
    before = engine.prefilled
    late = engine.submit("late", stem + prompt_of(60, 2) + [1, 2, 3])
    engine.run()
    assert engine.prefilled - before == 3
    assert late.cached_tokens == 160
    assert outputs_are_right([late])


def test_a_turn_goes_on_from_the_row_that_the_last_turn_left():
    engine = Engine()
    first = engine.submit("first", prompt_of(40, 1), max_new_tokens=30)
    engine.run()
    second = engine.submit("second", [*first.tokens, 5, 6, 7])
    engine.run()
    assert second.cached_tokens == 69  # the last sampled token was never computed
    assert outputs_are_right([second])


def test_prefixes_of_a_few_tokens_are_computed_rather_than_copied():
    engine = Engine()
    short = prompt_of(SHORTEST_SHARED - 1, 1)
    engine.submit("one", short + prompt_of(20, 2))
    two = engine.submit("two", short + prompt_of(20, 3))
    assert set(engine.step()) == {"one", "two"}
    assert two.cached_tokens == 0


def test_what_waits_for_a_prefix_holds_up_nobody_behind_it():
    engine = Engine(max_prefill=64)
    prompt = prompt_of(300, 1)
    for name in ("first", "sibling"):
        engine.submit(name, prompt)
    engine.step()
    engine.submit("other", prompt_of(20, 2))
    while "other" not in engine.finished:
        assert "sibling" not in engine.step()
        if engine.prefilled >= 300:
            break
    engine.run()
    assert sorted(engine.finished) == ["first", "other", "sibling"]


def test_siblings_go_on_when_the_one_they_waited_for_is_cancelled():
    engine = Engine(max_prefill=64)
    prompt = prompt_of(300, 1)
    first = engine.submit("first", prompt)
    sibling = engine.submit("sibling", prompt)
    engine.step()
    engine.step()
    engine.scheduler.finish(first)
    engine.run()
    assert sibling.cached_tokens == 128
    assert engine.prefilled == 300
    assert outputs_are_right([sibling])


def test_a_long_prompt_comes_in_chunks_between_which_running_sequences_go_on():
    engine = Engine(max_prefill=50)
    running = [engine.submit(f"r{i}", prompt_of(4, i), max_new_tokens=40) for i in range(5)]
    engine.step()
    long = engine.submit("long", prompt_of(320, 9))
    for chunk in [50] * 6 + [20]:
        assert engine.step() == {**{s.request.rid: 1 for s in running}, "long": chunk}
    assert long.num_output == 1
    engine.run()
    assert outputs_are_right([*running, long])


def test_no_step_computes_more_prompt_tokens_than_allowed():
    engine = Engine(max_prefill=70)
    sequences = [
        engine.submit(f"s{i}", prompt_of(20 * i + 5, i), max_new_tokens=6) for i in range(12)
    ]
    while engine.scheduler.has_work:
        decoding = sum(s.num_output > 0 for s in engine.scheduler.running)
        assert sum(engine.step().values()) <= 70 + decoding
    assert outputs_are_right(sequences)


def test_prompts_that_are_scored_come_in_chunks_of_their_own_size():
    engine = Engine()
    engine.submit("plain", prompt_of(400, 1))
    engine.run()
    scored = engine.submit("scored", prompt_of(400, 1), logprob_start=100)
    sizes = []
    while engine.scheduler.has_work:
        sizes.append(engine.step()["scored"])
    assert scored.cached_tokens == 99  # position 99 has to be computed: it predicts the first one
    assert sizes[:2] == [SCORED_CHUNK, 400 - 99 - SCORED_CHUNK]


def test_sequences_start_in_the_order_of_their_arrival():
    engine = Engine(max_sequences=2, budget=1200)
    sequences = [
        engine.submit(f"s{i}", prompt_of(30 + 40 * (i % 3), i), max_new_tokens=3 + i % 4)
        for i in range(12)
    ]
    engine.run()
    assert engine.admitted == [f"s{i}" for i in range(12)]
    assert outputs_are_right(sequences)


def test_no_more_sequences_run_than_allowed():
    engine = Engine(max_sequences=3)
    for index in range(9):
        engine.submit(f"s{index}", prompt_of(10, index))
    while engine.scheduler.has_work:
        engine.step()
        assert len(engine.scheduler.running) <= 3


@pytest.mark.parametrize("budget", [CONTEXT, 700, 900, 1500])
def test_too_little_memory_costs_time_but_no_sequence_and_no_token(budget):
    """Every sequence outgrows its first row, and they do not fit together."""
    engine = Engine(budget=budget, max_prefill=200)
    sequences = [
        engine.submit(f"s{i}", prompt_of(20 + 30 * i, i), max_new_tokens=250) for i in range(8)
    ]
    engine.run()
    assert sorted(engine.finished) == [f"s{i}" for i in range(8)]
    assert outputs_are_right(sequences)
    assert sum(s.num_recomputes for s in sequences) == engine.scheduler.num_preemptions > 0
    assert engine.scheduler.reserved_tokens == 0
    assert not any(row.is_running for row in engine.cache)


def test_ample_memory_recomputes_nothing():
    engine = Engine()
    sequences = [
        engine.submit(f"s{i}", prompt_of(20 + 30 * i, i), max_new_tokens=250) for i in range(8)
    ]
    engine.run()
    assert [s.num_recomputes for s in sequences] == [0] * 8


def test_the_youngest_gives_up_its_memory_and_nobody_starts_until_one_ends():
    engine = Engine(budget=2 * 256 + 128)
    names = ("old", "middle", "young")
    sequences = [engine.submit(n, prompt_of(100, i), 60 + 9 * i) for i, n in enumerate(names)]
    old, middle, young = sequences
    while not any(s.num_recomputes for s in sequences):
        engine.step()
    assert [s.num_recomputes for s in sequences] == [0, 0, 1]
    late = engine.submit("late", prompt_of(20, 9), 2)
    while not engine.finished:
        assert set(engine.step()) == {"old", "middle"}
    engine.run()
    assert engine.admitted == ["old", "middle", "young", "late"]
    assert outputs_are_right([old, middle, young, late])


def test_nobody_starts_while_the_first_in_line_has_no_memory():
    engine = Engine(budget=CONTEXT + 128)
    big = engine.submit("big", prompt_of(500, 1), max_new_tokens=90)
    engine.step()
    second = engine.submit("second", prompt_of(500, 2), max_new_tokens=2)
    small = engine.submit("small", prompt_of(10, 3), max_new_tokens=2)
    while not engine.finished:
        assert set(engine.step()) == {"big"}
    engine.run()
    assert engine.finished == ["big", "second", "small"]
    assert outputs_are_right([big, second, small])


def test_draining_holds_back_what_has_not_started_and_nothing_else():
    engine = Engine(budget=CONTEXT, max_sequences=4)
    started = [engine.submit(f"s{i}", prompt_of(100, i), max_new_tokens=200) for i in range(2)]
    while not any(s.num_recomputes for s in started):
        engine.step()
    engine.scheduler.is_draining = True
    late = engine.submit("late", prompt_of(10, 9))
    engine.run()
    assert sorted(engine.finished) == ["s0", "s1"]
    assert not late.has_started
    engine.scheduler.is_draining = False
    engine.run()
    assert outputs_are_right([*started, late])


def test_retracted_sequences_go_on_in_their_order_from_their_tokens():
    engine = Engine(max_sequences=3)
    sequences = [engine.submit(f"s{i}", prompt_of(30, i), max_new_tokens=20) for i in range(5)]
    for _ in range(6):
        engine.step()
    engine.scheduler.retract()
    assert [s.request.rid for s in engine.scheduler.waiting] == [f"s{i}" for i in range(5)]
    assert not any(row.is_running for row in engine.cache)
    assert [s.num_recomputes for s in sequences] == [1, 1, 1, 0, 0]
    assert engine.scheduler.num_preemptions == 0
    engine.run()
    assert outputs_are_right(sequences)


def test_no_row_of_mixed_origin_is_copied_or_waited_for():
    engine = Engine(max_prefill=100)
    prompt = prompt_of(300, 1)
    engine.submit("old", prompt, max_new_tokens=30)
    engine.step()
    engine.cache.invalidate()
    new = engine.submit("new", prompt)
    engine.run()
    assert new.cached_tokens == 0
    late = engine.submit("late", prompt)
    engine.run()
    assert late.cached_tokens == 299  # from `new`, which is pure
    assert outputs_are_right([new, late])


def test_random_crowds_in_random_memory_end_with_their_own_tokens():
    for seed in range(25):
        rng = random.Random(seed)
        engine = Engine(
            budget=rng.choice([CONTEXT, 1000, 2500]),
            max_sequences=rng.randint(1, 10),
            max_prefill=rng.choice([1, 17, 90, 600]),
        )
        stems = [prompt_of(rng.randint(1, 200), salt) for salt in range(3)]
        sequences, cancelled = [], []
        for index in range(rng.randint(5, 20)):
            prompt = rng.choice(stems)[: rng.randint(1, 200)] + prompt_of(rng.randint(0, 60), index)
            start = rng.choice([None, None, None, 0, len(prompt) // 2, len(prompt)])
            sequences.append(engine.submit(f"s{index}", prompt, rng.randint(1, 80), start))
            for _ in range(rng.choice([0, 0, 1, 10])):
                engine.step()
            action = rng.random()
            live = engine.scheduler.sequences
            if action < 0.1 and live:
                cancelled.append(rng.choice(live))
                engine.scheduler.finish(cancelled[-1])
            elif action < 0.2:
                engine.scheduler.retract()
            elif action < 0.3:
                engine.cache.invalidate()
        engine.run(20_000)
        whole = [s for s in sequences if s not in cancelled]
        assert outputs_are_right(whole), f"seed {seed}"
        assert len(engine.finished) == len(whole), f"seed {seed}"
        assert not any(row.is_running for row in engine.cache), f"seed {seed}"
