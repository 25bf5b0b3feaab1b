"""Every sampling field on a real model, against full float64 forwards and slow loops over them."""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_right
from itertools import accumulate

import pytest
import torch

from headway.contracts.errors import DataError
from tests.numeric.backends import Heard, errors, generate_all, prompt_of, request, serving
from tests.numeric.models import VOCAB_SIZE, load_reference, reference_logits, save_model
from tests.unit.inference_server.test_sampler import slow_distribution, slow_logits, slow_logprobs

FIELDS = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 1.8},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "all cuts": {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.02},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.8},
    "repetition": {"repetition_penalty": 1.7},
    "all penalties": {
        "presence_penalty": -0.5,
        "frequency_penalty": 0.9,
        "repetition_penalty": 0.8,
        "temperature": 0.7,
    },
    "bias": {"logit_bias": {5: 3.0, 9: -100.0, 11: 1.0}},
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 1.0},
    "everything": {
        "temperature": 1.2,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {7: 2.0},
        "min_new_tokens": 10,
        "stop_token_ids": (7, 8),
    },
}


@pytest.fixture(scope="module")
def precise(llama_dir):
    return load_reference(llama_dir).double()


@torch.no_grad()
def replay(model, asked, response):
    """(token, logits before it, logits after penalties and bias) along a response."""
    prompt = list(asked.input_ids)
    table = reference_logits(model, prompt + response.output_tokens).tolist()
    for index, token in enumerate(response.output_tokens):
        logits = table[len(prompt) - 1 + index]
        so_far = response.output_tokens[:index]
        yield token, logits, slow_logits(logits, asked.gconfig, prompt, so_far)


@pytest.fixture(scope="module")
def crowd(llama_dir):
    """One request per set of fields, all in one batch: rows must not touch each other."""
    requests = [
        request(name.replace(" ", "-"), prompt_of(5 + 3 * i, i), **{"seed": i} | options)
        for i, (name, options) in enumerate(FIELDS.items())
    ]

    async def run():
        async with serving(llama_dir, max_sequences=32) as backend:
            return await generate_all(backend, requests)

    return {name: pair for name, *pair in zip(FIELDS, requests, asyncio.run(run()), strict=True)}


@pytest.mark.parametrize("name", FIELDS)
def test_logprobs_are_of_the_scaled_and_penalised_distribution(crowd, precise, name):
    asked, response = crowd[name]
    scale = asked.gconfig.temperature or 1.0
    expected = [
        slow_logprobs([x / scale for x in changed])[token]
        for token, _, changed in replay(precise, asked, response)
    ]
    assert errors(response.output_logprobs, torch.tensor(expected)).max() < 1e-4


@pytest.mark.parametrize("name", FIELDS)
def test_no_token_is_sampled_that_the_fields_exclude(crowd, precise, name):
    asked, response = crowd[name]
    gconfig = asked.gconfig
    wide = gconfig.model_copy(  # float32 may decide otherwise within this margin
        update={"top_p": min(1.0, gconfig.top_p + 1e-4), "min_p": gconfig.min_p * 0.999}
    )
    stops = frozenset(gconfig.stop_token_ids)
    for index, (token, _, changed) in enumerate(replay(precise, asked, response)):
        forbidden = stops if index < gconfig.min_new_tokens else frozenset()
        if gconfig.temperature == 0.0:
            assert changed[token] >= max(changed) - 1e-4
        else:
            assert token in slow_distribution(changed, wide, forbidden)
    stopped = response.output_tokens[-1] in stops and len(response.output_tokens) >= 10
    assert response.stop_reason == ("stop" if stopped else "length")
    assert stopped or len(response.output_tokens) == gconfig.max_new_tokens


@pytest.mark.parametrize("name", ["all penalties", "all cuts", "everything"])
async def test_tokens_lie_at_their_uniforms_point_of_the_slow_distribution(
    llama_dir, precise, name
):
    """Sharper than frequencies: each seed's one uniform number decides its token."""
    prompt, size = prompt_of(6, 3), 600
    options = FIELDS[name] | {"max_new_tokens": 1, "min_new_tokens": 0}
    requests = [request(f"r{i}", prompt, seed=i, **options) for i in range(size)]
    async with serving(llama_dir, max_sequences=256) as backend:
        responses = await generate_all(backend, requests)
    with torch.no_grad():
        logits = reference_logits(precise, prompt)[-1].tolist()
    gconfig = requests[0].gconfig
    shares = sorted(slow_distribution(slow_logits(logits, gconfig, prompt, []), gconfig).items())
    ends = list(accumulate(share for _, share in shares))
    others = 0
    for seed, response in enumerate(responses):
        point = random.Random(seed).random()
        place = min(bisect_right(ends, point), len(shares) - 1)
        is_edge = min(abs(end - point) for end in ends) < 1e-5
        others += not is_edge and response.output_tokens != [shares[place][0]]
    assert others == 0
    assert len({r.output_tokens[0] for r in responses}) >= 4


async def test_top_logprobs_of_output_tokens_are_those_of_the_reported_distribution(
    llama_dir, precise
):
    options = {"temperature": 0.7, "presence_penalty": 1.0, "top_k": 2, "seed": 1}
    asked = [
        request("five", prompt_of(9, 1), top_logprobs=5, **options),
        request("all", prompt_of(9, 1), top_logprobs=64, **options),
        request("none", prompt_of(9, 1), **options),
    ]
    heard = [Heard() for _ in asked]
    async with serving(llama_dir) as backend:
        five, whole, none = [
            await backend.generate(a, h) for a, h in zip(asked, heard, strict=True)
        ]
    assert none.top_logprobs is None
    assert five.output_tokens == whole.output_tokens == none.output_tokens
    rows = replay(precise, asked[0], five)
    for index, (token, _, changed) in enumerate(rows):
        expected = slow_logprobs([x / 0.7 for x in changed])
        ranked = sorted(range(VOCAB_SIZE), key=lambda t: -expected[t])
        assert [t for t, _ in five.top_logprobs[index]] == ranked[:5]
        assert len(whole.top_logprobs[index]) == VOCAB_SIZE
        got = dict(whole.top_logprobs[index])
        table = torch.tensor([expected[t] for t in got])
        assert errors(got.values(), table).max() < 1e-4
        assert got[token] == pytest.approx(five.output_logprobs[index], abs=1e-5)
    assert [d.top_logprobs[0] for d in heard[0].deltas] == five.top_logprobs


async def test_deltas_add_up_to_the_response(llama_dir):
    heard = [Heard() for _ in range(6)]
    asked = [request(f"r{i}", prompt_of(4 + i, i), seed=i, max_new_tokens=5 * i) for i in range(6)]
    async with serving(llama_dir) as backend:
        calls = (backend.generate(a, h) for a, h in zip(asked, heard, strict=True))
        responses = await asyncio.gather(*calls)
    for ear, response in zip(heard, responses, strict=True):
        assert ear.tokens == response.output_tokens
        logprobs = [x for delta in ear.deltas for x in delta.output_logprobs]
        assert logprobs == response.output_logprobs
        assert [d.version for d in ear.deltas for _ in d.output_tokens] == response.output_versions


async def test_a_bias_outside_of_the_vocabulary_is_a_data_error(llama_dir):
    async with serving(llama_dir) as backend:
        with pytest.raises(DataError, match=f"logit_bias holds {VOCAB_SIZE}"):
            await backend.generate(request("r", [3], logit_bias={VOCAB_SIZE: 1.0}))


async def test_bfloat16_stays_near_the_float32_forward(tmp_path):
    """A sanity check: bfloat16 has 8 bits, so logits of size 10 are known to about 0.1.

    Measured: mean 0.05 and max 0.71 to a float32 forward, 0.04 and 0.37 to transformers' bfloat16 one.
    """
    folder = save_model(tmp_path, "llama")
    asked = [request(f"r{i}", prompt_of(10 + i, i), seed=i, max_new_tokens=60) for i in range(6)]
    async with serving(folder, dtype="bfloat16") as backend:
        responses = await generate_all(backend, asked)
    model, own = load_reference(folder), load_reference(folder).bfloat16()
    differences = {"float32": [], "bfloat16": []}
    for a, r in zip(asked, responses, strict=True):
        got = torch.tensor(r.output_logprobs)
        for name, judge in (("float32", model), ("bfloat16", own)):
            with torch.no_grad():
                logits = reference_logits(judge, [*a.input_ids, *r.output_tokens]).float()
            table = torch.log_softmax(logits, dim=-1)[len(a.input_ids) - 1 : -1]
            expected = table.gather(1, torch.tensor(r.output_tokens)[:, None])[:, 0]
            differences[name].append((got - expected).abs())
    for name, mean, most in (("float32", 0.1, 1.0), ("bfloat16", 0.08, 0.7)):
        error = torch.cat(differences[name])
        assert error.mean() < mean
        assert error.max() < most
