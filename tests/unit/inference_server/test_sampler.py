"""Cuts against slow loops, frequencies against probabilities, and the corners of rounding."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.contracts.config.sampling import SamplingConfig
from inference_server.sampler import SamplingPlan

CPU = torch.device("cpu")
ALMOST_ONE = 1.0 - 2.0**-24


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
    plan = SamplingPlan([config] * size, CPU)
    uniforms = (torch.arange(size) + 0.5) / size
    rows = torch.tensor(logits).repeat(size, 1)
    bans = [(row, list(forbidden)) for row in range(size)] if forbidden else ()
    tokens, _ = plan.sample(rows, uniforms, bans)
    return tokens.tolist()


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
    plan = SamplingPlan(
        [
            SamplingConfig(temperature=0.0),
            SamplingConfig(top_k=1),
            SamplingConfig(temperature=2.0),
            SamplingConfig(),
        ],
        CPU,
    )
    tokens, logprobs = plan.sample(logits, torch.full((4,), ALMOST_ONE))
    assert tokens.tolist() == [0, 0, 2, 2]
    plain = torch.log_softmax(logits[0], dim=-1)
    warm = torch.log_softmax(logits[0] / 2, dim=-1)
    torch.testing.assert_close(logprobs, torch.stack([plain[0], plain[0], warm[2], plain[2]]))


def test_frequencies_are_the_probabilities():
    torch.manual_seed(0)
    logits = torch.randn(30) * 1.5
    size = 20_000
    plan = SamplingPlan([SamplingConfig()] * size, CPU)
    tokens, _ = plan.sample(logits.repeat(size, 1), torch.rand(size))
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
    plan = SamplingPlan([SamplingConfig()] * 8, CPU)
    tokens, logprobs = plan.sample(logits, torch.full((8,), uniform))
    assert (logits.gather(1, tokens[:, None]) > -100).all()
    assert torch.isfinite(logprobs).all()


def test_a_banned_token_is_not_sampled_even_if_nothing_else_is_likely():
    logits = [0.0, 300.0, -50.0, -51.0]
    for config in (SamplingConfig(), SamplingConfig(temperature=0.0), SamplingConfig(top_p=0.9)):
        assert set(draw(logits, config, 20, forbidden=[1])) == {0}
    plan = SamplingPlan([SamplingConfig()], CPU)
    _, logprobs = plan.sample(torch.tensor([logits]), torch.tensor([0.5]), [(0, [1])])
    assert logprobs.item() == pytest.approx(-300.0)  # of the distribution before the ban


def test_top_p_counts_the_mass_that_a_ban_leaves():
    logits = [math.log(p) for p in (0.9, 0.06, 0.03, 0.01)]
    assert set(draw(logits, SamplingConfig(top_p=0.5), 100, forbidden=[0])) == {1}
    assert set(draw(logits, SamplingConfig(top_p=0.8), 100, forbidden=[0])) == {1, 2}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.5}])
def test_logits_that_are_not_finite_show_in_the_logprob_of_that_row_only(value, options):
    logits = torch.tensor([[0.0, value, 1.0], [0.0, 1.0, 2.0]])
    plan = SamplingPlan([SamplingConfig(**options)] * 2, CPU)
    tokens, logprobs = plan.sample(logits, torch.tensor([0.5, 0.5]))
    assert torch.isfinite(logprobs).tolist() == [False, True]
    assert 0 <= tokens[0] < 3
