"""The contract of training: `TrainEngine` and its records."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from headway.contracts.config.trainer import TokenNormalizeScope
from headway.contracts.types import FinetuneSpec, WeightUpdateMeta
from trainer.batching.sequences import SequenceBatch


@dataclass(frozen=True, slots=True)
class MicroBatchSpec:
    """Limits of the micro-batches that a batch is split into for memory; the loss does not depend on
    them.
    """

    max_tokens_per_mb: int
    n_mbs: int = 1
    """Minimum number of micro-batches on each rank, as far as it has sequences for them."""
    granularity: int = 1
    """Neighbouring sequences that stay together in one micro-batch: 2 for pairs. It divides the number of
    sequences of every rank."""


@dataclass(frozen=True, slots=True)
class SaveLoadMeta:
    """Path and form in which a model is stored."""

    path: str
    weight_format: Literal["hf", "dcp"] = "dcp"
    """`hf`: a Hugging Face directory, weights only; `dcp`: sharded, loads on another number of ranks."""
    with_optim: bool = True
    """Store optimizer and schedule, too (`dcp` only)."""
    asynchronous: bool = False
    """Save the current state, and return once it is copied (`dcp` only); one at a time."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Resources that one rank needs from a launcher; None leaves a value to the launcher."""

    cpu: int = 1
    """Cores."""
    gpu: int = 0
    """Devices."""
    mem: int = 8192
    """Memory of the host, in MiB."""
    nodelist: str | None = None
    """Machines to run on, as the scheduler writes a list of them."""
    exclude: str | None = None
    """Machines not to run on."""
    partition: str | None = None
    """Queue to wait in."""
    container_image: str | None = None
    """Image to run in."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables to add."""
    time_limit: str | None = None
    """Longest time to run, as the scheduler writes it (Slurm: `1-12:00:00`)."""
    begin: str | None = None
    """Earliest start, likewise."""
    deadline: str | None = None
    """Latest end: a job that cannot make it is not started."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A micro-batch's loss and metrics, all means over its weight (`loss_weight_fn`), save those whose
    names end in `_max`: of these the largest counts."""

    loss: Tensor  # []
    stats: dict[str, Tensor] = field(default_factory=dict)  # name -> []


class ModelOutput(Protocol):
    """Output of a model for a micro-batch of T tokens; position t predicts token t + 1.

    Valid within the loss or hook that it is given to. A value that the head does not have raises
    `ConfigError`.
    """

    def logprobs(
        self, labels: Tensor, temperature: float = 1.0, mask: Tensor | None = None
    ) -> Tensor:
        """[T] float32 log-probability of `labels` [T] under the temperature-scaled distribution, or
        [T, K] of labels [T, K].

        Differentiable, and computed without logits for all positions at a time. With a `mask` [T] bool
        only its positions are computed; others are 0. Where the micro-batch has a sampling mask,
        distributions are over the tokens that it holds.
        """

    def logprobs_and_entropy(
        self, labels: Tensor, temperature: float = 1.0, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same, and [T] float32 entropy of each position's distribution; both differentiable."""

    def top(
        self, count: int, temperature: float = 1.0, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Ids [T, K] int64 of the likeliest tokens of each position, and their log-probabilities [T, K];
        0 off the mask. Not differentiable."""

    def logits(self) -> Tensor:
        """[T, V], whole: for tests and small models."""

    def values(self) -> Tensor:
        """[T] float32, of models with a scalar head."""


LossFn = Callable[[ModelOutput, SequenceBatch], LossOutput]
"""`(output, micro-batch) -> loss`."""
LossWeightFn = Callable[[SequenceBatch], float]
"""Weight of a micro-batch, usually its tokens in the loss."""
PostHook = Callable[[ModelOutput, SequenceBatch], Tensor]
"""`(output, micro-batch) -> [T, ...]`, or one row per sequence."""


class TrainEngine(Protocol):
    """One model with its optimizer on all ranks of a trainer; every call is collective."""

    def initialize(self, addr: str | None, ft_spec: FinetuneSpec | None) -> None:
        """Join the process group, load the model, build the optimizer."""

    def get_scheduling_config(self) -> Scheduling:
        """Return the resources that one rank needs."""

    def train_batch(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        token_normalize_scope: TokenNormalizeScope = "global",
    ) -> dict[str, float]:
        """One optimizer step on this rank's sequences; the loss is the mean over the weight of all
        ranks and micro-batches, whatever the split.

        Args:
            token_normalize_scope: `dp` takes the mean over each rank's weight, and then over the ranks;
                one without weight adds 0. Metrics are averaged likewise.
        Returns:
            `loss`, `grad_norm`, `lr`, `skipped_steps` (1 if the gradient was not finite), and the loss's
            own metrics; the same on every rank.
        Raises:
            DataError: a sequence, or a unit of `granularity`, is longer than the token budget.
        """

    def eval_batch(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        token_normalize_scope: TokenNormalizeScope = "global",
    ) -> Tensor | None:
        """[] float64 loss that `train_batch` would see, without a step; [K] of a loss [K]."""

    def forward(
        self,
        input_: SequenceBatch,
        mb_spec: MicroBatchSpec,
        output_seqlens: list[int] | None = None,
        post_hook: PostHook | None = None,
        aggregate_fn: Callable[[list[Tensor]], Any] = torch.cat,
    ) -> Any:
        """Run without gradients; results per sequence, in the order of `input_`, aggregated.

        Args:
            output_seqlens: rows of the hook's result per sequence; None takes the sequences' lengths.
            post_hook: None takes whole logits, or the values of a model with a scalar head.
        """

    def without_adapters(self) -> AbstractContextManager[None]:
        """Within it the model is what it was before adapters were put in; without any, as it is."""

    def move_towards(self, source: TrainEngine, eta: float) -> None:
        """Every parameter ← eta · that of `source` + (1 - eta) · its own.

        Args:
            source: an engine of the same backend, model and sharding.
        """

    def upload_weights(self, meta: WeightUpdateMeta | None) -> Future[None] | None:
        """Publish the current weights as a version; `meta` is None on ranks other than the first.

        Returns:
            None once they are published. A future if a copy of them is sent in the background; the
            weights may change meanwhile, and the future holds the outcome of that upload.
        """

    def step_lr_scheduler(self) -> None:
        """Advance the learning rate, once per version."""

    def save(self, meta: SaveLoadMeta) -> Future[None]:
        """Store the model; the future is done once all ranks' parts are stored durably."""

    def load(self, meta: SaveLoadMeta) -> None:
        """Restore what `save` stored."""

    def destroy(self) -> None:
        """Leave the process group."""


@runtime_checkable
class OffloadingEngine(Protocol):
    """A train engine that gives its device free between calls."""

    def place_on_device(self, parameters: bool, optimizer: bool) -> None:
        """Move parameters and optimizer to this rank's device (true), or to the CPU's memory; collective
        calls want the parameters on the device, updates the optimizer, too.
        """
