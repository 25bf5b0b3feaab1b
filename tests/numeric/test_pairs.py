"""Reward models and direct preferences on an engine, against slow float64 loops over one model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.preference import PreferenceConfig
from headway.contracts.errors import DataError
from tests.numeric.engines import (
    GRAD_NORM,
    IN_FLOAT64,
    assert_close,
    assert_same_figures,
    open_engine,
    parameters_of,
)
from tests.numeric.float64 import float64_norms
from tests.numeric.models import VOCAB_SIZE, load_reference, reference_logits, save_model
from tests.numeric.ranks import run_ranks
from trainer.api import MicroBatchSpec
from trainer.backends.upload import whole
from trainer.batching.sequences import SequenceBatch
from trainer.data_supervised import Example, share_of
from trainer.interfaces.dpo import DPO
from trainer.interfaces.reward_modeling import RewardModelObjective
from trainer.interfaces.supervised import SupervisedInterface
from trainer.reference import Reference
from trainer.topology import Topology

ALONE = Topology(0, 1, torch.device("cpu"))
PLAIN = OptimizerConfig(lr=1e-3, eps=1e-4, max_grad_norm=1e9)  # gradients as they are
BUDGET = 40  # of the longest pair: several micro-batches
WHOLE = MicroBatchSpec(10_000, granularity=2)
CUT = MicroBatchSpec(BUDGET, granularity=2)
BETA = 0.3
PARAMETERS = 2e-6
"""Bound on parameters after three steps in float32, where the two ways differ by up to 1.6e-6 on some
processors (AMD EPYC), and each of them by up to 1.9e-5 from the same steps in float64 (both of `ipo`)."""
LOOSE = {"grad_norm": GRAD_NORM, "margin": 2e-6, "reward": 2e-6}
"""Bounds in float32. Margins and rewards are differences of sums of logprobs, of dozens of nats each."""
KINDS: dict[str, PreferenceConfig | None] = {
    "rw": None,
    "rw_margin": None,
    "dpo": PreferenceConfig(beta=BETA),
    "smoothed": PreferenceConfig(beta=BETA, label_smoothing=0.1),
    "ipo": PreferenceConfig(loss="ipo", beta=BETA),
    "hinge": PreferenceConfig(loss="hinge", beta=BETA),
    "exo_pair": PreferenceConfig(loss="exo_pair", beta=BETA, label_smoothing=0.1),
    "dpo_sft": PreferenceConfig(beta=BETA, sft_coef=0.7),
}


def random_pairs(seed: int, with_margin: bool, count: int = 7) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> list[int]:
        size = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(VOCAB_SIZE, (size,), generator=generator).tolist()

    return [
        Example(draw(1, 8), (draw(1, 11), draw(1, 11)), i / 4 if with_margin else None)
        for i in range(count)
    ]


def open_parts(
    kind: str, folders: dict[str, Path], topology: Topology = ALONE, in_float64: bool = False
) -> tuple[Any, Any]:
    """An engine and the interface that trains it."""
    how = {"topology": topology, "in_float64": in_float64}
    config = KINDS[kind]
    if config is None:
        engine = open_engine(folders["policy"], optimizer=PLAIN, head="value", **how)
        return engine, RewardModelObjective()
    engine = open_engine(folders["policy"], optimizer=PLAIN, **how)
    other = open_engine(folders["reference"], **how)
    return engine, DPO(config, Reference(other))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pairs")
    return {
        "policy": save_model(root / "policy", "llama", seed=1),
        "reference": save_model(root / "reference", "llama", seed=2),
    }


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log(1 + torch.exp(-x))


def answer_logprobs(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> list[Tensor]:
    table = torch.log_softmax(reference_logits(model, prompt + answer), -1)
    return [table[len(prompt) - 1 + t, token] for t, token in enumerate(answer)]


def slow_dpo(config: PreferenceConfig, policy, reference, example: Example) -> dict[str, Tensor]:
    gains, likelihoods = [], []
    for answer in example.answers:
        ours = answer_logprobs(policy, example.prompt, answer)
        theirs = answer_logprobs(reference, example.prompt, answer)
        gains.append(sum(a - b.detach() for a, b in zip(ours, theirs, strict=True)))
        likelihoods.append(sum(ours) / len(ours))
    margin = gains[0] - gains[1]
    if config.loss == "ipo":
        loss = (margin - 1 / (2 * config.beta)) ** 2
    elif config.loss == "hinge":
        loss = torch.relu(1 - config.beta * margin)
    elif config.loss == "exo_pair":
        loss = torch.zeros_like(margin)
        for share, sign in ((1 - config.label_smoothing, 1), (config.label_smoothing, -1)):
            preferred = torch.sigmoid(sign * config.beta * margin)
            loss = loss + preferred * torch.log(preferred / share)
    else:
        smooth = config.label_smoothing
        loss = -(1 - smooth) * log_sigmoid(config.beta * margin)
        loss = loss - smooth * log_sigmoid(-config.beta * margin)
    metrics = {
        "loss": loss - config.sft_coef * likelihoods[0],
        "accuracy": (margin > 0).double(),
        "margin": config.beta * margin,
        "chosen_reward": config.beta * gains[0],
        "rejected_reward": config.beta * gains[1],
    }
    return metrics | ({"sft_loss": -likelihoods[0]} if config.sft_coef else {})


def slow_rw(judge, example: Example) -> dict[str, Tensor]:
    scores = [
        judge(input_ids=torch.tensor([example.prompt + answer]), use_cache=False).logits[0, 0]
        for answer in example.answers
    ]
    margin = scores[0] - scores[1]
    return {
        "loss": -log_sigmoid(margin - (example.margin or 0.0)),
        "accuracy": (margin > 0).double(),
        "margin": margin,
        "chosen_reward": scores[0],
        "rejected_reward": scores[1],
    }


def slow_model(kind: str, engine, folders) -> torch.nn.Module:
    """What transformers loads, in float64, with the parameters of the engine."""
    if KINDS[kind] is not None:
        return load_reference(folders["policy"]).double()
    judge = AutoModelForSequenceClassification.from_pretrained(folders["policy"], num_labels=1)
    judge.load_state_dict(parameters_of(engine), strict=False)
    return judge.double().eval()


@pytest.mark.parametrize("kind", KINDS)
def test_losses_figures_and_gradients_equal_the_slow_loop(kind, folders):
    engine, interface = open_parts(kind, folders)
    examples = random_pairs(3, kind == "rw_margin")
    model = slow_model(kind, engine, folders)
    if (config := KINDS[kind]) is None:
        rows = [slow_rw(model, example) for example in examples]
    else:
        frozen = load_reference(folders["reference"]).double()
        rows = [slow_dpo(config, model, frozen, example) for example in examples]
    expected = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    expected["loss"].backward()

    share = share_of(examples, ALONE)
    batch = interface.prepare(share, CUT)
    judged = SupervisedInterface(interface, engine, CUT).evaluate(share)
    got = engine.train_batch(batch, CUT, interface.loss, interface.weight)
    for name, value in expected.items():
        assert got[name] == pytest.approx(value.item(), rel=1e-5, abs=2e-5)
        assert judged[name] == pytest.approx(value.item(), rel=1e-5, abs=2e-5)
    assert judged.keys() == expected.keys()
    slow = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    fast = {name: p.grad for name, p in engine._model.model.named_parameters()}
    norm = math.sqrt(sum(g.square().sum().item() for g in slow.values()))
    assert got["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, gradient in slow.items():
        torch.testing.assert_close(fast[name].double(), gradient, atol=2e-4 * norm, rtol=0)


def train_on(
    topology: Topology,
    kind: str,
    folders: dict[str, Path],
    spec: MicroBatchSpec,
    in_float64: bool = False,
):
    """Figures and parameters of three steps."""
    engine, interface = open_parts(kind, folders, topology, in_float64)
    metrics = []
    for seed in range(3):
        share = share_of(random_pairs(seed, kind == "rw_margin"), topology)
        batch = interface.prepare(share, spec)
        judged = SupervisedInterface(interface, engine, spec).evaluate(share)
        figures = engine.train_batch(batch, spec, interface.loss, interface.weight)
        metrics.append(figures | {f"eval_{name}": value for name, value in judged.items()})
    return metrics, {name: whole(p).clone() for name, p in engine._model.model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_one_by_one_train_as_packed(kind, folders):
    examples = [example for seed in range(3) for example in random_pairs(seed, False)]
    alone = max(example.num_tokens for example in examples)
    expected, parameters = train_on(ALONE, kind, folders, WHOLE)
    for budget in (alone, 2 * alone):
        got, trained = train_on(ALONE, kind, folders, MicroBatchSpec(budget, granularity=2))
        for one, two in zip(expected, got, strict=True):
            assert_same_figures(two, one, **LOOSE)
        assert_close(trained, parameters, atol=PARAMETERS, mean=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float64_pairs_one_by_one_have_the_numbers_of_packed_ones(kind, folders):
    examples = [example for seed in range(3) for example in random_pairs(seed, False)]
    alone = MicroBatchSpec(max(example.num_tokens for example in examples), granularity=2)
    with float64_norms():
        runs = [train_on(ALONE, kind, folders, spec, in_float64=True) for spec in (WHOLE, alone)]
    (expected, parameters), (got, trained) = runs
    for one, two in zip(expected, got, strict=True):
        assert two == pytest.approx(one, rel=IN_FLOAT64, abs=IN_FLOAT64)
    assert_close(trained, parameters, atol=IN_FLOAT64)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["rw_margin", "dpo_sft", "ipo"])
def test_pairs_on_two_ranks_train_as_on_one(kind, folders, tmp_path):
    expected, parameters = train_on(ALONE, kind, folders, CUT)
    for got, trained in run_ranks(2, tmp_path, train_on, kind, folders, CUT):
        for one, two in zip(expected, got, strict=True):
            assert_same_figures(two, one, **LOOSE)
        assert_close(trained, parameters, atol=PARAMETERS, mean=1e-8)


def test_a_pair_above_the_budget_says_what_to_set(folders):
    engine, interface = open_parts("rw", folders)
    batch = share_of(random_pairs(0, False), ALONE)
    spec = MicroBatchSpec(max(batch.lengths), granularity=2)
    for run in (engine.train_batch, engine.eval_batch):
        with pytest.raises(DataError, match=r"stay together.*trainer\.max_tokens_per_mb"):
            run(batch, spec, interface.loss, interface.weight)
    with pytest.raises(DataError, match="stay together"):
        engine.forward(batch, spec)


def test_forward_keeps_pairs_together_and_the_order_of_the_batch(folders):
    engine, _ = open_parts("dpo", folders)
    batch = share_of(random_pairs(0, False), ALONE)
    seen: list[int] = []

    def count(output, micro_batch: SequenceBatch) -> Tensor:
        seen.append(len(micro_batch.lengths))
        return output.logprobs(micro_batch["labels"])

    got = engine.forward(batch, CUT, post_hook=count)
    assert len(seen) > 1 and all(size % 2 == 0 for size in seen)
    torch.testing.assert_close(
        got, engine.forward(batch, WHOLE, post_hook=count), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_the_base_without_adapters_is_a_reference_like_a_second_copy(folders, tmp_path, world_size):
    if world_size == 1:
        results = [compare_references(ALONE, folders["policy"])]
    else:
        results = run_ranks(2, tmp_path, compare_references, folders["policy"])
    for apart, own, moved, metrics, grads in results:
        assert torch.equal(apart, own)
        assert (moved - own).abs().max() > 1e-3
        assert metrics[0] == metrics[1]
        assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))
        assert any(gradient.any() for gradient in grads[0])


def compare_references(topology: Topology, folder: Path):
    """Logprobs of both references after a step, of the policy; two runs' figures and parameters."""
    runs = []
    for is_own in (True, False):
        lora = {"rank": 4, "target_modules": ["q_proj", "v_proj"]}
        policy = open_engine(folder, topology=topology, optimizer=PLAIN, lora=lora)
        if is_own:
            reference = Reference(policy, is_base=True)
        else:
            reference = Reference(open_engine(folder, topology=topology))
        interface = DPO(PreferenceConfig(beta=BETA), reference)
        share = share_of(random_pairs(5, False), topology)
        metrics = []
        for _ in range(3):
            batch = interface.prepare(share, CUT)
            metrics.append(policy.train_batch(batch, CUT, interface.loss, interface.weight))
        trained = [whole(p).clone() for p in policy._model.model.parameters() if p.requires_grad]
        logprobs = reference.logprobs(share, CUT)
        own = Reference(policy).logprobs(share, CUT)
        runs.append((logprobs, own, metrics, trained))
    (logprobs, moved, metrics, trained), (apart, _, others, same) = runs
    return apart, logprobs, moved, (metrics, others), (trained, same)
