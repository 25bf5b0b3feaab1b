"""Generators of the role rollout: an engine by name, with the policy's current weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.workers import WorkersConfig
from headway.contracts.errors import ConfigError
from headway.contracts.registry import Registry
from headway.contracts.types import LLMRequest, LLMResponse
from trainer.api import MicroBatchSpec, ModelOutput, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.hybrid.transfer_cost import TransferCost
from trainer.topology import Topology


class RolloutEngine(Protocol):
    """Generates on all ranks of a group."""

    @property
    def last_transfer(self) -> TransferCost | None:
        """Cost of the last transfer of weights to it; None if it needs none."""

    def generate(self, requests: Sequence[LLMRequest]) -> list[LLMResponse]:
        """The responses to this rank's requests, in their order; collective.

        It brings whatever it samples with into place before, and leaves the training engine as it was.
        """

    def close(self) -> None:
        """Let go of all but the training engine; the last call."""


ROLLOUT_ENGINES: Registry[Callable[..., RolloutEngine]] = Registry(
    "rollout engine",
    {
        "forward": "trainer.workers.rollouts:ForwardRollout",
        "hybrid": "trainer.hybrid.rollout:HybridRollout",
        "server": "trainer.workers.served:ServedRollout",
    },
    entry_point_group="headway.rollout_engines",
)
"""Factories called with (config, policy engine, topology) and `generation.args`."""


def register_rollout_engine(name: str, target: str | Callable[..., RolloutEngine]) -> None:
    """Add a rollout engine: a factory, or `"module:attribute"` for a lazy one."""
    ROLLOUT_ENGINES.register(name, target)


def make_rollout_engine(
    config: WorkersConfig, policy: TrainEngine, topology: Topology
) -> RolloutEngine:
    """Build what `generation.engine` names."""
    factory = ROLLOUT_ENGINES.get(config.generation.engine)
    return factory(config, policy, topology, **config.generation.args)


@dataclass(slots=True)
class _GrowingRow:
    """A sequence as it grows."""

    request: LLMRequest
    ids: list[int]
    generator: torch.Generator
    logprobs: list[float] = field(default_factory=list)
    stop_reason: str | None = None

    @property
    def num_new(self) -> int:
        return len(self.logprobs)


class ForwardRollout:
    """One whole pass of the training engine per token, without a cache: for tests and small models.

    It samples with exactly the weights that are trained, on every mesh, and holds nothing itself.
    """

    HONOURED = (
        "max_new_tokens",
        "min_new_tokens",
        "temperature",
        "stop_token_ids",
        "seed",
        "ignore_eos",
    )

    def __init__(self, config: WorkersConfig, policy: TrainEngine, topology: Topology) -> None:
        self._policy = policy
        self._topology = topology
        self._mb_spec = MicroBatchSpec(config.trainer.max_tokens_per_mb)

    def generate(self, requests: Sequence[LLMRequest]) -> list[LLMResponse]:
        """The model's own end of sequence is unknown here: `stop_token_ids` end one.

        Raises:
            ConfigError: a setting that is not honoured.
        """
        begin = time.perf_counter()
        for request in requests:
            _refuse_others(request.gconfig)
        rows = [
            _GrowingRow(request, list(request.input_ids), _generator(request))
            for request in requests
        ]
        for row in rows:
            _end(row)
        # Ranks that are done go on with the others, which need them in the engine's collectives.
        while self._topology.max(sum(row.stop_reason is None for row in rows)):
            active = [row for row in rows if row.stop_reason is None]
            logits = self._last_logits(active or rows[:1])
            for row, scores in zip(active, logits, strict=False):
                _sample(row, scores)
                _end(row)
        return [_response(row, time.perf_counter() - begin) for row in rows]

    @property
    def last_transfer(self) -> None:
        return None

    def close(self) -> None:
        """It holds nothing."""

    def _last_logits(self, rows: Sequence[_GrowingRow]) -> Tensor:
        """[N, V] of the token that comes next."""
        lengths = tuple(len(row.ids) for row in rows)
        batch = SequenceBatch(
            lengths, {"input_ids": torch.tensor([t for r in rows for t in r.ids])}
        )
        ones = [1] * len(rows)
        logits: Tensor = self._policy.forward(batch, self._mb_spec, ones, _last_rows)
        return logits


def _last_rows(output: ModelOutput, batch: SequenceBatch) -> Tensor:
    ends = torch.tensor(batch.lengths, device=batch["input_ids"].device).cumsum(0) - 1
    return output.logits()[ends].float()


def _sample(row: _GrowingRow, scores: Tensor) -> None:
    wanted = row.request.gconfig
    if row.num_new < wanted.min_new_tokens:
        scores = scores.index_fill(
            0, torch.tensor(wanted.stop_token_ids, dtype=torch.int64), -torch.inf
        )
    # Greedy sampling reports the distribution of temperature 1, as servers do.
    logprobs = torch.log_softmax(scores / (wanted.temperature or 1.0), dim=-1)
    if wanted.temperature == 0.0:
        token = int(logprobs.argmax())
    else:
        token = int(torch.multinomial(logprobs.exp(), 1, generator=row.generator))
    row.ids.append(token)
    row.logprobs.append(float(logprobs[token]))


def _end(row: _GrowingRow) -> None:
    wanted = row.request.gconfig
    is_stop = row.num_new > wanted.min_new_tokens and row.ids[-1] in wanted.stop_token_ids
    if is_stop:
        row.stop_reason = "stop"
    elif row.num_new >= wanted.max_new_tokens:
        row.stop_reason = "length"


def _generator(request: LLMRequest) -> torch.Generator:
    generator = torch.Generator()
    if request.gconfig.seed is None:
        generator.seed()
    else:
        generator.manual_seed(request.gconfig.seed)
    return generator


def _response(row: _GrowingRow, seconds: float) -> LLMResponse:
    return LLMResponse(
        rid=row.request.rid,
        output_tokens=row.ids[len(row.request.input_ids) :],
        output_logprobs=row.logprobs,
        version_runs=[(0, 0, row.num_new)] if row.num_new else [],
        stop_reason=row.stop_reason,
        latency_s=seconds,
        ttft_s=seconds,
    )


def _refuse_others(sampling: SamplingConfig) -> None:
    fields = type(sampling).model_fields
    unknown = [
        name
        for name, field_ in fields.items()
        if name not in ForwardRollout.HONOURED and getattr(sampling, name) != field_.default
    ]
    if unknown:
        raise ConfigError(
            f"sampling.{', '.join(unknown)}: the rollout engine `forward` knows "
            f"{', '.join(ForwardRollout.HONOURED)}; unset the others, or choose another engine"
        )
