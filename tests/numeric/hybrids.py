"""Hybrid engines on tiny models, and what both of their sides say of the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headway.contracts.config.hybrid import HybridConfig
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.types import LLMRequest, LLMResponse
from tests.numeric.backends import KV_BYTES, prompt_of
from tests.numeric.engines import OPTIMIZER, TRAINER, random_batch, token_loss, tokens_in_loss
from trainer.api import MicroBatchSpec
from trainer.backends.fsdp2 import FSDP2Engine
from trainer.batching.balance import partition_by_tokens
from trainer.batching.sequences import SequenceBatch, shift_left
from trainer.hybrid.backend import RolloutBackend, make_backend
from trainer.hybrid.engine import HybridEngine
from trainer.topology import Topology
from weight_sync.weight_transfer import TransferredTensor

SPEC = MicroBatchSpec(64)
ALONE = Topology(0, 1, torch.device("cpu"))
PROMPT_LENGTHS = (5, 11, 3, 20, 8)
NEW_TOKENS = 12


class Watched:
    """A backend that tells what it was handed, and fails on demand."""

    def __init__(self, backend: RolloutBackend) -> None:
        self._backend = backend
        self.handed: list[TransferredTensor] = []
        """What came last, without its tensors."""
        self.fails_at: int | None = None
        """Number of the tensor at whose arrival it fails."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def wake(self, version: int, parts: Iterable[TransferredTensor], adapter: Any) -> None:
        self.handed = []
        self._backend.wake(version, self._watch(parts), adapter)

    def _watch(self, parts: Iterable[TransferredTensor]) -> Iterator[TransferredTensor]:
        for number, part in enumerate(parts):
            if number == self.fails_at:
                raise MemoryError("no room for this one")
            self.handed.append(replace(part, tensor=torch.empty(part.tensor.shape, device="meta")))
            yield part
            del part


class Prefixed(Watched):
    """Watched, and its model's parameters have other names outside than in it."""

    PREFIX = "engine."

    @property
    def kept(self) -> frozenset[str]:
        return frozenset(self.PREFIX + name for name in self._backend.kept)

    def _watch(self, parts: Iterable[TransferredTensor]) -> Iterator[TransferredTensor]:
        for part in super()._watch(parts):
            assert part.name.startswith(self.PREFIX)
            yield replace(part, name=part.name.removeprefix(self.PREFIX))
            del part


def open_hybrid(
    folder: Path,
    *,
    kind: type[Watched] = Watched,
    topology: Topology = ALONE,
    trainer: dict[str, Any] | None = None,
    hybrid: dict[str, Any] | None = None,
    version: int = 0,
    **model: Any,
) -> HybridEngine:
    """An initialised engine whose backend is `Watched`."""
    config = HybridConfig(
        **{
            "backend": EmbeddedTorchConfig(
                max_sequences=3, kv_cache_bytes=KV_BYTES, pack_weights=False
            ),
            **(hybrid or {}),
        }
    )
    trained = TrainedModelConfig(path=str(folder), **model)
    settings = TRAINER.model_copy(update=trainer or {})
    engine = HybridEngine(
        FSDP2Engine(trained, OPTIMIZER, settings, topology, None),
        kind(make_backend(config, trained)),
        config,
        version,
    )
    engine.initialize(None, None)
    return engine


def watched(engine: HybridEngine) -> Watched:
    backend = engine._backend
    assert isinstance(backend, Watched)
    return backend


def close(engine: HybridEngine) -> None:
    """Without the process group, which the ranks of a test leave themselves."""
    engine.stop()


def requests(round_: int, **gconfig: Any) -> list[LLMRequest]:
    """Prompts of several lengths that are all sampled to the end."""
    options = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True} | gconfig
    return [
        LLMRequest(
            rid=f"{round_}.{number}",
            input_ids=tuple(prompt_of(length, 100 * round_ + number)),
            gconfig=SamplingConfig(**options),
        )
        for number, length in enumerate(PROMPT_LENGTHS)
    ]


def batch_of(asked: Sequence[LLMRequest], answered: Sequence[LLMResponse]) -> SequenceBatch:
    """Prompts with responses, packed."""
    rows = [[*q.input_ids, *a.output_tokens] for q, a in zip(asked, answered, strict=True)]
    lengths = tuple(len(row) for row in rows)
    ids = torch.tensor([token for row in rows for token in row])
    return SequenceBatch(lengths, {"input_ids": ids, "labels": shift_left(ids, lengths, 0)})


def largest_error(
    engine: HybridEngine, asked: Sequence[LLMRequest], answered: Sequence[LLMResponse]
) -> float:
    """Between logprobs that generation gave and those of the trainer's `forward`; collective."""
    batch = batch_of(asked, answered)
    pieces = engine.forward(
        batch, SPEC, post_hook=lambda out, mine: out.logprobs(mine["labels"]), aggregate_fn=list
    )
    errors = [
        (torch.tensor(a.output_logprobs) - piece[len(q.input_ids) - 1 : -1]).abs().max()
        for q, a, piece in zip(asked, answered, pieces, strict=True)
    ]
    return float(torch.stack(errors).max())


def train(engine: HybridEngine, seed: int, topology: Topology = ALONE) -> dict[str, float]:
    """One step on this rank's share."""
    batch = random_batch(seed)
    share = partition_by_tokens(batch.lengths, topology.world_size)[topology.rank]
    metrics = engine.train_batch(batch.select(share), SPEC, token_loss, tokens_in_loss)
    engine.step_lr_scheduler()
    return metrics


def take_turns(engine: HybridEngine, rounds: int, topology: Topology = ALONE) -> dict[str, Any]:
    """Rollouts and steps by turns: per round, versions, responses and the largest error of logprobs."""
    seen: dict[str, Any] = {"versions": [], "responses": [], "errors": [], "scores": []}
    for round_ in range(rounds):
        asked = requests(round_)
        with engine.rollouts() as version:
            answered = engine.generate(asked)
            # The same tokens under every version: what they change by is the weights.
            scored = engine.generate(score_requests())
        seen["versions"].append(version)
        seen["responses"].append(answered)
        seen["scores"].append([s.prompt_logprobs[1:] for s in scored])
        seen["errors"].append(largest_error(engine, asked, answered))
        train(engine, round_, topology)
    return seen


def score_requests() -> list[LLMRequest]:
    return [
        one.model_copy(
            update={
                "logprob_start": 0,
                "gconfig": one.gconfig.model_copy(update={"max_new_tokens": 0}),
            }
        )
        for one in requests(77)
    ]
