"""One backend behind the `Generator` contract."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from headway.contracts.config.server import ServerConfig, UpdatePolicy
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.engines import OnDelta
from headway.contracts.errors import Conflict, ServiceError, StaleVersion, VersionMoved
from headway.contracts.http.adapters import adapter_views
from headway.contracts.http.servers import ServerReport, ServerState, ServerStatus
from headway.contracts.http.weights import (
    GroupRankBody,
    WeightAbortRequest,
    WeightCommitRequest,
    WeightPrepareRequest,
    is_group,
)
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion, WeightUpdateMeta
from headway.dialects.served_model import ServedLoad
from headway.runtime.logging import note_request
from headway.runtime.modules import import_modules
from headway.text.tokenizer import TextTokenizer
from inference_server.adapters import Adapters
from inference_server.admission import RequestAdmission
from inference_server.backends.base import GenerationBackend, make_backend
from inference_server.default_dtype import settled_model
from inference_server.memory import check_memory
from inference_server.metrics import ServerMetrics, ServerSnapshot
from inference_server.version_gate import VersionGate
from weight_sync.receiver import make_receiver

log = logging.getLogger(__name__)

END_GRACE_S = 2.0
"""Seconds for aborted sequences to return the tokens so far."""
UPLOAD_TIMEOUT_S = 3600.0
"""Seconds for a version that is published to a lone server, from its announcement to its last byte."""


class LocalGenerator:
    """`Generator` and `ServedModel` over one backend and its version gate, with the limits of
    `RequestAdmission`."""

    def __init__(
        self,
        backend: GenerationBackend,
        gate: VersionGate,
        name: str,
        tokenizer: TextTokenizer | None = None,
        admission: RequestAdmission | None = None,
        model_name: str = "model",
        gateways: Sequence[str] = (),
        weights: ReceiverConfig | None = None,
    ) -> None:
        """
        Args:
            weights: where adapters may be read; None is nowhere.
        """
        self.backend = backend
        self.adapters = Adapters(backend, weights or ReceiverConfig())
        self.gate = gate
        self.tokenizer = tokenizer
        self.model_name = model_name
        """Name by which clients of several models address this one."""
        self.model_paths: tuple[str, ...] = ()
        """Directories by which they may address it too: that of the start, and that which serves."""
        self.admission = admission or RequestAdmission()
        self.metrics = ServerMetrics()
        self.metrics.watch(self._snapshot)
        # What `ServedModel` asks for is the backend's own.
        self.abort = backend.abort
        self.pause = backend.pause
        self.resume = backend.resume
        self.flush = backend.flush
        self._name = name
        self._gateways = gateways
        # Takes most of a second for a large vocabulary: now, while nothing runs.
        self._tokenizer_digest = None if tokenizer is None else tokenizer.vocabulary.digest

    @property
    def weights(self) -> Self:
        """This: a server alone publishes to itself."""
        return self

    @property
    def version(self) -> PolicyVersion:
        return self.gate.version

    @property
    def sampled_version(self) -> PolicyVersion:
        return self.version

    @property
    def head(self) -> PolicyVersion:
        """The one that serves: a lone server has no other to go back from."""
        return self.version

    def has(self, version: PolicyVersion) -> bool:
        return version == self.version

    @property
    def adapter_versions(self) -> Mapping[str, PolicyVersion]:
        return self.adapters.versions

    @property
    def max_adapters(self) -> int:
        return self.adapters.max_adapters

    @property
    def max_context(self) -> int | None:
        return self.backend.limits.max_context or None

    @property
    def is_paused(self) -> bool:
        return self.backend.is_paused

    @property
    def is_ready(self) -> bool:
        return not (self.is_paused or self.admission.draining.is_set())

    @property
    def updates_in_flight(self) -> int:
        return self.gate.served.updates_in_flight

    @property
    def generated_tokens(self) -> int:
        return self.backend.load().generated_tokens

    def report(self, server_id: str, url: str) -> ServerReport:
        """Return the content of a heartbeat."""
        load = self.backend.load()
        return ServerReport(
            server_id=server_id,
            url=url,
            version=self.version,
            running=load.running,
            queued=load.queued,
            generated_tokens=load.generated_tokens,
            busy_s=load.busy_s,
            uptime_s=load.uptime_s,
            digest=self.gate.digest,
            kv_usage=load.kv_usage,
            preemptions=load.preemptions,
            max_running=load.max_running,
            max_context_tokens=self.max_context,
            num_ranks=self.backend.num_ranks,
            vocab_size=self.backend.limits.vocab_size or None,
            tokenizer_digest=self._tokenizer_digest,
            adapters=adapter_views(self.adapters.versions),
            max_adapters=self.adapters.max_adapters,
            draining=self.admission.draining.is_set(),
        )

    def statuses(self) -> list[ServerStatus]:
        report = self.report(self._name, "http://localhost")
        state: ServerState = "draining" if report.draining else "ready"
        return [ServerStatus(**report.model_dump(), state=state)]

    async def agenerate(self, req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
        """Generate one sequence; every dialect of the server comes through here.

        Raises:
            QueueFull, Conflict, Draining, RequestTimeout: by `RequestAdmission.admit`.
            RequestTooLong, DataError, BackendError: by the backend.
            DataError: the adapter is not loaded, or the backend serves none.
            VersionMoved: another version serves than the one that was asked for.
        """
        try:
            self._check_version(req)
            with self.metrics.counted(req) as answered:
                async with self.admission.admit(req.rid):
                    response = await self.backend.generate(req, on_delta)
                answered(response)
        except ServiceError as error:
            note_request(rid=req.rid, code=error.code, reason=error.message)
            raise
        return response

    def load(self) -> ServedLoad:
        load = self.backend.load()
        return ServedLoad(
            load.running,
            load.queued,
            load.generated_tokens,
            load.busy_s,
            load.kv_tokens,
            load.kv_capacity_tokens,
            load.kv_usage,
        )

    def _check_version(self, req: LLMRequest) -> None:
        serving = self.version if req.adapter is None else self.adapters.version(req.adapter)
        if req.version not in (None, serving):
            raise VersionMoved(
                f"version {serving} serves here, request {req.rid!r} wants {req.version}"
            )

    async def update_weights(
        self, meta: WeightUpdateMeta, policy: UpdatePolicy | None = None
    ) -> PolicyVersion:
        """Publish to this server alone, under the next epoch.

        Raises:
            Conflict: it belongs to a gateway, whose epochs this would overtake.
            StaleVersion: it is older than the one that serves.
            SyncError: it was refused, or a newer publication came; the old version serves on.
        """
        if self._gateways:
            raise Conflict(
                "this server takes its versions from the gateway "
                f"{' or '.join(self._gateways)}; publish there"
            )
        if meta.version < self.version:
            raise StaleVersion(f"version {meta.version} is older than {self.version}, which serves")
        order = WeightPrepareRequest(
            epoch=self.gate.epoch + 1,
            version=meta.version,
            path=meta.path,
            digest=meta.digest,
            fallbacks=meta.fallbacks,
            group_rank=GroupRankBody(rank=1, world_size=1 + self.backend.num_ranks)
            if is_group(meta.path)
            else None,
            timeout_s=UPLOAD_TIMEOUT_S,
        )
        try:
            await self.gate.prepare(order)
        except asyncio.CancelledError:
            if self.gate.epoch == order.epoch:
                await self.cancel_update(meta.version)
            raise
        # Not `order.epoch`: a later order for the same version has taken over.
        commit = WeightCommitRequest(epoch=self.gate.epoch, version=meta.version, policy=policy)
        await self.gate.commit(commit)
        return self.version

    async def cancel_update(self, version: PolicyVersion) -> None:
        """Forget a version that its publisher gave up; one that is being swapped in goes on."""
        self.gate.abort(WeightAbortRequest(epoch=self.gate.epoch, version=version))

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, let what runs end, then end it with the tokens so far."""
        self.admission.draining.set()
        self.gate.drain()
        if await self.admission.until_idle(timeout_s):
            return
        log.info("requests are ended early", extra={"requests": self.admission.in_flight})
        await self.backend.abort(None)
        if not await self.admission.until_idle(END_GRACE_S):
            self.admission.end_all()
            await self.admission.until_idle(END_GRACE_S)

    async def aclose(self) -> None:
        self.gate.drain()
        await self.backend.aclose()
        await self.gate.aclose()

    def _snapshot(self) -> ServerSnapshot:
        return ServerSnapshot(
            load=self.backend.load(),
            in_flight=self.admission.in_flight,
            is_draining=self.admission.draining.is_set(),
            swaps=self.gate.served.updates,
            swap_s=self.gate.served.swap_s,
        )


def has_tokenizer(config: ServerConfig) -> bool:
    """True if the model's folder has a tokenizer."""
    return (Path(config.model.path) / "tokenizer.json").is_file()


def make_generator(config: ServerConfig) -> LocalGenerator:
    """Import the configuration's modules, load the model and build its gate; nothing runs yet."""
    import_modules(config.modules)
    config = config.model_copy(update={"model": settled_model(config)})
    max_bytes = config.executor.max_prompt_bytes
    tokenizer = TextTokenizer(config.model.path, max_bytes) if has_tokenizer(config) else None
    check_memory(config)
    backend = make_backend(config.backend, config.model, config.initial_version, tokenizer)
    start = None if config.model.init_from_scratch else config.model.path
    receiver = make_receiver(config.weights, start)
    gate = VersionGate(backend, receiver, config.update_policy, config.weights.stage_timeout_s)
    admission = RequestAdmission(config.max_in_flight, config.request_timeout_s)
    model_name = config.served_model_name or Path(config.model.path).absolute().name
    generator = LocalGenerator(
        backend, gate, "local", tokenizer, admission, model_name, config.gateways, config.weights
    )
    generator.model_paths = (config.model.path,)
    return generator
