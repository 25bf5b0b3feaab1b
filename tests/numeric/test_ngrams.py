"""Guessed tokens change nothing but the number of steps: outputs beside those of the engine without
guesses, full float64 forwards and an exact distribution."""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_right
from collections import Counter
from itertools import accumulate, product

import pytest
import torch
from transformers import DynamicCache

from headway.contracts.errors import DataError
from inference_server.backends.embedded import decoder
from inference_server.backends.embedded.ngrams import LENGTHS, Ngrams
from tests.numeric.backends import (
    Call,
    errors,
    generate_all,
    prompt_of,
    request,
    serving,
    stage,
)
from tests.numeric.models import (
    EOS,
    VOCAB_SIZE,
    extend_cache,
    load_reference,
    reference_logits,
    reference_logprobs,
    save_model,
    write_char_tokenizer,
)
from tests.numeric.paged import PagedCpu

LETTERS = (35, 36, 37)
"""Tokens of A, B and C."""
FEW = {token: -100.0 for token in range(VOCAB_SIZE) if token not in LETTERS}
"""Bias that leaves the letters: most guesses among them are right or nearly so."""
CODE = [5, 6, 7, 35, 36, 37, 35, 36, 8, 5, 6, 7, 35, 36, 37, 35]


# The guesser.


def slow_guess(tokens, most):
    """What followed the newest earlier place of the longest n-gram."""
    for length in LENGTHS:
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return tokens[end : end + most]
    return []


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [
        ([1, 2, 3, 4, 9, 2, 3, 4, 8, 1, 2, 3, 4], [9, 2, 3]),  # longest: four, not the newer three
        ([2, 3, 7, 2, 3, 8, 2, 3], [8, 2, 3]),  # newest
        ([5, 5, 5, 5], [5]),  # as many as there are
        ([1, 2, 3, 4, 2], []),  # one token alone is no n-gram
        ([1, 2], []),
        ([1], []),
        ([], []),
    ],
)
def test_a_guess_is_what_followed_the_newest_longest_ngram(tokens, guess):
    assert slow_guess(tokens, 3) == guess
    assert Ngrams(list(tokens), 3).guess(3) == guess


@pytest.mark.parametrize("size", [2, 4, 9])
def test_guesses_are_those_of_a_slow_search_however_the_sequence_grows(size):
    rng = random.Random(size)
    tokens = [rng.randrange(size) for _ in range(5)]
    ngrams = Ngrams(tokens, 8)
    hits = 0
    while len(tokens) < 400:
        most = rng.randrange(1, 10)
        guess = ngrams.guess(most)
        assert guess == slow_guess(tokens, min(most, 8))
        hits += bool(guess)
        tokens.extend(rng.randrange(size) for _ in range(rng.randrange(1, 4)))
    assert hits > 20


def test_it_guesses_further_ahead_where_guesses_are_right():
    ngrams = Ngrams([*range(20)] * 3, 8)
    lengths = []
    for num_right in (0, 1, 2, 4, 3, 4, 8, 8):
        guess = ngrams.guess(20)
        lengths.append(len(guess))
        ngrams.learn(len(guess), min(num_right, len(guess)))
    assert lengths == [8, 1, 2, 4, 8, 4, 8, 8]


# The engine.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two versions of one model with a tokenizer, and a mixture of experts."""
    root = tmp_path_factory.mktemp("ngrams")
    kinds = {"llama": ("llama", 0), "other": ("llama", 1), "qwen3_moe": ("qwen3_moe", 0)}
    made = {name: save_model(root / name, kind, seed=seed) for name, (kind, seed) in kinds.items()}
    for folder in made.values():
        write_char_tokenizer(folder)
    return made


class Steps:
    """Counts turns of sequences in steps, and tokens that were guessed."""

    def __init__(self, backend):
        self.num_turns = self.num_guessed = 0
        self._launch = backend._decode_loop.decoder.launch
        backend._decode_loop.decoder.launch = self

    def __call__(self, scheduled):
        self.num_turns += len(scheduled)
        self.num_guessed += sum(len(work.guess) for work in scheduled)
        return self._launch(scheduled)


async def answers(folder, requests, guesses, **config):
    """Responses, and the steps that it took."""
    options = {"max_sequences": 16, "speculative_tokens": guesses} | config
    async with serving(folder, **options) as backend:
        steps = Steps(backend)
        return await generate_all(backend, requests), steps


def assert_same(after, before, atol=1e-4):
    assert after.output_tokens == before.output_tokens
    assert errors(after.output_logprobs, torch.tensor(before.output_logprobs)).max() < atol
    for name in ("version_runs", "stop_reason", "stop_match", "sampling_mask", "routed_experts"):
        assert getattr(after, name) == getattr(before, name), name
    for one, two in zip(after.top_logprobs or (), before.top_logprobs or (), strict=True):
        assert [token for token, _ in one] == [token for token, _ in two]
        assert errors((x for _, x in one), torch.tensor([x for _, x in two])).max() < atol


WAYS = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "letters": {"logit_bias": FEW},
    "hot": {"logit_bias": FEW, "temperature": 3.0},
    "nucleus": {"logit_bias": FEW, "top_p": 0.7, "top_k": 2},
    "penalties": {"logit_bias": FEW, "frequency_penalty": 0.3},
    "minimum": {"logit_bias": FEW, "stop_token_ids": (35,), "min_new_tokens": 20},
    "stop token": {"logit_bias": FEW, "stop_token_ids": (5, 37)},
    "stop string": {"logit_bias": FEW, "stop": ("ABA", "CC")},
    "end": {"logit_bias": FEW | {EOS: 2.0}, "ignore_eos": False},
    "scored": {"logit_bias": FEW},
}


def crowd(sampling_mask=False, routed_experts=False):
    """Repetitive prompts of several lengths, in every way."""
    asked = [
        request(
            f"r{at}-{copy}",
            (CODE * 3)[: 1 + 4 * at + copy],
            top_logprobs=2 * copy,
            logprob_start=1 if name == "scored" else None,
            **{"seed": 7 * at + copy, "max_new_tokens": 50} | options,
        )
        for at, (name, options) in enumerate(WAYS.items())
        for copy in range(2)
    ]
    fields = {"sampling_mask": sampling_mask, "routed_experts": routed_experts}
    return [one.model_copy(update=fields) for one in asked]


@pytest.mark.parametrize(
    ("on", "guesses"), [("slabs", 1), ("slabs", 4), ("slabs", 64), ("blocks", 4), ("blocks", 16)]
)
async def test_outputs_are_those_without_guesses(folders, on, guesses):
    asked = crowd(sampling_mask=guesses == 4)
    device = PagedCpu() if on == "blocks" else None
    plain, slow = await answers(folders["llama"], asked, 0)
    quick, fast = await answers(folders["llama"], asked, guesses, device=device)
    for before, after in zip(plain, quick, strict=True):
        assert_same(after, before)
        scores = before.prompt_logprobs
        assert (after.prompt_logprobs is None) == (scores is None)
        if scores is not None:
            assert errors(after.prompt_logprobs, torch.tensor(scores)).max() < 1e-4
    assert slow.num_guessed == 0 < fast.num_guessed
    assert fast.num_turns < slow.num_turns
    assert {r.stop_reason for r in quick} == {"stop", "length"}


async def test_experts_of_wrong_guesses_are_forgotten(folders):
    asked = crowd(routed_experts=True)
    plain, slow = await answers(folders["qwen3_moe"], asked, 0)
    quick, fast = await answers(folders["qwen3_moe"], asked, 8)
    for one, before, after in zip(asked, plain, quick, strict=True):
        assert_same(after, before)
        assert len(after.routed_experts) == len(one.input_ids) + len(after.output_tokens) - 1
    assert fast.num_turns < slow.num_turns


async def test_an_output_ends_anywhere_in_a_run_of_right_guesses(folders):
    """Each length, stop token and stop string; a row that ended so serves what begins alike."""
    folder, options = folders["llama"], {"temperature": 0.0, "logit_bias": FEW}
    [whole], _ = await answers(folder, [request("w", CODE, max_new_tokens=60, **options)], 0)
    text = "".join(chr(ord(" ") + token - 2) for token in whole.output_tokens)
    lengths = [request(f"l{n}", CODE, max_new_tokens=n, **options) for n in range(1, 30)]
    stops = sorted({text[at : at + n] for n in (1, 2, 5) for at in range(30)})
    strings = [
        request(f"s{at}", CODE, max_new_tokens=60, stop=(stop,), **options)
        for at, stop in enumerate(stops)
    ]
    model = load_reference(folder)
    async with serving(folder, max_sequences=1, speculative_tokens=8) as backend:
        steps = Steps(backend)
        for asked in lengths + strings:
            response = await backend.generate(asked)
            stop = "".join(asked.gconfig.stop)
            end = text.index(stop) + len(stop) if stop else asked.gconfig.max_new_tokens
            assert response.output_tokens == whole.output_tokens[:end]
            assert response.stop_match == (stop or None)
            expected = torch.tensor(whole.output_logprobs[:end])
            assert errors(response.output_logprobs, expected).max() < 1e-4
            more = [*CODE, *response.output_tokens, 9, 11]
            after = await backend.generate(request("more", more, max_new_tokens=3, seed=1))
            assert after.cached_tokens >= len(CODE) + end - 1
            with torch.no_grad():
                wanted = reference_logprobs(model, more, after.output_tokens)
            assert errors(after.output_logprobs, wanted).max() < 1e-4
    num_tokens = sum(one.gconfig.max_new_tokens for one in lengths)
    assert steps.num_guessed > num_tokens / 4


@torch.no_grad()
def replay(models, asked, response):
    """Logprobs over one kept cache, each token by the version that sampled it."""
    cache, fed, found = DynamicCache(), list(asked.input_ids), []
    bias = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    bias[list(FEW)] = torch.tensor(list(FEW.values()), dtype=torch.float64)
    for token, version in zip(response.output_tokens, response.output_versions, strict=True):
        logits = extend_cache(models[version], cache, fed)[-1].double() + bias
        found.append(torch.log_softmax(logits, dim=-1)[token])
        fed = [token]
    return torch.stack(found)


@pytest.mark.parametrize("policy", ["keep", "recompute", "abort"])
async def test_each_token_has_the_version_that_sampled_it(folders, policy):
    rows = [
        request(f"r{i}", CODE[i:], seed=i, max_new_tokens=120, logit_bias=FEW) for i in range(4)
    ]
    update = stage(1, folders["other"])
    async with serving(folders["llama"], max_sequences=4, speculative_tokens=8) as backend:
        steps = Steps(backend)
        calls = [Call(backend, asked) for asked in rows]
        await calls[0].heard.until(20)
        assert await backend.swap(update, policy) == 4
        responses = [await call.response() for call in calls]
    assert steps.num_guessed > 50
    models = [load_reference(folders[name]) for name in ("llama", "other")]
    for call, response in zip(calls, responses, strict=True):
        versions = [0] if policy == "abort" else [0, 1]
        assert [version for version, _, _ in response.version_runs] == versions
        ends = [end for _, _, end in response.version_runs]
        assert [start for _, start, _ in response.version_runs] == [0, *ends[:-1]]
        assert ends[-1] == len(response.output_tokens)
        assert call.heard.tokens == response.output_tokens
        told = [delta.version for delta in call.heard.deltas for _ in delta.output_tokens]
        assert told == response.output_versions
        assert len(response.output_tokens) == 120 or response.stop_reason == "interrupt"
        if policy != "recompute":
            expected = replay(models, call.asked, response)
            assert errors(response.output_logprobs, expected).max() < 1e-4


async def test_rows_that_are_taken_away_come_back_to_the_same_tokens(folders):
    asked = [
        request(f"r{i}", prompt_of(20 + i, i), seed=i, max_new_tokens=120, logit_bias=FEW)
        for i in range(6)
    ]
    plain, _ = await answers(folders["llama"], asked, 0)
    short, steps = await answers(folders["llama"], asked, 8, kv_cache_bytes=1 << 17)
    for before, after in zip(plain, short, strict=True):
        assert_same(after, before)
    assert any(response.num_recomputes for response in short)
    assert steps.num_guessed > 0


async def test_a_mask_that_becomes_too_large_in_a_run_ends_its_request_alone(folders, monkeypatch):
    monkeypatch.setattr(decoder, "MAX_MASK_TOKENS", 50)
    options = {"temperature": 0.8, "logit_bias": FEW, "max_new_tokens": 24, "seed": 3}
    rows = [request(f"r{k}", CODE, top_k=k, **options) for k in (2, 3)]
    rows = [asked.model_copy(update={"sampling_mask": True}) for asked in rows]
    async with serving(folders["llama"], speculative_tokens=8) as backend:
        steps = Steps(backend)
        calls = [Call(backend, asked) for asked in rows]
        other, refused = await asyncio.gather(
            *(c.response() for c in calls), return_exceptions=True
        )
        assert backend.load().running == 0
    assert isinstance(refused, DataError)
    assert "51 tokens were left to draw from over 17 positions" in refused.message
    assert len(calls[1].heard.tokens) == 16
    assert other.sampling_mask.counts.tolist() == [2] * 24
    assert steps.num_guessed > 0


# The distribution.

SIZE, NUM_TOKENS, HIGHEST = 800, 3, 54.05
"""HIGHEST: the 99.9th percentile of chi-square with 26 degrees of freedom."""


@torch.no_grad()
def shares_after(model, tokens):
    """Probabilities of the letters."""
    logits = reference_logits(model, tokens)[-1, list(LETTERS)] / 2.0
    return torch.softmax(logits.double(), dim=-1).tolist()


async def test_drawn_tokens_have_the_distribution_of_the_model(folders):
    """Frequencies of all outputs; and sharper, each seed's numbers decide its tokens."""
    options = {"max_new_tokens": NUM_TOKENS, "logit_bias": FEW, "temperature": 2.0}
    prompt = [*(one for pair in product(LETTERS, repeat=2) for one in (*pair, *pair)), 35, 36]
    asked = [request(f"r{seed}", prompt, seed=seed, **options) for seed in range(SIZE)]
    config = {"max_sequences": 100, "kv_cache_bytes": 1 << 26}
    responses, steps = await answers(folders["llama"], asked, 8, **config)
    assert steps.num_guessed > SIZE / 4
    model = load_reference(folders["llama"]).double()
    shares = {
        begun: shares_after(model, [*prompt, *begun])
        for count in range(NUM_TOKENS)
        for begun in product(LETTERS, repeat=count)
    }
    counts = Counter(tuple(response.output_tokens) for response in responses)
    distance = 0.0
    for output in product(LETTERS, repeat=NUM_TOKENS):
        parts = (shares[output[:n]][LETTERS.index(token)] for n, token in enumerate(output))
        expected = SIZE * math.prod(parts)
        distance += (counts.pop(output, 0) - expected) ** 2 / expected
    assert not counts
    assert distance < HIGHEST
    for seed, response in enumerate(responses):
        points = random.Random(seed)
        for at, token in enumerate(response.output_tokens):
            ends = list(accumulate(shares[tuple(response.output_tokens[:at])]))
            point = points.random()
            if min(abs(end - point) for end in ends) > 1e-5:
                assert token == LETTERS[bisect_right(ends, point)]
