"""Interface of a generation backend; chosen by `backend.type`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headway.contracts.config.base import Config
from headway.contracts.config.server import PluginBackendConfig, UpdatePolicy
from headway.contracts.context import check_context
from headway.contracts.engines import OnDelta
from headway.contracts.errors import DataError
from headway.contracts.http.generation import PauseMode
from headway.contracts.registry import Registry
from headway.contracts.types import (
    LLMRequest,
    LLMResponse,
    PolicyVersion,
    WeightUpdateMeta,
)
from headway.runtime.plugins import plugin_args

if TYPE_CHECKING:
    from headway.text.tokenizer import TextTokenizer
    from weight_sync.channel import StagedWeights, VerifiedVersion, WeightReader


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a request must keep to."""

    vocab_size: int
    """Token ids are below this."""
    max_context: int
    """Tokens per sequence, prompt included."""


@dataclass(frozen=True, slots=True)
class Load:
    """Current load of a backend."""

    running: int
    """Sequences being decoded."""
    queued: int
    """Sequences that wait."""
    generated_tokens: int
    """Tokens sampled since the start."""
    busy_s: float
    """Seconds with work since the start."""
    uptime_s: float
    prefill_tokens: int = 0
    """Prompt tokens computed since the start; shared ones are not."""
    kv_tokens: int = 0
    """Tokens whose keys and values are held."""
    kv_capacity_tokens: int = 0
    """Tokens whose keys and values fit; 0 if not known."""
    kv_usage: float = 0.0
    """Share of the key-value cache that running sequences hold; 0 if not known."""
    preemptions: int = 0
    """Running sequences that lost their cache for want of memory, since the start."""
    max_running: int = 0
    """Sequences decoded at once, at most; 0 if not known, or has no bound."""


class StagedVersion(Protocol):
    """A verified version, ready to be swapped in."""

    @property
    def version(self) -> PolicyVersion: ...

    @property
    def digest(self) -> str:
        """Digest of its weights; empty if it is not known."""

    @property
    def held(self) -> StagedWeights | VerifiedVersion | None:
        """The version as it came, for deltas and for peers; None if there is nothing to keep."""


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A verified version whose weights this process holds."""

    held: StagedWeights

    @property
    def version(self) -> PolicyVersion:
        return self.held.version

    @property
    def digest(self) -> str:
        return self.held.digest


class GenerationBackend(Protocol):
    """Continuous batching over one copy of the weights.

    A request that is aborted, by `abort`, by a pause or by a swap under the policy `abort`, ends
    with `stop_reason="interrupt"` and the tokens so far. While paused, new requests wait.
    """

    @property
    def limits(self) -> Limits:
        """Known once started."""

    @property
    def version(self) -> PolicyVersion:
        """Version that samples the next token."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that it has in a process group."""

    @property
    def is_paused(self) -> bool: ...

    @property
    def failure(self) -> str | None:
        """Why it failed for good; the server then ends, so that it is started again."""

    async def start(self) -> None:
        """Begin to decode; returns when requests are served.

        Raises:
            BackendError: it did not come up.
        """

    async def generate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        """Generate one sequence; cancelling the call frees what it holds.

        Raises:
            RequestTooLong: prompt + max_new_tokens exceed the context.
            DataError: a token id is outside of the vocabulary, or the request asks for a sampling mask
                that the backend cannot report (`refuse_mask`).
            BackendError: the backend failed or is closed.
        """

    async def abort(self, rid: str | None) -> None:
        """End the request of this id, or all; an unknown id is no error."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding after the current step."""

    async def resume(self) -> None:
        """Go on; no effect if it is not paused."""

    async def flush(self) -> bool:
        """Drop shared prefixes; false if sequences were running, and nothing was dropped."""

    def stage(self, meta: WeightUpdateMeta, reader: WeightReader) -> StagedVersion:
        """Read and verify a version; called on a thread, while generation goes on.

        Raises:
            SyncError: torn, tampered, of another model, or outside the allowed directory.
        """

    async def swap(self, staged: StagedVersion, policy: UpdatePolicy = "keep") -> int:
        """Exchange the weights between two decode steps.

        Returns:
            Sequences that were running at that moment.
        """

    def load(self) -> Load:
        """Counters for heartbeats and metrics."""

    async def aclose(self) -> None:
        """Stop; what is running fails with `BackendError`."""


def check_request(req: LLMRequest, limits: Limits) -> None:
    """Refuse what no server of this model could serve.

    Raises:
        RequestTooLong: prompt + max_new_tokens exceed the context.
        DataError: a token id is outside of the vocabulary.
    """
    check_context(len(req.input_ids), req.gconfig.max_new_tokens, limits.max_context)
    named = {
        "input_ids": req.input_ids,
        "stop_token_ids": req.gconfig.stop_token_ids,
        "logit_bias": tuple(req.gconfig.logit_bias),
    }
    for name, ids in named.items():
        if ids and max(ids) >= limits.vocab_size:
            raise DataError(
                f"{name} holds {max(ids)}, the vocabulary has {limits.vocab_size} tokens"
            )
    if req.logprob_start is not None and req.logprob_start > len(req.input_ids):
        raise DataError(
            f"logprob_start={req.logprob_start} is behind the prompt of {len(req.input_ids)} tokens"
        )


def refuse_mask(req: LLMRequest, backend: str) -> None:
    """Refuse a request for a sampling mask, for a backend that reports none.

    Raises:
        DataError: the request asks for one, and cuts.
    """
    if req.sampling_mask and req.gconfig.cuts_distribution:
        raise DataError(
            f"request {req.rid} asks for its sampling mask, and the backend {backend} reports none; cut "
            "nothing (top_k, top_p, min_p), serve with backend.type=embedded_torch, or train with "
            "algorithm.sampling_mask=ignore, whose ratios are biased"
        )


BACKENDS: Registry[Callable[..., GenerationBackend]] = Registry(
    "generation backend",
    {
        "embedded_torch": "inference_server.backends.embedded.backend:EmbeddedTorchBackend",
        "sglang": "inference_server.backends.sglang.backend:SGLangBackend",
        "vllm": "inference_server.backends.vllm.backend:VLLMBackend",
        "fake": "inference_server.backends.fake:FakeBackend",
    },
    entry_point_group="headway.generation_backends",
)
"""Factories called with (backend config, model config, initial version, tokenizer or None).

That of another package has a pydantic model `Args`: its config is an instance, made of `backend.args`."""


def register_backend(name: str, target: str | Callable[..., GenerationBackend]) -> None:
    """Add a generation backend: a factory with `Args`, or `"module:attribute"` for a lazy one.

    Raises:
        ConfigError: the name is taken.
    """
    BACKENDS.register(name, target)


def make_backend(
    config: Any, model: Any, version: PolicyVersion, tokenizer: TextTokenizer | None
) -> GenerationBackend:
    """Build the backend that `config.type` names; a plug-in by its name.

    Raises:
        UnknownName: no installed package registers the plug-in.
        ConfigError: its arguments do not fit.
    """
    if isinstance(config, PluginBackendConfig):
        factory = BACKENDS.get(config.name)
        return factory(plugin_args(factory, config, Config, {}), model, version, tokenizer)
    return BACKENDS.get(config.type)(config, model, version, tokenizer)
