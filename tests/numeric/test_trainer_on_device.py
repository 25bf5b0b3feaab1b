"""What a training step asks of a GPU: launches, copies and waits, on a device that is not there.

The engine is the real one, of one rank, in bfloat16 through `varlen_attn`. Not covered: FSDP and
recomputed activations (which do not run on such a device), pinned memory, streams, copies of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.critic import CriticConfig
from headway.contracts.config.model import LoraConfig
from headway.contracts.config.preference import PreferenceConfig
from tests.numeric.engines import open_engine, random_batch
from tests.numeric.models import save_model
from tests.numeric.ranks import run_ranks
from trainer.algorithms.logprobs import GPU_VOCABULARY_TILE, chunked_logprobs
from trainer.api import MicroBatchSpec
from trainer.backends import packed_attention
from trainer.batching.sequences import SequenceBatch
from trainer.interfaces.dpo import DPO
from trainer.interfaces.ppo_actor import PPOActor
from trainer.interfaces.ppo_critic import PPOCritic
from trainer.interfaces.reward_modeling import RewardModelObjective
from trainer.interfaces.sft import SFT
from trainer.interfaces.updates import loss_tokens
from trainer.reference import Reference
from trainer.topology import Topology
from weight_sync.adapter import merge_weight

HOST_READS_PER_STEP = 1
"""Its figures with the norm of its gradient, which decides on the step."""
LAUNCHES_PER_TILE = 40
"""Of the head, forward and backward."""
LAUNCHES_PER_MERGE = 40
"""Of one matrix of an adapter of rank 16."""
NUM_LAYERS = 2
ONE_PASS = MicroBatchSpec(10_000)
LENGTHS = {1: (120,), 4: (12, 36, 25, 47), 9: (5, 7, 9, 11, 13, 15, 17, 20, 23)}


def batch_of(lengths: tuple[int, ...]) -> SequenceBatch:
    """All columns of a policy's and a critic's loss."""
    batch = random_batch(0, lengths)
    values = batch["advantages"]
    more = {"action_mask": batch["loss_mask"], "normalized_values": values, "targets": values + 0.1}
    return batch.with_columns(**more)


def steps(
    engine: Any, topology: Topology
) -> dict[str, Callable[[SequenceBatch, MicroBatchSpec], Any]]:
    """What a run asks of its models."""
    actor = PPOActor(engine, topology, AlgorithmConfig(), ONE_PASS, 0.9)
    critic = PPOCritic(engine, topology, CriticConfig(), ONE_PASS)
    return {
        "policy": lambda batch, spec: engine.train_batch(batch, spec, actor._loss, actor._weight),
        "entropy": lambda batch, spec: engine.forward(batch, spec, post_hook=actor._judged),
        "reference": lambda batch, spec: Reference(engine).logprobs(batch, spec),
        "critic": lambda batch, spec: engine.train_batch(batch, spec, critic._loss, loss_tokens),
        "values": lambda batch, spec: critic.infer(batch),
    }


LOSSES: dict[str, dict[str, Any]] = {
    "sequence ratio": {"ratio_level": "sequence", "aggregation": "sequence_mean_token_mean"},
    "entropy": {"entropy_coef": 0.1, "policy_loss": {"type": "cispo"}},
    "reference": {"kl_coef": 0.1, "aggregation": "sequence_mean_token_sum"},
    "interpolated": {"proximal": "loglinear", "policy_loss": {"dual_clip": 3.0}},
    "moment": {"m2_threshold": 0.1, "behaviour_weight_level": "geometric"},
    "stop": {"early_stop_kl": 0.1, "early_stop_ratio": 2.0},
    "rejection": {"rejection": {"upper": 2.0, "statistic": "max", "metric": "k2"}},
    "coupled": {"decoupled": False, "behaviour_weight_cap": None, "policy_loss": {"type": "sapo"}},
}
"""Of `AlgorithmConfig`."""
LOSS_NAMES = (*LOSSES, "sft", "dpo", "ipo", "reward model")


def losses(folder: Path, topology: Topology) -> dict[str, Callable[[], Any]]:
    """A step of every kind of loss."""
    language, value = (
        open_engine(folder, topology=topology, dtype="bfloat16", head=head)
        for head in ("lm", "value")
    )
    batch = batch_of(LENGTHS[4])
    ones = torch.ones(batch.num_tokens)
    more = {"reference_logprobs": -ones, "proximal_shares": ones / 2, "margin": ones}
    batch = batch.with_columns(near=batch["loss_mask"], **more)

    def step(engine: Any, part: Any) -> Callable[[], Any]:
        return partial(engine.train_batch, batch, MicroBatchSpec(200, 2), part.loss, part.weight)

    actors = {
        name: PPOActor(language, topology, AlgorithmConfig(**options), ONE_PASS, 0.9)
        for name, options in LOSSES.items()
    }
    reference = Reference(language)
    return {
        **{
            name: partial(language.train_batch, batch, ONE_PASS, actor._loss, actor._weight)
            for name, actor in actors.items()
        },
        "sft": step(language, SFT()),
        "dpo": step(language, DPO(PreferenceConfig(sft_coef=0.1), reference)),
        "ipo": step(language, DPO(PreferenceConfig(loss="ipo"), reference)),
        "reward model": step(value, RewardModelObjective()),
    }


MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "language": ({}, ("policy", "entropy", "reference")),
    "lora": ({"lora": LoraConfig(rank=2, dropout=0.1)}, ("policy",)),
    "value": ({"head": "value"}, ("critic", "values")),
}


def measure(topology: Topology, folder: Path) -> dict[str, Any]:
    """Logs of every step, and of the head and an adapter alone; in a process of its own, since the device
    changes PyTorch."""
    from tests import varlen_double
    from tests.device_double import DEVICE, DeviceDouble

    varlen_double.install()
    packed_attention.has_flash = lambda device: True
    double = DeviceDouble()
    found: dict[str, Any] = {}

    def watched(work: Callable[[], Any]) -> dict[str, Any]:
        double.clear()
        varlen_double.CALLS.clear()
        result = work()
        return {
            "result": result,
            "launches": double.launches.total(),
            "by_name": dict(double.launches),
            "syncs": list(double.syncs),
            "mixed": list(double.mixed),
            "attention": sorted(varlen_double.CALLS),
        }

    with double:
        here = Topology(0, 1, DEVICE)
        for model, (options, names) in MODELS.items():
            engine = open_engine(folder, topology=here, dtype="bfloat16", **options)
            for name in names:
                step = steps(engine, here)[name]
                step(batch_of(LENGTHS[1]), ONE_PASS)  # an optimizer's first step makes its state
                for count, lengths in LENGTHS.items():
                    batch = batch_of(lengths)
                    found[f"{model} {name} {count}"] = watched(partial(step, batch, ONE_PASS))
                batch = batch_of((40,) * 3)
                found[f"{model} {name} cut"] = watched(partial(step, batch, MicroBatchSpec(40)))
        found |= {name: watched(loss) for name, loss in losses(folder, here).items()}
        found["tiles"] = [watched(partial(head, double, number)) for number in (1, 3)]
        matrices = [
            double.tensor(torch.randn(shape)) for shape in ((256, 512), (16, 512), (256, 16))
        ]
        found["merge"] = watched(lambda: merge_weight(*matrices, 2.0).cpu())
    return found


def head(double: Any, number: int) -> None:
    """Logprobs of a vocabulary of so many tiles, and their gradients."""
    weight = torch.randn(number * GPU_VOCABULARY_TILE, 4, dtype=torch.bfloat16)
    hidden = torch.randn(8, 4, dtype=torch.bfloat16)
    leaves = [double.tensor(tensor).requires_grad_() for tensor in (hidden, weight)]
    logprobs, _ = chunked_logprobs(*leaves, double.tensor(torch.arange(8)))
    logprobs.sum().backward()


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict[str, Any]:
    folder = save_model(tmp_path_factory.mktemp("llama"), "llama")
    (found,) = run_ranks(1, tmp_path_factory.mktemp("device"), measure, folder)
    return found


NAMES = [f"{model} {name}" for model, (_, names) in MODELS.items() for name in names]


@pytest.mark.parametrize("name", NAMES)
def test_no_operation_mixes_devices(logs, name):
    for cut in (*LENGTHS, "cut"):
        assert logs[f"{name} {cut}"]["mixed"] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_step_waits_for_the_device_at_its_end_alone(logs, name):
    """However many micro-batches there are."""
    bound = HOST_READS_PER_STEP + ("lora" in name)  # dropout is drawn by the number of the step
    for cut in (*LENGTHS, "cut"):
        assert len(logs[f"{name} {cut}"]["syncs"]) <= bound


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_no_loss_waits_or_mixes_devices(logs, name):
    assert logs[name]["mixed"] == []
    assert len(logs[name]["syncs"]) <= HOST_READS_PER_STEP, logs[name]["syncs"]


@pytest.mark.parametrize("name", NAMES)
def test_attention_has_one_shape_and_one_launch_whatever_the_sequences_are(logs, name):
    for count in LENGTHS:
        log = logs[f"{name} {count}"]
        assert {shape for shape, _ in log["attention"]} == {(120, 4, 8)}
        assert log["by_name"]["_varlen_attn"] == NUM_LAYERS
    launches = {count: logs[f"{name} {count}"]["launches"] for count in LENGTHS}
    # A gradient may be clipped.
    assert max(launches.values()) - min(launches.values()) <= 1, launches


def test_a_tile_of_the_head_costs_few_launches(logs):
    one, three = (log["launches"] for log in logs["tiles"])
    assert (three - one) / 2 <= LAUNCHES_PER_TILE, f"{one} for one tile, {three} for three"


def test_an_adapter_is_merged_by_few_launches(logs):
    assert logs["merge"]["launches"] <= LAUNCHES_PER_MERGE, logs["merge"]["by_name"]
