"""Cuts against slow loops, frequencies against probabilities, and the corners of rounding."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.contracts.config.sampling import SamplingConfig
from inference_server.backends.embedded.device import Accelerator, Device
from inference_server.backends.embedded.sampler import SamplingPlan, top_logprobs
from inference_server.backends.embedded.sampling_rows import SamplingRow
from inference_server.backends.embedded.step_outputs import tokens_left

CPU = Device()
ALMOST_ONE = 1.0 - 2.0**-24


def plan_of(configs: list[SamplingConfig], vocab_size: int, forbidden=()) -> SamplingPlan:
    """A plan for rows without history, whose first token must not be a forbidden one."""
    early = {"min_new_tokens": 1, "max_new_tokens": 9} if forbidden else {}
    rows = [
        SamplingRow(config.model_copy(update=early), stop_ids=list(forbidden)) for config in configs
    ]
    return SamplingPlan(rows, vocab_size, CPU)


def slow_logits(
    logits: list[float], config: SamplingConfig, prompt: list[int], output: list[int]
) -> list[float]:
    """Logits after penalties and bias, one token at a time: repetition as CTRL defines it, presence
    and frequency over the output alone as OpenAI and vLLM do, then OpenAI's logit_bias."""
    changed = list(logits)
    for token in set(prompt) | set(output):
        factor = config.repetition_penalty
        changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
    for token in output:
        changed[token] -= config.frequency_penalty
    for token in set(output):
        changed[token] -= config.presence_penalty
    for token, value in config.logit_bias.items():
        changed[token] += value
    return changed


def slow_logprobs(logits: list[float]) -> list[float]:
    """Log-softmax in Python floats."""
    peak = max(logits)
    log_total = peak + math.log(math.fsum(math.exp(x - peak) for x in logits))
    return [x - log_total for x in logits]


def slow_distribution(
    logits: list[float], config: SamplingConfig, forbidden: frozenset[int] = frozenset()
) -> dict[int, float]:
    """Token -> probability after temperature, the ban, and the three cuts; in Python floats."""
    scale = config.temperature or 1.0
    scaled = {i: x / scale for i, x in enumerate(logits) if i not in forbidden}
    peak = max(scaled.values())
    total = math.fsum(math.exp(x - peak) for x in scaled.values())
    ranked = sorted(
        ((math.exp(x - peak) / total, i) for i, x in scaled.items()), key=lambda p: (-p[0], p[1])
    )
    kept, before = {}, 0.0
    for rank, (probability, token) in enumerate(ranked):
        fits = (
            rank < (config.top_k or len(ranked))
            and before < config.top_p
            and probability >= config.min_p * ranked[0][0]
        )
        if rank == 0 or fits:
            kept[token] = probability
        before += probability
    mass = math.fsum(kept.values())
    return {token: probability / mass for token, probability in kept.items()}


def draw(logits: list[float], config: SamplingConfig, size: int, forbidden=()) -> list[int]:
    """Tokens at evenly spread points of the cumulative distribution."""
    plan = plan_of([config] * size, len(logits), forbidden)
    uniforms = (torch.arange(size) + 0.5) / size
    rows = torch.tensor(logits).repeat(size, 1)
    return plan.sample(rows, uniforms).tokens.tolist()


def is_on_an_edge(logits: list[float], config: SamplingConfig, forbidden=frozenset()) -> bool:
    """Whether float32 rounding may decide another cut than the slow loop."""
    nudged = [config.model_copy(update={"top_p": config.top_p + d}) for d in (-1e-4, 1e-4)]
    nudged += [config.model_copy(update={"min_p": config.min_p * f}) for f in (0.999, 1.001)]
    sets = [slow_distribution(logits, c, forbidden).keys() for c in (config, *nudged)]
    gaps = sorted(logits)
    return any(s != sets[0] for s in sets) or any(b - a < 1e-4 for a, b in pairwise(gaps))


configs = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
vectors = st.lists(st.floats(-6, 6, width=32), min_size=3, max_size=10)


@settings(max_examples=80)
@given(vectors, configs, st.booleans())
def test_every_cut_keeps_the_tokens_and_shares_of_the_slow_loop(logits, config, is_banned):
    forbidden = frozenset({0}) if is_banned else frozenset()
    if is_on_an_edge(logits, config, forbidden):
        return
    expected = slow_distribution(logits, config, forbidden)
    size = 500
    tokens = draw(logits, config, size, forbidden)
    assert set(tokens) <= expected.keys()
    for token, probability in expected.items():
        assert abs(tokens.count(token) / size - probability) <= 1.5 / size


def test_cuts_by_hand():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]

    def tokens(**options):
        return set(draw(logits, SamplingConfig(**options), 200))

    assert tokens() == {0, 1, 2, 3}
    assert tokens(top_k=2) == {0, 1}
    assert tokens(top_p=0.79) == {0, 1}
    assert tokens(top_p=0.81) == {0, 1, 2}
    assert tokens(top_p=0.01) == {0}
    assert tokens(min_p=0.29) == {0, 1, 2}
    assert tokens(min_p=1.0) == {0}
    assert tokens(temperature=0.0) == {0}


def test_rows_keep_their_own_parameters_and_uncut_logprobs():
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(4, 1)
    configs = [
        SamplingConfig(temperature=0.0),
        SamplingConfig(top_k=1),
        SamplingConfig(temperature=2.0),
        SamplingConfig(),
    ]
    sampled = plan_of(configs, 3).sample(logits, torch.full((4,), ALMOST_ONE))
    assert sampled.tokens.tolist() == [0, 0, 2, 2]
    plain = torch.log_softmax(logits[0], dim=-1)
    warm = torch.log_softmax(logits[0] / 2, dim=-1)
    expected = torch.stack([plain[0], plain[0], warm[2], plain[2]])
    torch.testing.assert_close(sampled.logprobs, expected)


def test_frequencies_are_the_probabilities():
    torch.manual_seed(0)
    logits = torch.randn(30) * 1.5
    size = 20_000
    plan = plan_of([SamplingConfig()] * size, 30)
    tokens = plan.sample(logits.repeat(size, 1), torch.rand(size)).tokens
    expected = torch.softmax(logits, dim=-1) * size
    counts = torch.bincount(tokens, minlength=30)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert expected.min() >= 5
    assert chi_square < 29 + 4 * math.sqrt(2 * 29)


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_rounding_never_selects_a_token_of_probability_zero(uniform, seed):
    torch.manual_seed(seed)
    size = 5000
    logits = torch.randn(8, size) * 3
    logits[:, torch.rand(size) < 0.5] = -200.0  # underflows to 0 in float32
    logits[:, 0] = logits[:, -1] = -200.0
    plan = plan_of([SamplingConfig()] * 8, size)
    sampled = plan.sample(logits, torch.full((8,), uniform))
    assert (logits.gather(1, sampled.tokens[:, None]) > -100).all()
    assert torch.isfinite(sampled.logprobs).all()


def test_a_banned_token_is_not_sampled_even_if_nothing_else_is_likely():
    logits = [0.0, 300.0, -50.0, -51.0]
    for config in (SamplingConfig(), SamplingConfig(temperature=0.0), SamplingConfig(top_p=0.9)):
        assert set(draw(logits, config, 20, forbidden=[1])) == {0}
    plan = plan_of([SamplingConfig()], 4, forbidden=[1])
    sampled = plan.sample(torch.tensor([logits]), torch.tensor([0.5]))
    assert sampled.logprobs.item() == pytest.approx(-300.0)  # of the distribution before the ban


def test_top_p_counts_the_mass_that_a_ban_leaves():
    logits = [math.log(p) for p in (0.9, 0.06, 0.03, 0.01)]
    assert set(draw(logits, SamplingConfig(top_p=0.5), 100, forbidden=[0])) == {1}
    assert set(draw(logits, SamplingConfig(top_p=0.8), 100, forbidden=[0])) == {1, 2}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.5}])
def test_logits_that_are_not_finite_show_in_the_logprob_of_that_row_only(value, options):
    logits = torch.tensor([[0.0, value, 1.0], [0.0, 1.0, 2.0]])
    plan = plan_of([SamplingConfig(**options)] * 2, 3)
    sampled = plan.sample(logits, torch.tensor([0.5, 0.5]))
    assert torch.isfinite(sampled.logprobs).tolist() == [False, True]
    assert 0 <= sampled.tokens[0] < 3


@st.composite
def histories(draw):
    """Logits of a row, its parameters, its prompt and what it sampled."""
    logits = draw(vectors)
    token = st.integers(0, len(logits) - 1)
    config = SamplingConfig(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        repetition_penalty=draw(st.sampled_from([0.5, 1.0, 1.3, 10.0])),
        frequency_penalty=draw(st.sampled_from([-2.0, 0.0, 0.7])),
        presence_penalty=draw(st.sampled_from([-1.5, 0.0, 2.0])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -1.0, 2.5]), max_size=3)),
    )
    tokens = st.lists(token, max_size=8)
    return logits, config, draw(tokens), draw(tokens)


@settings(max_examples=100)
@given(st.lists(histories(), min_size=1, max_size=4))
def test_penalties_and_bias_of_a_mixed_batch_equal_the_slow_loops(rows):
    size = max(len(logits) for logits, *_ in rows)
    padded = [logits + [-50.0] * (size - len(logits)) for logits, *_ in rows]
    plan = SamplingPlan([SamplingRow(c, p, o) for _, c, p, o in rows], size, CPU)
    outputs = [list(output) for *_, output in rows]
    for _ in range(3):  # the counts follow what is sampled
        sampled = plan.sample(torch.tensor(padded), torch.full((len(rows),), 0.4))
        for row, (_, config, prompt, _) in enumerate(rows):
            changed = slow_logits(padded[row], config, prompt, outputs[row])
            scaled = [x / (config.temperature or 1.0) for x in changed]
            token = int(sampled.tokens[row])
            expected = slow_logprobs(scaled)
            assert sampled.logprobs[row].item() == pytest.approx(expected[token], abs=2e-4)
            table = torch.log_softmax(sampled.scaled[row], dim=-1).tolist()
            assert table == pytest.approx(expected, abs=2e-4)
            if config.temperature == 0.0:
                assert changed[token] == pytest.approx(max(changed), abs=1e-4)
            outputs[row].append(token)


def test_a_rebuilt_plan_goes_on_with_the_counts_of_the_old_one():
    config = SamplingConfig(
        temperature=0.0, frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.2
    )
    logits = torch.tensor([[1.0, 1.4, 0.6, -0.5]])
    uniform = torch.tensor([0.5])
    kept, output = SamplingPlan([SamplingRow(config, [2])], 4, CPU), []
    for _ in range(12):
        rebuilt = SamplingPlan([SamplingRow(config, [2], output)], 4, CPU)
        one, two = kept.sample(logits, uniform), rebuilt.sample(logits, uniform)
        torch.testing.assert_close(one.scaled, two.scaled)
        assert one.tokens.item() == two.tokens.item()
        output.append(one.tokens.item())
    assert len(set(output)) > 1


def test_bias_forces_and_forbids():
    logits = [math.log(p) for p in (0.9, 0.06, 0.03, 0.01)]
    assert set(draw(logits, SamplingConfig(logit_bias={3: 100.0}), 100)) == {3}
    assert set(draw(logits, SamplingConfig(logit_bias={0: -100.0}), 200)) == {1, 2, 3}


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-6])
def test_the_coldest_temperatures_are_a_limit_not_an_overflow(temperature):
    logits = torch.tensor([[-300.0, 4.0, 3.9, 120.0], [0.0, 0.5, 0.4, 0.1]])
    plan = plan_of([SamplingConfig(temperature=temperature)] * 2, 4)
    sampled = plan.sample(logits, torch.tensor([0.999, 0.001]))
    assert sampled.tokens.tolist() == [3, 1]
    assert sampled.logprobs.tolist() == [0.0, 0.0]


def test_nuclei_wider_than_the_likely_tokens_are_found_by_a_whole_sort():
    size = 5000
    torch.manual_seed(1)
    logits = torch.randn(2, size) * 0.1  # so flat that 1024 tokens hold a quarter of the mass
    for options in ({"top_p": 0.6}, {"top_k": 3000}):
        config = SamplingConfig(**options)
        kept = slow_distribution(logits[0].tolist(), config).keys()
        plan = plan_of([config] * 2, size)
        drawn = {
            int(token)
            for uniform in torch.linspace(0, ALMOST_ONE, 400)
            for token in plan.sample(logits[:1].repeat(2, 1), uniform.repeat(2)).tokens
        }
        edge = {int(t) for t in logits[0].sort(descending=True).indices[len(kept) - 3 :][:6]}
        assert drawn <= kept | edge
        assert len(drawn) > 380


def test_top_logprobs_are_the_most_likely_tokens_in_order():
    logits = torch.tensor([0.1, 3.0, -1.0, 2.0])
    table = slow_logprobs(logits.tolist())
    tokens, logprobs = top_logprobs(logits[None], 3)
    assert tokens.tolist() == [[1, 3, 0]]
    assert logprobs[0].tolist() == pytest.approx([table[1], table[3], table[0]])
    assert top_logprobs(logits[None], 64)[0].shape == (1, 4)


def masked_plan(configs, vocab_size: int, device: Device = CPU, forbidden=()) -> SamplingPlan:
    """Like `plan_of`, where every row reports its mask."""
    early = {"min_new_tokens": 1, "max_new_tokens": 9} if forbidden else {}
    rows = [
        SamplingRow(c.model_copy(update=early), stop_ids=list(forbidden), reports_mask=True)
        for c in configs
    ]
    return SamplingPlan(rows, vocab_size, device)


def masks_of(sampled) -> dict[int, list[int]]:
    left = tokens_left(sampled.masks, sampled.masks.counts, sampled.masks.tokens)
    return {row: ids.tolist() for row, ids in left.items()}


@settings(max_examples=80)
@given(vectors, configs, st.booleans(), st.booleans(), st.floats(0.0, 0.999))
def test_masks_and_their_logprobs_are_those_of_the_slow_loop(
    logits, config, is_banned, is_device, uniform
):
    forbidden = frozenset({0}) if is_banned else frozenset()
    if is_on_an_edge(logits, config, forbidden) or not config.cuts_distribution:
        return
    expected = slow_distribution(logits, config, forbidden)
    device = Accelerator(torch.device("cpu")) if is_device else CPU
    plan = masked_plan([config, SamplingConfig()], len(logits), device, forbidden)
    sampled = plan.sample(torch.tensor([logits] * 2), torch.tensor([uniform] * 2))
    assert masks_of(sampled) == {0: sorted(expected)}
    token = int(sampled.tokens[0])
    assert sampled.logprobs[0].item() == pytest.approx(math.log(expected[token]), abs=2e-5)
    assert sampled.logprobs[1].item() == pytest.approx(
        slow_logprobs(logits)[int(sampled.tokens[1])], abs=2e-5
    )


def test_no_mask_is_made_where_nobody_asks_or_nothing_is_cut():
    logits, uniforms = torch.zeros(2, 4), torch.zeros(2)
    assert plan_of([SamplingConfig(top_k=2)] * 2, 4).sample(logits, uniforms).masks is None
    greedy = SamplingConfig(top_k=2, temperature=0.0)
    assert masked_plan([SamplingConfig(), greedy], 4).sample(logits, uniforms).masks is None


def test_a_device_reads_back_bounded_masks_and_draws_wider_ones_again():
    size = 5000
    torch.manual_seed(1)
    logits = torch.randn(2, size) * 0.1
    configs = [SamplingConfig(min_p=0.7), SamplingConfig(top_p=0.001)]
    uniforms = torch.tensor([0.5, 0.5])
    expected = masked_plan(configs, size).sample(logits, uniforms)
    plan = masked_plan(configs, size, Accelerator(torch.device("cpu")))
    sampled = plan.sample(logits, uniforms)
    narrow = plan_of([configs[0]], size).sample(logits[:1], uniforms[:1])
    assert narrow.is_enough is None
    wide = int(expected.masks.counts[0])
    assert (wide > 1024) == (not bool(sampled.is_enough.all()))
    assert wide > 1024
    again = plan.sample(logits, uniforms, is_whole=True)
    assert masks_of(again) == masks_of(expected)
    assert again.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(again.logprobs, expected.logprobs)
