"""Train engines on tiny models, batches for them, and the plain loop that they must equal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.policy_losses import ClipLossConfig
from headway.contracts.config.trainer import TrainerConfig
from tests.numeric.models import VOCAB_SIZE, reference_logits
from trainer.algorithms.losses import policy_loss
from trainer.api import LossOutput, ModelOutput, TrainEngine
from trainer.backends.fsdp2 import FSDP2Engine
from trainer.backends.heads import LogitsOutput
from trainer.backends.upload import whole
from trainer.batching.sequences import SequenceBatch, shift_left
from trainer.meter import MeteredEngine
from trainer.topology import Topology
from weight_sync.channel import WeightPublisher

# AdamW's steps are smooth in gradients well below eps; with 1e-8, rounding noise moves a parameter by lr.
OPTIMIZER = OptimizerConfig(
    lr=1e-3,
    eps=1e-4,
    weight_decay=0.1,
    schedule="linear",
    max_grad_norm=0.5,
    beta2=0.95,  # bounds below, and tokens near a clip, are of these very steps
)
TOTAL_STEPS = 10
TRAINER = TrainerConfig(total_steps=TOTAL_STEPS)
GRAD_NORM = 5e-6
"""Relative bound on the norm's differences between ways to compute it in float32.

It is above 1e-6 because float32 is: of the steps here one process itself is up to 2e-6 away from the same
step in float64, by the rounding of its forward (a logprob of 10 nats has an error of 1e-6, up to 1e-5,
and so has its ratio) and, from the second step on, of its parameters. Two ways differ by up to
1.7e-6 with AVX-512, and 3.2e-6 with AVX2.
In float64 they differ by 1e-14: see `tests.numeric.float64`.
"""
IN_FLOAT64 = 1e-11
WIDE = AlgorithmConfig(
    policy_loss=ClipLossConfig(eps_clip=0.9, eps_clip_higher=5.0), behaviour_weight_cap=2.0
)
LENGTHS = (9, 3, 17, 5, 12, 2, 8)


def open_engine(
    folder: Path,
    *,
    in_float64: bool = False,
    topology: Topology | None = None,
    publisher: WeightPublisher | None = None,
    optimizer: OptimizerConfig = OPTIMIZER,
    trainer: TrainerConfig = TRAINER,
    **model: Any,
) -> FSDP2Engine:
    """An initialised engine; in float64 (which no configuration offers) within `float64_norms`."""
    config = TrainedModelConfig(path=str(folder), **model)
    if in_float64:
        config = config.model_copy(update={"dtype": "float64"})
    engine = FSDP2Engine(
        config,
        optimizer,
        trainer,
        topology or Topology(0, 1, torch.device("cpu")),
        publisher,
    )
    engine.initialize(None, None)
    return engine


def random_batch(seed: int, lengths: Sequence[int] = LENGTHS) -> SequenceBatch:
    """Packed random sequences with all columns of the decoupled loss; a random part is masked."""
    generator = torch.Generator().manual_seed(seed)
    lengths = tuple(lengths)
    size = sum(lengths)
    ids = torch.randint(VOCAB_SIZE, (size,), generator=generator)
    behaviour = -4 * torch.rand(size, generator=generator)
    return SequenceBatch(
        lengths,
        {
            "input_ids": ids,
            "labels": shift_left(ids, lengths, 0),
            "loss_mask": shift_left(torch.rand(size, generator=generator) < 0.7, lengths, False),
            "behaviour_logprobs": behaviour,
            "proximal_logprobs": behaviour + 0.3 * torch.randn(size, generator=generator),
            "advantages": torch.randn(size, generator=generator),
        },
    )


def token_loss(output: ModelOutput, batch: SequenceBatch) -> LossOutput:
    """Decoupled PPO with a wide clip range, so that random models have gradients."""
    logprobs = output.logprobs(batch["labels"], mask=batch["loss_mask"])
    return LossOutput(*policy_loss(WIDE, batch, logprobs))


def tokens_in_loss(batch: SequenceBatch) -> float:
    return float(batch["loss_mask"].sum())


def bare(engine: TrainEngine) -> FSDP2Engine:
    """Without its meter."""
    engine = engine.train_engine if isinstance(engine, MeteredEngine) else engine
    assert isinstance(engine, FSDP2Engine)
    return engine


def parameters_of(engine: TrainEngine) -> dict[str, Tensor]:
    """Copies of all parameters, whole; collective."""
    return {name: whole(p).clone() for name, p in bare(engine)._model.model.named_parameters()}


def assert_close(
    got: dict[str, Tensor], expected: dict[str, Tensor], atol: float, mean: float | None = None
) -> None:
    """Same names; no element further off than `atol`, and on average less than `mean`."""
    assert got.keys() == expected.keys()
    errors = torch.cat([(got[n] - expected[n]).abs().flatten().double() for n in expected])
    assert errors.max().item() <= atol, errors.max().item()
    assert errors.mean().item() <= (atol / 10 if mean is None else mean)


def assert_same_figures(
    got: Mapping[str, float], expected: Mapping[str, float], **bounds: float
) -> None:
    """Same names, and values within 1e-6: of their own size, or of 1 where they are smaller.

    Args:
        bounds: in place of 1e-6 for figures with this in their name; the one of `grad_norm` is always of
            its own size.
    """
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        bound = max((bound for part, bound in bounds.items() if part in name), default=1e-6)
        floor = 0.0 if "grad_norm" in name else bound
        assert got[name] == pytest.approx(value, rel=bound, abs=floor), name


def plain_training(model: torch.nn.Module, batches: Sequence[SequenceBatch]) -> dict[str, Any]:
    """The same steps, one sequence at a time, written with PyTorch alone."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(),
        lr=OPTIMIZER.lr,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    losses, norms = [], []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * (1 - step / TOTAL_STEPS)
        optimizer.zero_grad()
        total = batch["loss_mask"].sum()
        loss_sum = 0.0
        for index in range(len(batch.lengths)):
            one = batch.select([index])
            logits = reference_logits(model, one["input_ids"].tolist())
            output = token_loss(LogitsOutput(logits, one), one)
            share = output.loss * one["loss_mask"].sum() / total
            share.backward()
            loss_sum += share.item()
        squares = sum((p.grad.double() ** 2).sum().item() for p in trained.values())
        norm = math.sqrt(squares)
        scale = min(1.0, OPTIMIZER.max_grad_norm / (norm + 1e-6))
        for parameter in trained.values():
            parameter.grad *= scale
        optimizer.step()
        losses.append(loss_sum)
        norms.append(norm)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "parameters": parameters}
