"""The composed policy loss against one slow float64 loop over every choice of the configuration."""

from __future__ import annotations

import math

import pytest
import torch

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.policy_losses import UnclippedLossConfig
from tests.numeric.packed import actions, random_batch
from trainer.algorithms.losses import policy_loss, policy_loss_weight
from trainer.batching.sequences import SequenceBatch

STEP = 1e-6


def average(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def slow_bound(loss, x: float, a: float) -> float:
    """A log-ratio of GMPO, bounded where that takes the gradient of its advantage."""
    high = loss.eps_clip if loss.eps_clip_higher is None else loss.eps_clip_higher
    return min(x, high) if a > 0 else max(x, -loss.eps_clip)


def slow_divergence(kind: str, p: float, q: float) -> float:
    """Of the policies' distributions over a token and all others; q is the sampling policy's."""
    if kind == "tv":
        return abs(p - q)
    other = (1 - q) * math.log((1 - q) / (1 - p)) if q < 1 and p < 1 else 0.0
    return q * math.log(q / p) + (math.inf if q < 1 and p == 1 else other)


def slow_dppo(loss, logprob: float, proximal: float, a: float) -> float:
    p, q = min(math.exp(logprob), 1.0), min(math.exp(proximal), 1.0)
    bound = loss.max_divergence_higher if a > 0 else loss.max_divergence_lower
    is_away = p > q if a > 0 else p < q
    if is_away and slow_divergence(loss.divergence, p, q) > bound:
        return 0.0
    return math.exp(logprob - proximal) * a


def slow_objective(config: AlgorithmConfig, ratio: float, a: float, logprob: float) -> float:
    loss = config.policy_loss
    if loss.type == "sapo":
        tau = loss.temperature_positive if a > 0 else loss.temperature_negative
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1))) * a
    if loss.type in ("unclipped", "gmpo", "kl_cov"):
        return ratio * a
    if loss.type == "reinforce":
        return logprob * a
    high = loss.eps_clip if loss.eps_clip_higher is None else loss.eps_clip_higher
    clipped = min(max(ratio, 1 - loss.eps_clip), 1 + high)
    if loss.type == "cispo":
        return clipped * a * logprob
    value = min(ratio * a, clipped * a)
    dual = loss.dual_clip if loss.type == "clip" else None
    return max(value, dual * a) if dual and a < 0 else value


def slow_weight(config: AlgorithmConfig, gap: float, gaps: list[float], is_near: bool) -> float:
    """proximal / behaviour of a token in a sequence of `gaps`."""
    if not config.decoupled:
        return 1.0
    levels = {"token": gap, "geometric": average(gaps), "sequence": math.fsum(gaps)}
    weight = math.exp(levels[config.behaviour_weight_level])
    low, cap = config.behaviour_weight_floor or 0.0, config.behaviour_weight_cap or math.inf
    if config.behaviour_weight_action == "clamp":
        weight = min(max(weight, low), cap)
    elif not low <= weight <= cap:
        return 0.0
    rule = config.rejection
    if rule is not None:  # the cases below reject by the geometric mean
        assert (rule.metric, rule.level, rule.statistic) == ("ratio", "sequence", "mean")
        if not (rule.lower or 0.0) <= math.exp(average(gaps)) <= (rule.upper or math.inf):
            return 0.0
    return weight if is_near or config.m2_threshold is None else 0.0


def slow_kl(estimator: str, d: float, bound: float) -> float:
    estimate = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": abs(d)}[estimator]
    return min(max(estimate, -bound), bound)


def slow_loss(
    config: AlgorithmConfig,
    batch: SequenceBatch,
    logprobs: list[float],
    held: list[float] | None = None,
) -> float:
    """Differentiable in `logprobs`; a sequence's ratio is of what is held (GSPO-token)."""
    held = logprobs if held is None else held
    columns = {name: column.tolist() for name, column in batch.columns.items()}
    proximal, behaviour = columns["proximal_logprobs"], columns["behaviour_logprobs"]
    sequences = []
    for rows in actions(batch):
        if not rows:
            continue
        gaps = [proximal[t] - behaviour[t] for t in rows]
        steps = [logprobs[t] - proximal[t] for t in rows]
        losses = []
        for t, gap, step in zip(rows, gaps, steps, strict=True):
            a = columns["advantages"][t]
            if config.ratio_level == "sequence":
                step = average([held[i] - proximal[i] for i in rows]) + logprobs[t] - held[t]
            if config.policy_loss.type == "gmpo":
                bounded = [
                    slow_bound(config.policy_loss, held[i] - proximal[i], columns["advantages"][i])
                    for i in rows
                ]
                own = slow_bound(config.policy_loss, step, a)
                step = average(bounded) + own - bounded[rows.index(t)]
            is_marked = columns["prepared"][t]
            if config.policy_loss.type == "clip_cov" and is_marked:
                step = held[t] - proximal[t]
            weight = slow_weight(config, gap, gaps, columns["near"][t])
            if config.behaviour_weight_normalize:
                weight *= columns["weight_factor"][t]
            gone = average([behaviour[i] - held[i] for i in rows])
            if config.opsm_threshold is not None and a < 0 and gone > config.opsm_threshold:
                weight = 0.0
            if config.policy_loss.type != "dppo":
                objective = slow_objective(config, math.exp(step), a, logprobs[t])
            else:
                objective = slow_dppo(config.policy_loss, logprobs[t], proximal[t], a)
                objective -= config.policy_loss.square_coef * step**2
            if config.policy_loss.type == "kl_cov" and is_marked:
                objective -= config.policy_loss.penalty_coef * abs(step)
            loss = -weight * objective - config.entropy_coef * columns["entropy"][t]
            d = logprobs[t] - columns["reference_logprobs"][t]
            kl = slow_kl(config.kl_estimator, d, config.kl_bound)
            if config.kl_bias_correction:
                kl *= math.exp(logprobs[t] - behaviour[t])
            losses.append(loss + config.kl_coef * kl)
        sequences.append(losses)
    sums = [math.fsum(losses) for losses in sequences]
    if config.aggregation == "token_mean":
        return math.fsum(sums) / sum(len(losses) for losses in sequences)
    if config.aggregation == "sequence_mean_token_mean":
        return average([average(losses) for losses in sequences])
    return average(sums) / (config.aggregation_max_tokens or 1)


CASES = {
    "ppo": {"decoupled": False, "policy_loss": {"eps_clip_higher": 0.28, "dual_clip": 3.0}},
    "areal": {"behaviour_weight_cap": 1.3},
    "gspo": {"ratio_level": "sequence", "aggregation": "sequence_mean_token_mean"},
    "cispo": {"policy_loss": {"type": "cispo", "eps_clip": 1.0, "eps_clip_higher": 0.3}},
    "sapo": {"policy_loss": {"type": "sapo"}, "decoupled": False},
    "m2po": {
        "policy_loss": {"type": "unclipped"},
        "m2_threshold": 0.04,
        "behaviour_weight_cap": None,
    },
    "ice_pop": {"behaviour_weight_cap": 1.4, "behaviour_weight_floor": 0.7},
    "truncated": {"behaviour_weight_cap": 1.2, "behaviour_weight_action": "clamp"},
    "sequence_weights": {
        "behaviour_weight_level": "sequence",
        "behaviour_weight_cap": 2.0,
        "behaviour_weight_action": "clamp",
    },
    "geometric": {"rejection": {"lower": 0.8, "upper": 1.2}, "behaviour_weight_cap": None},
    "dr_grpo": {"aggregation": "sequence_mean_token_sum_norm", "aggregation_max_tokens": 16},
    "sums": {"aggregation": "sequence_mean_token_sum", "behaviour_weight_level": "geometric"},
    "reinforce": {"policy_loss": {"type": "reinforce"}},
    "gmpo": {
        "policy_loss": {"type": "gmpo", "eps_clip": 0.3, "eps_clip_higher": 0.5},
        "aggregation": "sequence_mean_token_mean",
    },
    "dppo": {"policy_loss": {"type": "dppo", "square_coef": 0.01}, "decoupled": False},
    "dppo_kl": {
        "policy_loss": {
            "type": "dppo",
            "divergence": "kl",
            "max_divergence_higher": 0.02,
            "max_divergence_lower": 0.05,
        },
        "decoupled": False,
    },
    "clip_cov": {"policy_loss": {"type": "clip_cov", "eps_clip_higher": 0.3}},
    "kl_cov": {"policy_loss": {"type": "kl_cov", "penalty_coef": 0.7}},
    "opsm": {"opsm_threshold": 0.1},
    "normalized_weights": {"behaviour_weight_normalize": True, "behaviour_weight_cap": 1.3},
    "unbiased_kl": {"kl_coef": 0.3, "kl_bias_correction": True, "kl_bound": 0.2},
    "grpo_kl": {"kl_coef": 0.3, "entropy_coef": 0.1},
    "k2": {"kl_coef": 0.3, "kl_estimator": "k2", "aggregation": "sequence_mean_token_mean"},
}


def loss_of(config: AlgorithmConfig, batch: SequenceBatch, logprobs=None) -> torch.Tensor:
    logprobs = batch["logprobs"] if logprobs is None else logprobs
    return policy_loss(config, batch, logprobs, batch["entropy"])[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_slow_loop(case, seed):
    config, batch = AlgorithmConfig(**CASES[case]), random_batch(seed)
    expected = slow_loss(config, batch, batch["logprobs"].tolist())
    assert loss_of(config, batch).item() == pytest.approx(expected, rel=1e-10)


def test_under_a_sequences_ratio_every_token_keeps_its_own_advantage():
    config = AlgorithmConfig(
        policy_loss=UnclippedLossConfig(),
        ratio_level="sequence",
        decoupled=False,
        aggregation="sequence_mean_token_mean",
    )
    batch = random_batch(2)
    logprobs = batch["logprobs"].clone().requires_grad_()
    loss_of(config, batch, logprobs).backward()
    expected = [0.0] * batch.num_tokens
    sequences = [rows for rows in actions(batch) if rows]
    for rows in sequences:
        steps = [(batch["logprobs"] - batch["proximal_logprobs"])[t].item() for t in rows]
        ratio = math.exp(average(steps))
        for t in rows:
            advantage = batch["advantages"][t].item()
            expected[t] = -ratio * advantage / len(rows) / len(sequences)
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-10)


def test_an_interpolated_proximal_is_computed_on_the_way_and_has_no_gradient():
    batch = random_batch(1)
    shares = torch.linspace(0, 0.9, batch.num_tokens, dtype=torch.float64)
    behaviour = batch["behaviour_logprobs"]
    explicit = batch.with_columns(
        proximal_logprobs=behaviour + shares * (batch["logprobs"] - behaviour)
    )
    columns = dict(batch.columns) | {"proximal_shares": shares}
    del columns["proximal_logprobs"]
    gradients = []
    for config, given in (
        (AlgorithmConfig(), explicit),
        (AlgorithmConfig(proximal="loglinear"), SequenceBatch(batch.lengths, columns)),
    ):
        logprobs = batch["logprobs"].clone().requires_grad_()
        loss_of(config, given, logprobs).backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("case", CASES)
def test_of_float32_tokens_it_stays_close_and_is_summed_in_float64(case):
    config, batch = AlgorithmConfig(**CASES[case]), random_batch(5)
    floats = {n: c.float() if c.is_floating_point() else c for n, c in batch.columns.items()}
    got = loss_of(config, SequenceBatch(batch.lengths, floats))
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(loss_of(config, batch).item(), rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("case", sorted(set(CASES) - {"cispo"}))
def test_its_gradient_equals_differences_of_the_slow_loop(case):
    config, batch = AlgorithmConfig(**CASES[case]), random_batch(6)
    logprobs = batch["logprobs"].clone().requires_grad_()
    loss_of(config, batch, logprobs).backward()
    start = batch["logprobs"].tolist()
    for t in range(batch.num_tokens):
        ends = [
            slow_loss(config, batch, [*start[:t], start[t] + step, *start[t + 1 :]], start)
            for step in (STEP, -STEP)
        ]
        slope = (ends[0] - ends[1]) / (2 * STEP)
        assert logprobs.grad[t].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cut", [[[3], [5, 1], [0, 2, 4]], [[2, 1, 0], [4, 5, 3]]])
def test_loss_figures_and_gradient_do_not_depend_on_micro_batches(case, cut):
    config, batch = AlgorithmConfig(**CASES[case]), random_batch(3)
    whole = batch["logprobs"].clone().requires_grad_()
    loss, stats = policy_loss(config, batch, whole, batch["entropy"])
    loss.backward()
    parts = [batch.select(indices) for indices in cut]
    weights = [policy_loss_weight(config, part) for part in parts]
    assert sum(weights) == policy_loss_weight(config, batch)
    sums = dict.fromkeys(stats, 0.0)
    gradients, total = [], 0.0
    for part, weight in zip(parts, weights, strict=True):
        logprobs = part["logprobs"].clone().requires_grad_()
        part_loss, part_stats = policy_loss(config, part, logprobs, part["entropy"])
        (part_loss * weight / sum(weights)).backward()
        gradients.append(logprobs.grad)
        total += part_loss.item() * weight / sum(weights)
        for name, value in part_stats.items():
            sums[name] += value.item() * weight / sum(weights)
    assert total == pytest.approx(loss.item(), rel=1e-10)
    order = [index for indices in cut for index in indices]
    expected = batch.with_columns(gradient=whole.grad).select(order)["gradient"]
    torch.testing.assert_close(torch.cat(gradients), expected)
    assert sums == pytest.approx({name: value.item() for name, value in stats.items()}, rel=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_outside_of_the_mask_reaches_loss_figures_or_gradient(case, value):
    config, batch = AlgorithmConfig(**CASES[case]), random_batch(4)
    mask = batch["loss_mask"]
    spoilt = batch.with_columns(
        **{
            name: torch.where(mask, column, value)
            for name, column in batch.columns.items()
            if column.is_floating_point()
        }
    )
    logprobs = spoilt["logprobs"].clone().requires_grad_()
    loss, stats = policy_loss(config, spoilt, logprobs, spoilt["entropy"])
    loss.backward()
    assert loss.item() == pytest.approx(loss_of(config, batch).item(), rel=1e-10)
    assert torch.isfinite(logprobs.grad).all()
    assert not logprobs.grad[~mask].any()
    assert all(torch.isfinite(figure) for figure in stats.values())


@pytest.mark.parametrize("case", CASES)
def test_everything_is_made_on_the_device_of_the_batch(case):
    """The meta device refuses to meet tensors of another."""
    batch = random_batch(0).to(torch.device("meta"))
    config = AlgorithmConfig(**CASES[case])
    loss, stats = policy_loss(config, batch, batch["logprobs"], batch["entropy"])
    assert {tensor.device.type for tensor in (loss, *stats.values())} == {"meta"}


@pytest.mark.parametrize("case", ["areal", "ice_pop", "truncated", "geometric", "m2po"])
def test_the_capped_fraction_counts_every_weight_that_was_not_left_as_it_was(case):
    config, batch = AlgorithmConfig(**CASES[case]), random_batch(1)
    gaps = (batch["proximal_logprobs"] - batch["behaviour_logprobs"]).tolist()
    changed = [
        slow_weight(config, gaps[t], [gaps[i] for i in rows], batch["near"][t]) != math.exp(gaps[t])
        for rows in actions(batch)
        for t in rows
    ]
    _, stats = policy_loss(config, batch, batch["logprobs"])
    assert 0 < sum(changed) < len(changed)
    assert stats["capped_fraction"].item() == pytest.approx(sum(changed) / len(changed))


def test_what_the_configuration_leaves_out_is_not_asked_for():
    batch = random_batch(0)
    needed = ("loss_mask", "advantages", "proximal_logprobs", "behaviour_logprobs")
    bare = SequenceBatch(batch.lengths, {name: batch[name] for name in needed})
    _, stats = policy_loss(AlgorithmConfig(), bare, batch["logprobs"])
    clips = {"clip_fraction", "clip_fraction_low", "clip_fraction_high"}
    others = {"behaviour_weight", "capped_fraction", "behaviour_kl", "ratio", "update_kl"}
    assert stats.keys() == clips | others


@pytest.mark.parametrize("objective", ["clip", "cispo"])
def test_clip_fractions_equal_the_slow_loop(objective):
    batch = random_batch(2)
    inside = [t for rows in actions(batch) for t in rows]
    low, high = [], []
    for t in inside:
        ratio = math.exp(batch["logprobs"][t].item() - batch["proximal_logprobs"][t].item())
        advantage = batch["advantages"][t].item()
        low.append(ratio < 0.8 and (objective == "cispo" or advantage < 0))
        high.append(ratio > 1.3 and (objective == "cispo" or advantage > 0))
    config = AlgorithmConfig(
        policy_loss={"type": objective, "eps_clip": 0.2, "eps_clip_higher": 0.3}
    )
    _, stats = policy_loss(config, batch, batch["logprobs"])
    assert min(sum(low), sum(high)) > 0
    assert stats["clip_fraction_low"].item() == pytest.approx(sum(low) / len(inside))
    assert stats["clip_fraction_high"].item() == pytest.approx(sum(high) / len(inside))
    both = stats["clip_fraction_low"] + stats["clip_fraction_high"]
    torch.testing.assert_close(both, stats["clip_fraction"])


def test_an_entropy_bonus_without_entropy_is_refused():
    batch = random_batch(0)
    with pytest.raises(ValueError, match="entropy"):
        policy_loss(AlgorithmConfig(entropy_coef=0.1), batch, batch["logprobs"])


def test_the_entropy_bonus_raises_the_entropy():
    batch = random_batch(0)
    entropy = batch["entropy"].clone().requires_grad_()
    policy_loss(AlgorithmConfig(entropy_coef=0.1), batch, batch["logprobs"], entropy)[0].backward()
    expected = torch.where(batch["loss_mask"], -0.1 / batch["loss_mask"].sum(), 0.0)
    torch.testing.assert_close(entropy.grad, expected.double())
