"""The embedded backend against Hugging Face forwards."""

from __future__ import annotations

import pytest
import torch

from tests.numeric.backends import generate_all, prompt_of, request, serving
from tests.numeric.models import load_reference, reference_logits, reference_logprobs


def crowd(**gconfig):
    """Requests of many lengths, some longer than one step of the cache's read length."""
    lengths = [1, 7, 31, 2, 33, 12, 64, 5, 32, 3]
    return [
        request(f"r{i}", prompt_of(n, i), **({"seed": i, "max_new_tokens": 4 + 7 * i} | gconfig))
        for i, n in enumerate(lengths)
    ]


def errors_against(model, requests, responses, temperature=1.0):
    return torch.cat(
        [
            reference_logprobs(model, list(r.input_ids), o.output_tokens, temperature)
            - torch.tensor(o.output_logprobs, dtype=torch.float64)
            for r, o in zip(requests, responses, strict=True)
        ]
    ).abs()


async def test_logprobs_of_a_crowd_equal_full_forwards(model_dir):
    requests = crowd()
    async with serving(model_dir) as backend:
        responses = await generate_all(backend, requests)
    assert [r.rid for r in responses] == [r.rid for r in requests]
    lengths = [len(o.output_tokens) for o in responses]
    assert lengths == [r.gconfig.max_new_tokens for r in requests]
    errors = errors_against(load_reference(model_dir), requests, responses)
    assert errors.max() < 1e-4
    assert errors.mean() < 1e-5


@pytest.mark.parametrize("temperature", [0.5, 1.7])
async def test_logprobs_are_of_the_temperature_scaled_distribution_before_any_cut(
    llama_dir, temperature
):
    requests = crowd(temperature=temperature, top_k=4, top_p=0.8, min_p=0.05)
    async with serving(llama_dir) as backend:
        responses = await generate_all(backend, requests)
    errors = errors_against(load_reference(llama_dir), requests, responses, temperature)
    assert errors.max() < 1e-4


async def test_small_prefill_passes_give_the_same_numbers(llama_dir):
    requests = crowd()
    async with serving(llama_dir, max_sequences=10, max_prefill_tokens=40) as backend:
        responses = await generate_all(backend, requests)
    assert errors_against(load_reference(llama_dir), requests, responses).max() < 1e-4


async def test_greedy_tokens_equal_those_of_hugging_face_generate(model_dir):
    requests = crowd(temperature=0.0, max_new_tokens=40)
    async with serving(model_dir) as backend:
        responses = await generate_all(backend, requests)
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    for asked, got in zip(requests, responses, strict=True):
        ids = torch.tensor([asked.input_ids])
        expected = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=40,
            pad_token_id=0,
        )
        assert got.output_tokens == expected[0, ids.shape[1] :].tolist()


async def test_a_seeded_request_samples_the_same_alone_and_in_a_crowd(llama_dir):
    requests = crowd()
    async with serving(llama_dir) as backend:
        together = await generate_all(backend, requests)
        alone = [(await generate_all(backend, [r]))[0] for r in requests]
    assert [o.output_tokens for o in alone] == [o.output_tokens for o in together]
    assert len({tuple(o.output_tokens[:4]) for o in together}) > 5


async def test_siblings_share_a_prefill_and_sample_on_their_own(llama_dir):
    prompt = prompt_of(20, 0)
    siblings = [request(f"s{i}", prompt, seed=i) for i in range(8)]
    twins = [request(f"t{i}", prompt, seed=99) for i in range(2)]
    async with serving(llama_dir, max_sequences=10) as backend:
        responses = await generate_all(backend, siblings + twins)
    assert len({tuple(o.output_tokens) for o in responses[:8]}) == 8
    assert responses[8].output_tokens == responses[9].output_tokens
    assert errors_against(load_reference(llama_dir), siblings + twins, responses).max() < 1e-4


async def test_requests_without_a_seed_differ_within_a_server_and_repeat_with_its_seed(llama_dir):
    requests = [request(f"r{i}", prompt_of(5, 0)) for i in range(3)]
    runs = []
    for _ in range(2):
        async with serving(llama_dir, seed=4) as backend:
            runs.append([o.output_tokens for o in await generate_all(backend, requests)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


async def test_first_tokens_have_the_frequencies_of_the_model(llama_dir):
    prompt = prompt_of(6, 3)
    size = 2000
    requests = [request(f"r{i}", prompt, max_new_tokens=1, seed=i) for i in range(size)]
    async with serving(llama_dir, max_sequences=256) as backend:
        responses = await generate_all(backend, requests)
    with torch.no_grad():
        logits = reference_logits(load_reference(llama_dir), prompt)[-1]
    expected = size * torch.softmax(logits, dim=-1)
    counts = torch.zeros_like(expected)
    for response in responses:
        counts[response.output_tokens[0]] += 1
    likely = expected >= 5
    observed = torch.cat([counts[likely], counts[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]])
    chi_square = ((observed - wanted) ** 2 / wanted).sum().item()
    freedom = observed.numel() - 1
    assert freedom >= 5
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5
